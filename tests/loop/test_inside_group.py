"""What becomes of gradients between the backward and the vote, in groups of one rank and of several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ft_core.errors import UsageError
from ft_core.loop.inside_group import InsideGroup


def test_a_divisor_that_was_not_planned_is_corrected_once() -> None:
    """Planned for 4 participants, 3 contributed: sums were divided by 4 and have to be divided by 3."""
    done: list[Any] = []
    attempt: Any = SimpleNamespace(number=1, planned=4, verdict=SimpleNamespace(weight=3))
    models: Any = [SimpleNamespace(gradient_reducer=SimpleNamespace(unsettled=True, rescale=done.append))]
    inside = InsideGroup(1)
    inside.settle(attempt, models)
    assert done == [4 / 3]
    assert attempt.planned == 3  # the Manager has nothing left to correct
    inside.settle(attempt, models)
    assert done == [4 / 3], "clipping and the step ask again"


def test_an_attempt_without_a_verdict_is_left_alone() -> None:
    reducer = SimpleNamespace(unsettled=True, rescale=None)
    attempt: Any = SimpleNamespace(number=1, planned=1, verdict=None)
    model: Any = SimpleNamespace(gradient_reducer=reducer)
    InsideGroup(1).settle(attempt, [model])


def test_several_ranks_have_final_gradients_when_backward_returns() -> None:
    attempt: Any = SimpleNamespace(number=1, planned=4, verdict=SimpleNamespace(weight=3))
    model: Any = SimpleNamespace(gradient_reducer=SimpleNamespace(unsettled=True, rescale=None), sharded=False)
    InsideGroup(2).settle(attempt, [model])
    assert attempt.planned == 4


def test_sharded_models_are_corrected_like_those_of_one_rank() -> None:
    """FSDP2 has reduced inside the group; each ring divides by what it planned."""
    done: list[Any] = []
    attempt: Any = SimpleNamespace(number=1, planned=4, verdict=SimpleNamespace(weight=3))
    model: Any = SimpleNamespace(gradient_reducer=SimpleNamespace(unsettled=True, rescale=done.append), sharded=True)
    InsideGroup(2).settle(attempt, [model])
    assert done == [4 / 3]


def test_several_ranks_need_a_process_group() -> None:
    InsideGroup(1).open()
    with pytest.raises(UsageError, match="a group of 2 ranks: call torch"):
        InsideGroup(2).open()
