"""What trainers send to the lighthouse, ranks to their leader, and tools to either; each checked in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ft_core._pb import coordination_pb2 as pb
from ft_core.errors import ConfigError, ProtocolError
from ft_core.protocol.group.ranks import Join
from ft_core.protocol.lighthouse.events import Incomplete, Left
from ft_core.protocol.pushes import Order
from ft_core.protocol.types import Verdict
from ft_core.rpc.codec.bounds import (
    INT64,
    MAX_ADDRESS,
    MAX_DATA,
    MAX_DURATION_MS,
    MAX_NAME,
    MAX_RANKS,
    MAX_TEXT,
    Check,
    check_version,
    clip,
    parse,
    pb_version,
    sending,
    to_ms,
)
from ft_core.rpc.codec.pushes import pb_push
from ft_core.rpc.codec.state import (
    MAX_BASES,
    Opening,
    Renewal,
    check_hello,
    fit_signature_lines,
    pb_ask,
    pb_bases,
    pb_left,
    pb_progress,
    pb_quorum,
    pb_verdict,
    read_ask,
    read_left,
    read_opening,
    read_quorum,
    read_renewal,
    read_verdict,
)
from ft_core.settings import MAX_REPLICAS, MAX_STEP, PROTOCOL_VERSION

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.types import Ask, Quorum


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


def encode_hello(hello: Hello, room: str, release: str) -> bytes:
    """A lease's first message. `hello.generation` does not travel: the lighthouse numbers its streams."""
    with sending("Hello"):
        m = pb.Hello(
            protocol_version=PROTOCOL_VERSION, release=clip(release, MAX_NAME), room=room, replica_id=hello.replica_id,
            name=hello.name, incarnation=hello.incarnation, version=pb_version(hello.version),
            stable=pb_version(hello.stable), highest_id=hello.highest_id, quorum_id=hello.quorum_id,
            members=hello.members, signature=hello.signature,
            signature_lines=fit_signature_lines(hello.signature_lines), expected=hello.expected,
            min_replicas=hello.min_replicas, group_world_size=hello.group_world_size,
            join_ms=to_ms(hello.join_s), liveness_ms=to_ms(hello.liveness_s), orphan_ms=to_ms(hello.orphan_s),
            heal_addresses=hello.heal_addresses, paused_ms=min(to_ms(hello.paused_s), MAX_DURATION_MS),
            not_cast=not hello.cast, fenced=hello.fenced, after=pb_bases(hello.after[-MAX_BASES:]),
        )  # fmt: skip
        check_hello(m, Check(ConfigError, "Hello"))
        return pb.LeaseRequest(hello=m).SerializeToString()


def encode_lease(message: Renewal | Ask | Left | Broken) -> bytes:
    """A trainer's later messages to the lighthouse; Broken: a rank of the group is missing."""
    with sending(type(message).__name__):
        match message:
            case Renewal():
                request = pb.LeaseRequest(progress=pb_progress(message))
            case Broken():
                request = pb.LeaseRequest(broken=_pb_break(message))
            case Left():
                request = pb.LeaseRequest(left=pb_left(message))
            case _:
                request = pb.LeaseRequest(ask=pb_ask(message))
        return request.SerializeToString()


def _pb_break(broken: Broken) -> pb.Break:
    return pb.Break(quorum_id=broken.quorum_id, reason=clip(broken.reason))


def _read_break(message: pb.Break) -> Broken:
    Check(ProtocolError, "Break").number("quorum_id", message.quorum_id, 0, INT64)
    return Broken(message.quorum_id, clip(message.reason))


def decode_lease_request(
    data: bytes, replica_id: str = "", generation: int = 0
) -> Opening | Renewal | Ask | Left | Incomplete:
    """A trainer's message. `replica_id` and `generation` are those of the stream it came on.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = parse(pb.LeaseRequest, data)
    match message.WhichOneof("body"):
        case "hello":
            return read_opening(message.hello)
        case "progress":
            return read_renewal(message.progress, replica_id, generation)
        case "ask":
            ask = read_ask(message.ask)
            if ask.replica_id != replica_id:
                raise ProtocolError(f"an ask of {ask.replica_id!r} arrived on the lease of {replica_id!r}")
            return ask
        case "left":
            return read_left(message.left, replica_id, generation)
        case "broken":
            broken = _read_break(message.broken)
            return Incomplete(replica_id, generation, broken.quorum_id, broken.reason)
        case _:
            raise ProtocolError("an empty LeaseRequest arrived")


def encode_join(join: Join, release: str) -> bytes:
    """A rank's first message."""
    with sending("Join"):
        m = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION, release=clip(release, MAX_NAME), replica_id=join.replica_id,
            rank=join.rank, world_size=join.world_size, incarnation=join.incarnation,
        )  # fmt: skip
        return pb.GroupRequest(join=m).SerializeToString()


def encode_rank(message: Renewal | RankAsk | Verdict | Broken | Order | Left) -> bytes:
    """A rank's later messages."""
    with sending(type(message).__name__):
        match message:
            case Renewal():
                request = pb.GroupRequest(progress=pb_progress(message))
            case RankAsk():
                Check(ConfigError, "Ask").text("room", message.room)
                request = pb.GroupRequest(ask=pb_ask(message.ask), room=message.room)
            case Verdict():
                request = pb.GroupRequest(vote=pb_verdict(message))
            case Broken():
                request = pb.GroupRequest(broken=_pb_break(message))
            case Order():
                request = pb.GroupRequest(order=pb_push(message).order)
            case _:
                request = pb.GroupRequest(left=pb_left(message))
        return request.SerializeToString()


def decode_group_request(
    data: bytes, replica_id: str = ""
) -> Join | Renewal | RankAsk | Verdict | Broken | Order | Left:
    """A rank's message to its leader.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = parse(pb.GroupRequest, data)
    match message.WhichOneof("body"):
        case "join":
            j = message.join
            check_version(j.protocol_version, j.release, they_are=f"group rank {j.rank}", we_are="group rank 0")
            check = Check(ProtocolError, "Join")
            check.text("replica_id", j.replica_id, needed=True)
            check.number("world_size", j.world_size, 1, MAX_RANKS)
            check.number("rank", j.rank, 0, MAX_RANKS - 1)
            return Join(j.replica_id, j.rank, j.world_size, j.incarnation)
        case "progress":
            return read_renewal(message.progress, replica_id, 0)
        case "ask":
            Check(ProtocolError, "Ask").text("room", message.room)
            return RankAsk(read_ask(message.ask), message.room)
        case "vote":
            return read_verdict(message.vote)
        case "broken":
            return _read_break(message.broken)
        case "left":
            return read_left(message.left, replica_id, 0)
        case "order":
            if message.order.kind != pb.Order.Kind.DRAIN:
                raise ProtocolError("a rank may only ask its group to drain")
            return Order(kill=False, reason=clip(message.order.reason))
        case _:
            raise ProtocolError("an empty GroupRequest arrived")


def encode_quorum_info(quorum: Quorum) -> bytes:
    """QuorumResponse."""
    with sending("Quorum"):
        return pb.QuorumResponse(quorum=pb_quorum(quorum)).SerializeToString()


def decode_quorum_info(data: bytes) -> Quorum:
    """QuorumResponse. Raises ProtocolError."""
    return read_quorum(parse(pb.QuorumResponse, data).quorum)


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
    message = parse(kind, data)
    check_version(message.protocol_version, "", they_are="the caller", we_are="the lighthouse")
    check = Check(ProtocolError, kind.DESCRIPTOR.name)
    limits = {"address": MAX_ADDRESS, "store_address": MAX_ADDRESS, "data": MAX_DATA, "reason": MAX_TEXT}
    needed = ("replica_id", "replica", "ended")
    for field in kind.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, str):
            check.text(field.name, value, limits.get(field.name, MAX_NAME), needed=field.name in needed)
        elif not isinstance(value, int):
            check.texts(field.name, value, MAX_REPLICAS)
        elif not isinstance(value, bool):
            check.number(field.name, value, 0, {"world_size": MAX_RANKS, "step": MAX_STEP}.get(field.name, INT64))
    return message
