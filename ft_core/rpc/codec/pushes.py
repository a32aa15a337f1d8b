"""Pushes on the wire: what the lighthouse sends to trainers, and a leader to its ranks, in one message.

A quorum is encoded once for all its members: `encode_quorum` gives the bytes they share, `answer` puts a member's `seq`
in front (concatenated protobuf messages merge).
"""

from __future__ import annotations

import zlib

from ft_core._pb import coordination_pb2 as pb
from ft_core.compression import inflate
from ft_core.errors import ConfigError, JobFinishedError, ProtocolError, RefusedError, StateLostError
from ft_core.protocol.pushes import (
    Acked,
    Answer,
    Busy,
    Change,
    Lost,
    Order,
    Over,
    Push,
    Reason,
    Refusal,
    Welcome,
)
from ft_core.protocol.types import VOID, Quorum, Verdict
from ft_core.rpc.codec.bounds import (
    MAX_ADDRESS,
    MAX_DURATION_MS,
    MAX_PUSH_BYTES,
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

PACKED_FROM = 16
"""A quorum of so many members is compressed: a thousand take 13 kB in place of 100, for each of a thousand."""
PACK_LEVEL = 1


def encode_quorum(quorum: Quorum) -> bytes:
    """The part of an answer that all members share; see `answer`."""
    with sending("Quorum"):
        return _pb_answer(quorum).SerializeToString()


def _pb_answer(quorum: Quorum) -> pb.Push:
    info = pb_quorum(quorum)
    if len(quorum.members) < PACKED_FROM:
        return pb.Push(quorum=info)
    packed = zlib.compress(info.SerializeToString(), PACK_LEVEL)
    return pb.Push(packed=pb.PackedQuorum(quorum_id=quorum.quorum_id, info=packed))


def _unpack(packed: bytes) -> pb.QuorumInfo:
    """Raises ProtocolError also for what would become larger than any quorum."""
    try:
        return parse(pb.QuorumInfo, inflate(packed, MAX_PUSH_BYTES))
    except ValueError as error:
        raise ProtocolError(f"a quorum arrived that cannot be unpacked: {error}") from None


def answer(seq: int, shared: bytes) -> bytes:
    """One member's answer: its ask's seq, and the quorum encoded by `encode_quorum`."""
    return pb.Push(seq=seq).SerializeToString() + shared


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


def pb_push(push: Push) -> pb.Push:
    """A push as protobuf."""
    match push:
        case Answer():
            found = _pb_answer(push.quorum)
            found.seq = push.seq
            return found
        case Reason():
            return pb.Push(reason=clip(push.text), paused_ms=min(to_ms(push.paused_s), MAX_DURATION_MS))
        case Change():
            return pb.Push(change_pending=pb.ChangePending(quorum_id=push.quorum_id, reason=clip(push.reason)))
        case Lost():
            held = pb_version(push.held)
            return pb.Push(
                member_lost=pb.MemberLost(
                    quorum_id=push.quorum_id, lost=push.lost, held=held, failed=push.failed, moves=push.moves
                )
            )
        case Busy():
            for_ms = min(to_ms(push.for_s), MAX_DURATION_MS)
            return pb.Push(paused=pb.Paused(quorum_id=push.quorum_id, replica_id=push.replica_id, for_ms=for_ms))
        case Over():
            return pb.Push(superseded=pb.Superseded(quorum_id=push.quorum_id))
        case Refusal():
            return pb.Push(refused=pb_refused(push.error))
        case Order():
            kind = pb.Order.Kind.KILL if push.kill else pb.Order.Kind.DRAIN
            return pb.Push(order=pb.Order(kind=kind, reason=clip(push.reason)))
        case Acked():
            return _pb_ack(push)
        case Verdict():
            return pb.Push(verdict=pb_verdict(push))
        case Welcome():
            peers = [pb.Peer(replica_id=i, heal_addresses=a) for i, a in push.peers]
            return pb.Push(
                welcome=pb.Welcome(
                    protocol_version=PROTOCOL_VERSION,
                    liveness_ms=to_ms(push.liveness_s),
                    peers=peers,
                    boot=push.boot,
                    of_pair=push.of_pair,
                )
            )


def _pb_ack(push: Acked) -> pb.Push:
    age_ms = min(to_ms(push.lease_age_s), MAX_DURATION_MS)
    clock_us, renew_ms = max(0, int(push.clock_s * 1e6)), to_ms(push.renew_s)
    return pb.Push(ack=pb.Ack(clock_us=clock_us, lease_age_ms=age_ms, renew_ms=renew_ms))


def encode_push(push: Push) -> bytes:
    """A push, for a lease or for a rank."""
    if type(push) is Acked:  # the most frequent one by far, and nothing in it can be wrong
        return _pb_ack(push).SerializeToString()
    with sending(type(push).__name__):
        return pb_push(push).SerializeToString()


def _read_welcome(w: pb.Welcome) -> Welcome:
    check = Check(ProtocolError, "Welcome")
    check.number("peers", len(w.peers), 0, MAX_REPLICAS)
    for peer in w.peers:
        check.text("peers.replica_id", peer.replica_id)
        check.texts("peers.heal_addresses", peer.heal_addresses, MAX_RANKS, MAX_ADDRESS)
    peers = tuple((peer.replica_id, tuple(peer.heal_addresses)) for peer in w.peers)
    return Welcome(from_ms(w.liveness_ms, check, "liveness_ms"), peers, w.boot, w.of_pair)


def decode_push(data: bytes, *, they_are: str = "the lighthouse", we_are: str = "this trainer") -> Push | None:
    """A push; None if it is of a kind that this release does not know.

    Args:
        data: the message.
        they_are: the sender, for messages.
        we_are: the receiver, for messages.

    Raises:
        ProtocolError: not of this protocol (version), or a bound is broken.
    """
    m = parse(pb.Push, data)
    check = Check(ProtocolError, "Push")
    match m.WhichOneof("body"):
        case "welcome":
            check_version(m.welcome.protocol_version, "", they_are=they_are, we_are=we_are)
            return _read_welcome(m.welcome)
        case "verdict":
            return read_verdict(m.verdict)
        case "quorum" | "packed" as form:
            return Answer(m.seq, read_quorum(m.quorum if form == "quorum" else _unpack(m.packed.info)))
        case "reason":
            return Reason(clip(m.reason), from_ms(m.paused_ms, check, "paused_ms"))
        case "change_pending":
            return Change(m.change_pending.quorum_id, clip(m.change_pending.reason))
        case "member_lost":
            check.texts("lost", m.member_lost.lost, MAX_REPLICAS)
            held = read_version(m.member_lost.held, check, "held") if m.member_lost.HasField("held") else VOID
            lost = m.member_lost
            return Lost(lost.quorum_id, tuple(lost.lost), held, lost.failed, lost.moves)
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
            age_s, renew_s = (from_ms(getattr(m.ack, key), check, key) for key in ("lease_age_ms", "renew_ms"))
            return Acked(m.ack.clock_us / 1e6, age_s, renew_s)
        case _:
            return None
