"""A lighthouse without a network: the real `room.Room`s behind a lock, for Managers that run as threads.

`LoopbackControl` is what a Manager gets instead of a gRPC link. Pushes are delivered by one thread, in order, as the
lease thread would. `cut(replica_id)` ends a lease the way a killed process does. `wait_for` waits for the lighthouse
to be in a state, so that tests need no sleeps.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.errors import JobFinishedError, RefusedError
from ft_core.protocol.lighthouse import events
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.pushes import Answer, Busy, Change, Lost, Order, Over, Push, Reason, Refusal, Welcome
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.types import VOID, Ask, Version
from ft_core.settings import LighthouseSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ft_core.control.lighthouse.lease_client import PushHandler
    from ft_core.protocol.types import Verdict


_boots = itertools.count(1)
"""Tests share a store, and quorum ids are part of its keys."""


class Loopback:
    """One lighthouse, served in this process."""

    def __init__(self, **settings: float) -> None:
        self.settings = LighthouseSettings(boot_window_s=0.0, **settings)  # type: ignore[arg-type]
        self.ids = QuorumIds(boot=next(_boots), noise=7)
        self.rooms: dict[str, Room] = {}
        self.handlers: dict[str, PushHandler] = {}
        self.generation = 0
        self.log: list[str] = []
        self.asks = 0
        self.hold_asks = threading.Event()
        """Cleared: asks are held back, as on a slow network. Set by default."""
        self.hold_asks.set()
        self._held: list[tuple[str, events.Asked]] = []
        self._lock = threading.RLock()
        self._pushes: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._changed = threading.Condition(self._lock)
        self._stopped = False
        self.room_named("default")
        self._threads = [
            threading.Thread(target=self._deliver, daemon=True, name="loopback-push"),
            threading.Thread(target=self._tick, daemon=True, name="loopback-timer"),
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"Loopback({list(self.rooms.values())}, asks={self.asks})"

    @property
    def room(self) -> Room:
        return self.rooms["default"]

    def room_named(self, name: str) -> Room:
        with self._lock:
            if name not in self.rooms:
                self.rooms[name] = Room(name, self.settings, self.ids, boot_at=time.monotonic())
            return self.rooms[name]

    def stop(self) -> None:
        """End its threads, and forget all replicas. Idempotent."""
        with self._changed:
            self._stopped = True
            self.handlers.clear()
            self._changed.notify_all()
        self._pushes.put(None)
        for thread in self._threads:
            thread.join(5)

    def event(self, event: events.Event, room: str = "default") -> None:
        with self._changed:
            for effect in self.room_named(room).handle(event, time.monotonic()):
                self._push(effect)
            self._changed.notify_all()

    def ask(self, event: events.Asked, room: str) -> None:
        with self._changed:
            self.asks += 1
            if not self.hold_asks.is_set():
                self._held.append((room, event))
                self._changed.notify_all()
                return
        self.event(event, room)

    def release_asks(self) -> None:
        """Deliver what was held back, and what comes from now on."""
        with self._changed:
            self.hold_asks.set()
            held, self._held = self._held, []
        for room, event in held:
            self.event(event, room)

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        """Block until `condition()` holds; looked at under the lock, after every event and every few ms."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                assert time.monotonic() < end, f"not reached: {self!r}\n" + "\n".join(self.log)
                self._changed.wait(0.005)

    def asking(self, name: str, room: str = "default") -> bool:
        """A replica of that name has an open ask."""
        records = self.room_named(room).records.values()
        held = any(event.ask.replica_id.startswith(f"{name}:") for _, event in self._held)
        return held or any(r.hello.name == name and r.ask is not None for r in records)

    def members(self, room: str = "default") -> tuple[str, ...]:
        """Names in the quorum in force."""
        current = self.room_named(room).current
        return tuple(i.rpartition(":")[0] for i in current.members) if current else ()

    def cut(self, replica_id: str, room: str = "default", silence_s: float = 0.0) -> None:
        """End the lease as a SIGKILL would (the connection is closed right after a word), or after a long silence."""
        with self._changed:
            record = self.room_named(room).records[replica_id]
            self.handlers.pop(replica_id, None)
            self.event(events.LeaseEnded(replica_id, record.generation, silence_s), room)

    def ended(self, replica_id: str, room: str = "default") -> None:
        """A supervisor has seen the end of this process."""
        with self._changed:
            self.event(events.Ended(replica_id), room)

    def _push(self, effect: events.Effect) -> None:
        match effect:
            case events.Announce(quorum, asked):
                for replica_id, seq in asked:
                    self._to((replica_id,), Answer(seq, quorum))
            case events.Explain(targets, reason, paused_s):
                self._to(targets, Reason(reason, paused_s))
            case events.ChangePending(targets, quorum_id, reason):
                self._to(targets, Change(quorum_id, reason))
            case events.MemberLost(targets, quorum_id, lost, held, failed):
                self._to(targets, Lost(quorum_id, lost, held, failed))
            case events.Paused(targets, quorum_id, who, for_s):
                self._to(targets, Busy(quorum_id, who, for_s))
            case events.Superseded(replica_id, quorum_id):
                self._to((replica_id,), Over(quorum_id))
            case events.Refuse(replica_id, reason, finished):
                self._to((replica_id,), Refusal((JobFinishedError if finished else RefusedError)(reason)))
            case events.Note(text):
                self.log.append(text)

    def _to(self, targets: Iterable[str], push: Push) -> None:
        for replica_id in targets:
            handler = self.handlers.get(replica_id)
            if handler is not None:
                self._pushes.put(functools.partial(handler.on_push, push))

    def _deliver(self) -> None:
        while (push := self._pushes.get()) is not None:
            push()

    def _tick(self) -> None:
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                times = {name: room.next_at for name, room in self.rooms.items() if room.next_at is not None}
                due = [name for name, at in times.items() if now >= at]
                for name in due:
                    self.event(events.Tick(), name)
                if not due:
                    self._changed.wait(max(0.001, min(times.values()) - now) if times else None)


class LoopbackControl:
    """`link.Control` over a Loopback, for a group of one rank."""

    def __init__(self, loopback: Loopback, replica_id: str, handler: PushHandler) -> None:
        self._loopback, self._id, self._handler = loopback, replica_id, handler
        self._room = "default"
        self.connected = False
        self.generation = 0
        self.no_lease_since: float | None = None
        """Set by a test: the lighthouse is out of reach since then."""

    def __repr__(self) -> str:
        return f"LoopbackControl({self._id}, {'connected' if self.connected else 'closed'})"

    @property
    def last_ack(self) -> float:
        return time.monotonic() if self.no_lease_since is None else self.no_lease_since

    @property
    def last_reason(self) -> str:
        return self._loopback.room_named(self._room).waits.reason

    def start(self) -> None:
        lb = self._loopback
        with lb._lock:
            lb.generation += 1
            self.generation = lb.generation
            lb.handlers[self._id] = self._handler
            self.connected = True
            quorum = lb.room_named(self._room).last_quorum
            lb.event(replace(self._handler.hello(), generation=self.generation), self._room)
        peers = tuple((q.replica_id, q.heal_addresses) for q in quorum.members) if quorum else ()
        self._handler.on_push(Welcome(5.0, peers))

    def wait_connected(self, timeout_s: float) -> None: ...

    def ask(self, ask: Ask, room: str | None = None) -> None:
        if room is not None and room != self._room:
            self._loopback.event(
                events.Left(self._id, self.generation, f"moves to {room}", False, VOID, False), self._room
            )
            self._room = room
            self.start()
        self._loopback.ask(events.Asked(ask, self.generation), self._room)

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        return verdict

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        self._loopback.event(events.Progress(self._id, self.generation, step, phase, stable, paused_s), self._room)

    def leave(
        self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float, over: bool = False
    ) -> bool:
        if self.connected:
            self._loopback.event(
                events.Left(self._id, self.generation, reason, finished, version, agreed, over), self._room
            )
        self.connected = False
        return True

    def break_group(self, quorum_id: int, reason: str) -> None: ...

    def drain(self, reason: str) -> None:
        self._handler.on_push(Order(kill=False, reason=reason))

    def shutdown(self, timeout_s: float = 5.0) -> None:
        if self.connected:
            self.connected = False
            self._loopback.cut(self._id, self._room)


__all__ = ["VOID", "Loopback", "LoopbackControl"]
