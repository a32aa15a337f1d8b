"""A lighthouse without a network: the real `membership.Room` behind a lock, for Managers that run as threads.

`Loopback.control` is what a Manager gets instead of a gRPC link. Pushes are delivered by one thread, in order, as the
lease thread would. `cut(replica_id)` ends a lease the way a killed process does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core import membership as m
from ft_core.quorum import VOID, Ask, Version
from ft_core.settings import LighthouseSettings

if TYPE_CHECKING:
    from ft_core.group_server import LeaseHandler
    from ft_core.step import Verdict


class Loopback:
    """One room, served in this process."""

    def __init__(self, **settings: float) -> None:
        self.settings = LighthouseSettings(boot_window_s=0.0, **settings)  # type: ignore[arg-type]
        self.room = m.Room("default", self.settings, m.QuorumIds(boot=1, noise=7), boot_at=time.monotonic())
        self.handlers: dict[str, LeaseHandler] = {}
        self.generation = 0
        self.log: list[str] = []
        self.asks = 0
        self._lock = threading.RLock()
        self._pushes: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._timer = threading.Condition(self._lock)
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._deliver, daemon=True, name="loopback-push"),
            threading.Thread(target=self._tick, daemon=True, name="loopback-timer"),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        with self._timer:
            self._stopped = True
            self._timer.notify_all()
        self._pushes.put(None)
        for thread in self._threads:
            thread.join(5)

    def event(self, event: m.Event) -> None:
        with self._timer:
            for effect in self.room.handle(event, time.monotonic()):
                self._push(effect)
            self._timer.notify_all()

    def cut(self, replica_id: str) -> None:
        """End the lease as a SIGKILL would: the connection is closed right after a word."""
        record = self.room.records[replica_id]
        self.handlers.pop(replica_id, None)
        self.event(m.LeaseEnded(replica_id, record.generation, 0.0))

    def _push(self, effect: m.Effect) -> None:
        def to(replica_id: str, call: Callable[[LeaseHandler], None]) -> None:
            handler = self.handlers.get(replica_id)
            if handler is not None:
                self._pushes.put(lambda: call(handler))

        match effect:
            case m.Announce(quorum, targets):
                for replica_id, seq in targets:
                    to(replica_id, lambda h, seq=seq: h.on_quorum(seq, quorum))
            case m.Explain(targets, reason):
                for replica_id in targets:
                    to(replica_id, lambda h: h.on_reason(reason))
            case m.ChangePending(targets, quorum_id, reason):
                for replica_id in targets:
                    to(replica_id, lambda h: h.on_change_pending(quorum_id, reason))
            case m.MemberLost(targets, quorum_id, lost):
                for replica_id in targets:
                    to(replica_id, lambda h: h.on_member_lost(quorum_id, lost))
            case m.Paused(targets, quorum_id, who, for_s):
                for replica_id in targets:
                    to(replica_id, lambda h: h.on_paused(quorum_id, who, for_s))
            case m.Superseded(replica_id, quorum_id):
                to(replica_id, lambda h: h.on_superseded(quorum_id))
            case m.Refuse(replica_id, reason, finished):
                from ft_core.errors import JobFinishedError, RefusedError

                error = (JobFinishedError if finished else RefusedError)(reason)
                to(replica_id, lambda h: h.on_refused(error))
            case m.Note(text):
                self.log.append(text)

    def _deliver(self) -> None:
        while (push := self._pushes.get()) is not None:
            push()

    def _tick(self) -> None:
        with self._timer:
            while not self._stopped:
                at = self.room.next_at
                if at is not None and time.monotonic() >= at:
                    self.event(m.Tick())
                    continue
                self._timer.wait(None if at is None else max(0.001, at - time.monotonic()))


class LoopbackControl:
    """`group_server.Control` over a Loopback, for a group of one rank."""

    def __init__(self, loopback: Loopback, replica_id: str, handler: LeaseHandler) -> None:
        self._loopback, self._id, self._handler = loopback, replica_id, handler
        self.connected = False
        self.generation = 0

    @property
    def last_ack(self) -> float:
        return time.monotonic()

    @property
    def last_reason(self) -> str:
        return self._loopback.room.reason

    def start(self) -> None:
        lb = self._loopback
        with lb._lock:
            lb.generation += 1
            self.generation = lb.generation
            lb.handlers[self._id] = self._handler
            self.connected = True
            hello = replace(self._handler.hello(), generation=self.generation)
            quorum = lb.room.last_quorum
            lb.event(hello)
        peers = tuple((q.replica_id, q.heal_addresses) for q in quorum.members) if quorum else ()
        self._handler.on_welcome(peers)

    def wait_connected(self, timeout_s: float) -> None: ...

    def ask(self, ask: Ask, room: str | None = None) -> None:
        self._loopback.asks += 1
        self._loopback.event(m.Asked(ask, self.generation))

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        return verdict

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        if phase != "step" or paused_s:
            self._loopback.event(m.Progress(self._id, self.generation, step, phase, stable, paused_s))

    def leave(self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float) -> bool:
        self._loopback.event(m.Left(self._id, self.generation, reason, finished, version, agreed))
        self.connected = False
        return True

    def break_group(self, quorum_id: int, reason: str) -> None: ...

    def shutdown(self, timeout_s: float = 5.0) -> None:
        if self.connected:
            self.connected = False
            self._loopback.cut(self._id)


__all__ = ["VOID", "Loopback", "LoopbackControl"]
