"""`RoomEvents`: what happens in the lighthouse's rooms, as events for the job's log. Derived; decides nothing.

How it works. The shell calls `fed` with the events that a room took, the effects that followed, and the room as it is
then. A quorum's end is seen by comparing; its reason is what the room was told at that moment. How a loss was noticed
is what was last received about the one that is lost.

Invariants: nothing here blocks or raises for what it sees; what is kept of a replica or a room is bounded by KEPT.
Threads: the server's loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.events.schema import FIRST, JOINED, LEFT, LOSS_SIGNS, LOST, SAME
from ft_core.protocol.lighthouse.events import (
    Announce,
    Asked,
    Ended,
    GivenUp,
    Hello,
    Incomplete,
    LeaseEnded,
    Left,
    MemberLost,
    Refuse,
)
from ft_core.protocol.lighthouse.view import Life

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.events.event_log import Events
    from ft_core.protocol.lighthouse.events import Effect, Event
    from ft_core.protocol.lighthouse.room import Room
    from ft_core.protocol.types import Quorum

KEPT = 4096
"""Replicas and rooms of which something is remembered; then all is forgotten, and less is known of the next loss."""

NOTHING: tuple[int, float, tuple[str, ...]] = (0, 0.0, ())
SUPERVISOR, CONNECTION, SILENCE, GOODBYE, ABSENCE = LOSS_SIGNS


class RoomEvents:
    """The log of one lighthouse, and what is needed to write it."""

    def __init__(self, log: Events) -> None:
        self._log = log
        self._seen: dict[tuple[str, str], tuple[str, str]] = {}
        """(room, replica_id): what was last received about the end of its process or connection: sign and sentence."""
        self._lost: dict[str, tuple[int, set[str]]] = {}
        """By room: the quorum in force, and those of its members whose loss is an event already."""
        self._open: dict[str, tuple[int, float, tuple[str, ...]]] = {}
        """By room: id, begin (s) and members of the quorum that has not ended."""
        self._before: dict[str, tuple[int, tuple[str, ...]]] = {}
        """By room: id and members of the last quorum."""

    def __repr__(self) -> str:
        return f"RoomEvents({self._log!r}, {len(self._open)} quorums)"

    def fed(self, room: Room, events: Sequence[Event], effects: Sequence[Effect], now: float) -> None:
        """A room has taken these events, with these effects."""
        if not self._log.on:
            return
        if max(len(self._seen), len(self._before)) > KEPT:
            for kept in (self._seen, self._lost, self._open, self._before):
                kept.clear()
        why, among = "", frozenset(self._open.get(room.name, NOTHING)[2])
        for event in events:
            told = self._received(room, event, among)
            why = why or told
        formed = [effect.quorum for effect in effects if isinstance(effect, Announce)]
        before = self._quorum_over(room, why, now)
        current = room.current
        if current is not None and not current.ended and room.name not in self._open:
            self._open[room.name] = (current.quorum_id, now, current.members)
            quorum = next((quorum for quorum in formed if quorum.quorum_id == current.quorum_id), None)
            self._begun(room, current.quorum_id, current.members, before, quorum)
        for effect in effects:
            if isinstance(effect, MemberLost):
                self._members_lost(room, effect.quorum_id, effect.lost)
            elif isinstance(effect, Refuse):
                self._log.emit("refused", room=room.name, replica_id=effect.to, reason=effect.reason)

    def explained(self, room: Room) -> None:
        """Those who ask were told why there is no quorum."""
        self._log.emit("no_quorum_yet", room=room.name, reason=room.waits.reason)

    def stood_still(self, seconds: float) -> None:
        """The lighthouse itself did nothing for so long."""
        self._log.emit("stood_still", seconds_s=seconds)

    def close(self) -> None:
        """End the log. Idempotent."""
        self._log.close()

    # ------------------------------------------------------------ what was received

    def _received(self, room: Room, event: Event, among: frozenset[str]) -> str:
        """Note an event. Returns why it could end the quorum of the members `among`, as a phrase; '': it could not."""
        log, name = self._log, room.name
        match event:
            case Hello():
                log.emit("lease_opened", room=name, replica_id=event.replica_id)
                self._seen.pop((name, event.replica_id), None)
            case LeaseEnded():
                log.emit("lease_ended", room=name, replica_id=event.replica_id, silence_s=event.silence_s)
                how = f"its connection ended, {event.silence_s:.2f} s after it last sent"
                self._seen[name, event.replica_id] = CONNECTION, how
                return f"the connection of {event.replica_id} has ended"
            case Ended():
                for replica_id, record in room.records.items():
                    if event.replica_id in (replica_id, record.hello.name) and record.life is Life.GONE:
                        self._seen[name, replica_id] = SUPERVISOR, "its supervisor reported that its process has ended"
                return f"the process of {event.replica_id} has ended"
            case GivenUp():
                return f"{event.name} was given up: {event.reason}"
            case Left():
                log.emit(
                    "goodbye", room=name, replica_id=event.replica_id, reason=event.reason, finished=event.finished
                )
                self._seen[name, event.replica_id] = GOODBYE, f"it said goodbye: {event.reason}"
                return f"{event.replica_id} left: {event.reason}"
            case Asked() if event.ask.replica_id in among:
                return f"{event.ask.replica_id} asked for the next one: {event.ask.reason}"
            case Incomplete():
                return event.reason
            case _:
                pass
        return ""

    # ------------------------------------------------------------ what followed

    def _quorum_over(self, room: Room, why: str, now: float) -> tuple[int, tuple[str, ...]]:
        """Note the end of the quorum that was in force, if it has come. Returns id and members of the last one."""
        quorum_id, since, members = self._open.get(room.name, NOTHING)
        current = room.current
        if quorum_id and (current is None or current.quorum_id != quorum_id or current.ended):
            del self._open[room.name]
            self._log.emit(
                "quorum_ended", room=room.name, quorum_id=quorum_id, reason=why or "a newer one took its place",
                lived_s=now - since,
            )  # fmt: skip
        if quorum_id:
            self._before[room.name] = quorum_id, members
        return self._before.get(room.name, (0, ()))

    def _begun(
        self, room: Room, quorum_id: int, members: tuple[str, ...], last: tuple[int, tuple[str, ...]],
        quorum: Quorum | None,
    ) -> None:  # fmt: skip
        last_id, before = last
        step = max((member.version.step for member in quorum.members), default=0) if quorum is not None else 0
        joined = sorted(set(members) - set(before)) if before else []
        without = sorted(set(before) - set(members))
        lost = [one for one in without if self._seen.get((room.name, one), ("", ""))[0] != GOODBYE]
        self._members_lost(room, last_id, lost)  # of whom nobody had to be notified: all others had noticed, and asked
        self._log.emit(
            "quorum_formed", room=room.name, quorum_id=quorum_id, members=members, step=max(0, step), joined=joined,
            without=without,
            cause=LOST if lost else LEFT if without else JOINED if joined else SAME if before else FIRST,
        )  # fmt: skip

    def _members_lost(self, room: Room, quorum_id: int, lost: Sequence[str]) -> None:
        """Note members that a quorum has lost, each once, if it is known how."""
        known, told = self._lost.get(room.name, (0, set()))
        told = told if known == quorum_id else set()
        self._lost[room.name] = quorum_id, told
        for replica_id in lost:
            if replica_id in told:
                continue
            sign, how = self._how(room, replica_id)
            if how:
                told.add(replica_id)
                self._log.emit(
                    "member_lost", room=room.name, quorum_id=quorum_id, replica_id=replica_id, how=how, sign=sign
                )

    def _how(self, room: Room, replica_id: str) -> tuple[str, str]:
        """How its loss was noticed; '': it is not lost, the quorum broke for it and it asks for the next one."""
        record = room.records.get(replica_id)
        sign, seen = self._seen.get((room.name, replica_id), ("", ""))
        if record is not None and record.life is Life.MISSED:
            return SILENCE, f"silent: frozen or cut off{f' ({seen})' if seen else ''}"
        if seen:
            return sign, seen
        if record is not None and record.life is Life.UP:
            return "", ""
        return ABSENCE, "it did not come back after the lighthouse was started again"
