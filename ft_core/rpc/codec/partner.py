"""What the two lighthouses of a pair send each other; checked in both directions."""

from __future__ import annotations

from ft_core._pb import coordination_pb2 as pb
from ft_core.errors import ConfigError, ProtocolError
from ft_core.protocol.lighthouse.pair import Report, Role
from ft_core.protocol.lighthouse.partner import Proposal, Told
from ft_core.protocol.lighthouse.room_keeping import MAX_ROOMS
from ft_core.rpc.codec.bounds import (
    INT64,
    MAX_NAME,
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
from ft_core.rpc.codec.state import MAX_BASES, check_bases, pb_bases, read_bases
from ft_core.settings import MAX_REPLICAS, MAX_STEP, PROTOCOL_VERSION

UINT64 = 2**64 - 1
MAX_OVER = 8 * MAX_BASES
"""Quorums that a lighthouse says it has taken into account, or are over."""
MAX_ROOM_REPORTS = 2 * MAX_ROOMS
"""A lighthouse that stands by may know of each room twice: what it knew itself, and what it was told."""
_ROLES = {Role.STARTING: 0, Role.ACTIVE: 1, Role.STANDBY: 2}
_FROM_ROLE = {number: role for role, number in _ROLES.items()}


def _check(m: pb.PartnerReport, check: Check) -> None:
    check.number("boot", m.boot, 1, UINT64)
    check.number("leases", m.leases, 0, 1 << 20)
    for field, found in (("rooms", m.rooms), ("proposals", m.proposals), ("answers", m.answers)):
        check.number(field, len(found), 0, MAX_ROOM_REPORTS)
    for room in m.rooms:
        check.text("rooms.room", room.room, needed=True)
        _check_quorum("rooms", room, check)
        check.number("rooms.furthest", room.furthest, 0, MAX_STEP)
        check.number("rooms.merged", len(room.merged), 0, MAX_OVER)
        check.number("rooms.entered", room.entered, 0, INT64)
        check_bases("rooms.elsewhere", room.elsewhere, check)
    for proposal in m.proposals:
        check.text("proposals.room", proposal.room, needed=True)
        _check_quorum("proposals", proposal, check)
        check.number("proposals.over", len(proposal.over), 0, MAX_OVER)
        check.number("proposals.furthest", proposal.furthest, 0, MAX_STEP)
        check.number("proposals.entered", proposal.entered, 0, INT64)


def _check_quorum(field: str, m: pb.RoomReport | pb.PartnerProposal, check: Check) -> None:
    check.number(f"{field}.quorum_id", m.quorum_id, 0, INT64)
    check.texts(f"{field}.members", m.members, MAX_REPLICAS)
    check_bases(f"{field}.bases", m.bases, check)


def encode_report(report: Report, release: str) -> bytes:
    """A report to the other lighthouse. Raises ConfigError if something of it has no place."""
    with sending("PartnerReport"):
        m = pb.PartnerReport(
            protocol_version=PROTOCOL_VERSION, release=clip(release, MAX_NAME), boot=report.boot,
            role=_ROLES[report.role], hears=report.hears, leases=report.leases,  # type: ignore[arg-type]
            complete=report.complete, contact=report.contact,
            rooms=[
                pb.RoomReport(
                    room=t.room, quorum_id=t.quorum_id, members=t.members, ended=t.ended, bases=pb_bases(t.bases),
                    furthest=t.furthest, closed=clip(t.closed), finished=pb_version(t.finished), merged=t.merged,
                    entered=t.entered, orphan_ms=to_ms(t.orphan_s), elsewhere=pb_bases(t.elsewhere),
                )
                for t in report.told
            ],
            proposals=[
                pb.PartnerProposal(
                    room=p.room, quorum_id=p.quorum_id, members=p.members, bases=pb_bases(p.bases), over=p.over,
                    presumed=p.presumed, orphan_ms=to_ms(p.orphan_s), furthest=p.furthest,
                    entered=p.entered,
                )
                for p in report.proposals
            ],
            answers=[pb.PartnerAnswer(quorum_id=quorum_id, accepted=ok) for quorum_id, ok in report.answers],
        )  # fmt: skip
        _check(m, Check(ConfigError, "PartnerReport"))
        return m.SerializeToString()


def decode_report(data: bytes) -> Report:
    """A report of the other lighthouse. Raises ProtocolError."""
    m = parse(pb.PartnerReport, data)
    check_version(m.protocol_version, m.release, they_are="the other lighthouse", we_are="this one")
    check = Check(ProtocolError, "PartnerReport")
    _check(m, check)
    role = _FROM_ROLE.get(int(m.role))
    if role is None:
        raise ProtocolError(f"PartnerReport.role is {int(m.role)}, which this protocol version does not know")
    return Report(
        m.boot, role, m.hears, m.contact, m.leases, tuple(_read_told(t, check) for t in m.rooms), m.complete,
        tuple(_read_proposal(p, check) for p in m.proposals),
        tuple((a.quorum_id, a.accepted) for a in m.answers),
    )  # fmt: skip


def _read_told(m: pb.RoomReport, check: Check) -> Told:
    finished = read_version(m.finished, check, "rooms.finished")
    return Told(
        m.room, m.quorum_id, tuple(m.members), m.ended, read_bases(m.bases), m.furthest, clip(m.closed), finished,
        tuple(m.merged), m.entered, from_ms(m.orphan_ms, check, "rooms.orphan_ms"),
        read_bases(m.elsewhere),
    )  # fmt: skip


def _read_proposal(m: pb.PartnerProposal, check: Check) -> Proposal:
    return Proposal(
        m.room, m.quorum_id, tuple(m.members), read_bases(m.bases), tuple(m.over), m.presumed,
        from_ms(m.orphan_ms, check, "proposals.orphan_ms"), m.furthest, m.entered,
    )  # fmt: skip
