"""The state that the next run of a process begins with."""

from __future__ import annotations

from ft_core.loop.runs import carried_over


def test_a_run_counts_on_with_a_lineage_of_its_own_in_each_group() -> None:
    state = {"step": 7, "batches_committed": 12, "lineage": 5}
    one, two = carried_over(state, 0), carried_over(state, 1)
    assert one["step"] == two["step"] == 7
    assert one["batches_committed"] == 12
    assert len({one["lineage"], two["lineage"], state["lineage"]}) == 3
    assert one == carried_over({**state, "lineage": 6}, 0)  # whoever made the run may have had another history


def test_nothing_is_carried_over_from_no_run() -> None:
    assert carried_over({}, 0) == carried_over({"step": 0, "lineage": 5}, 0) == {}
