"""Samples of rooms, as a lighthouse would take them, for the pure tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.dashboard.sample import Note, PairSample, ReplicaSample, RoomSample, Sample
from ft_core.protocol.types import Member, Quorum, Version

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW = 1_000_000.0


def replica(name: str = "a:1", **more: Any) -> ReplicaSample:
    """One that trains at step 7."""
    usual: dict[str, Any] = {
        "replica_id": name, "name": name.split(":")[0], "life": "up", "since": NOW - 60, "step": 7, "phase": "step",
        "asking": False, "asked_at": 0.0, "paused_until": 0.0, "stable": Version(6, 3), "stalled": "", "incomplete": "",
        "silence_s": 0.1, "release": "1.2.3", "ranks": 1, "heal_addresses": ("http://10.0.0.1:5/x",),
    }  # fmt: skip
    return ReplicaSample(**(usual | more))


def quorum(quorum_id: int, steps: dict[str, int]) -> Quorum:
    """One that these formed, each with the step of its state."""
    members = (
        Member(name, Version(step, 1), 0, address=f"http://{name.partition(':')[0]}:900")
        for name, step in steps.items()
    )
    return Quorum(quorum_id, tuple(members))


def room(replicas: Sequence[ReplicaSample], quorum_id: int = 3, **more: Any) -> RoomSample:
    """A room in which all of these are members."""
    usual: dict[str, Any] = {
        "name": "default", "quorum_id": quorum_id, "members": tuple(r.replica_id for r in replicas), "ended": False,
        "formed": None, "reason": "", "held": {}, "closed": "", "given_up": {}, "replicas": replicas,
    }  # fmt: skip
    return RoomSample(**(usual | more))


def sample(*rooms: RoomSample, at: float = NOW, notes: tuple[Note, ...] = (), pair: PairSample | None = None) -> Sample:
    """All rooms at one instant."""
    return Sample(at=at, started=NOW - 100, liveness_s=1.0, release="1.2.3", rooms=rooms, notes=notes, pair=pair)


def formed(quorum_id: int, members: list[str], at: float = NOW, room: str = "default", **more: Any) -> Note:
    """A quorum was formed."""
    fields: dict[str, Any] = {"joined": [], "without": [], "step": 0}
    return Note(at, "quorum_formed", {"room": room, "quorum_id": quorum_id, "members": members, **fields, **more})
