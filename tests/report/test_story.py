"""The states of a group out of its events; without files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.report.story import ANSWER, BUILDING, State, Story, plain, tell, whom
from tests.report.jobs import Job, big

NAMES = ["a", "b", "c"]


def told(job: Job, name: str = "a", end: float = 20.0) -> Story:
    events = [
        event
        for log in job.found().logs
        for event in log.events
        if log.source == name or event.get("group") == name
    ]  # fmt: skip
    return tell(name, events, NAMES, end)


def states(story: Story) -> list[tuple[str, float]]:
    return [(segment.state.value, round(segment.seconds, 3)) for segment in story.segments]


def test_a_start_a_wait_and_training() -> None:
    job = Job()
    job.starts("a", 0.0)
    job.joins("a", 5.0, 1, wait_s=2.0, reason="2 of 3 groups are here (a:0000000a, b:0000000b); waiting for the others")
    story = told(job, end=10.0)
    assert states(story) == [("starting", 5.0), ("waiting", 2.0), ("training", 3.0)]
    assert [segment.whom for segment in story.segments] == ["", "c", ""]


def test_the_whole_wait_is_for_whom_the_lighthouse_names_first() -> None:
    job = Job()
    job.joins("a", 0.0, 1, wait_s=2.0, reason="waiting for 1 of 3 groups: b:0000000b (alive, last seen in saving)")
    first = told(job).segments[0]
    assert (first.state, first.whom, first.seconds) == (State.WAITING, "b", 2.0)


def test_a_broken_attempt_is_lost_back_to_its_begin() -> None:
    job = Job()
    job.joins("a", 0.0, 1)
    job.breaks("a", 5.0, 1, "lost b", 0.4)
    job.asks("a", 5.1, 2, wait_s=0.2, failed=True)
    assert states(told(job, end=7.0)) == [
        ("waiting", 1.0), ("training", 3.6), ("lost steps", 0.5), ("waiting", 0.2), ("training", 1.7),
    ]  # fmt: skip


def test_an_attempt_that_moves_is_not_lost() -> None:
    job = Job()
    job.joins("a", 0.0, 1)
    job.breaks("a", 5.0, 1, "lost b", 0.4, moves=True)
    job.asks("a", 5.0, 2, wait_s=0.2, failed=True)
    assert told(job, end=7.0).seconds(State.LOST) == 0


def test_vetoes_are_taken_back_in_pieces() -> None:
    job = Job()
    job.joins("a", 0.0, 1)
    for t in (3.0, 4.0):
        job.replica("a", t, "vetoed", reason="NaN", step=1, attempt_s=0.25, attempts=1)
    assert states(told(job, end=5.0)) == [
        ("waiting", 1.0), ("training", 1.75), ("lost steps", 0.25), ("training", 0.75), ("lost steps", 0.25),
        ("training", 1.0),
    ]  # fmt: skip


def test_a_death_and_the_way_back() -> None:
    job = Job()
    job.starts("a", 0.0)
    job.joins("a", 1.0, 1)
    job.fails("a", 5.0, excuse="killed by --chaos")
    job.starts("a", 5.2, restarts=1)
    job.replica("a", 7.0, "made", 2, replica_id="a:2", ranks=1, step=0)
    job.replica("a", 7.1, "prefetch_begun", 2)
    job.replica("a", 7.1, "asking", 2, reason="joining", failed=False, step=0)
    job.replica("a", 7.4, "prefetch_ended", 2, bytes=5, error="")
    job.asks("a", 7.5, 2, pid=2, heals=True, wait_s=0.5, step=9)
    story = told(job, end=10.0)
    assert states(story) == [
        ("starting", 1.0), ("waiting", 1.0), ("training", 3.0), ("restarting", 2.1), ("healing", 0.3),
        ("waiting", 0.6), ("healing", 0.5), ("training", 1.5),
    ]  # fmt: skip
    assert [(mark.kind, mark.t) for mark in story.marks] == [("death", 5.0), ("heal", 8.5)]
    assert story.trains_again(5.0) == 8.5


def test_a_death_that_no_supervisor_saw() -> None:
    """The next process of the name tells of it: the last one has not said that it ends."""
    job = Job()
    job.joins("a", 0.0, 1)
    job.counts("a", 4.0, 10, 10)
    job.joins("a", 9.0, 2, pid=2)
    story = told(job, end=12.0)
    assert ("restarting", 5.0) in states(story)
    assert [mark.kind for mark in story.marks] == ["death"]


def test_a_group_that_has_left_is_not_part_of_the_job_until_it_comes_back() -> None:
    job = Job()
    job.joins("a", 0.0, 1)
    job.leaves("a", 4.0, "drained: SIGTERM")
    job.joins("a", 9.0, 2, pid=2)
    story = told(job, end=12.0)
    assert sum(segment.seconds for segment in story.segments) == pytest.approx(4.0 + 3.0)
    assert [mark.kind for mark in story.marks] == ["drain"]


def test_a_pause_and_a_freeze_are_no_training() -> None:
    job = Job()
    job.joins("a", 0.0, 1)
    job.replica("a", 2.0, "pause_begun", reason="validation", max_s=60.0)
    job.replica("a", 2.5, "pause_begun", reason="nested", max_s=60.0)
    job.replica("a", 3.0, "pause_ended", reason="nested", seconds_s=0.5)
    job.replica("a", 4.0, "pause_ended", reason="validation", seconds_s=2.0)
    for t, what in ((6.0, "freeze"), (7.5, "thaw")):
        job.ftrun(t, "order", group="a", what=what, reason="--chaos", chaos=True)
    job.breaks("a", 7.6, 1, "left behind", 1.7)
    story = told(job, end=8.0)
    assert story.seconds(State.PAUSED) == 2.0
    assert story.seconds(State.FROZEN) == 1.5
    assert story.seconds(State.LOST) == pytest.approx(0.1 + 0.1 + 0.4)  # around the freeze, and until the end


def test_a_step_that_waited_for_a_peer_that_paused() -> None:
    job = Job()
    job.joins("a", 0.0, 1)
    job.gap("a", 6.0, "pause of a peer", 3.1, detail="b:0000000b")
    story = told(job, end=7.0)
    (wait,) = [s for s in story.segments if s.state is State.WAITING and s.whom == "b"]
    assert [wait.begin, wait.end] == pytest.approx([2.9, 5.9])


def test_the_kinds_of_waiting_without_a_name() -> None:
    job = Job()
    job.joins("a", 0.0, 1, reason="the lighthouse has just started and waits for running groups to reconnect")
    assert told(job).segments[0].whom == "the lighthouse has just started and waits for running groups to reconnect"
    job = Job()
    job.replica("a", 0.0, "asking", reason="x", failed=False, step=0)
    job.replica("a", 1.0, "entered", quorum_id=1, members=["a"], step=0, heals=False)
    job.replica("a", 1.5, "formed", quorum_id=1)
    assert [s.whom for s in told(job).segments] == [ANSWER, BUILDING, ""]


@pytest.mark.parametrize(
    ("reason", "names"),
    [
        ("1 of 3 groups are here (a:0000000a); waiting for the others", "b, c"),
        ("waiting for 1 of 3 groups: c:0000000c (alive, 4.1 s)", "c"),
        ("waiting for 2 of 3 groups: b:1 (alive), c:1 (alive)", "b, c"),
        ("the connection of a-1:0000000a closed; waiting for it to return", ""),
        ("nobody asks for a quorum", ""),
    ],
)
def test_whom(reason: str, names: str) -> None:
    assert whom(reason, NAMES, "a") == names


def test_many_are_counted() -> None:
    names = [f"r-{number}" for number in range(9)]
    assert whom("1 of 9 groups are here (r-0:00000000); waiting for the others", names, "r-0") == "r-1 and 7 more"


def test_sentences_for_tables() -> None:
    assert plain("lost replica-1:4fb577e2 (step 7)") == "lost replica-1 (step 7)"
    assert plain("at 127.0.0.1:40397") == "at 127.0.0.1:40397"


@given(st.integers(0, 1000), st.integers(2, 6), st.floats(20.0, 90.0))
def test_segments_follow_each_other_and_none_is_empty(seed: int, groups: int, seconds: float) -> None:
    job = big(groups, seconds, seed)
    names = [f"replica-{number}" for number in range(groups)]
    for name in names:
        events = [e for log in job.found().logs for e in log.events if log.source == name or e.get("group") == name]
        story = tell(name, events, names, seconds + 1)
        assert all(segment.end > segment.begin for segment in story.segments)
        pairs = zip(story.segments, story.segments[1:], strict=False)
        assert all(before.end <= after.begin + 1e-9 for before, after in pairs)
        assert story.segments[0].begin == 0.0
        assert story.segments[-1].end == pytest.approx(seconds + 0.5)
