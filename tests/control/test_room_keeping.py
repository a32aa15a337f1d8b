"""A lighthouse that serves run after run: rooms that are over make place, those that live stay."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.control.lighthouse.partner_link import PartnerLink
from ft_core.control.lighthouse.room_host import Rooms
from ft_core.control.lighthouse.room_shell import Waiter
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import JobFinishedError, RefusedError
from ft_core.protocol.lighthouse.events import Asked, Hello, LeaseEnded, Left
from ft_core.protocol.lighthouse.pair import MAX_NOTES, Role
from ft_core.protocol.lighthouse.partner import Told
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.room_keeping import MAX_FINISHED, MAX_ROOMS, FinishedRooms, replaceable
from ft_core.protocol.pushes import Answer, Push, Refusal, Welcome
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.types import Ask, Basis, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import LIGHTHOUSE, channel_options, grpc
from ft_core.settings import LighthouseSettings, room_of_run

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNS = 1000
ABSENCE_S = 2.0


@pytest.fixture
def server() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", boot_window_ms=0, token="")
    yield server
    server.shutdown()


class Stream:
    """One lease without a client around it: what is sent, and what comes."""

    def __init__(self, channel: grpc.aio.Channel, room: str, name: str = "a") -> None:
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{LIGHTHOUSE}/Lease")()
        self._room, self._name = room, name

    async def open(self) -> Push:
        """Hello; the answer."""
        hello = Hello(f"{self._name}:1", self._name, 0, 1)
        await self._call.write(codec.encode_hello(hello, self._room, "test"))
        return await self._next()

    async def ask(self) -> None:
        """Ask, and be in a quorum."""
        await self._call.write(codec.encode_lease(Ask(f"{self._name}:1", 1)))
        while not isinstance(await self._next(), Answer):
            pass

    async def finish(self) -> None:
        """Training is over."""
        await self._call.write(codec.encode_lease(Left(f"{self._name}:1", 0, "out of data", True, Version(7, 1), True)))
        await self._ended()

    async def end(self) -> None:
        """The connection is closed in the usual way.

        Each stream that is open is ended so: what a channel cancels when it closes ends in grpc.aio's poller thread,
        and one whose end comes after its event loop has gone keeps that thread in this process for ever.
        """
        await self._call.done_writing()
        await self._ended()

    async def _ended(self) -> None:
        while await self._call.read() is not grpc.aio.EOF:
            pass
        await self._call.code()

    async def vanish(self) -> None:
        """The connection closes, without a word."""
        self._call.cancel()

    async def _next(self) -> Push:
        data = await self._call.read()
        assert isinstance(data, bytes)
        push = codec.decode_push(data)
        assert push is not None
        return push


def test_a_thousand_runs_of_one_job_at_one_lighthouse(server: LighthouseServer) -> None:
    """Half of them finish, the others are dropped where they are; a job beside them lives through it all."""

    async def run() -> None:
        options = channel_options()
        async with grpc.aio.insecure_channel(server.address().removeprefix("http://"), options=options) as channel:
            beside = Stream(channel, "another job")
            await beside.open()
            await beside.ask()
            for nth in range(RUNS):
                stream = Stream(channel, room_of_run(nth))
                opened = await stream.open()
                assert isinstance(opened, Welcome), f"run {nth}: {opened}"
                if nth % 2:
                    await stream.vanish()
                else:
                    await stream.ask()
                    await stream.finish()
            for nth in (0, RUNS // 2, RUNS - 2):
                late = Stream(channel, room_of_run(nth), "late")
                refused = await late.open()
                assert isinstance(refused, Refusal), "it would train again over the checkpoints"
                assert isinstance(refused.error, JobFinishedError)
                await late.end()
            await beside.finish()

    asyncio.run(run())
    client = LighthouseClient(server.address(), token="")
    try:
        rooms = {room.room: room for room in client.status().rooms}
        assert len(rooms) == MAX_ROOMS
        assert rooms["another job"].closed, "it was never forgotten"
        client.room = room_of_run(2)
        assert client.reopen(), "an operator may open a room that was forgotten"
        assert not client.reopen()
    finally:
        client.close()


def test_rooms_with_living_replicas_are_never_forgotten(server: LighthouseServer) -> None:
    async def run() -> None:
        options = channel_options()
        async with grpc.aio.insecure_channel(server.address().removeprefix("http://"), options=options) as channel:
            streams = [Stream(channel, f"job {number}") for number in range(MAX_ROOMS)]
            for stream in streams:
                assert isinstance(await stream.open(), Welcome)
            one_more = Stream(channel, "one more")
            refused = await one_more.open()
            assert isinstance(refused, Refusal)
            assert isinstance(refused.error, RefusedError)
            assert "all of 256 rooms here have living replicas: start a lighthouse for 'one more'" in str(refused.error)
            await one_more.end()
            await streams.pop(5).finish()
            streams.append(Stream(channel, "one more"))
            assert isinstance(await streams[-1].open(), Welcome)
            for stream in streams:
                await stream.end()

    asyncio.run(run())


# ---------------------------------------------------------------- which one


def room(name: str, *, asks: bool = True) -> Room:
    """A room with one replica that is in a quorum, or has only said hello, at second 100."""
    made = Room(name, LighthouseSettings(boot_window_s=0.0), QuorumIds(9, 1, deque([5] * 8)), boot_at=0.0)
    made.handle(Hello("a:1", "a", 1, 1), 100.0)
    if asks:
        made.handle(Asked(Ask("a:1", 1), 1), 100.0)
        assert made.current is not None
    return made


def silent(made: Room, at: float) -> Room:
    made.handle(LeaseEnded("a:1", 1, 9.0), at)
    return made


def finished(made: Room, at: float) -> Room:
    made.handle(Left("a:1", 1, "out of data", True, Version(7, 1), True), at)
    return made


def test_what_is_over_goes_before_what_is_out_of_reach_and_the_oldest_first() -> None:
    rooms = {
        "alive": room("alive"), "silent": silent(room("silent"), 100.5), "later": finished(room("later"), 109.0),
        "over": finished(room("over"), 108.0), "untrained": silent(room("untrained", asks=False), 108.5),
    }  # fmt: skip
    order = []
    while name := replaceable(rooms, 110.0, ABSENCE_S):
        order.append(name)
        del rooms[name]
    assert order == ["over", "untrained", "later", "silent"]
    assert set(rooms) == {"alive"}


def test_who_may_be_about_to_return_is_waited_for() -> None:
    rooms = {"silent": silent(room("silent"), 100.5)}
    assert replaceable(rooms, 100.5 + ABSENCE_S, ABSENCE_S) == ""
    assert replaceable(rooms, 100.6 + ABSENCE_S, ABSENCE_S) == "silent"
    assert (
        replaceable({"empty": Room("empty", LighthouseSettings(), QuorumIds(9, 1), boot_at=0.0)}, 1.0, 2.0) == "empty"
    )


def test_finished_rooms_are_remembered_and_bounded() -> None:
    book = FinishedRooms()
    over = finished(room("over"), 100.0)
    book.remember(room("alive"))
    book.remember(over)
    again = Room("over", LighthouseSettings(), QuorumIds(9, 1), boot_at=0.0, closed=book.take("over"))
    assert (again.closed, again.finished) == (over.closed, Version(7, 1))
    for number in range(MAX_FINISHED + 5):
        book.remember(finished(room(f"r{number}", asks=False), 100.0))
    assert repr(book) == f"FinishedRooms({MAX_FINISHED})"


# ---------------------------------------------------------------- two lighthouses (R22)


def of_a_pair() -> tuple[Rooms, PartnerLink]:
    """The rooms of one that serves while the other one is out of reach."""
    rooms = Rooms(LighthouseSettings(boot_window_s=0.0), ABSENCE_S)
    link = rooms.partner = PartnerLink(rooms, "127.0.0.1:1", None, "")
    link._pair.role = Role.ACTIVE
    return rooms, link


def fill(rooms: Rooms, number: int) -> None:
    """Rooms in which somebody asks."""
    for nth in range(number):
        rooms.room(f"r{nth}").waiters["x"] = Waiter(1, asyncio.get_running_loop().create_future())


def test_a_room_of_a_pair_that_makes_place_is_the_same_when_it_is_made_again() -> None:
    """Else more than half of an older quorum could go on beside the members of the last one, who are out of reach."""

    async def run() -> None:
        rooms, link = of_a_pair()
        shell = rooms.room("job")
        rooms.feed(shell, Hello("a:1", "a", 1, 1, expected=1))
        rooms.feed(shell, Asked(Ask("a:1", 1), 1))
        rooms._settle(shell)
        rooms.feed(shell, LeaseEnded("a:1", 1, 9.0))
        before = shell.room.told
        assert before.bases
        rooms._offset += 10 * ABSENCE_S
        fill(rooms, MAX_ROOMS)
        assert "job" not in rooms._rooms
        assert link.known("job")[0].bases == before.bases
        rooms._rooms.popitem()[1].stop()
        again = rooms.room("job").room
        assert (again.told.bases, again.told.entered) == (before.bases, before.entered)
        rooms.close()

    asyncio.run(run())


def test_a_room_of_a_pair_is_refused_while_replicas_may_train_in_all_that_are_known() -> None:
    async def run() -> None:
        rooms, link = of_a_pair()
        for number in range(MAX_NOTES):
            link._pair.keeps(Told(f"n{number}", 5, ("a",), bases=(Basis(5, ("a",)),), orphan_s=60.0), rooms.now())
        with pytest.raises(RefusedError, match=f"in all of the {MAX_NOTES} rooms .* start other lighthouses for 'new'"):
            rooms.room("new")
        assert rooms.room("n7").room.told.bases, "one that is known is served"
        rooms.close()

    asyncio.run(run())


def test_rooms_to_which_nobody_has_come_yet_are_part_of_a_complete_report() -> None:
    """Else a partner that was started again would believe to be informed, and contradict them."""

    async def run() -> None:
        rooms, link = of_a_pair()
        rooms.room("here")
        link._pair.keeps(Told("away", 5, ("a",), bases=(Basis(5, ("a",)),), orphan_s=60.0), rooms.now())
        link._queue.clear()
        link._report(complete=True)
        reports = [codec.decode_report(data) for data in link._queue]
        assert {told.room for report in reports for told in report.told} == {"here", "away"}
        rooms.close()

    asyncio.run(run())
