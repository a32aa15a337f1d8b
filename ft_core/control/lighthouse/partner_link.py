"""`PartnerLink`: a lighthouse's connection to the other one of its pair (R22), around the machine `pair.Pair`.

How it works. Each of the two dials the other and writes its reports on that stream; what arrives on the stream that the
other one has dialled is handed to the machine. What the machine answers is performed here: reports are sent, rooms are
fed, and when this lighthouse is to stand by, the streams of all its clients end and its rooms are dropped, after the
machine has written down what they know. A stream that breaks is dialled anew after REDIAL_S; the end of the other
process shows at once, its silence after a liveness timeout.

Invariants: at most MAX_QUEUED reports wait to be written; a room's report is sent only if it has changed. A mistake of
ours ends neither the dialling nor the reports: it is logged (`_stumbled`) and costs one turn, because a lighthouse that
reports nothing more is taken for one that is gone. Everything runs on the server's one loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ft_core.dashboard.sample import PairSample
from ft_core.errors import ConfigError, FaultToleranceError, RefusedError
from ft_core.events.event_log import SILENT
from ft_core.protocol.lighthouse.events import PartnerIs
from ft_core.protocol.lighthouse.pair import MAX_NOTES, REPORTS_PER_LIVENESS, Feed, Pair, Role, Send, Serve, StandBy
from ft_core.protocol.lighthouse.room_keeping import MAX_ROOMS
from ft_core.rpc import codec
from ft_core.rpc.channel import LIGHTHOUSE, aio_channel, explain, grpc, release, status_of, token_metadata

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ft_core.certificates import Tls
    from ft_core.control.lighthouse.room_host import Rooms
    from ft_core.control.lighthouse.room_shell import RoomShell
    from ft_core.events.event_log import Events
    from ft_core.protocol.lighthouse.pair import Action, Report
    from ft_core.protocol.lighthouse.partner import Proposal, Told
    from ft_core.protocol.lighthouse.room import Room
    from ft_core.rpc.stream_host import Context

REDIAL_S = 0.1
"""Between two attempts to reach the other lighthouse."""
STUMBLED_S = 1.0
"""Pause after a mistake of this lighthouse's own, so that one that lasts neither takes the loop nor fills the log."""
MAX_QUEUED = 256
"""Reports that wait to be written: more than all rooms need at once."""
MAX_NAMES = 8192
"""Members that the rooms of one report may name before the next report begins: it has to fit into a gRPC message."""
FAILED_WRITES = ("Internal error from Core", "Stream removed (sendmsg: ")
"""How the words of gRPC for a write that failed begin (of grpc.aio with status INTERNAL, or of the system's call): the
connection has ended, which the loop has not read yet. Who was frozen writes first when it is thawed."""
STANDBY = "standby: "
"""What the refusal of a lighthouse that stands by begins with: its clients go to the other one."""
OVERRUN = (
    f"replicas may train in more than {MAX_NOTES} rooms of the two lighthouses, and this one had to forget one: until "
    "it is started again it forms quorums by itself only of all members of the last. Give some jobs another pair"
)

_log = logging.getLogger("ft_core.lighthouse")


class PartnerLink:
    """The other lighthouse of a pair. The constructor assigns.

    Args:
        rooms: of this lighthouse.
        address: of the other one, host:port.
        tls: certificates; None: none.
        token: what the other one wants to see.
        events: where to write what this lighthouse does, when that changes.
    """

    def __init__(
        self, rooms: Rooms, address: str, tls: Tls | None, token: str, events: Events = SILENT
    ) -> None:  # fmt: skip
        self.address = address
        self._rooms = rooms
        self._tls = tls
        self._metadata = token_metadata(token)
        self._pair = Pair(secrets.randbits(63) | 1, address, rooms.liveness_s, rooms.started)
        self._events = events
        self._standing = PairSample(Role.STARTING.value, address, rooms.started, False, rooms.started, False)
        self._queue: deque[bytes] = deque()
        self._wake: asyncio.Event | None = None
        self._overrun = False
        """A report found no place in the queue."""
        self._sent: dict[str, Told] = {}
        self._stream: object = None
        """The newest stream of the other one's."""
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._said = ""
        """What was logged last of the other one."""
        self._stumble = ""
        """The last of this one's own mistakes."""
        self._closed = False

    def __repr__(self) -> str:
        return f"PartnerLink({self.address}, {self._pair.role.value}, {'in' if self._pair.contact else 'no'} contact)"

    @property
    def serves(self) -> bool:
        """This lighthouse takes leases and calls."""
        return self._pair.serves

    @property
    def refusal(self) -> str:
        """What clients are told by one that stands by, or has not found out yet whether it is to serve."""
        if self._pair.contact:
            records = "complete" if self._pair.partner.informed else "not complete"
            return (
                f"{STANDBY}{self.address} is active; this lighthouse takes its place when it is gone, and its records "
                f"are {records}"
            )
        return f"{STANDBY}this lighthouse has just started and looks for {self.address}"

    @property
    def standing(self) -> PairSample:
        """What this lighthouse does, and since when."""
        return self._standing._replace(complete=self._pair.partner.informed)

    def start(self) -> None:
        """On the loop: look for the other one."""
        if self._tasks:
            return
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._dial()), loop.create_task(self._beat())]
        self._arm()

    def close(self) -> None:
        """On the loop: end all of it."""
        for task in self._tasks:
            task.cancel()
        self._tasks, self._closed = [], True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------ rooms

    def known(self, room: str) -> tuple[Told, ...]:
        """What is known of a room that is made now. Raises RefusedError if there is no place for one more."""
        served = {shell.room.name for shell in self._rooms.chosen("")}
        actions = self._pair.makes_place(room, served, self._rooms.now())
        if actions is None:
            raise RefusedError(
                f"in all of the {MAX_NOTES} rooms that this lighthouse and {self.address} know of replicas may train, "
                f"some out of reach: start other lighthouses for {room!r}, or wait until FT_ORPHAN_S has passed"
            )
        self._act(actions)
        return self._pair.known(room)

    def keeps(self, room: Room) -> None:
        """A room makes place for another one: what R22 needs of it is written down."""
        since = max((record.since for record in room.records.values()), default=self._rooms.now())
        self._pair.keeps(room.told, since)
        self._sent.pop(room.name, None)

    def is_made(self, shell: RoomShell) -> None:
        """A room was made: it has to know of the other lighthouse."""
        self._rooms.feed(shell, PartnerIs(self._pair.partner))

    def decided(self, shell: RoomShell) -> None:
        """A room has decided something: the other lighthouse is told what has changed."""
        told = shell.room.told
        if self._pair.serves and self._sent.get(told.room) != told:
            self._sent[told.room] = told
            self._write(self._pair.report(self._leases, (told,)))

    def propose(self, proposal: Proposal) -> None:
        """Have the other one record a quorum."""
        self._write(replace(self._pair.report(self._leases), proposals=(proposal,)))

    @property
    def _leases(self) -> int:
        return self._rooms.callers

    # ------------------------------------------------------------ what arrives

    async def serve(self, _requests: object, context: Context) -> None:
        """Handler of the stream that the other one has dialled."""
        await self._rooms.check_token(context)
        mine = object()
        try:
            while True:
                data: Any = await context.read()
                if data is grpc.aio.EOF:
                    return
                report = self._decode(data)
                self._stream = mine  # the newest of the other one's; a stranger's never is
                self._heard(report)
        except FaultToleranceError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, codec.clip(str(error)))
        finally:
            if mine is self._stream:
                self._stream = None
                self._act(self._pair.ended())

    def _decode(self, data: bytes) -> Report:
        report = codec.decode_report(data)
        if report.boot == self._pair.boot:
            raise RefusedError("--peer is this lighthouse itself; give the address of the other one")
        if self._pair.is_stranger(report, self._rooms.now()):
            raise RefusedError("this lighthouse has a partner, and that is another one: end one of the three")
        return report

    def _heard(self, report: Report) -> None:
        contact = self._pair.contact
        self._act(self._pair.heard(report, self._rooms.now(), self._leases))
        if self._pair.overrun:
            self._say(OVERRUN)
        if self._pair.contact != contact:
            self._report()

    def _act(self, actions: Sequence[Action]) -> None:
        """Perform what the machine has decided: all of it, also if this lighthouse fails at one of the actions."""
        for action in () if self._closed else actions:
            try:
                self._perform(action)
            except Exception:  # noqa: BLE001 - logged
                self._stumbled(f"it could not perform {type(action).__name__}, and goes on with what comes next")
        self._note_standing()
        self._arm()

    def _note_standing(self) -> None:
        """Write down what this lighthouse does, if that has changed."""
        before, now = self._standing, self._rooms.now()
        role, contact = self._pair.role.value, self._pair.contact
        if self._closed or (role, contact) == (before.role, before.contact):
            return
        took_over = (before.role, role) == (Role.STANDBY.value, Role.ACTIVE.value)
        self._standing = PairSample(
            role, self.address, before.since if role == before.role else now, contact,
            before.contact_since if contact is before.contact else now, self._pair.partner.informed,
            took_over or (role == before.role and before.took_over),
        )  # fmt: skip
        if self._events.on:
            self._events.emit(
                "pair", role=role, before=before.role, other=self.address, contact=contact,
                complete=self._standing.complete, took_over=took_over,
            )  # fmt: skip

    def _perform(self, action: Action) -> None:
        match action:
            case Send():
                self._write(action.report)
            case Serve():
                took_over = self._standing.role == Role.STANDBY.value
                what = "in the place of" if took_over else "the other lighthouse is"
                _log.info("serves now; %s %s", what, self.address)
                self._rooms.begin()
                self._report()
            case StandBy():
                _log.info("stands by: %s serves", self.address)
                for told in self._rooms.stop_serving(f"{STANDBY}{self.address} is active"):
                    self._pair.stops(told, self._rooms.now())
                self._sent.clear()
                self._report()
            case Feed():
                for shell in self._rooms.chosen(action.room) if self._pair.serves else ():
                    self._rooms.feed(shell, action.event)

    def _arm(self, least_s: float = 0.0) -> None:
        """Look again when the machine wants to, but not before `least_s`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._pair.next_at
        if at < float("inf") and not self._closed:
            delay_s = max(least_s, at - self._rooms.now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._act(self._pair.tick(self._rooms.now()))
        except Exception:  # noqa: BLE001 - logged
            self._stumbled("it could not look after the other one, and looks again")
            self._arm(STUMBLED_S)

    # ------------------------------------------------------------ what is sent

    def _report(self, *, complete: bool = False) -> None:
        """Report, completely if the other one may not know everything: some rooms at a time."""
        if not (complete or self._pair.tells_all):
            self._write(self._pair.report(self._leases))
            return
        self._sent = {one.room: one for shell in self._rooms.chosen("") for one in (shell.room.told,)}
        told = [*self._sent.values(), *self._pair.all_known(self._sent)]  # also of rooms to which nobody has come yet
        batch: list[Told] = []
        for one in told:
            batch.append(one)
            if sum(map(_names, batch)) > MAX_NAMES or len(batch) >= MAX_ROOMS:
                self._write(self._pair.report(self._leases, batch))
                batch = []
        self._write(self._pair.report(self._leases, batch, complete=True))

    def _write(self, report: Report) -> None:
        try:
            data = codec.encode_report(report, release())
        except ConfigError as error:  # what is known of a room has no place in a report: the other one goes without
            self._say(f"a report to {self.address} cannot be sent: {error}")
            return
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(data)
        else:
            self._overrun = True  # it reads nothing, or is not there: a new stream tells it everything
        if self._wake is not None:
            self._wake.set()

    async def _beat(self) -> None:
        while True:
            try:
                self._report()
            except Exception:  # noqa: BLE001 - logged
                self._stumbled("it could not make a report, and makes the next one")
            await asyncio.sleep(self._rooms.liveness_s / REPORTS_PER_LIVENESS)

    async def _dial(self) -> None:
        """Keep a stream to the other one open, and write on it what there is to report."""
        while True:
            pause_s = REDIAL_S
            try:
                await self._converse()
            except grpc.RpcError as error:
                self._say(_why(error, self.address))
            except FaultToleranceError as error:  # certificates that do not work at present
                self._say(str(error))
                pause_s = 1.0
            except Exception:  # noqa: BLE001 - logged
                self._stumbled("the connection is opened again")
                pause_s = STUMBLED_S
            try:
                self._act(self._pair.ended())  # what was under way is lost: the next stream begins with everything
            except Exception:  # noqa: BLE001 - logged
                self._stumbled("it could not take the end of the connection into account")
                pause_s = STUMBLED_S
            await asyncio.sleep(pause_s)

    async def _converse(self) -> None:
        """One stream, from its opening to its end. Raises what has ended it, if the other one has not."""
        channel = aio_channel(self.address, "--peer", self._tls, self._rooms.liveness_s)
        written: list[Exception | None] = []
        try:
            method: Any = channel.stream_stream(f"/{LIGHTHOUSE}/Partner")
            async for _ in method(self._outgoing(written), metadata=self._metadata):
                pass
        except asyncio.CancelledError:
            if self._closed or not written:
                raise  # this task is to end
            # else gRPC has cancelled the call, because what was to be written on it has ended early
        finally:
            await channel.close()
        error = written.pop() if written else None
        if error is None:
            self._say(f"{self.address} has ended the connection between the lighthouses")
            return
        try:
            raise error
        finally:
            del error  # else it refers to this frame, and this one to it: gRPC's poller lives as long as its channel

    async def _outgoing(self, written: list[Exception | None]) -> AsyncIterator[bytes]:
        """What is written on a stream. gRPC would tell nobody what is raised here: when it ends, `written` says why."""
        try:
            async for data in self._reports():
                yield data
        except Exception as error:  # noqa: BLE001 - raised by `_converse`
            written.append(error)
        else:
            written.append(None)

    async def _reports(self) -> AsyncIterator[bytes]:
        assert self._wake is not None
        self._queue.clear()
        self._overrun = False
        self._report(complete=True)
        while not self._overrun:
            while self._queue:
                yield self._queue.popleft()
            self._wake.clear()
            await self._wake.wait()

    def _stumbled(self, what_now: str) -> None:
        """Log the exception that is being handled: with its stack, unless it is that of the last time."""
        error = sys.exc_info()[1]
        text = f"{what_now}: {error!r}"
        if text != self._stumble:
            self._stumble = text
            _log.exception(
                "a mistake of this lighthouse's own, in its connection to %s (please report it): %s",
                self.address, what_now,
            )  # fmt: skip

    def _say(self, text: str) -> None:
        """Log it once, until something else is to be said."""
        if text != self._said:
            self._said = text
            _log.warning("%s", text)


def _names(told: Told) -> int:
    return len(told.members) + sum(len(basis.members) for basis in told.bases)


def _why(error: grpc.RpcError, address: str) -> str:
    """What keeps this lighthouse from the other one, and what to do."""
    code, text = status_of(error), explain(error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"the lighthouse at {address} does not know that it is one of a pair, so both may decide beside each "
            "other: start it with --peer, and this one's address"
        )
    if text.startswith(FAILED_WRITES):
        text = "the connection ended while a report was being written on it"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL):
        return f"the other lighthouse, {address}, cannot be reached: {text}"
    return f"the other lighthouse, {address}, refuses this one: {text}"
