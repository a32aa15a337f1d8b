"""Protobuf <-> the pure dataclasses, checked in both directions. The only module that knows the generated classes' fields.

How it works. `encode_*` turn pure values into bytes, `decode_*` turn bytes into pure values or raise. Nothing that came
over the network leaves this module unchecked: lengths and counts have named bounds, numbers a range, enums a known
value. A value of our own that breaks a bound is the caller's mistake (`ConfigError`); one that arrived is a
`ProtocolError`. Text that only people read is cut to its bound instead.

Pushes (lighthouse to trainer, and leader to rank) are small dataclasses of their own, because the effects of
`membership` name their receivers and these do not. A quorum is encoded once: `encode_quorum` gives the bytes all members
share, `answer` puts a member's `seq` in front (concatenated protobuf messages merge).

No socket, thread or clock. `PROTOCOL_VERSION` is compared in `check_version` before anything else is looked at.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ft_core._pb import coordination_pb2 as pb
from ft_core.errors import ConfigError, JobFinishedError, ProtocolError, RefusedError
from ft_core.membership import Hello, Left, Progress
from ft_core.quorum import Ask, Member, Quorum, Version
from ft_core.settings import MAX_REPLICAS, PROTOCOL_VERSION
from ft_core.step import Outcome, Verdict

MAX_NAME = 256
"""Characters of a replica_id, name, room or phase."""
MAX_ADDRESS = 1024
MAX_TEXT = 2000
"""Characters of a reason; longer ones are cut."""
MAX_DATA = 16 * 1024
MAX_RANKS = 4096
"""Ranks per group."""
MAX_LAYOUT_LINES = 20_000
MAX_LAYOUT_BYTES = 2 << 20
"""Layout lines past this are left out: they only serve to name the first difference, the hash decides."""
MAX_DURATION_MS = 10**12
NEVER_MS = 2**63 - 1
MAX_REQUEST_BYTES = 4 << 20
MAX_PUSH_BYTES = 64 << 20
"""gRPC's message limits: a Hello with its layout; a quorum of 256 groups of many ranks."""

_M = TypeVar("_M", bound=Message)


# ---------------------------------------------------------------- messages that the pure modules have no name for


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message of a lease: the pure Hello (without generation) and the room it is for."""

    hello: Hello
    room: str


@dataclass(frozen=True, slots=True)
class Renewal:
    """A Progress as it travels. `clock_s` is the sender's own monotonic clock, echoed in the Ack."""

    clock_s: float
    progress: Progress


@dataclass(frozen=True, slots=True)
class Join:
    """The first message of a rank's stream to its group's leader."""

    replica_id: str
    rank: int
    world_size: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class RankAsk:
    """A rank's part of its group's ask; `room` '' leaves the room as it is."""

    ask: Ask
    room: str


@dataclass(frozen=True, slots=True)
class Broken:
    """One rank of the group cannot go on in this quorum."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The stream is open. `boot` tells a reconnect from a restart of the lighthouse."""

    liveness_s: float
    peers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    boot: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The quorum that answers the ask `seq`."""

    seq: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Reason:
    """Why there is no quorum yet."""

    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change of membership is wanted in `quorum_id`."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Members of `quorum_id` that will not answer any more."""

    quorum_id: int
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Busy:
    """A peer is legitimately busy for at most `for_s`."""

    quorum_id: int
    replica_id: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Over:
    """`quorum_id` is over."""

    quorum_id: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Final. `error` is what the receiver raises."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Order:
    """An operator's order: exit now (`kill`) or finish the step and leave."""

    kill: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Acked:
    """What the receiver sent at its `clock_s` has arrived; the sender's own lease is `lease_age_s` old."""

    clock_s: float
    lease_age_s: float = 0.0


Push = Welcome | Answer | Reason | Change | Lost | Busy | Over | Refusal | Order | Acked | Verdict


# ---------------------------------------------------------------- versions


def check_version(theirs: int, release: str, *, they_are: str, we_are: str) -> None:
    """Compare protocol versions.

    Raises:
        ProtocolError: they differ; the message names both and says which side to upgrade.
    """
    if theirs == PROTOCOL_VERSION:
        return
    older = they_are if theirs < PROTOCOL_VERSION else we_are
    made_by = f" (ft-training {release[:40]})" if release else ""
    raise ProtocolError(
        f"{they_are} speaks protocol version {theirs}{made_by}, {we_are} speaks version {PROTOCOL_VERSION}: "
        f"upgrade ft-training on {older}"
    )


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Cut text for people to `limit` characters, and make it encodable."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ---------------------------------------------------------------- checks


@contextlib.contextmanager
def _sending(what: str) -> Iterator[None]:
    """Protobuf's own complaints about our values (a number out of range, a lone surrogate) become ConfigErrors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what} cannot be sent: {error}") from None


def _parse(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise ProtocolError(
            f"{len(data)} bytes arrived that are not a {kind.DESCRIPTOR.name}: something else than ft-training "
            "of this protocol version talks to this port"
        ) from None
    return message


class _Check:
    """Bounds on one message; `error` says whose fault a violation is."""

    def __init__(self, error: type[Exception], what: str) -> None:
        self._error, self._what = error, what

    def fail(self, field: str, why: str) -> None:
        raise self._error(f"{self._what}.{field} {why}")

    def text(self, field: str, value: str, limit: int = MAX_NAME, *, needed: bool = False) -> None:
        if len(value) > limit:
            self.fail(field, f"has {len(value)} characters; at most {limit} are allowed")
        if needed and not value:
            self.fail(field, "is empty")

    def texts(self, field: str, values: Sequence[str], count: int, limit: int = MAX_NAME) -> None:
        if len(values) > count:
            self.fail(field, f"has {len(values)} entries; at most {count} are allowed")
        for value in values:
            self.text(field, value, limit)

    def number(self, field: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            self.fail(field, f"is {value}; it must be between {low} and {high}")


_INT64 = 2**63 - 1


def _version(message: pb.Version, check: _Check, field: str) -> Version:
    check.number(field, message.step, -1, _INT64)
    check.number(field, message.epoch, -1, _INT64)
    return Version(message.step, message.epoch)


def _pb_version(version: Version) -> pb.Version:
    return pb.Version(step=version.step, epoch=version.epoch)


def _ms(seconds: float) -> int:
    return NEVER_MS if seconds == math.inf else max(0, round(seconds * 1000))


def _seconds(ms: int, check: _Check, field: str) -> float:
    if ms == NEVER_MS:
        return math.inf
    check.number(field, ms, 0, MAX_DURATION_MS)
    return ms / 1000


# ---------------------------------------------------------------- ask


def _check_ask(m: pb.Ask, check: _Check) -> None:
    check.text("replica_id", m.replica_id, needed=True)
    check.number("seq", m.seq, 0, _INT64)
    check.number("quorum_id", m.quorum_id, 0, _INT64)
    check.number("min_replicas", m.min_replicas, 1, MAX_REPLICAS)
    check.number("group_world_size", m.group_world_size, 1, MAX_RANKS)
    check.number("open_attempt", m.open_attempt, -1, _INT64)
    check.texts("heal_addresses", m.heal_addresses, MAX_RANKS, MAX_ADDRESS)
    check.text("store_address", m.store_address, MAX_ADDRESS)
    check.text("address", m.address, MAX_ADDRESS)
    check.text("data", m.data, MAX_DATA)


def _pb_ask(ask: Ask) -> pb.Ask:
    message = pb.Ask(
        replica_id=ask.replica_id, seq=ask.seq, version=_pb_version(ask.version), lineage=ask.lineage,
        quorum_id=ask.quorum_id, failed=ask.failed, reason=clip(ask.reason), min_replicas=ask.min_replicas,
        group_world_size=ask.group_world_size, heal_addresses=ask.heal_addresses, store_address=ask.store_address,
        address=ask.address, layout=ask.layout, init_sync=ask.init_sync, allow_heal=ask.allow_heal,
        shrink_only=ask.shrink_only, heals_before_forward=ask.heals_before_forward, open_attempt=ask.open_attempt,
        commit_failures=ask.commit_failures, data=ask.data,
    )  # fmt: skip
    _check_ask(message, _Check(ConfigError, "Ask"))
    return message


def _ask(m: pb.Ask) -> Ask:
    check = _Check(ProtocolError, "Ask")
    _check_ask(m, check)
    return Ask(
        replica_id=m.replica_id, seq=m.seq, version=_version(m.version, check, "version"), lineage=m.lineage,
        quorum_id=m.quorum_id, failed=m.failed, reason=clip(m.reason), min_replicas=m.min_replicas,
        group_world_size=m.group_world_size, heal_addresses=tuple(m.heal_addresses), store_address=m.store_address,
        address=m.address, layout=m.layout, init_sync=m.init_sync, allow_heal=m.allow_heal,
        shrink_only=m.shrink_only, heals_before_forward=m.heals_before_forward, open_attempt=m.open_attempt,
        commit_failures=m.commit_failures, data=m.data,
    )  # fmt: skip


# ---------------------------------------------------------------- quorum


def _check_quorum(m: pb.QuorumInfo, check: _Check) -> None:
    check.number("quorum_id", m.quorum_id, 0, _INT64)
    check.number("members", len(m.members), 1, MAX_REPLICAS)
    for member in m.members:
        check.text("members.replica_id", member.replica_id, needed=True)
        check.number("members.group_world_size", member.group_world_size, 1, MAX_RANKS)
        check.number("members.previous_quorum_id", member.previous_quorum_id, 0, _INT64)
        check.number("members.open_attempt", member.open_attempt, -1, _INT64)
        check.texts("members.heal_addresses", member.heal_addresses, MAX_RANKS, MAX_ADDRESS)
        check.text("members.store_address", member.store_address, MAX_ADDRESS)
        check.text("members.address", member.address, MAX_ADDRESS)
        check.text("members.data", member.data, MAX_DATA)
    ids = [member.replica_id for member in m.members]
    if len(set(ids)) != len(ids):
        check.fail("members", "names a replica twice")


def _pb_quorum(quorum: Quorum) -> pb.QuorumInfo:
    message = pb.QuorumInfo(quorum_id=quorum.quorum_id, created_ms=quorum.created_ms)
    for m in quorum.members:
        message.members.add(
            replica_id=m.replica_id, version=_pb_version(m.version), lineage=m.lineage,
            group_world_size=m.group_world_size, heal_addresses=m.heal_addresses, store_address=m.store_address,
            address=m.address, init_sync=m.init_sync, allow_heal=m.allow_heal, shrink_only=m.shrink_only,
            heals_before_forward=m.heals_before_forward, previous_quorum_id=m.previous_quorum_id,
            open_attempt=m.open_attempt, commit_failures=m.commit_failures, data=m.data,
        )  # fmt: skip
    _check_quorum(message, _Check(ConfigError, "Quorum"))
    return message


def _quorum(m: pb.QuorumInfo) -> Quorum:
    check = _Check(ProtocolError, "Quorum")
    _check_quorum(m, check)
    return Quorum(
        m.quorum_id,
        tuple(
            Member(
                replica_id=x.replica_id, version=_version(x.version, check, "members.version"), lineage=x.lineage,
                group_world_size=x.group_world_size, heal_addresses=tuple(x.heal_addresses),
                store_address=x.store_address, address=x.address, init_sync=x.init_sync, allow_heal=x.allow_heal,
                shrink_only=x.shrink_only, heals_before_forward=x.heals_before_forward,
                previous_quorum_id=x.previous_quorum_id, open_attempt=x.open_attempt,
                commit_failures=x.commit_failures, data=x.data,
            )
            for x in m.members
        ),
        m.created_ms,
    )  # fmt: skip


# ---------------------------------------------------------------- hello


def fit_layout_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """As many layout lines as travel: MAX_LAYOUT_LINES, MAX_LAYOUT_BYTES in total, each cut to MAX_TEXT."""
    kept: list[str] = []
    room = MAX_LAYOUT_BYTES
    for line in lines[:MAX_LAYOUT_LINES]:
        short = clip(line)
        room -= 4 * len(short) + 8
        if room < 0:
            break
        kept.append(short)
    return tuple(kept)


def _check_hello(m: pb.Hello, check: _Check) -> None:
    check.text("room", m.room, needed=True)
    check.text("replica_id", m.replica_id, needed=True)
    check.text("name", m.name)
    check.number("highest_id", m.highest_id, 0, _INT64)
    check.number("quorum_id", m.quorum_id, 0, _INT64)
    check.texts("members", m.members, MAX_REPLICAS)
    check.texts("layout_lines", m.layout_lines, MAX_LAYOUT_LINES, MAX_TEXT)
    check.number("expected", m.expected, 0, MAX_REPLICAS)
    check.number("min_replicas", m.min_replicas, 1, MAX_REPLICAS)
    check.number("group_world_size", m.group_world_size, 1, MAX_RANKS)
    check.texts("heal_addresses", m.heal_addresses, MAX_RANKS, MAX_ADDRESS)


def encode_hello(hello: Hello, room: str, release: str) -> bytes:
    """A lease's first message. `hello.generation` does not travel: the lighthouse numbers its streams."""
    with _sending("Hello"):
        m = pb.Hello(
            protocol_version=PROTOCOL_VERSION, release=clip(release, MAX_NAME), room=room, replica_id=hello.replica_id,
            name=hello.name, incarnation=hello.incarnation, version=_pb_version(hello.version),
            stable=_pb_version(hello.stable), highest_id=hello.highest_id, quorum_id=hello.quorum_id,
            members=hello.members, layout=hello.layout, layout_lines=fit_layout_lines(hello.layout_lines),
            expected=hello.expected, min_replicas=hello.min_replicas, group_world_size=hello.group_world_size,
            join_ms=_ms(hello.join_s), liveness_ms=_ms(hello.liveness_s), orphan_ms=_ms(hello.orphan_s),
            heal_addresses=hello.heal_addresses,
        )  # fmt: skip
        _check_hello(m, _Check(ConfigError, "Hello"))
        return pb.LeaseRequest(hello=m).SerializeToString()


def _opening(m: pb.Hello) -> Opening:
    check_version(m.protocol_version, m.release, they_are="the trainer", we_are="the lighthouse")
    check = _Check(ProtocolError, "Hello")
    _check_hello(m, check)
    hello = Hello(
        replica_id=m.replica_id, name=m.name, generation=0, incarnation=m.incarnation,
        version=_version(m.version, check, "version"), stable=_version(m.stable, check, "stable"),
        highest_id=m.highest_id, quorum_id=m.quorum_id, members=tuple(m.members), layout=m.layout,
        layout_lines=tuple(m.layout_lines), expected=m.expected, min_replicas=m.min_replicas,
        group_world_size=m.group_world_size, join_s=_seconds(m.join_ms, check, "join_ms"),
        liveness_s=_seconds(m.liveness_ms, check, "liveness_ms"), orphan_s=_seconds(m.orphan_ms, check, "orphan_ms"),
        heal_addresses=tuple(m.heal_addresses),
    )  # fmt: skip
    return Opening(hello, m.room)


# ---------------------------------------------------------------- trainer to lighthouse


def _pb_progress(renewal: Renewal) -> pb.Progress:
    p = renewal.progress
    return pb.Progress(
        clock_us=max(0, int(renewal.clock_s * 1e6)), step=max(p.step, 0), phase=clip(p.phase, MAX_NAME),
        stable=_pb_version(p.stable), paused_ms=min(_ms(p.paused_s), MAX_DURATION_MS), heal_addresses=p.heal_addresses,
    )  # fmt: skip


def _renewal(m: pb.Progress, replica_id: str, generation: int) -> Renewal:
    check = _Check(ProtocolError, "Progress")
    check.text("phase", m.phase)
    check.number("step", m.step, 0, _INT64)
    check.texts("heal_addresses", m.heal_addresses, MAX_RANKS, MAX_ADDRESS)
    paused_s = _seconds(m.paused_ms, check, "paused_ms")
    stable = _version(m.stable, check, "stable")
    progress = Progress(replica_id, generation, m.step, m.phase, stable, paused_s, tuple(m.heal_addresses))
    return Renewal(m.clock_us / 1e6, progress)


def _pb_left(left: Left) -> pb.Left:
    return pb.Left(
        reason=clip(left.reason), finished=left.finished, version=_pb_version(left.version), agreed=left.agreed
    )


def _left(m: pb.Left, replica_id: str, generation: int) -> Left:
    version = _version(m.version, _Check(ProtocolError, "Left"), "version")
    return Left(replica_id, generation, clip(m.reason), m.finished, version, m.agreed)


def encode_renewal(renewal: Renewal) -> bytes:
    """Lease renewal."""
    with _sending("Progress"):
        return pb.LeaseRequest(progress=_pb_progress(renewal)).SerializeToString()


def encode_ask(ask: Ask) -> bytes:
    """The group's ask, to the lighthouse."""
    with _sending("Ask"):
        return pb.LeaseRequest(ask=_pb_ask(ask)).SerializeToString()


def encode_left(left: Left) -> bytes:
    """Goodbye."""
    with _sending("Left"):
        return pb.LeaseRequest(left=_pb_left(left)).SerializeToString()


def decode_lease_request(data: bytes, replica_id: str = "", generation: int = 0) -> Opening | Renewal | Ask | Left:
    """A trainer's message. `replica_id` and `generation` are those of the stream it came on.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = _parse(pb.LeaseRequest, data)
    match message.WhichOneof("body"):
        case "hello":
            return _opening(message.hello)
        case "progress":
            return _renewal(message.progress, replica_id, generation)
        case "ask":
            ask = _ask(message.ask)
            if ask.replica_id != replica_id:
                raise ProtocolError(f"an ask of {ask.replica_id!r} arrived on the lease of {replica_id!r}")
            return ask
        case "left":
            return _left(message.left, replica_id, generation)
        case _:
            raise ProtocolError("an empty LeaseRequest arrived")


# ---------------------------------------------------------------- rank to leader


def encode_join(join: Join, release: str) -> bytes:
    """A rank's first message."""
    with _sending("Join"):
        m = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION, release=clip(release, MAX_NAME), replica_id=join.replica_id,
            rank=join.rank, world_size=join.world_size, incarnation=join.incarnation,
        )  # fmt: skip
        return pb.GroupRequest(join=m).SerializeToString()


def encode_rank(message: Renewal | RankAsk | Verdict | Broken | Left) -> bytes:
    """A rank's later messages."""
    with _sending(type(message).__name__):
        match message:
            case Renewal():
                request = pb.GroupRequest(progress=_pb_progress(message))
            case RankAsk():
                _Check(ConfigError, "Ask").text("room", message.room)
                request = pb.GroupRequest(ask=_pb_ask(message.ask), room=message.room)
            case Verdict():
                request = pb.GroupRequest(vote=_pb_verdict(message))
            case Broken():
                request = pb.GroupRequest(broken=pb.Break(quorum_id=message.quorum_id, reason=clip(message.reason)))
            case Left():
                request = pb.GroupRequest(left=_pb_left(message))
        return request.SerializeToString()


def decode_group_request(data: bytes, replica_id: str = "") -> Join | Renewal | RankAsk | Verdict | Broken | Left:
    """A rank's message to its leader.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = _parse(pb.GroupRequest, data)
    match message.WhichOneof("body"):
        case "join":
            j = message.join
            check_version(j.protocol_version, j.release, they_are=f"group rank {j.rank}", we_are="group rank 0")
            check = _Check(ProtocolError, "Join")
            check.text("replica_id", j.replica_id, needed=True)
            check.number("world_size", j.world_size, 1, MAX_RANKS)
            check.number("rank", j.rank, 0, MAX_RANKS - 1)
            return Join(j.replica_id, j.rank, j.world_size, j.incarnation)
        case "progress":
            return _renewal(message.progress, replica_id, 0)
        case "ask":
            _Check(ProtocolError, "Ask").text("room", message.room)
            return RankAsk(_ask(message.ask), message.room)
        case "vote":
            return _verdict(message.vote)
        case "broken":
            return Broken(message.broken.quorum_id, clip(message.broken.reason))
        case "left":
            return _left(message.left, replica_id, 0)
        case _:
            raise ProtocolError("an empty GroupRequest arrived")


# ---------------------------------------------------------------- verdict

_OUTCOMES = {
    Outcome.COMMIT: pb.Verdict.Outcome.COMMIT,
    Outcome.VETO: pb.Verdict.Outcome.VETO,
    Outcome.BROKEN: pb.Verdict.Outcome.BROKEN,
}
_FROM_OUTCOME = {int(number): outcome for outcome, number in _OUTCOMES.items()}


def _pb_verdict(v: Verdict) -> pb.Verdict:
    return pb.Verdict(
        quorum_id=v.quorum_id, attempt=v.attempt, outcome=_OUTCOMES[v.outcome], reason=clip(v.reason), weight=v.weight,
        contributors=v.contributors, change=v.change, healed=v.healed, exhausted=v.exhausted, stop=v.stop,
        behind=v.behind,
    )  # fmt: skip


def _verdict(m: pb.Verdict) -> Verdict:
    outcome = _FROM_OUTCOME.get(int(m.outcome))
    if outcome is None:
        raise ProtocolError(f"Verdict.outcome is {int(m.outcome)}, which this protocol version does not know")
    check = _Check(ProtocolError, "Verdict")
    check.number("quorum_id", m.quorum_id, 0, _INT64)
    check.number("attempt", m.attempt, 0, _INT64)
    check.number("contributors", m.contributors, 0, MAX_REPLICAS)
    return Verdict(
        m.quorum_id, m.attempt, outcome, clip(m.reason), m.weight, m.contributors, m.change, m.healed, m.exhausted, m.stop,
        m.behind,
    )  # fmt: skip


# ---------------------------------------------------------------- pushes


def encode_quorum(quorum: Quorum) -> bytes:
    """The part of an answer that all members share; see `answer`."""
    with _sending("Quorum"):
        return pb.LeasePush(quorum=_pb_quorum(quorum)).SerializeToString()


def answer(seq: int, shared: bytes) -> bytes:
    """One member's answer: its ask's seq, and the quorum encoded by `encode_quorum`."""
    return pb.LeasePush(seq=seq).SerializeToString() + shared


_KINDS: tuple[tuple[type[Exception], int], ...] = (
    (JobFinishedError, pb.Refused.Kind.FINISHED),
    (ProtocolError, pb.Refused.Kind.PROTOCOL),
    (ConfigError, pb.Refused.Kind.CONFIG),
    (RefusedError, pb.Refused.Kind.REFUSED),
)
_FROM_KIND: dict[int, type[Exception]] = {int(number): error for error, number in _KINDS}


def _refused(error: Exception) -> pb.Refused:
    kind = next((number for cls, number in _KINDS if isinstance(error, cls)), pb.Refused.Kind.REFUSED)
    return pb.Refused(kind=pb.Refused.Kind.Name(kind), reason=clip(str(error)))


def _pb_push(push: Push) -> pb.GroupPush | pb.LeasePush:  # noqa: C901, PLR0911 - one case per kind of push
    match push:
        case Answer():
            return pb.LeasePush(seq=push.seq, quorum=_pb_quorum(push.quorum))
        case Reason():
            return pb.LeasePush(reason=clip(push.text))
        case Change():
            return pb.LeasePush(change_pending=pb.ChangePending(quorum_id=push.quorum_id, reason=clip(push.reason)))
        case Lost():
            return pb.LeasePush(member_lost=pb.MemberLost(quorum_id=push.quorum_id, lost=push.lost))
        case Busy():
            for_ms = min(_ms(push.for_s), MAX_DURATION_MS)
            return pb.LeasePush(paused=pb.Paused(quorum_id=push.quorum_id, replica_id=push.replica_id, for_ms=for_ms))
        case Over():
            return pb.LeasePush(superseded=pb.Superseded(quorum_id=push.quorum_id))
        case Refusal():
            return pb.LeasePush(refused=_refused(push.error))
        case Order():
            kind = pb.Order.Kind.KILL if push.kill else pb.Order.Kind.DRAIN
            return pb.LeasePush(order=pb.Order(kind=kind, reason=clip(push.reason)))
        case Acked():
            age_ms = min(_ms(push.lease_age_s), MAX_DURATION_MS)
            return pb.LeasePush(ack=pb.Ack(clock_us=max(0, int(push.clock_s * 1e6)), lease_age_ms=age_ms))
        case Verdict():
            return pb.GroupPush(verdict=_pb_verdict(push))
        case Welcome():
            peers = [pb.Peer(replica_id=i, heal_addresses=a) for i, a in push.peers]
            return pb.LeasePush(
                welcome=pb.Welcome(
                    protocol_version=PROTOCOL_VERSION, liveness_ms=_ms(push.liveness_s), peers=peers, boot=push.boot
                )
            )


def encode_push(push: Push) -> bytes:
    """A push, for a lease or for a rank: the two messages share field numbers for what they have in common."""
    with _sending(type(push).__name__):
        return _pb_push(push).SerializeToString()


def encode_joined(liveness_s: float) -> bytes:
    """The leader's first answer to a rank."""
    joined = pb.Joined(protocol_version=PROTOCOL_VERSION, liveness_ms=_ms(liveness_s))
    return pb.GroupPush(joined=joined).SerializeToString()


def decode_lease_push(data: bytes) -> Push | None:
    """A push from the lighthouse; None if it is of a kind that this release does not know.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = _parse(pb.LeasePush, data)
    if message.WhichOneof("body") == "welcome":
        w = message.welcome
        check_version(w.protocol_version, "", they_are="the lighthouse", we_are="this trainer")
        check = _Check(ProtocolError, "Welcome")
        check.number("peers", len(w.peers), 0, MAX_REPLICAS)
        for peer in w.peers:
            check.text("peers.replica_id", peer.replica_id)
            check.texts("peers.heal_addresses", peer.heal_addresses, MAX_RANKS, MAX_ADDRESS)
        peers = tuple((peer.replica_id, tuple(peer.heal_addresses)) for peer in w.peers)
        return Welcome(_seconds(w.liveness_ms, check, "liveness_ms"), peers, w.boot)
    return _push(message)


def decode_group_push(data: bytes) -> Push | None:
    """A push from group rank 0; None if it is of a kind that this release does not know.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = _parse(pb.GroupPush, data)
    match message.WhichOneof("body"):
        case "joined":
            check_version(message.joined.protocol_version, "", they_are="group rank 0", we_are="this rank")
            return Welcome(_seconds(message.joined.liveness_ms, _Check(ProtocolError, "Joined"), "liveness_ms"))
        case "verdict":
            return _verdict(message.verdict)
        case _:
            return _push(message)


def _push(m: pb.LeasePush | pb.GroupPush) -> Push | None:  # noqa: PLR0911 - one case per kind of push
    check = _Check(ProtocolError, "Push")
    match m.WhichOneof("body"):
        case "quorum":
            return Answer(m.seq, _quorum(m.quorum))
        case "reason":
            return Reason(clip(m.reason))
        case "change_pending":
            return Change(m.change_pending.quorum_id, clip(m.change_pending.reason))
        case "member_lost":
            check.texts("lost", m.member_lost.lost, MAX_REPLICAS)
            return Lost(m.member_lost.quorum_id, tuple(m.member_lost.lost))
        case "paused":
            check.text("replica_id", m.paused.replica_id)
            return Busy(m.paused.quorum_id, m.paused.replica_id, _seconds(m.paused.for_ms, check, "for_ms"))
        case "superseded":
            return Over(m.superseded.quorum_id)
        case "refused":
            return Refusal(_FROM_KIND.get(int(m.refused.kind), RefusedError)(clip(m.refused.reason)))
        case "order":
            known = m.order.kind in (pb.Order.Kind.KILL, pb.Order.Kind.DRAIN)
            return Order(m.order.kind == pb.Order.Kind.KILL, clip(m.order.reason)) if known else None
        case "ack":
            return Acked(m.ack.clock_us / 1e6, _seconds(m.ack.lease_age_ms, check, "lease_age_ms"))
        case _:
            return None


# ---------------------------------------------------------------- unary calls


def encode_quorum_info(quorum: Quorum) -> bytes:
    """QuorumResponse."""
    with _sending("Quorum"):
        return pb.QuorumResponse(quorum=_pb_quorum(quorum)).SerializeToString()


def decode_quorum_info(data: bytes) -> Quorum:
    """QuorumResponse. Raises ProtocolError."""
    return _quorum(_parse(pb.QuorumResponse, data).quorum)


def encode_unary(message: Message) -> bytes:
    """Any other message of the unary calls."""
    return message.SerializeToString()


_U = TypeVar(
    "_U", pb.QuorumRequest, pb.HeartbeatRequest, pb.StatusRequest, pb.ReportRequest, pb.OrderRequest, pb.ReopenRequest
)


def decode_unary(kind: type[_U], data: bytes) -> _U:
    """A request of one of the unary calls, its version and texts checked.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = _parse(kind, data)
    check_version(message.protocol_version, "", they_are="the caller", we_are="the lighthouse")
    check = _Check(ProtocolError, kind.DESCRIPTOR.name)
    limits = {"address": MAX_ADDRESS, "store_address": MAX_ADDRESS, "data": MAX_DATA, "reason": MAX_TEXT}
    needed = ("replica_id", "replica", "ended")
    for field in kind.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, str):
            check.text(field.name, value, limits.get(field.name, MAX_NAME), needed=field.name in needed)
        elif not isinstance(value, bool):
            check.number(field.name, value, 0, MAX_RANKS if field.name == "world_size" else _INT64)
    return message
