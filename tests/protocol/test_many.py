"""As many groups as a quorum holds, and one more."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ft_core.protocol.lighthouse.events import Announce, Asked, Ended, Hello, LeaseEnded, Refuse, Tick
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.types import Ask, Version
from ft_core.settings import MAX_REPLICAS, LighthouseSettings

NOW = 1000.0


def hello(number: int) -> Hello:
    return Hello(f"r{number:04}:1", f"r{number:04}", number + 1, 1, liveness_s=1.0, expected=MAX_REPLICAS)


def asked(number: int, seq: int, quorum_id: int = 0, step: int = 0, *, failed: bool = False) -> Asked:
    version = Version(step, quorum_id)
    return Asked(Ask(f"r{number:04}:1", seq, version, quorum_id=quorum_id, failed=failed), number + 1)


def test_a_quorum_of_as_many_as_it_holds_forms_loses_one_and_refuses_one_more() -> None:
    room = Room("job", LighthouseSettings(), QuorumIds(500, 77, deque(range(1, 9))), boot_at=NOW)
    everybody = range(MAX_REPLICAS)
    assert room.handle_all(map(hello, everybody), NOW) == []
    effects = room.handle_all((asked(number, 1) for number in everybody), NOW)
    (first,) = [effect for effect in effects if isinstance(effect, Announce)]
    assert len(first.quorum.members) == len(first.to) == MAX_REPLICAS == 1024

    (refusal,) = [effect for effect in room.handle(hello(MAX_REPLICAS), NOW) if isinstance(effect, Refuse)]
    assert refusal.to == "r1024:1"
    assert "1024 replica groups are here, and a quorum holds at most 1024" in refusal.reason
    assert "Run fewer groups with more ranks each" in refusal.reason

    room.handle(LeaseEnded("r0500:1", 501, 0.1), NOW + 1)
    others = [number for number in everybody if number != 500]
    events = [asked(number, 2, first.quorum.quorum_id, 1, failed=True) for number in others]
    effects = room.handle_all(events, NOW + 1)
    (second,) = [effect for effect in effects if isinstance(effect, Announce)]
    assert set(first.quorum.ids) - set(second.quorum.ids) == {"r0500:1"}
    room.validate()
    assert room.handle_all([hello(MAX_REPLICAS)], NOW + 1) == [], "there is a place now"


def test_a_replica_that_comes_back_by_another_name_or_none_is_known_by_that() -> None:
    room = Room("job", LighthouseSettings(), QuorumIds(500, 77, deque(range(1, 9))), boot_at=NOW)
    room.handle_all(map(hello, range(3)), NOW)
    for generation, name in enumerate(("other", "", "", "r0001", "", "last"), start=10):
        room.handle(replace(hello(0), name=name, generation=generation), NOW)
        room.validate()
    room.handle(Ended("last"), NOW + 1)
    room.handle(Tick(), NOW + 100)
    room.validate()
    assert room.handle(replace(hello(1), name="", generation=20), NOW + 101) == []
    room.validate()
