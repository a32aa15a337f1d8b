"""Watching a real lighthouse: what arrives without being asked for, and how often."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse import watchers
from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import FaultToleranceError, LighthouseError
from ft_core.protocol.types import Version
from tests.control.recorder import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ft_core.rpc.codec import pb
    from tests.control.recorder import Replica


class Watcher:
    """Reads what arrives on a thread."""

    def __init__(self, address: str, names: Collection[str] = (), token: str = "", room: str = "") -> None:
        self.client = LighthouseClient(address, timedelta(seconds=5), token=token)
        self.arrived: list[pb.StatusResponse] = []
        self.ended: Exception | None = None
        self._stream = self.client.watch(names, room)
        self._thread = threading.Thread(target=self._read, name="watcher")
        self._thread.start()

    def _read(self) -> None:
        try:
            for status in self._stream:
                self.arrived.append(status)
        except FaultToleranceError as error:
            self.ended = error

    def lives(self) -> dict[str, str]:
        """The life of each replica in what arrived last."""
        rooms = self.arrived[-1].rooms if self.arrived else ()
        return {replica.replica_id: replica.life for room in rooms for replica in room.replicas}

    def close(self) -> None:
        self._stream.cancel()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.client.close()


@pytest.fixture
def watch() -> Iterator[Callable[..., Watcher]]:
    made: list[Watcher] = []

    def make(*arguments: object, **more: object) -> Watcher:
        made.append(Watcher(*arguments, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_changes_arrives_without_being_asked_for(
    lighthouse: LighthouseServer,
    watch: Callable[..., Watcher],
    trio: list[Replica],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchers, "STATUS_S", 3600.0)  # nothing arrives but what counts
    seen = watch(lighthouse.address())
    wait_until(lambda: seen.lives() == {"a:1": "up", "b:1": "up", "c:1": "up"})
    count = len(seen.arrived)
    assert trio[2].lease.leave("done", finished=False, version=Version(1, 1), agreed=True, timeout_s=5)
    wait_until(lambda: seen.lives() == {"a:1": "up", "b:1": "up", "c:1": "gone"})
    assert len(seen.arrived) <= count + 3, "once per change, and not while nothing changes"
    assert seen.ended is None


def test_progress_arrives_a_few_times_per_second(
    lighthouse: LighthouseServer, watch: Callable[..., Watcher], trio: list[Replica]
) -> None:
    assert len(trio) == 3
    seen = watch(lighthouse.address(), ("a",))
    wait_until(lambda: len(seen.arrived) >= 3)
    rooms = seen.arrived[-1].rooms
    assert [replica.replica_id for room in rooms for replica in room.replicas] == ["a:1"], "only who was named"
    assert [(room.member_count, list(room.members)) for room in rooms] == [(3, [])]


def test_one_that_ends_is_forgotten(lighthouse: LighthouseServer, watch: Callable[..., Watcher]) -> None:
    seen = watch(lighthouse.address())
    wait_until(lambda: bool(seen.arrived))
    assert repr(lighthouse._calls._watchers) == "Watchers(1)"
    seen.close()
    wait_until(lambda: repr(lighthouse._calls._watchers) == "Watchers(0)")
    assert seen.ended is None


def test_it_ends_with_the_lighthouse(watch: Callable[..., Watcher]) -> None:
    server = LighthouseServer("127.0.0.1:0", token="")
    seen = watch(server.address())
    wait_until(lambda: bool(seen.arrived))
    server.shutdown()
    wait_until(lambda: isinstance(seen.ended, LighthouseError))


def test_too_many_are_refused(
    lighthouse: LighthouseServer, watch: Callable[..., Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "MAX_WATCHERS", 1)
    first = watch(lighthouse.address())
    wait_until(lambda: bool(first.arrived))
    second = watch(lighthouse.address())
    wait_until(lambda: second.ended is not None)
    assert "1 watch this lighthouse already" in str(second.ended)
    assert not second.arrived


def test_a_watcher_needs_the_token(watch: Callable[..., Watcher]) -> None:
    server = LighthouseServer("127.0.0.1:0", token="secret")
    try:
        seen = watch(server.address(), token="secret")
        wait_until(lambda: bool(seen.arrived))
        client = LighthouseClient(server.address(), timedelta(seconds=5), token="secret")
        client._metadata = ()
        with pytest.raises(FaultToleranceError, match="needs a token"):
            next(iter(client.watch()))
        client.close()
    finally:
        server.shutdown()


def test_a_room_may_be_named(
    lighthouse: LighthouseServer, watch: Callable[..., Watcher], replica: Callable[..., Replica]
) -> None:
    for room in ("one", "two"):
        one = replica(f"{room}:1", room=room)
        one.lease.wait_connected(5)
    client = LighthouseClient(lighthouse.address(), timedelta(seconds=5))
    status = client.status(room="two")
    assert [(room.room, [r.replica_id for r in room.replicas]) for room in status.rooms] == [("two", ["two:1"])]
    assert [room.room for room in client.status(names=("one",)).rooms] == ["one", "two"]
    client.close()
    seen = watch(lighthouse.address(), room="one")
    wait_until(lambda: seen.lives() == {"one:1": "up"})
