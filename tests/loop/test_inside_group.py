"""What the ranks of a group average among themselves, once per attempt and pass, after what each ring divided by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ft_core.loop.inside_group import InsideGroup


def test_rings_with_different_divisors_are_corrected_before_they_are_mixed() -> None:
    """Planned for 4 participants, 3 contributed: sums were divided by 4 and have to be divided by 3."""
    done: list[Any] = []
    attempt: Any = SimpleNamespace(number=1, planned=4, verdict=SimpleNamespace(weight=3))
    reducer = SimpleNamespace(
        unsettled=True, rescale=done.append, average_inside=lambda _reduce, ranks: done.append(ranks)
    )
    models: Any = [SimpleNamespace(gradient_reducer=reducer)]
    inside = InsideGroup(2)
    inside.passes = 1
    inside.settle(attempt, models)
    assert done == [4 / 3, 2]
    assert attempt.planned == 3  # the Manager has nothing left to correct
    inside.settle(attempt, models)
    assert done == [4 / 3, 2], "clipping and the step ask again"
    inside.passes += 1  # another backward
    inside.settle(attempt, models)
    assert done == [4 / 3, 2, 2]
    attempt.number, attempt.verdict = 2, None  # a broken ring still takes part in its group's collective
    inside.settle(attempt, models)
    assert done[3:] == [2]


def test_a_group_of_one_rank_averages_nothing() -> None:
    reducer = SimpleNamespace(unsettled=True, rescale=None, average_inside=None)
    attempt: Any = SimpleNamespace(number=1, planned=1, verdict=None)
    model: Any = SimpleNamespace(gradient_reducer=reducer)
    InsideGroup(1).settle(attempt, [model])
