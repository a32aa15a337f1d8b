"""Progress with an advancing stable step, as every training replica sends it several times per second: it decides
nothing by itself, so its consequences are not drawn for each of them; and that changes nothing but the cost."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.protocol.lighthouse.deferred_reports import NEWS_S
from ft_core.protocol.lighthouse.events import Announce, Asked, Explain, Hello, LeaseEnded, Progress, Tick
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.types import Ask, Version
from ft_core.settings import LighthouseSettings
from tests.simulation import world as simulation
from tests.simulation.config import Config
from tests.simulation.lighthouse import Lighthouse

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.events import Effect, Event

GROUPS = 64


class Counting(Room):
    """A room that counts how often it looks at everybody."""

    settled = 0

    def settle(self, now: float) -> list[Effect]:
        self.settled += 1
        return super().settle(now)


def training(now: float) -> tuple[Counting, int]:
    """A room of GROUPS that train, and their quorum_id."""
    room = Counting("job", LighthouseSettings(), QuorumIds(500, 7, deque(range(9))), boot_at=now - 100)
    for number in range(GROUPS):
        room.handle(Hello(f"g{number}:x", f"g{number}", number + 1, 7), now)
    effects = room.handle_all([Asked(Ask(f"g{n}:x", 1), n + 1) for n in range(GROUPS)], now)
    quorum = next(e.quorum for e in effects if isinstance(e, Announce))
    return room, quorum.quorum_id


def report(room: Room, quorum_id: int, step: int, now: float) -> None:
    """Everybody reports a newer stable step."""
    for number in range(GROUPS):
        room.handle(Progress(f"g{number}:x", number + 1, step, "step", Version(step, quorum_id)), now)


def test_a_newer_stable_step_is_no_reason_to_look_at_everybody() -> None:
    room, quorum_id = training(1000.0)
    before = room.settled
    for step in range(1, 10):
        report(room, quorum_id, step, 1000.0 + step)
    assert room.settled == before
    assert room.next_at is None
    assert all(record.stable.step == 9 and record.committed for record in room.records.values())


def test_while_somebody_asks_the_room_looks_again_soon_and_once() -> None:
    room, quorum_id = training(1000.0)
    room.handle(Hello("new:x", "new", 900, 7), 1001.0)
    room.handle(Asked(Ask("new:x", 1), 900), 1001.0)
    before = room.settled
    report(room, quorum_id, 1, 1002.0)
    report(room, quorum_id, 2, 1002.1)
    assert room.settled == before
    assert room.next_at == 1002.0 + NEWS_S
    room.handle(Tick(), room.next_at)
    assert room.settled == before + 1


def test_what_was_reported_counts_in_the_next_decision() -> None:
    """R2: a replica that fell silent right after its report holds what it reported."""
    room, quorum_id = training(1000.0)
    room.handle(Progress("g0:x", 1, 5, "step", Version(5, quorum_id)), 1001.0)
    room.handle(LeaseEnded("g0:x", 1, 30.0), 1002.0)
    room.handle_all([Asked(Ask(f"g{n}:x", 2, Version(4, quorum_id), 0, quorum_id), n + 1) for n in range(1, 9)], 1003.0)
    assert "g0:x holds step 5, newer than the step 4 of those who ask" in room.waits.reason


class Twice(Lighthouse):
    """A lighthouse whose room has a double that looks at everybody after every event. Both do the same."""

    events = 0

    def __init__(self, world: simulation.World, boot: int, number: int, index: int = 0) -> None:
        super().__init__(world, boot, number, index)
        ids = self.room._ids
        other = QuorumIds(ids.boot, ids.noise, deque(ids.entropy), unique=ids.unique)
        rules, holds = Rules(lazy_news=False), self.room.reachability.holds
        self.double = Room("job", self.room._settings, other, boot_at=world.now, rules=rules, holds=holds)

    def handle(self, event: Event) -> None:
        world = self.world
        theirs = [e for e in self.double.handle(event, world.now) if not isinstance(e, Explain)]
        self.ours: list[Effect] = []
        super().handle(event)
        assert self.ours == theirs, f"{event} at {world.now}"
        if self.double.next_at is not None:
            assert self.room.next_at is not None
            assert self.room.next_at <= max(self.double.next_at, world.now + NEWS_S)
        Twice.events += 1

    def _perform(self, effect: Effect) -> None:
        if not isinstance(effect, Explain):
            self.ours.append(effect)
        super()._perform(effect)


@pytest.mark.parametrize("start", [0, *(pytest.param(start, marks=pytest.mark.long) for start in (20, 40))])
def test_a_room_that_looks_after_every_report_does_the_same(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "Lighthouse", Twice)
    for seed in range(start, start + 20):
        fixed: dict[str, Any] = {"progress_s": 0.05, "settle_s": 0.0}
        result = simulation.simulate(seed, Config.draw(seed, **fixed))
        assert result.violation is None, result.violation
    assert Twice.events > 5_000
