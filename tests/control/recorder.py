"""A PushHandler that writes down what it is told, and lets a test wait for it; and a replica made of one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ft_core.control.lighthouse.lease_client import LeaseClient, LeaseSettings
from ft_core.protocol.lighthouse.events import Hello
from ft_core.protocol.pushes import Answer, Busy, Change, Lost, Order, Over, Push, Reason, Refusal, Welcome
from ft_core.protocol.types import Ask, Quorum, Version
from ft_core.settings import TimeBudget

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 10.0
BUDGET = TimeBudget.derive(8.0, overrides={"join_s": 2.0, "connect_s": 5.0})


class Recorder:
    """Events as (name, arguments)."""

    def __init__(self, hello: Hello) -> None:
        self.presented = hello
        self.quorum: Quorum | None = None
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        self.changed = threading.Condition()

    def note(self, name: str, *arguments: Any) -> None:
        with self.changed:
            self.events.append((name, arguments))
            self.changed.notify_all()

    def wait(self, name: str, of: Callable[..., bool] = lambda *_: True, timeout_s: float = WAIT_S) -> tuple[Any, ...]:
        """The arguments of the first such event."""
        with self.changed:

            def find() -> tuple[Any, ...] | None:
                return next((a for n, a in self.events if n == name and of(*a)), None)

            assert self.changed.wait_for(lambda: find() is not None, timeout_s), f"no {name} among {self.events}"
            found = find()
            assert found is not None
            return found

    def of(self, name: str) -> list[tuple[Any, ...]]:
        with self.changed:
            return [a for n, a in self.events if n == name]

    def hello(self) -> Hello:
        self.note("hello")
        if self.quorum is None:
            return self.presented
        return replace(
            self.presented,
            quorum_id=self.quorum.quorum_id,
            members=self.quorum.ids,
            highest_id=self.quorum.quorum_id,
        )

    def on_push(self, push: Push) -> None:
        match push:
            case Welcome():
                self.note("welcome", push.peers)
            case Answer():
                self.quorum = push.quorum
                self.note("quorum", push.seq, push.quorum)
            case Reason():
                self.note("reason", push.text)
                self.note("awaited", push.paused_s)
            case Change():
                self.note("change_pending", push.quorum_id, push.reason)
            case Lost():
                self.note("member_lost", push.quorum_id, push.lost)
            case Busy():
                self.note("paused", push.quorum_id, push.replica_id, push.for_s)
            case Over():
                self.note("superseded", push.quorum_id)
            case Refusal():
                self.note("refused", push.error)
            case Order():
                self.note("kill" if push.kill else "drain", push.reason)
            case _:
                raise AssertionError(push)


class Replica:
    """A lease and its recorder."""

    def __init__(
        self,
        address: str,
        replica_id: str,
        *,
        token: str = "",
        room: str = "default",
        start: bool = True,
        budget: TimeBudget = BUDGET,
        **hello: Any,
    ) -> None:
        presented = Hello(replica_id, replica_id.rpartition(":")[0] or replica_id, 0, 0, join_s=2.0, **hello)
        self.replica_id = replica_id
        self.size = presented.group_world_size
        self.recorder = Recorder(presented)
        self.lease = LeaseClient(LeaseSettings(address, replica_id, budget, room=room, token=token), self.recorder)
        self.seq = 0
        if start:
            self.lease.start()

    def ask(self, *, step: int = 0, failed: bool = False, room: str | None = None, **ask: Any) -> int:
        """Ask for the next quorum; returns the seq."""
        self.seq += 1
        left = self.recorder.quorum.quorum_id if self.recorder.quorum else 0
        version = Version(step, left if step else 0)
        ask = {"quorum_id": left, "failed": failed, "group_world_size": self.size} | ask
        wish = Ask(self.replica_id, self.seq, version, **ask)
        self.lease.ask(wish, room=room)
        return self.seq

    def answer(self, seq: int | None = None) -> Quorum:
        """Wait for the answer to an ask (default: the last)."""
        wanted = self.seq if seq is None else seq
        found: Quorum = self.recorder.wait("quorum", lambda s, _: s == wanted)[1]
        return found

    def close(self) -> None:
        self.lease.shutdown()


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """For what has no event to wait for."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        pause.wait(0.005)
