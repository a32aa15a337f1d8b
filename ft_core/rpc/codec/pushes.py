"""What the lighthouse says to trainers and a leader to its ranks: one small dataclass per kind of push.

They are not the effects of `room`, which name their receivers. The two protobuf messages share field numbers for
what they have in common, so that a push is encoded once for both. A quorum is encoded once for all its members:
`encode_quorum` gives the bytes they share, `answer` puts a member's `seq` in front (concatenated protobuf messages
merge).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core._pb import coordination_pb2 as pb
from ft_core.errors import ConfigError, JobFinishedError, ProtocolError, RefusedError, StateLostError
from ft_core.protocol.types import VOID, Verdict
from ft_core.rpc.codec.bounds import (
    MAX_ADDRESS,
    MAX_DURATION_MS,
    MAX_RANKS,
    Check,
    check_version,
    clip,
    from_ms,
    parse,
    pb_version,
    read_version,
    sending,
    to_ms,
)
from ft_core.rpc.codec.state import pb_quorum, pb_verdict, read_quorum, read_verdict
from ft_core.settings import MAX_REPLICAS, PROTOCOL_VERSION

if TYPE_CHECKING:
    from ft_core.protocol.types import Quorum, Version


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
    """Why there is no quorum yet; `paused_s`: what it waits for is busy for at most that much longer."""

    text: str
    paused_s: float = 0.0


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
    held: Version = VOID
    """The oldest state that one of them held when it said goodbye; VOID unless all of them did."""


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


def encode_quorum(quorum: Quorum) -> bytes:
    """The part of an answer that all members share; see `answer`."""
    with sending("Quorum"):
        return pb.LeasePush(quorum=pb_quorum(quorum)).SerializeToString()


def answer(seq: int, shared: bytes) -> bytes:
    """One member's answer: its ask's seq, and the quorum encoded by `encode_quorum`."""
    return pb.LeasePush(seq=seq).SerializeToString() + shared


_KINDS: tuple[tuple[type[Exception], int], ...] = (
    (JobFinishedError, pb.Refused.Kind.FINISHED),
    (ProtocolError, pb.Refused.Kind.PROTOCOL),
    (ConfigError, pb.Refused.Kind.CONFIG),
    (StateLostError, pb.Refused.Kind.LOST),
    (RefusedError, pb.Refused.Kind.REFUSED),
)
_FROM_KIND: dict[int, type[Exception]] = {int(number): error for error, number in _KINDS}


def pb_refused(error: Exception) -> pb.Refused:
    """A final refusal; the kind is which error the receiver raises."""
    kind = next((number for cls, number in _KINDS if isinstance(error, cls)), pb.Refused.Kind.REFUSED)
    return pb.Refused(kind=pb.Refused.Kind.Name(kind), reason=clip(str(error)))


def pb_push(push: Push) -> pb.GroupPush | pb.LeasePush:
    """Any push, in the message that has it."""
    match push:
        case Answer():
            return pb.LeasePush(seq=push.seq, quorum=pb_quorum(push.quorum))
        case Reason():
            return pb.LeasePush(reason=clip(push.text), paused_ms=min(to_ms(push.paused_s), MAX_DURATION_MS))
        case Change():
            return pb.LeasePush(change_pending=pb.ChangePending(quorum_id=push.quorum_id, reason=clip(push.reason)))
        case Lost():
            held = pb_version(push.held)
            return pb.LeasePush(member_lost=pb.MemberLost(quorum_id=push.quorum_id, lost=push.lost, held=held))
        case Busy():
            for_ms = min(to_ms(push.for_s), MAX_DURATION_MS)
            return pb.LeasePush(paused=pb.Paused(quorum_id=push.quorum_id, replica_id=push.replica_id, for_ms=for_ms))
        case Over():
            return pb.LeasePush(superseded=pb.Superseded(quorum_id=push.quorum_id))
        case Refusal():
            return pb.LeasePush(refused=pb_refused(push.error))
        case Order():
            kind = pb.Order.Kind.KILL if push.kill else pb.Order.Kind.DRAIN
            return pb.LeasePush(order=pb.Order(kind=kind, reason=clip(push.reason)))
        case Acked():
            age_ms = min(to_ms(push.lease_age_s), MAX_DURATION_MS)
            return pb.LeasePush(ack=pb.Ack(clock_us=max(0, int(push.clock_s * 1e6)), lease_age_ms=age_ms))
        case Verdict():
            return pb.GroupPush(verdict=pb_verdict(push))
        case Welcome():
            peers = [pb.Peer(replica_id=i, heal_addresses=a) for i, a in push.peers]
            return pb.LeasePush(
                welcome=pb.Welcome(
                    protocol_version=PROTOCOL_VERSION, liveness_ms=to_ms(push.liveness_s), peers=peers, boot=push.boot
                )
            )


def encode_push(push: Push) -> bytes:
    """A push, for a lease or for a rank: the two messages share field numbers for what they have in common."""
    with sending(type(push).__name__):
        return pb_push(push).SerializeToString()


def encode_joined(liveness_s: float) -> bytes:
    """The leader's first answer to a rank."""
    joined = pb.Joined(protocol_version=PROTOCOL_VERSION, liveness_ms=to_ms(liveness_s))
    return pb.GroupPush(joined=joined).SerializeToString()


def decode_lease_push(data: bytes) -> Push | None:
    """A push from the lighthouse; None if it is of a kind that this release does not know.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = parse(pb.LeasePush, data)
    if message.WhichOneof("body") == "welcome":
        w = message.welcome
        check_version(w.protocol_version, "", they_are="the lighthouse", we_are="this trainer")
        check = Check(ProtocolError, "Welcome")
        check.number("peers", len(w.peers), 0, MAX_REPLICAS)
        for peer in w.peers:
            check.text("peers.replica_id", peer.replica_id)
            check.texts("peers.heal_addresses", peer.heal_addresses, MAX_RANKS, MAX_ADDRESS)
        peers = tuple((peer.replica_id, tuple(peer.heal_addresses)) for peer in w.peers)
        return Welcome(from_ms(w.liveness_ms, check, "liveness_ms"), peers, w.boot)
    return read_push(message)


def decode_group_push(data: bytes) -> Push | None:
    """A push from group rank 0; None if it is of a kind that this release does not know.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    message = parse(pb.GroupPush, data)
    match message.WhichOneof("body"):
        case "joined":
            check_version(message.joined.protocol_version, "", they_are="group rank 0", we_are="this rank")
            return Welcome(from_ms(message.joined.liveness_ms, Check(ProtocolError, "Joined"), "liveness_ms"))
        case "verdict":
            return read_verdict(message.verdict)
        case _:
            return read_push(message)


def read_push(m: pb.LeasePush | pb.GroupPush) -> Push | None:
    """A push that both messages have, checked; None if this release does not know its kind."""
    check = Check(ProtocolError, "Push")
    match m.WhichOneof("body"):
        case "quorum":
            return Answer(m.seq, read_quorum(m.quorum))
        case "reason":
            return Reason(clip(m.reason), from_ms(m.paused_ms, check, "paused_ms"))
        case "change_pending":
            return Change(m.change_pending.quorum_id, clip(m.change_pending.reason))
        case "member_lost":
            check.texts("lost", m.member_lost.lost, MAX_REPLICAS)
            held = read_version(m.member_lost.held, check, "held") if m.member_lost.HasField("held") else VOID
            return Lost(m.member_lost.quorum_id, tuple(m.member_lost.lost), held)
        case "paused":
            check.text("replica_id", m.paused.replica_id)
            return Busy(m.paused.quorum_id, m.paused.replica_id, from_ms(m.paused.for_ms, check, "for_ms"))
        case "superseded":
            return Over(m.superseded.quorum_id)
        case "refused":
            return Refusal(_FROM_KIND.get(int(m.refused.kind), RefusedError)(clip(m.refused.reason)))
        case "order":
            known = m.order.kind in (pb.Order.Kind.KILL, pb.Order.Kind.DRAIN)
            return Order(m.order.kind == pb.Order.Kind.KILL, clip(m.order.reason)) if known else None
        case "ack":
            return Acked(m.ack.clock_us / 1e6, from_ms(m.ack.lease_age_ms, check, "lease_age_ms"))
        case _:
            return None
