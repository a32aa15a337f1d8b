"""ftrun's exit status: what a batch system is told."""

from __future__ import annotations

import itertools

import pytest

from ft_core.launch.exit_status import ALL, BAD, KINDS, MIN, exit_status


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_success_is_that_no_group_was_lost(groups: int) -> None:
    for ends in itertools.product(KINDS, repeat=groups):
        status = exit_status(ends, ALL, 1, whole_job=True)
        if set(ends) & BAD:
            assert status == 1, ends
        else:
            assert status == (0 if {"finished", "drained"} & set(ends) else 1), ends


@pytest.mark.parametrize(("ends", "min_replicas", "status"), [
    (("finished", "quarantined", "quarantined"), 1, 0),
    (("finished", "quarantined", "quarantined"), 2, 1),
    (("finished", "failed"), 2, 0),
    (("failed", "failed"), 1, 1),
    (("drained", "drained"), 1, 0),
    (("drained", "stopped"), 1, 1),
    (("stopped",), 1, 1),
])  # fmt: skip
def test_as_many_as_the_smallest_quorum(ends: tuple[str, ...], min_replicas: int, status: int) -> None:
    assert exit_status(ends, MIN, min_replicas, whole_job=True) == status


def test_a_part_of_a_job_may_have_none_that_finished() -> None:
    """Its group was killed when the others, elsewhere, had finished."""
    assert exit_status(("missed",), ALL, 1, whole_job=False) == 0
    assert exit_status(("missed",), ALL, 1, whole_job=True) == 1
    assert exit_status(("failed",), ALL, 1, whole_job=False) == 1
