"""What a rank writes of its life: derived from the real machine, with every event checked against the schema."""

from __future__ import annotations

import pathlib
import threading
from bisect import bisect_left

import pytest

from ft_core.errors import CollectiveError
from ft_core.events import schema
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import Phase
from ft_core.protocol.types import VOID, Outcome, Quorum, Verdict, Version
from ft_core.runtime import rank_events
from ft_core.runtime.rank_events import RankEvents
from ft_core.runtime.veto_cause import cause_of_veto
from tests.fakes import FakeEvents
from tests.protocol.rig import member, new_rank, only, wish
from tests.runtime.harness import Cluster, Replica, crash, soft_error


class Life:
    """One rank "a" with its log, driven as the shell drives it."""

    def __init__(self) -> None:
        self.rank = new_rank("a")
        self.log = FakeEvents()
        self.events = RankEvents(self.rank)
        self.events._log = self.log
        self.now = 10.0

    def feed(self, event: on.Event, after_s: float = 0.0) -> do.Actions:
        self.now += after_s
        actions = self.rank.handle(event, self.now)
        self.events.handled(event, actions, self.now)
        return actions

    def enter(self, quorum_id: int, *others: str, step: int = 0) -> None:
        if self.rank.phase is not Phase.ASKING:
            self.feed(on.QuorumWanted(wish()))
        members = [member(name, step, 1 if step else 0) for name in sorted(("a", *others))]
        self.feed(on.QuorumAnswered(self.rank.asks, Quorum(quorum_id, tuple(members))))
        self.feed(on.GroupsUp(quorum_id))

    def attempt(self, outcome: Outcome = Outcome.COMMIT, took_s: float = 0.1, reason: str = "") -> None:
        """One step, as it is made alone."""
        rank = self.rank
        rank.opened(self.now, pinned=False)
        self.now += took_s
        if outcome is Outcome.VETO:
            self.feed(on.SoftError(ValueError(reason)))
        rank.may_launch(self.now)
        rank.count([x * len(rank.plan.quorum.members) for x in rank.ballot(self.now)], self.now)  # type: ignore[union-attr]
        verdict = rank.own_vote()
        assert verdict.outcome is outcome
        commit, _ = rank.settle(verdict)
        self.events.settled(verdict, self.now, commit=commit)


def test_a_loss_in_the_middle_of_a_step_and_the_gap_that_it_costs() -> None:
    life = Life()
    life.enter(1, "b")
    for _ in range(3):
        life.attempt()
    life.rank.opened(life.now, pinned=False)
    life.rank.may_launch(life.now)
    life.feed(on.CollectiveFailed(CollectiveError("connection closed by peer")), after_s=0.03)
    life.feed(on.MemberLost(1, ("b",)))
    life.enter(2, step=life.rank.held.version.step)
    life.attempt()
    broken, asking, gap = (life.log.of(kind)[-1] for kind in ("broken", "asking", "gap"))
    assert (broken["quorum_id"], broken["moves"]) == (1, False)
    assert broken["attempt_s"] == pytest.approx(0.03)
    assert (asking["failed"], asking["reason"]) == (True, "connection closed by peer")
    assert (gap["cause"], gap["detail"], gap["step"]) == ("member lost", "lost b", 4)
    assert gap["seconds_s"] == pytest.approx(0.13)
    assert gap["usual_s"] == pytest.approx(0.1)
    assert life.log.kinds == [
        "asking", "entered", "formed", "broken", "asking", "entered", "formed", "gap",
    ]  # fmt: skip


def test_an_attempt_that_moves_is_not_lost() -> None:
    life = Life()
    life.enter(1, "b", "c")
    life.attempt()
    life.attempt()
    life.rank.opened(life.now, pinned=False)
    life.feed(on.MemberLost(1, ("c",)), after_s=0.02)
    broken, asking = life.log.of("broken")[0], life.log.of("asking")[-1]
    assert broken["moves"]
    assert asking["reason"] == "lost c"


def test_vetoes_with_their_causes_are_counted_where_they_are_many() -> None:
    life = Life()
    life.enter(1, "b")
    life.attempt()
    for _ in range(30):
        life.attempt(Outcome.VETO, took_s=0.02, reason="a NaN in the loss")
    life.attempt()
    vetoes = life.log.of("vetoed")
    assert 2 <= len(vetoes) <= 0.6 / rank_events.VETO_S + 2
    life.events._count(life.now)
    assert sum(event["attempts"] for event in life.log.of("vetoed")) == 30
    assert sum(event["attempt_s"] for event in life.log.of("vetoed")) == pytest.approx(0.6)
    assert {event["reason"] for event in vetoes} == {"ValueError: a NaN in the loss"}
    (gap,) = life.log.of("gap")
    assert (gap["cause"], gap["detail"]) == ("veto", "ValueError: a NaN in the loss")


def test_quorums_vetoes_and_votes_have_causes_that_can_be_counted() -> None:
    life = Life()
    life.enter(1, "b", "c")
    life.attempt()
    life.attempt()
    life.feed(on.MemberLost(1, ("b",), Version(2, 1)))
    life.enter(2, "c", step=2)
    life.feed(on.MemberLost(2, ("c",)))
    life.enter(3, step=2)
    life.feed(on.CollectiveFailed(CollectiveError("reset")))
    life.enter(4, step=2)
    life.feed(on.CollectiveFailed(CollectiveError("reset")))
    life.enter(5, "d", step=2)
    assert [event["cause"] for event in life.log.of("entered")] == [schema.QUORUM_CAUSES[i] for i in (0, 2, 1, 4, 3)]
    assert {event["cause"] for event in life.log.of("entered")} == set(schema.QUORUM_CAUSES)


def test_the_cause_of_a_veto_is_looked_for_where_its_reason_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that skips every step, as without a lease, is told so in each, and pays for it once."""
    asked: list[str] = []

    def cause(reason: str) -> str:
        asked.append(reason)
        return cause_of_veto(reason)

    monkeypatch.setattr(rank_events, "cause_of_veto", cause)
    life = Life()
    asked.clear()
    life.enter(1, "b")
    for reason in (*["a NaN in the loss"] * 20, "another"):
        life.attempt(Outcome.VETO, took_s=0.02, reason=reason)
    assert asked == ["ValueError: a NaN in the loss", "ValueError: another"]


def test_vetoes_of_different_causes_are_not_counted_together() -> None:
    life = Life()
    life.enter(1, "b")
    life.attempt()
    life.now += 1.0
    for reason in ("a NaN", "a NaN"):
        life.attempt(Outcome.VETO, took_s=0.001, reason=reason)
    verdict = Verdict(1, 0, Outcome.VETO, "no member contributed a gradient")
    for _ in range(2):
        life.events.settled(verdict, life.now, commit=False)
    life.events._count(life.now)
    vetoes = [(event["cause"], event["attempts"]) for event in life.log.of("vetoed")]
    assert sum(count for cause, count in vetoes if cause == "error") == 2
    assert sum(count for cause, count in vetoes if cause == "no gradient") == 2
    assert len({cause for cause, _ in vetoes}) == 2


def test_what_steps_and_votes_took_adds_up() -> None:
    life = Life()
    life.enter(1)
    for took_s in (0.1, 0.1, 0.1, 0.1, 2.0, 0.1):
        life.attempt(took_s=took_s)
    life.events.settled(Verdict(1, 0, Outcome.VETO, "stop"), life.now, commit=False, voted_s=0.3)
    life.events._count(life.now)
    (gap,), last = life.log.of("gap"), life.log.of("counters")[-1]
    assert last["trained_s"] == pytest.approx(0.5), "the first step begins it, the long one counts as a usual one"
    assert last["trained_s"] + gap["seconds_s"] - gap["usual_s"] == pytest.approx(2.4)
    assert last["voted_s"] == pytest.approx(0.3)
    assert sum(last["votes"]) == 7
    assert last["votes"][bisect_left(schema.VOTE_BOUNDS_S, 0.3)] == 1


def test_a_slow_step_is_a_gap_and_a_usual_one_is_not() -> None:
    life = Life()
    life.enter(1)
    for took_s in (0.1, 0.1, 0.1, 0.3, 0.1, 2.0, 0.1):
        life.attempt(took_s=took_s)
    (gap,) = life.log.of("gap")
    assert gap["cause"] == "slow"
    assert gap["seconds_s"] == pytest.approx(2.0)


def test_counters_come_once_a_second() -> None:
    life = Life()
    life.enter(1)
    for _ in range(40):
        life.attempt(took_s=0.05)
    counters = life.log.of("counters")
    assert len(counters) == 2
    assert counters[-1]["commits"] > counters[0]["commits"]


def test_without_a_log_nothing_is_put_together() -> None:
    life = Life()
    life.log.on = False
    life.enter(1, "b")
    life.attempt()
    life.feed(on.MemberLost(1, ("b",), VOID))
    assert life.log.all == []


def test_what_the_lighthouse_says_is_written_when_it_changes() -> None:
    life = Life()
    (ask,) = [only(life.feed(on.QuorumWanted(wish())), do.SendAsk)]
    assert ask.ask.seq == 1
    for reason in ("waiting for b", "waiting for b", "waiting for c"):
        life.feed(on.NoQuorumYet(reason))
    assert [event["reason"] for event in life.log.of("waiting")] == ["waiting for b", "waiting for c"]


def test_real_replicas_write_a_crash_a_heal_and_a_veto(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: dict[str, list[FakeEvents]] = {}

    def opened(folder: str, role: str, name: str, release: str) -> FakeEvents:
        log = FakeEvents()
        logs.setdefault(name, []).append(log)
        return log

    monkeypatch.setattr(rank_events, "open_events", opened)
    again = Replica(2, name="r2", seed=77, steps=10)
    others = [Replica(0, steps=10, at={(5, "boundary"): cluster.joins(again), (2, "started"): soft_error}),
              Replica(1, steps=10)]  # fmt: skip
    cluster.run(*others, Replica(2, steps=10, at={(3, "backward"): crash}))
    cluster.check(steps=10, survivors=3)
    first, back = logs["r2"]
    assert "left" not in first.kinds
    assert back.of("heal_ended")[-1]["ok"]
    assert back.of("heal_ended")[-1]["bytes"] > 0
    assert back.of("left")
    survivor = logs["r1"][0]
    assert "soft error" in survivor.of("vetoed")[0]["reason"] or "members failed" in survivor.of("vetoed")[0]["reason"]
    assert {event["cause"] for event in survivor.of("gap")} >= {"veto", "member lost"}
    assert survivor.of("counters")[-1]["commits"] == 10
    assert not survivor.on


def test_a_pause_of_the_script_is_two_events(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FakeEvents()
    monkeypatch.setattr(rank_events, "open_events", lambda *_: log)

    def pause(replica: Replica) -> None:
        with replica.manager.pause("validation", 5.0):
            threading.Event().wait(0.01)

    cluster.run(Replica(0, at={(3, "boundary"): pause}))
    (begun,), (ended,) = log.of("pause_begun"), log.of("pause_ended")
    assert (begun["reason"], begun["max_s"]) == ("validation", 5.0)
    assert 0.01 <= ended["seconds_s"] < 5.0
    assert log.of("gap")[0]["cause"] == "pause"


def test_only_rank_0_of_a_group_writes(tmp_path: pathlib.Path) -> None:
    rank = new_rank("a", group_rank=1, group_world_size=2)
    events = RankEvents(rank)
    events.open(str(tmp_path), "a")
    events.close()
    assert list(tmp_path.iterdir()) == []
