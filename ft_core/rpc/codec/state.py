"""The parts that several messages share: asks, quorums, hellos, progress, goodbyes, verdicts. `pb_*` build, `read_*`
check and take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core._pb import coordination_pb2 as pb
from ft_core.errors import ConfigError, ProtocolError
from ft_core.protocol.lighthouse.events import Hello, Left, Progress
from ft_core.protocol.types import VOID, Ask, Basis, Member, Outcome, Quorum, Verdict
from ft_core.rpc.codec.bounds import (
    INT64,
    MAX_ADDRESS,
    MAX_ADDRESSES_BYTES,
    MAX_DATA,
    MAX_DURATION_MS,
    MAX_NAME,
    MAX_RANKS,
    MAX_SIGNATURE_BYTES,
    MAX_SIGNATURE_LINES,
    MAX_TEXT,
    MAX_UNBUILT,
    Check,
    check_version,
    clip,
    from_ms,
    pb_version,
    read_version,
    to_ms,
)
from ft_core.settings import MAX_REPLICAS, MAX_STEP

if TYPE_CHECKING:
    from collections.abc import Sequence


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


MAX_BASES = 16
"""Quorums that one may grow out of: a lighthouse forms alone out of fewer."""


def pb_bases(bases: Sequence[Basis]) -> list[pb.Basis]:
    """What a quorum grows out of, as it travels."""
    return [pb.Basis(quorum_id=basis.quorum_id, members=basis.members) for basis in bases]


def check_bases(field: str, bases: Sequence[pb.Basis], check: Check) -> None:
    """The bounds of what a quorum grows out of."""
    check.number(field, len(bases), 0, MAX_BASES)
    for basis in bases:
        check.number(f"{field}.quorum_id", basis.quorum_id, 1, INT64)
        check.number(f"{field}.members", len(basis.members), 1, MAX_REPLICAS)
        check.texts(f"{field}.members", basis.members, MAX_REPLICAS)


def read_bases(bases: Sequence[pb.Basis]) -> tuple[Basis, ...]:
    """What a quorum grows out of, after `check_bases`."""
    return tuple(Basis(basis.quorum_id, tuple(basis.members)) for basis in bases)


def _check_ask(m: pb.Ask, check: Check) -> None:
    check.text("replica_id", m.replica_id, needed=True)
    check.number("seq", m.seq, 0, INT64)
    check.number("quorum_id", m.quorum_id, 0, INT64)
    check.number("min_replicas", m.min_replicas, 1, MAX_REPLICAS)
    check.number("group_world_size", m.group_world_size, 1, MAX_RANKS)
    check.texts("heal_addresses", m.heal_addresses, MAX_RANKS, MAX_ADDRESS)
    check.size("heal_addresses", m.heal_addresses, MAX_ADDRESSES_BYTES)
    check.text("store_address", m.store_address, MAX_ADDRESS)
    check.text("address", m.address, MAX_ADDRESS)
    check.text("data", m.data, MAX_DATA)
    check.texts("signature_lines", m.signature_lines, MAX_SIGNATURE_LINES, MAX_TEXT)
    check.texts("unreachable", m.unreachable, MAX_REPLICAS)
    check.texts("reached", m.reached, MAX_REPLICAS)
    check.number("position", m.position, 0, INT64)


def pb_ask(ask: Ask) -> pb.Ask:
    """An ask, checked, as it travels."""
    message = pb.Ask(
        replica_id=ask.replica_id, seq=ask.seq, version=pb_version(ask.version), lineage=ask.lineage,
        quorum_id=ask.quorum_id, failed=ask.failed, reason=clip(ask.reason), min_replicas=ask.min_replicas,
        group_world_size=ask.group_world_size, heal_addresses=ask.heal_addresses, store_address=ask.store_address,
        address=ask.address, signature=ask.signature, signature_lines=fit_signature_lines(ask.signature_lines),
        init_sync=ask.init_sync, allow_heal=ask.allow_heal, shrink_only=ask.shrink_only,
        heals_before_forward=ask.heals_before_forward, heals_late=ask.heals_late,
        commit_failures=ask.commit_failures, data=ask.data, unreachable=ask.unreachable, reached=ask.reached,
        unbuilt=clip(ask.unbuilt, MAX_UNBUILT), unbuilt_here=ask.unbuilt_here, stable=pb_version(ask.stable),
        from_scratch=ask.from_scratch, moves=ask.moves, position=ask.position, not_cast=not ask.cast, fenced=ask.fenced,
    )  # fmt: skip
    _check_ask(message, Check(ConfigError, "Ask"))
    return message


def read_ask(m: pb.Ask) -> Ask:
    """An ask, checked."""
    check = Check(ProtocolError, "Ask")
    _check_ask(m, check)
    return Ask(
        replica_id=m.replica_id, seq=m.seq, version=read_version(m.version, check, "version"), lineage=m.lineage,
        quorum_id=m.quorum_id, failed=m.failed, reason=clip(m.reason), min_replicas=m.min_replicas,
        group_world_size=m.group_world_size, heal_addresses=tuple(m.heal_addresses), store_address=m.store_address,
        address=m.address, signature=m.signature, signature_lines=tuple(m.signature_lines),
        init_sync=m.init_sync, allow_heal=m.allow_heal, shrink_only=m.shrink_only,
        heals_before_forward=m.heals_before_forward, heals_late=m.heals_late,
        commit_failures=m.commit_failures, data=m.data, unreachable=tuple(m.unreachable), reached=tuple(m.reached),
        unbuilt=clip(m.unbuilt, MAX_UNBUILT), unbuilt_here=m.unbuilt_here, from_scratch=m.from_scratch,
        moves=m.moves, position=m.position, cast=not m.not_cast, fenced=m.fenced,
        stable=read_version(m.stable, check, "stable") if m.HasField("stable") else VOID,
    )  # fmt: skip


def _check_quorum(m: pb.QuorumInfo, check: Check) -> None:
    check.number("quorum_id", m.quorum_id, 0, INT64)
    check_bases("after", m.after, check)
    check.number("members", len(m.members), 1, MAX_REPLICAS)
    for member in m.members:
        check.text("members.replica_id", member.replica_id, needed=True)
        check.number("members.group_world_size", member.group_world_size, 1, MAX_RANKS)
        check.number("members.previous_quorum_id", member.previous_quorum_id, 0, INT64)
        check.texts("members.heal_addresses", member.heal_addresses, MAX_RANKS, MAX_ADDRESS)
        check.text("members.store_address", member.store_address, MAX_ADDRESS)
        check.text("members.address", member.address, MAX_ADDRESS)
        check.text("members.data", member.data, MAX_DATA)
        check.number("members.position", member.position, 0, INT64)
    ids = [member.replica_id for member in m.members]
    if len(set(ids)) != len(ids):
        check.fail("members", "names a replica twice")


def pb_quorum(quorum: Quorum) -> pb.QuorumInfo:
    """A quorum, checked, as it travels."""
    message = pb.QuorumInfo(
        quorum_id=quorum.quorum_id, created_ms=quorum.created_ms, after=pb_bases(quorum.after[-MAX_BASES:])
    )
    for m in quorum.members:
        message.members.add(
            replica_id=m.replica_id, version=pb_version(m.version), lineage=m.lineage,
            group_world_size=m.group_world_size, heal_addresses=m.heal_addresses, store_address=m.store_address,
            address=m.address, init_sync=m.init_sync, allow_heal=m.allow_heal, shrink_only=m.shrink_only,
            heals_before_forward=m.heals_before_forward, heals_late=m.heals_late,
            previous_quorum_id=m.previous_quorum_id, commit_failures=m.commit_failures, data=m.data,
            position=m.position,
        )  # fmt: skip
    _check_quorum(message, Check(ConfigError, "Quorum"))
    return message


def read_quorum(m: pb.QuorumInfo) -> Quorum:
    """A quorum, checked."""
    check = Check(ProtocolError, "Quorum")
    _check_quorum(m, check)
    return Quorum(
        m.quorum_id,
        tuple(
            Member(
                replica_id=x.replica_id, version=read_version(x.version, check, "members.version"), lineage=x.lineage,
                group_world_size=x.group_world_size, heal_addresses=tuple(x.heal_addresses),
                store_address=x.store_address, address=x.address, init_sync=x.init_sync, allow_heal=x.allow_heal,
                shrink_only=x.shrink_only, heals_before_forward=x.heals_before_forward, heals_late=x.heals_late,
                previous_quorum_id=x.previous_quorum_id, commit_failures=x.commit_failures, data=x.data,
                position=x.position,
            )
            for x in m.members
        ),
        m.created_ms,
        read_bases(m.after),
    )  # fmt: skip


def fit_signature_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """As many signature lines as travel: MAX_SIGNATURE_LINES, MAX_SIGNATURE_BYTES in total, each cut to MAX_TEXT."""
    kept: list[str] = []
    room = MAX_SIGNATURE_BYTES
    for line in lines[:MAX_SIGNATURE_LINES]:
        short = clip(line)
        room -= 4 * len(short) + 8
        if room < 0:
            break
        kept.append(short)
    return tuple(kept)


def check_hello(m: pb.Hello, check: Check) -> None:
    """The bounds of a Hello."""
    check.text("room", m.room, needed=True)
    check.text("replica_id", m.replica_id, needed=True)
    check.text("name", m.name)
    check.number("highest_id", m.highest_id, 0, INT64)
    check.number("quorum_id", m.quorum_id, 0, INT64)
    check.texts("members", m.members, MAX_REPLICAS)
    check_bases("after", m.after, check)
    check.texts("signature_lines", m.signature_lines, MAX_SIGNATURE_LINES, MAX_TEXT)
    check.number("expected", m.expected, 0, MAX_REPLICAS)
    check.number("min_replicas", m.min_replicas, 1, MAX_REPLICAS)
    check.number("group_world_size", m.group_world_size, 1, MAX_RANKS)
    check.texts("heal_addresses", m.heal_addresses, MAX_RANKS, MAX_ADDRESS)
    check.size("heal_addresses", m.heal_addresses, MAX_ADDRESSES_BYTES)


def read_opening(m: pb.Hello) -> Opening:
    """A Hello, its version compared, checked."""
    check_version(m.protocol_version, m.release, they_are="the trainer", we_are="the lighthouse")
    check = Check(ProtocolError, "Hello")
    check_hello(m, check)
    hello = Hello(
        replica_id=m.replica_id, name=m.name, generation=0, incarnation=m.incarnation,
        version=read_version(m.version, check, "version"), stable=read_version(m.stable, check, "stable"),
        highest_id=m.highest_id, quorum_id=m.quorum_id, members=tuple(m.members), signature=m.signature,
        signature_lines=tuple(m.signature_lines), expected=m.expected, min_replicas=m.min_replicas,
        group_world_size=m.group_world_size, join_s=from_ms(m.join_ms, check, "join_ms"),
        liveness_s=from_ms(m.liveness_ms, check, "liveness_ms"), orphan_s=from_ms(m.orphan_ms, check, "orphan_ms"),
        heal_addresses=tuple(m.heal_addresses), paused_s=from_ms(m.paused_ms, check, "paused_ms"),
        release=clip(m.release, MAX_NAME), cast=not m.not_cast, fenced=m.fenced, after=read_bases(m.after),
    )  # fmt: skip
    return Opening(hello, m.room)


def pb_progress(renewal: Renewal) -> pb.Progress:
    """Progress, as it travels."""
    p = renewal.progress
    return pb.Progress(
        clock_us=max(0, int(renewal.clock_s * 1e6)), step=max(p.step, 0), phase=clip(p.phase, MAX_NAME),
        stable=pb_version(p.stable), paused_ms=min(to_ms(p.paused_s), MAX_DURATION_MS), heal_addresses=p.heal_addresses,
        healed_bytes=p.healed[0], heal_bytes=p.healed[1],
    )  # fmt: skip


def read_renewal(m: pb.Progress, replica_id: str, generation: int) -> Renewal:
    """Progress, checked."""
    check = Check(ProtocolError, "Progress")
    check.text("phase", m.phase)
    check.number("step", m.step, 0, MAX_STEP)
    addresses: tuple[str, ...] = ()
    if m.heal_addresses:  # hardly ever, and a lighthouse reads some thousand of these per second
        check.texts("heal_addresses", m.heal_addresses, MAX_RANKS, MAX_ADDRESS)
        check.size("heal_addresses", m.heal_addresses, MAX_ADDRESSES_BYTES)
        addresses = tuple(m.heal_addresses)
    paused_s = from_ms(m.paused_ms, check, "paused_ms")
    stable = read_version(m.stable, check, "stable")
    healed = min(m.healed_bytes, m.heal_bytes), m.heal_bytes
    progress = Progress(replica_id, generation, m.step, m.phase, stable, paused_s, addresses, healed)
    return Renewal(m.clock_us / 1e6, progress)


def pb_left(left: Left) -> pb.Left:
    """A goodbye, as it travels."""
    return pb.Left(
        reason=clip(left.reason),
        finished=left.finished,
        version=pb_version(left.version),
        agreed=left.agreed,
        over=left.over,
    )


def read_left(m: pb.Left, replica_id: str, generation: int) -> Left:
    """A goodbye, checked."""
    version = read_version(m.version, Check(ProtocolError, "Left"), "version")
    return Left(replica_id, generation, clip(m.reason), m.finished, version, m.agreed, m.over)


_OUTCOMES = {
    Outcome.COMMIT: pb.Verdict.Outcome.COMMIT,
    Outcome.VETO: pb.Verdict.Outcome.VETO,
    Outcome.BROKEN: pb.Verdict.Outcome.BROKEN,
}
_FROM_OUTCOME = {int(number): outcome for outcome, number in _OUTCOMES.items()}


def pb_verdict(v: Verdict) -> pb.Verdict:
    """A verdict, as it travels."""
    return pb.Verdict(
        quorum_id=v.quorum_id, attempt=v.attempt, outcome=_OUTCOMES[v.outcome], reason=clip(v.reason), weight=v.weight,
        contributors=v.contributors, change=v.change, healed=v.healed, exhausted=v.exhausted, stop=v.stop,
        behind=v.behind, drain=v.drain, missing=v.missing, lapsed=v.lapsed, trails=v.trails,
        own_weight=0 if v.own_weight is None else v.own_weight + 1, own_weights=v.own_weights,
    )  # fmt: skip


def read_verdict(m: pb.Verdict) -> Verdict:
    """A verdict, checked."""
    outcome = _FROM_OUTCOME.get(int(m.outcome))
    if outcome is None:
        raise ProtocolError(f"Verdict.outcome is {int(m.outcome)}, which this protocol version does not know")
    check = Check(ProtocolError, "Verdict")
    check.number("quorum_id", m.quorum_id, 0, INT64)
    check.number("attempt", m.attempt, 0, INT64)
    check.number("contributors", m.contributors, 0, MAX_REPLICAS)
    check.number("missing", len(m.missing), 0, MAX_REPLICAS)
    check.number("own_weights", len(m.own_weights), 0, MAX_RANKS)
    check.number("missing", max(m.missing, default=0), 0, MAX_REPLICAS - 1)
    return Verdict(
        m.quorum_id, m.attempt, outcome, clip(m.reason), m.weight, m.contributors, tuple(m.missing), m.change, m.healed,
        m.exhausted, m.stop, m.behind, m.drain, m.lapsed, m.trails,
        m.own_weight - 1 if m.own_weight else None, tuple(m.own_weights),
    )  # fmt: skip
