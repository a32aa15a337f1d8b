"""The pushes to members of the quorum in force: pauses, losses, and who wants to join. Pure.

A member of the quorum in force learns every pause that is open in it: when it changes (`pauses_to_peers`), when the
quorum forms, and when the member's lease opens anew, because pushes are lost while there is none
(`pauses_to_member`).

Ownership: `room.Room` only, whose records these functions read and mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import ChangePending, MemberLost, Note, Paused, Superseded
from ft_core.protocol.lighthouse.view import Current, Formed, Life

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.types import Ask, Version


def pauses_to_peers(
    current: Current | None, replica_id: str, records: Mapping[str, Record], now: float
) -> list[Paused]:
    """The other members learn that a member is busy, and for how long at most; or that it is back."""
    if current is None or replica_id not in current.among:
        return []
    record = records[replica_id]
    record.pause_told = True
    peers = tuple(
        i for i in current.members if i != replica_id and (r := records.get(i)) is not None and r.life is Life.UP
    )
    return [Paused(peers, current.quorum_id, replica_id, max(0.0, record.paused_until - now))] if peers else []


def pauses_of_members(current: Current | None, records: Mapping[str, Record], now: float) -> list[Paused]:
    """The members of a quorum just formed learn who asked from inside a step, and is busy now."""
    busy = [i for i in (current.members if current is not None else ()) if records[i].paused_until > now]
    return [paused for replica_id in busy for paused in pauses_to_peers(current, replica_id, records, now)]


def left_out(formed: Formed, records: Mapping[str, Record]) -> list[Note | Superseded]:
    """Members that a new quorum did not wait for learn that theirs is over."""
    out: list[Note | Superseded] = []
    for replica_id, why in formed.left_out.items():
        if not records[replica_id].stalled:
            out.append(Note(why))
        out.append(Superseded(replica_id, records[replica_id].hello.quorum_id))
    return out


def pauses_to_member(
    current: Current | None, replica_id: str, records: Mapping[str, Record], now: float
) -> list[Paused]:
    """A member whose lease is open (again) learns what its peers announced, and they what it announced."""
    if current is None or replica_id not in current.among:
        return []
    out: list[Paused] = []
    for member in current.members:
        peer = records.get(member)
        if member != replica_id and peer is not None and (peer.pause_told or peer.paused_until > now):
            peer.pause_told = True
            left_s = max(0.0, peer.paused_until - now) if peer.life is Life.UP else 0.0
            out.append(Paused((replica_id,), current.quorum_id, member, left_s))
    record = records[replica_id]
    if record.pause_told or record.paused_until > now:
        out += pauses_to_peers(current, replica_id, records, now)
    return out


def losses(
    current: Current | None, records: Mapping[str, Record], suspected: Callable[[Record], bool]
) -> list[MemberLost]:
    """Members that will not answer any more, or may not, once each, to those that may be waiting for them."""
    lost: dict[str, Version] = {}
    for replica_id in current.members if current is not None else ():
        record = records.get(replica_id)
        if record is None or record.loss_announced:
            continue
        if record.incomplete or suspected(record):
            record.loss_announced, lost[replica_id] = True, record.left_with
    if current is None or not lost:
        return []
    others = (i for i in current.members if i in records and i not in lost)
    peers = tuple(i for i in others if records[i].life is Life.UP and records[i].ask is None)
    return [MemberLost(peers, current.quorum_id, tuple(lost), min(lost.values()))] if peers else []


def joiners(current: Current | None, records: Mapping[str, Record], held: Mapping[str, str]) -> frozenset[str]:
    """Replicas that ask and are in no current quorum. `held`: who asks and is held back.

    That quorum may have ended: a member that was believed gone may be back in it, and would train on for ever.
    """
    return frozenset(
        i for i, r in records.items() if current is not None and r.ask is not None and r.life is Life.UP
        and i not in current.among and not r.ask.shrink_only and i not in held
    )  # fmt: skip


def change_pending(
    current: Current | None, records: Mapping[str, Record], joining: frozenset[str]
) -> list[ChangePending]:
    """Members that have not asked are to agree on a new quorum, for those that want to join."""
    if current is None:
        return []
    train = (i for i in current.members if i in records and records[i].ask is None)
    members = tuple(i for i in train if records[i].life is Life.UP)
    reason = f"{', '.join(sorted(joining))} wants to join"
    return [ChangePending(members, current.quorum_id, reason)] if members else []


def departure(
    ask: Ask, current: Current, records: Mapping[str, Record], leaseless: Collection[str], *, first: bool
) -> list[MemberLost]:
    """A member leaves the current quorum by asking. If its data plane broke, that speaks against who has no lease.

    The others may wait for it where no closed connection shows it, as while a process group is built; also for one that
    asked again before it had the answer that put it into the current quorum, which it never enters. They are notified
    once per quorum (`first`): every member of a broken one asks, and a push to all for each is quadratic.

    Args:
        ask: the member's.
        current: the quorum that it leaves.
        records: of the room.
        leaseless: replica_ids among which everybody is whose connection closed, or who was never seen.
        first: of the quorum's members.
    """
    for replica_id in leaseless if ask.failed else ():
        peer = records.get(replica_id)
        if replica_id in current.among and peer is not None and peer.life in (Life.CLOSED, Life.UNKNOWN):
            peer.peer_reported_failure = True
    if not first:
        return []
    living = {i: r for i in current.members if (r := records.get(i)) is not None and r.life is Life.UP}
    others = tuple(i for i, r in living.items() if i != ask.replica_id and r.ask is None)
    lost = MemberLost(others, current.quorum_id, (ask.replica_id,), failed=ask.failed)
    return [lost] if others else []


def superseded(quorum_id: int, records: Mapping[str, Record]) -> list[Superseded]:
    """`quorum_id` was adopted: notify whoever holds another one that it is over."""
    holders = {i: r.hello.quorum_id for i, r in records.items() if r.life is Life.UP and r.ask is None}
    return [Superseded(i, mine) for i, mine in holders.items() if mine and mine != quorum_id]
