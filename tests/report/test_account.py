"""Sums, goodput, gaps and failures; without files."""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.events.schema import LIGHTHOUSE
from ft_core.report.account import account, covered, natural, quantile
from ft_core.report.reader import Found
from ft_core.report.story import State
from ft_core.report.text import CAUSE_MAX
from tests.report.jobs import Job, big


def killed() -> Job:
    """Two groups; "b" is killed at 10 and is back at 15; "a" loses 0.3 s."""
    job = Job()
    for name in ("a", "b"):
        job.starts(name, 0.0)
        job.joins(name, 1.0, 1)
        job.counts(name, 2.5, 5, 5)
    job.lighthouse(1.9, "quorum_formed", quorum_id=1, members=["a", "b"], step=0, joined=[], without=[])
    job.fails("b", 10.0)
    job.lighthouse(10.004, "member_lost", quorum_id=1, replica_id="b:00000001", how="its supervisor reported ...")
    job.breaks("a", 10.01, 1, "lost b:00000001", 0.1)
    job.asks("a", 10.02, 2, wait_s=0.2, failed=True)
    job.gap("a", 10.4, "member lost", 0.5, detail="lost b:00000001")
    job.starts("b", 10.1, restarts=1)
    job.joins("b", 13.0, 3, pid=2, heals=True, wait_s=1.5)
    for name, pid in (("a", 1), ("b", 2)):
        job.counts(name, 20.0, 170, 170, pid=pid)
        job.leaves(name, 20.5, pid=pid)
    return job


def test_every_second_is_somewhere() -> None:
    result = account(killed().found())
    assert result.total_s == pytest.approx(sum(result.seconds.values()))
    assert result.seconds[State.RESTARTING] == pytest.approx(3.0)
    assert result.seconds[State.HEALING] == pytest.approx(0.5)
    assert result.seconds[State.LOST] == pytest.approx(0.11)
    assert result.seconds[State.STARTING] == pytest.approx(2.0)
    assert result.total_s == pytest.approx(41.0)
    assert (result.heals, result.healed_bytes) == (1, 2_000_000)


def test_goodput() -> None:
    result = account(killed().found())
    assert result.steps == 170
    assert result.usual_s == pytest.approx(0.1)
    # From 2.5 to 20 "a" stood still for 0.4 s beyond a usual step; meanwhile nobody trained.
    assert result.moving == pytest.approx(1 - 0.4 / 17.5)
    trained = (10.01 - 0.1 - 2.5) + (20.5 - 10.22) + (10.0 - 2.5) + (20.5 - 15.0)
    assert result.share == pytest.approx(trained / 36.0)


def test_a_death_is_one_failure_with_what_it_cost() -> None:
    (failure,) = account(killed().found()).failures
    assert (failure.t, failure.who, failure.what) == (10.0, "b", "killed")
    assert failure.cause == "rank 0 (pid 1) was ended by SIGKILL"
    assert failure.noticed_s == pytest.approx(0.004)
    assert failure.gap_s == pytest.approx(0.4)
    assert failure.back_s == pytest.approx(5.0)


def test_a_gap_that_begins_one_step_after_the_death_belongs_to_it() -> None:
    job = killed()
    job.gap("a", 11.5, "member lost", 1.0)  # since 10.5
    job.gap("a", 13.5, "slow", 2.9)  # since 10.6
    (failure,) = account(job.found()).failures
    assert failure.gap_s == pytest.approx(0.9)


def test_peers_may_notice_a_death_before_the_lighthouse() -> None:
    job = killed()
    job.fails("a", 17.0)
    job.breaks("b", 17.002, 3, "a peer has ended its connection", 0.1, pid=2)
    assert account(job.found()).failures[-1].noticed_s == pytest.approx(0.002)


def test_gaps_by_cause() -> None:
    job = Job()
    job.joins("a", 0.0, 1)
    for number in range(10):
        job.gap("a", 10.0 + number, "veto", 0.1 + number)
    job.gap("a", 30.0, "slow", 5.1)
    veto, slow = account(job.found()).gaps
    assert (veto.cause, veto.count, veto.p50_s, veto.p90_s, veto.max_s) == ("veto", 10, 5.0, 9.0, 9.0)
    assert (slow.cause, slow.count) == ("slow", 1)


def test_whom_was_waited_for() -> None:
    job = Job()
    job.joins("a", 0.0, 1, wait_s=4.0, reason="waiting for 1 of 2 groups: b:1 (alive)")
    job.joins("b", 4.0, 1, wait_s=0.5)
    assert account(job.found()).waiting[0] == ("b", 4.0)


def failures(job: Job) -> list[tuple[str, str, str]]:
    return [(f.who, f.what, f.cause) for f in account(job.found()).failures]


def test_an_error_of_the_script_says_which() -> None:
    job = killed()
    job.fails("a", 17.0, code=1, error="ValueError: bad batch")
    assert ("a", "failed", "rank 0 (pid 1) exited with code 1: ValueError: bad batch") in failures(job)


def test_a_freeze_by_chaos_and_one_that_nobody_ordered() -> None:
    job = Job()
    for name in ("a", "b"):
        job.joins(name, 0.0, 1)
    job.ftrun(5.0, "order", group="b", what="freeze", reason="--chaos", chaos=True)
    how = "silent: frozen or cut off"
    job.lighthouse(6.0, "member_lost", quorum_id=1, replica_id="b:1", how=how)
    job.lighthouse(80.0, "member_lost", quorum_id=2, replica_id="a:1", how=how)
    first, second = account(job.found()).failures
    assert (first.t, first.what, first.noticed_s) == (5.0, "frozen", 1.0)
    assert first.cause == f"frozen by --chaos: {how}"
    assert (second.t, second.what, second.cause) == (80.0, "frozen or cut off", how)


def test_a_process_that_vanished_without_a_supervisor() -> None:
    job = Job()
    for name in ("a", "b"):
        job.joins(name, 0.0, 1)
    job.counts("b", 4.9, 40, 40)
    job.lighthouse(5.0, "member_lost", quorum_id=1, replica_id="b:00000001", how="its connection ended")
    job.breaks("a", 5.1, 1, "lost b:00000001", 0.1)
    assert failures(job) == [("b", "lost", "its connection ended; the last that it wrote was counters, 0.1 s before")]


def test_a_goodbye_is_no_failure() -> None:
    job = Job()
    for name in ("a", "b"):
        job.joins(name, 0.0, 1)
    job.lighthouse(5.0, "member_lost", quorum_id=1, replica_id="b:1", how="it said goodbye: drained")
    job.leaves("b", 5.0, "drained: SIGTERM")
    job.breaks("a", 5.1, 1, "left by b", 0.1)
    assert failures(job) == []


def test_vetoes_of_all_are_one_with_the_reason_of_who_caused_it() -> None:
    job = Job()
    for name in ("a", "b"):
        job.joins(name, 0.0, 1)
    for t in (5.0, 5.2, 9.0):
        for name, reason in (("a", "1 of 2 members failed in this step"), ("b", "ValueError: NaN")):
            job.replica(name, t, "vetoed", reason=reason, step=3, attempt_s=0.1, attempts=2)
    job.replica("a", 15.0, "vetoed", reason="1 of 2 members failed in this step", step=3, attempt_s=0.1, attempts=1)
    assert failures(job) == [
        ("b", "4 steps vetoed", "ValueError: NaN"), ("b", "2 steps vetoed", "ValueError: NaN"),
        ("a member", "a step vetoed", "a member failed; it did not write why"),
    ]  # fmt: skip


def test_the_lighthouse_itself() -> None:
    job = killed()
    job.lighthouse(16.0, "stood_still", seconds_s=2.0)
    job.lighthouse(18.0, "refused", replica_id="c:00000001", reason="another model")
    job.write("lighthouse", "lighthouse", 19.0, "lighthouse_started", 2, address="x", min_replicas=1)
    found = failures(job)
    assert ("the lighthouse", "started again", "it had ended; training went on") in found
    assert any(who == "the lighthouse" and what == "stood still" for who, what, _ in found)
    assert ("c", "refused", "another model") in found


def test_a_quorum_that_broke_for_no_other_reason_and_a_heal_that_failed() -> None:
    job = Job()
    for name in ("a", "b"):
        job.joins(name, 0.0, 1)
    job.breaks("b", 5.0, 1, "allreduce timed out", 0.1)
    job.breaks("a", 5.2, 1, "a peer has ended its connection", 0.1)
    job.replica(
        "a", 30.0, "heal_ended", ok=False, bytes=0, seconds_s=0.0, donors=[], step=3, reason="no donor answered"
    )
    assert failures(job) == [
        ("b", "quorum broken", "allreduce timed out"), ("a", "heal given up", "no donor answered"),
    ]  # fmt: skip


def test_a_big_job_adds_up() -> None:
    result = account(big(16, 60.0, 3).found())
    assert [story.name for story in result.stories] == [f"replica-{number}" for number in range(16)]
    assert {failure.what for failure in result.failures} == {"killed"}
    assert all(failure.back_s is not None for failure in result.failures)
    assert sum(story.seconds(State.TRAINING) for story in result.stories) == pytest.approx(
        result.seconds[State.TRAINING]
    )


def test_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no events"):
        account(Found())


def test_only_a_lighthouse() -> None:
    job = Job()
    job.lighthouse(1.0, "lease_opened", replica_id="a:1")
    result = account(job.found())
    assert (result.stories, result.total_s, result.share, result.moving) == ([], 0.0, None, None)


def test_helpers() -> None:
    assert sorted(["r-10", "r-9", "x", "r-a"], key=natural) == sorted(["r-9", "r-10", "x", "r-a"], key=natural)
    assert sorted(["r-10", "r-9"], key=natural) == ["r-9", "r-10"]
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)], 0.5, 6.0) == pytest.approx(3.5)
    assert covered([], 0.0, 1.0) == 0.0


def test_a_takeover_is_a_failure_and_the_start_of_the_second_of_two_lighthouses_is_none() -> None:
    job = Job()
    for process, host, other, role in ((1, "a", "b", "active"), (2, "b", "a", "standby")):
        at = 0.1 * process
        started = {"address": f"http://{host}:1", "min_replicas": 1}
        job.write(LIGHTHOUSE, "lighthouse", at, "lighthouse_started", process, **started)
        _pair(job, at + 0.1, process, role=role, before="starting", other=f"{other}:1")
    job.joins("a-0", 1.0, 1)
    job.counts("a-0", 3.0, 10, 10)
    _pair(job, 9.0, 2, role="active", before="standby", other="a:1", contact=False, took_over=True)
    job.write(LIGHTHOUSE, "lighthouse", 12.0, "lighthouse_started", 3, address="http://a:1", min_replicas=1)
    _pair(job, 12.1, 3, role="standby", before="starting", other="b:1")
    job.counts("a-0", 14.0, 100, 110)
    took, again = account(job.found()).failures
    assert (took.t, took.what) == (9.0, "taken over")
    assert took.cause == "the one that stood by took over from a:1, gone or out of reach; its records were complete"
    assert len(took.cause) < CAUSE_MAX - 15, "there is place for a longer name"
    assert (again.t, again.what) == (12.0, "started again")


def _pair(job: Job, t: float, process: int, **more: Any) -> None:
    fields = {"contact": True, "complete": True, "took_over": False} | more
    job.write(LIGHTHOUSE, "lighthouse", t, "pair", process, **fields)
