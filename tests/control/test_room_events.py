"""What the lighthouse writes of a room's life: quorums with why they ended, losses with how they were noticed."""

from __future__ import annotations

from collections import deque
from typing import Any

from ft_core.control.lighthouse.room_events import RoomEvents
from ft_core.protocol.lighthouse.events import Asked, Ended, Event, Hello, LeaseEnded, Left, Tick
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.types import VOID, Ask, Version
from ft_core.settings import LighthouseSettings
from tests.fakes import FakeEvents


class Story:
    """A room whose events are written."""

    def __init__(self) -> None:
        self.log = FakeEvents()
        settings = LighthouseSettings(boot_window_s=0.0, grace_s=0.1)
        self.room = Room("job", settings, QuorumIds(500, 77, deque(range(1, 100))), boot_at=1000.0)
        self.events = RoomEvents(self.log)
        self.now = 1000.0
        self.seq = 0

    def feed(self, *events: Event, after_s: float = 0.0) -> None:
        self.now += after_s
        self.events.fed(self.room, events, self.room.handle_all(events, self.now), self.now)

    def hello(self, *names: str) -> None:
        for name in names:
            self.feed(Hello(name, name.partition(":")[0], 1, 1, expected=2))

    def ask(self, name: str, reason: str = "joining", **more: Any) -> None:
        self.seq += 1
        current = self.room.current
        quorum_id = current.quorum_id if current is not None and name in current.members else 0
        self.feed(Asked(Ask(name, self.seq, quorum_id=quorum_id, reason=reason, **more), 1))

    def formed(self, *names: str) -> None:
        self.hello(*names)
        for name in names:
            self.ask(name)


def test_a_loss_that_a_supervisor_reports() -> None:
    story = Story()
    story.formed("a:1", "b:1")
    story.feed(LeaseEnded("b:1", 1, 0.3))
    story.feed(Ended("b"), after_s=0.01)
    story.ask("a:1", "lost b:1", failed=True, version=Version(7, 1))
    formed, again = story.log.of("quorum_formed")
    assert formed["members"] == ["a:1", "b:1"]
    assert (again["members"], again["step"], again["without"]) == (["a:1"], 7, ["b:1"])
    (ended,) = story.log.of("quorum_ended")
    assert (ended["quorum_id"], ended["reason"]) == (formed["quorum_id"], "the process of b has ended")
    (lost,) = story.log.of("member_lost")
    assert (lost["replica_id"], lost["how"]) == ("b:1", "its supervisor reported that its process has ended")
    assert lost["sign"] == "supervisor"
    assert [event["cause"] for event in (formed, again)] == ["first", "member lost"]


def test_a_closed_connection_and_a_freeze_are_told_apart() -> None:
    closed, frozen = "its connection ended, 0.20 s after it last sent", "silent: frozen or cut"
    for silence_s, how, sign in ((0.2, closed, "connection"), (60.0, frozen, "silence")):
        story = Story()
        story.formed("a:1", "b:1")
        story.feed(LeaseEnded("b:1", 1, silence_s))
        story.feed(Tick(), after_s=0.2)
        (lost,) = story.log.of("member_lost")
        assert lost["how"].startswith(how)
        assert lost["sign"] == sign
        story.feed(Tick(), after_s=0.2)
        assert len(story.log.of("member_lost")) == 1


def test_a_loss_that_all_others_noticed_themselves_is_one_too() -> None:
    """They ask before the lighthouse believes it, so that it notifies nobody."""
    story = Story()
    story.formed("a:1", "b:1", "c:1")
    story.feed(LeaseEnded("b:1", 1, 0.01))
    before = story.log.of("quorum_formed")[0]["quorum_id"]
    asks = [Ask(name, 9, quorum_id=before, reason="a collective failed", failed=True) for name in ("a:1", "c:1")]
    story.feed(*(Asked(ask, 1) for ask in asks))
    story.feed(Tick(), after_s=0.2)
    assert story.log.of("quorum_formed")[-1]["members"] == ["a:1", "c:1"]
    assert story.log.of("quorum_formed")[-1]["cause"] == "member lost"
    (lost,) = story.log.of("member_lost")
    assert (lost["replica_id"], lost["sign"]) == ("b:1", "connection")
    assert lost["quorum_id"] == before
    assert [kind for kind in story.log.kinds if kind in ("member_lost", "quorum_formed")][-2:] == [
        "member_lost", "quorum_formed",
    ]  # fmt: skip


def test_a_goodbye_and_a_newcomer_end_quorums_with_their_reasons() -> None:
    story = Story()
    story.formed("a:1", "b:1")
    story.hello("c:1")
    story.ask("c:1")
    story.ask("a:1", "c:1 wants to join")
    story.ask("b:1", "c:1 wants to join")
    story.feed(Left("c:1", 1, "drained: SIGTERM", finished=False, version=VOID, agreed=True))
    assert [event["reason"] for event in story.log.of("quorum_ended")] == [
        "a:1 asked for the next one: c:1 wants to join", "c:1 left: drained: SIGTERM",
    ]  # fmt: skip
    assert story.log.of("quorum_formed")[-1]["joined"] == ["c:1"]
    assert story.log.of("quorum_formed")[-1]["cause"] == "member joined"
    story.ask("a:1", "left by c:1")
    story.ask("b:1", "left by c:1")
    assert story.log.of("quorum_formed")[-1]["cause"] == "member left"
    story.ask("a:1", "a collective failed", failed=True)
    story.ask("b:1", "a collective failed", failed=True)
    assert story.log.of("quorum_formed")[-1]["cause"] == "same members"
    (goodbye,) = story.log.of("goodbye")
    assert goodbye["replica_id"] == "c:1"


def test_a_member_that_asks_because_its_quorum_broke_is_not_lost() -> None:
    story = Story()
    story.formed("a:1", "b:1")
    story.ask("a:1", "a collective failed", failed=True)
    assert story.log.of("member_lost") == []
    assert story.log.of("quorum_ended")[0]["reason"] == "a:1 asked for the next one: a collective failed"
