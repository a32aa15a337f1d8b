"""`Succession`: out of which quorums the next one of a room has to grow, where two lighthouses share a job (R22). Pure.

How it works. Either lighthouse of a pair may be the only one that a group can reach, and neither can tell whether the
other is gone or only out of its reach. What keeps them from forming two quorums beside each other is that a quorum is
formed only

- alone: of more than half of the members of each quorum that it grows out of (its *bases*), or
- together: of anybody, once the other lighthouse, which stands by, has recorded it.

The bases are the newest quorum of which a fence has completed, so that all its members have entered it, and whichever
was formed after it and may be entered yet. Two quorums that grow alone out of one basis have a member in common, who is
in one of them only, and a fence needs all members: so at most one of the two ever completes anything. What has grown
together is known to both lighthouses. Members bring the bases of their quorum along, so a lighthouse that has been
elsewhere, or was started again, learns of them from those who ask. (The idea of a primary component that grows out of
a majority of the last one, and of the attempts that have to be remembered with it: Yeger Lotem, Keidar and Dolev,
"Dynamic voting for consistent primary components", PODC 1997. Recorded quorums are added here: two lighthouses that
know of each other need no majority.)

A basis is dropped when a newer one is known to be entered by all, or when one of its members leaves it without having
given a ballot in it: then no fence of it has completed, or ever will.

That a quorum has ended here does not always mean that it is over. It may have been presented here, or told, and been
ended by an ask that the other lighthouse, out of reach, may answer with it yet; or have made place for another one that
was presented. Such quorums are *elsewhere*: nothing is formed together beside them, and they are not told as ended,
until one of their members leaves them, is certainly gone or enters a newer one, or nobody can train in them any more
(orphan_s since contact was made).

A lighthouse forgets by a restart. So one that has not been told by the other what that knows (`informed`) forms alone
only with all members of each basis; and the two form together only what cannot contradict something that either has
forgotten: once more than half of the newest basis's members were heard of in it since both were started (`remembered`).

Invariants: without a partner nothing is held up, and nothing is sent. `bases` is sorted by quorum_id; the first is the
one that all have entered (`entered`), if any of them is; what is told says so. Whether a quorum may still go on is
known here only: `current_quorum` knows whether it has ended for this lighthouse. Ownership: `room.Room` only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import PartnerIs, PartnerTold, Propose, Recorded
from ft_core.protocol.lighthouse.forgotten import Forgotten
from ft_core.protocol.lighthouse.partner import ALONE, Partner, Proposal, Told, most_of
from ft_core.protocol.lighthouse.view import Formed, Life, NotReady
from ft_core.protocol.types import Basis

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ft_core.protocol.lighthouse.events import Hello, Refuse
    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.view import Current, View
    from ft_core.protocol.quorum_ids import QuorumIds
    from ft_core.protocol.types import Ask, Quorum, Version

RETRY_S = 0.2
"""How soon a quorum is proposed again that the other lighthouse has refused to record (seconds)."""
MAX_PAST = 256
"""As many former quorums are remembered: the other lighthouse may not have been told of the last ones."""
LOST_S = 1.0
"""A proposal that is not answered within it was lost with a stream, and is made anew (seconds)."""
MAX_DROPPED = MAX_ELSEWHERE = 16
MAX_BASES = 4
"""Member lists that the next quorum may have to grow out of alone; of more it is formed together only."""
MAX_ATTEMPTS = 15
"""Bases that are remembered; with a proposal that is open they fit into a report. Of more the oldest attempts go, and
nothing is formed alone until a newer quorum than those is entered."""


@dataclass(slots=True)
class _Proposed:
    asks: tuple[tuple[str, int], ...]
    """(replica_id, seq) of each: a proposal is for these asks alone."""
    proposal: Proposal
    at: float = 0.0
    answer: bool | None = None


class Succession:
    """Which quorums the next one has to grow out of.

    Args:
        room: its name.
        ids: where quorum ids come from.
        told: what the other lighthouse has told of the room before this one took over, and what this one knew.
    """

    def __init__(self, room: str, ids: QuorumIds, told: Sequence[Told] = ()) -> None:
        self._room, self._ids = room, ids
        self.partner = ALONE
        self.bases: tuple[Basis, ...] = ()
        self.furthest = 0
        """The newest step that the other lighthouse knows to be committed."""
        self.entered = 0
        """The newest quorum that all its members are known to have entered; 0: none."""
        self.vouched = 0
        """The newest quorum that the other lighthouse has told to be entered by all its members; 0: none."""
        self.theirs = Basis(0, ())
        """The newest quorum that the other lighthouse has told to be in force, or to have been the last one there."""
        self.elsewhere: tuple[Basis, ...] = ()
        """Quorums that may go on under the other lighthouse, or that it may announce yet; none older than `entered`."""
        self.orphan_s = max((t.orphan_s for t in told), default=0.0)
        """For how long replicas may train without a lease; 0.0: nobody has said it."""
        self._untold = 0
        """The newest attempt for which there was no place among `bases`."""
        self._inherited: list[Told] = sorted(told, key=lambda t: t.quorum_id)
        """What was told and is not adopted yet: that takes a member's Hello."""
        self.forgotten = Forgotten()
        """What neither lighthouse remembers."""
        self.merged: tuple[int, ...] = ()
        """Quorums of the other lighthouse that are taken into account here."""
        self._remembered = False
        self._proposed: _Proposed | None = None
        self._refused, self._retry_at = False, 0.0
        """The other lighthouse has refused a proposal; it is asked again then, if it has told nothing new before."""
        self._dropped: tuple[int, ...] = ()
        """The last quorum that was recorded and never announced."""
        self._past: deque[int] = deque(maxlen=MAX_PAST)
        """Quorums that have been in force here: what is told of an older one is no news."""
        self._left: dict[int, set[str]] = {}
        """Who of a basis has asked after it."""
        self._formed: deque[int] = deque(maxlen=MAX_PAST)
        """Quorums that were formed here."""
        for one in self._inherited:
            self._learn(one)

    def __repr__(self) -> str:
        return f"Succession({', '.join(f'{b.quorum_id:#x}' for b in self.bases)}, entered={self.entered:#x})"

    def take(self, event: PartnerIs | PartnerTold | Recorded, current: Current | None) -> None:
        """Something has become of the other lighthouse, or it has sent something."""
        match event:
            case PartnerIs():
                self._partner_is(event.partner)
            case PartnerTold():
                self._hears(event.told, current)
            case Recorded():
                self._recorded(event.quorum_id, event.accepted)

    # ------------------------------------------------------------ what is learned

    def presented(self, hello: Hello) -> None:
        """A replica presents the quorum that it is in."""
        self.orphan_s = max(self.orphan_s, hello.orphan_s)
        if hello.quorum_id and hello.members and hello.replica_id in hello.members:
            mine = Basis(hello.quorum_id, hello.members)
            self.forgotten.presented(mine, self.partner, known=self._knows(mine.quorum_id))
            if hello.fenced:
                self._enter(mine)
            else:
                self._take((*hello.after, mine) if hello.cast else hello.after)
            self._over(b for b in self.elsewhere if b.quorum_id < mine.quorum_id and hello.replica_id in b.members)

    def asked(self, ask: Ask, members: tuple[str, ...], *, leaves: bool) -> None:
        """A replica asks. `members`: of the quorum that it leaves, as far as is known; `leaves`: that is, or would have
        been, the one in force. What it had not done when it opened its lease it may have done since."""
        if ask.quorum_id and ask.replica_id in members:
            mine = Basis(ask.quorum_id, members)
            if ask.fenced:
                self._enter(mine)
            elif ask.cast:
                self._take((mine,))
                left = self._left.setdefault(ask.quorum_id, set())
                left.add(ask.replica_id)
                if left.issuperset(members):
                    self._enter(mine)  # all of them have left it, so all had entered it
        last = max((b for b in self.bases if ask.replica_id in b.members), key=lambda b: b.quorum_id, default=None)
        if leaves and last is not None and ask.quorum_id < last.quorum_id and not self._only_here(last.quorum_id):
            self._goes_on(last)
        its = [basis for basis in self.elsewhere if ask.replica_id in basis.members]
        self._over(b for b in its if ask.quorum_id >= b.quorum_id or self._only_here(b.quorum_id))
        self._left = {q: who for q, who in self._left.items() if any(b.quorum_id == q for b in self.bases)}
        kept = self.bases
        for basis in self.bases:
            member = ask.replica_id in basis.members and basis.quorum_id != self.entered
            never = basis.quorum_id == ask.quorum_id and not ask.cast
            # The same ask may be presented to the other lighthouse again, and be answered there with what that formed.
            never = never or (leaves and basis.quorum_id > ask.quorum_id and self._only_here(basis.quorum_id))
            if member and len(self.bases) > 1 and never:
                kept = tuple(b for b in kept if b is not basis)
        self.bases = kept

    def _only_here(self, quorum_id: int) -> bool:
        """Whether nobody but this lighthouse can answer an ask with that quorum from now on."""
        return self.partner.stands_by or not self.partner.address or quorum_id in self._formed

    def formed(self, quorum: Quorum) -> None:
        """A quorum was formed here."""
        if self._proposed is not None and self._proposed.proposal.quorum_id == quorum.quorum_id:
            self.elsewhere = ()  # both have agreed that nothing else goes on
        self._proposed, self._dropped = None, ()
        self._past.append(quorum.quorum_id)
        self._formed.append(quorum.quorum_id)
        self._take((Basis(quorum.quorum_id, quorum.ids),))

    def adopted(self, quorum_id: int, before: Current | None, hello: Hello) -> None:
        """The room goes on from this one, which was presented (then by `hello`) or told: what is told of it again is no
        news. The one in force `before` makes place, and goes on unless it has ended, or the presenter has left it."""
        self._past.append(quorum_id)
        if before is not None and not before.ended and self.partner.address:
            left = before.quorum_id < quorum_id == hello.quorum_id and hello.replica_id in before.among
            if not left:
                self._goes_on(Basis(before.quorum_id, before.members))

    def committed(self, current: Current) -> None:
        """A step was committed in that quorum."""
        self._enter(Basis(current.quorum_id, current.members))

    def _hears(self, told: Told, current: Current | None) -> None:
        """The other lighthouse tells what it knows."""
        self._learn(told)
        self._retry_at = 0.0
        kept = [i for i in self.merged if i not in told.ids]  # a report may say two things of a room
        self.merged = tuple(sorted((*kept[-MAX_DROPPED:], *told.ids)))
        self.orphan_s = max(self.orphan_s, told.orphan_s)
        if told.ended:
            self._over(basis for basis in self.elsewhere if basis.quorum_id == told.quorum_id)
        if not told.quorum_id or told.ended or told.quorum_id in self._past or told.quorum_id < self.entered:
            return
        if current is not None and told.quorum_id < current.quorum_id:
            self._goes_on(Basis(told.quorum_id, told.members))
        else:
            self._inherited.append(told)

    def _goes_on(self, basis: Basis) -> None:
        """That quorum may go on under the other lighthouse."""
        if basis.quorum_id >= self.entered and basis not in self.elsewhere:
            self.elsewhere = (*self.elsewhere, basis)[-MAX_ELSEWHERE:]

    def _over(self, quorums: Iterable[Basis]) -> None:
        """Those can complete nothing more."""
        over = [*quorums]
        if over:
            self.elsewhere = tuple(basis for basis in self.elsewhere if basis not in over)

    def is_over(self, current: Current, *, presumed: bool) -> bool:
        """Whether the quorum in force can complete nothing more under either lighthouse."""
        return current.ended and not presumed and all(b.quorum_id != current.quorum_id for b in self.elsewhere)

    def tells(self, current: Current | None, furthest: int, closed: str, finished: Version, *, presumed: bool) -> Told:
        """What the other lighthouse has to know to go on in this one's place. `presumed`: as in `grown`."""
        quorum_id, members = (current.quorum_id, current.members) if current is not None else (0, ())
        ended = current is not None and self.is_over(current, presumed=presumed)
        open_ = self._proposed.proposal if self._proposed is not None else None  # it is not to be forgotten by this
        bases = (*self.bases, Basis(open_.quorum_id, open_.members)) if open_ is not None else self.bases
        return Told(
            self._room, quorum_id, members, ended, bases, furthest, closed, finished, self.merged, self.entered,
            self.orphan_s, self.elsewhere,
        )  # fmt: skip

    def inherits(self, current: Current | None) -> list[Told]:
        """What to adopt, now that somebody is here: the newest quorum; an older one that may go on stands beside it."""
        told, self._inherited = sorted(self._inherited, key=lambda t: t.quorum_id), []
        told = [t for t in told if t.quorum_id and not t.ended and t.quorum_id >= self.entered]
        if not told:
            return []
        last = told[-1] if current is None or told[-1].quorum_id > current.quorum_id else None
        for other in told[:-1]:
            if other.quorum_id != told[-1].quorum_id:
                self._goes_on(Basis(other.quorum_id, other.members))
        return [last] if last is not None else []

    def _knows(self, quorum_id: int) -> bool:
        """Whether that quorum is known, or older than one that all have entered."""
        bases = (basis.quorum_id for basis in (*self.bases, *self.elsewhere))
        return quorum_id <= self.entered or quorum_id in self._past or quorum_id in bases

    def _learn(self, told: Told) -> None:
        self.forgotten.told(told.ids)
        self.furthest = max(self.furthest, told.furthest)
        self.vouched = max(self.vouched, told.entered)
        self.theirs = max(self.theirs, Basis(told.quorum_id, told.members), key=lambda basis: basis.quorum_id)
        for quorum_id in told.ids:
            self._ids.observe(quorum_id)
        for basis in told.bases:  # one that the other has heard of from who is in it may never be entered by all
            if basis.quorum_id == told.entered:
                self._enter(basis)
        self._take(told.bases)
        for basis in told.elsewhere:
            if basis.quorum_id not in self._past:  # what was in force here this lighthouse knows itself
                self._goes_on(basis)

    def _enter(self, basis: Basis) -> None:
        if basis.quorum_id > self.entered:
            self.entered = basis.quorum_id
            self.bases = (basis, *(b for b in self.bases if b.quorum_id > basis.quorum_id))
            self._over(b for b in self.elsewhere if b.quorum_id < basis.quorum_id)

    def _take(self, bases: Sequence[Basis]) -> None:
        """These may be entered, or have been."""
        for basis in bases:
            if basis.quorum_id > self.entered and all(b.quorum_id != basis.quorum_id for b in self.bases):
                bases = sorted((*self.bases, basis), key=lambda b: b.quorum_id)
                if len(bases) > MAX_ATTEMPTS:
                    self._untold = max(self._untold, bases.pop(bool(self.entered)).quorum_id)
                self.bases = tuple(bases)

    # ------------------------------------------------------------ the other lighthouse

    def _partner_is(self, partner: Partner) -> None:
        """The connection to it, or its life, has changed."""
        if partner.since != self.partner.since:
            self._remembered = False
        if not partner.stands_by:
            self._drop()
        self.partner = partner

    def _recorded(self, quorum_id: int, accepted: bool) -> None:
        """The answer to a proposal."""
        proposed = self._proposed
        if proposed is not None and proposed.proposal.quorum_id == quorum_id:
            proposed.answer = accepted
            if not accepted:
                self._proposed, self._refused = None, True

    def _drop(self) -> None:
        if self._proposed is not None:
            self._dropped = (*self._dropped, self._proposed.proposal.quorum_id)[-MAX_DROPPED:]
        self._proposed = None

    # ------------------------------------------------------------ what may form

    def grown(
        self, formed: Formed, view: View, records: Mapping[str, Record], furthest: int, presumed: bool
    ) -> tuple[Formed | NotReady, list[Propose]]:
        """Whether this quorum may form now, or has to be proposed to the other lighthouse first.

        Args:
            formed: what `quorum_rule.decide` has found.
            view: the room.
            records: of the room.
            furthest: the newest step that is known to be committed.
            presumed: that the quorum in force has ended is not certain.
        """
        outcome = self._allow(formed, view, records, presumed=presumed)
        if isinstance(outcome, Formed) or not outcome.propose:
            return outcome, []
        return outcome, [Propose(self._propose(formed, view, furthest, presumed=presumed))]

    def _allow(self, formed: Formed, view: View, records: Mapping[str, Record], *, presumed: bool) -> Formed | NotReady:
        partner = self.partner
        if not partner.address or not view.rules.r22_grows:
            return formed
        ids = {ask.replica_id for ask in formed.asks}
        gone = {i for i, record in records.items() if record.life is Life.GONE}
        self._over(basis for basis in self.elsewhere if not gone.isdisjoint(basis.members))
        unary = any((r := records.get(i)) is not None and r.hello.unary for i in ids)
        if not presumed and self._grows(ids, view, unary=unary):
            return formed
        asks = tuple((ask.replica_id, ask.seq) for ask in formed.asks)
        proposed, recording = self._proposed, f"the lighthouse at {partner.address} is recording the next quorum"
        if proposed is not None and proposed.asks == asks and partner.stands_by:
            if proposed.answer:
                return replace(formed, quorum_id=proposed.proposal.quorum_id)
            if view.now < proposed.at + LOST_S:
                return NotReady(recording, proposed.at + LOST_S)
        self._drop()
        if not partner.stands_by:
            return self._waits(ids, presumed=presumed)
        if self.elsewhere and not presumed and view.now < partner.met_at + view.orphan_s:
            names = ", ".join(sorted({i for basis in self.elsewhere for i in basis.members})[:4])
            return NotReady(
                f"{names} may train on in a quorum that the lighthouse at {partner.address} has formed",
                partner.met_at + view.orphan_s,
            )
        if not self._remembers(view, records):
            at = partner.met_at + view.orphan_s
            return NotReady(
                f"a lighthouse has been started since {', '.join(self._lacks(ids)[:4])} was last heard of, and may "
                f"have forgotten with whom it trains on; waiting for it, for {at - view.now:.0f} s more (orphan_s)",
                at,
            )
        if self._refused:
            self._refused, self._retry_at = False, view.now + RETRY_S
        if view.now < self._retry_at:
            return NotReady(f"the lighthouse at {partner.address} knows of another quorum", self._retry_at)
        return NotReady(recording, view.now + LOST_S, propose=True)

    def certain(
        self, outcome: Formed | NotReady, lost: list[Refuse], view: View
    ) -> tuple[Formed | NotReady, list[Refuse]]:
        """Nobody is refused for good because all state is lost (R21) while the other lighthouse may know who has it."""
        partner, rules = self.partner, view.rules
        in_contact = partner.stands_by and (view.now < partner.silent_at or not rules.r22_silent)
        if not lost or not partner.address or in_contact or not rules.r22_grows:
            return outcome, lost
        why = "those who ask hold none of what this job has trained; whether others do is known when the other "
        why += f"lighthouse, {partner.address}, can be reached again"
        return NotReady(why, None), []

    def _propose(self, formed: Formed, view: View, furthest: int, *, presumed: bool) -> Proposal:
        members = tuple(ask.replica_id for ask in formed.asks)
        quorum_id = self._ids.next()
        current = (view.current.quorum_id,) if view.current is not None else ()
        over = {*current, *self.merged, *self._dropped, *(b.quorum_id for b in (*self.bases, *self.elsewhere))}
        proposal = Proposal(
            self._room, quorum_id, members, (*self.bases, Basis(quorum_id, members)), tuple(sorted(over)),
            presumed or bool(self.elsewhere), view.orphan_s, furthest, self.entered,
        )  # fmt: skip
        self._proposed = _Proposed(tuple((ask.replica_id, ask.seq) for ask in formed.asks), proposal, view.now)
        return proposal

    def _grows(self, ids: Collection[str], view: View, *, unary: bool) -> bool:
        """Whether a quorum of these grows out of all bases, without anybody's consent. `unary`: one of them brings
        nothing along, so all have to be here."""
        if not self.bases:
            return bool(view.expected) and len(ids) >= view.expected
        bases = {basis.members: basis for basis in (*self.bases, *self.elsewhere)}.values()
        if len(bases) > MAX_BASES or self._untold > self.entered:
            return False
        if unary or (not self.partner.informed and view.rules.r22_informed):
            return all(set(basis.members).issubset(ids) for basis in bases)
        return all(most_of(basis, ids) for basis in bases)

    def _lacks(self, ids: Collection[str]) -> list[str]:
        """Members of the bases that are not among these."""
        return sorted({i for basis in self.bases for i in basis.members} - set(ids))

    def _waits(self, ids: Collection[str], *, presumed: bool) -> NotReady:
        away, names = self.partner.address, ", ".join(self._lacks(ids)[:4])
        if presumed:
            why = "that the last quorum has ended is not certain"
        elif not self.bases:
            why = (
                "this lighthouse does not know whether the job runs under it, and not all of its groups are here (as "
                "many as FT_NUM_REPLICA_GROUPS says)"
            )
        elif not self.partner.informed:
            why = f"this lighthouse was started since, and {names} may train on under it"
        else:
            why = f"{names} may train on under it, with half or more of the last quorum"
        return NotReady(
            f"the other lighthouse, {away}, cannot be reached, and {why}. Start that lighthouse, or those groups; if "
            "it is certain that both are gone, start this lighthouse again without --peer",
            None,
        )

    def _remembers(self, view: View, records: Mapping[str, Record]) -> bool:
        """Whether nothing that either lighthouse has forgotten by a restart can contradict what they form now."""
        partner = self.partner
        if not self.bases or self._remembered or not view.rules.r22_remembers:
            return True
        heard = {i for i, record in records.items() if record.heard_at >= partner.since}
        bases = self.bases[:1] if self.entered else self.bases
        heard_of = all(most_of(basis, heard) for basis in bases)
        self._remembered = heard_of or view.now >= partner.met_at + view.orphan_s
        return self._remembered
