"""The machine of a replica group, kept by its rank 0: its ranks ask, vote, break and leave as one (R12). Pure.

Theory of operation. What happens to the group comes in as an event, what its shell must do goes out as effects:
`handle` is the only way in, and `next_at` says when a `Tick` is due. The group asks when every rank has asked
(`merge_asks`), and has a verdict when every rank has voted (`merge_votes`); pushes of the lighthouse go on to every
rank. A rank that is broken, or whose stream ends and is not open again within the grace, breaks the group in that
quorum: votes on it are BROKEN, and every rank is told that its own group is lost. There is no grace in a quorum that
has broken for somebody, here or in another group: that speaks against whoever has no connection, as the lighthouse
judges closed leases (`protocol.lighthouse.absence`). Without a rank the group can neither
go on nor ask, which is reported, so that the other groups do not wait for it. If it stays away for a liveness timeout,
and one that is there has not asked by then, that one waits for it in a collective of the group, which ends in half an
hour or never: all ranks are told to end.

What a rank may have missed while its stream was away it is told when it is open again: verdicts and breaks of quorums,
pauses, a drain, why there is no quorum yet. Its own ask and vote it presents anew, and gets the same answers.

Invariants (`validate`): an ask that is open is the newest one made; a verdict stands (R0); nobody waits for a verdict
in a quorum that the group has left; a break is told once per quorum; what is remembered of quorums has a bound.

Ownership: one shell, which calls it from one thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError
from ft_core.protocol.group import events as ev
from ft_core.protocol.group.merge import Mismatch, merge_asks
from ft_core.protocol.group.moving import moving_from, why_it_stays
from ft_core.protocol.group.ranks import ANY_GROUP, Join, RankRecord, never_came, not_asked, stuck, unwanted
from ft_core.protocol.group.votes import Verdicts, Votes
from ft_core.protocol.lighthouse.replica_table import CLOSED_BEFORE
from ft_core.protocol.pauses import GroupPauses
from ft_core.protocol.pushes import Busy, Lost, Order, Reason, Refusal, Welcome
from ft_core.protocol.types import Ask, Outcome, Verdict

if TYPE_CHECKING:
    from ft_core.protocol.group.settings import GroupSettings
    from ft_core.protocol.pushes import Push

LATE_S = 1.0
"""After this long, ranks that have asked are told which ranks have not; those that want to go on lose the attempt."""


class Group:
    """The protocol state of one replica group. See the module's theory of operation."""

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.fatal: Exception | None = None
        """Why the group was refused for good."""
        self.late = ""
        """Which ranks are waited for, once that takes long; '' otherwise."""
        self.quorum_id = 0
        """Of the quorum that the lighthouse has announced last; 0: none."""
        self._ranks = {rank: RankRecord() for rank in range(settings.world_size)}
        self._asks: dict[int, Ask] = {}
        """Of the ranks that have asked for the next quorum."""
        self._room: str | None = None
        self._open: Ask | None = None
        """The group's ask that the lighthouse has not answered."""
        self.signature: tuple[int, tuple[str, ...]] | None = None
        """Of the models of all ranks, with its lines, as it was asked with last."""
        self._seq = 0
        self._votes = Votes(settings.world_size)
        self._verdicts = Verdicts()
        self._pauses = GroupPauses(settings.world_size)
        self._incomplete = False
        """The lighthouse knows that a rank is missing."""
        self._left_by_others = 0
        """The newest quorum that another group has left because its data plane broke; 0: none."""
        self._drain: Order | None = None
        self._reason: Reason | None = None
        """Why there is no quorum yet, as the lighthouse said last of the ask that is open."""
        self._admitted = False
        """The lighthouse has opened the lease: ranks may know that they have joined."""
        self._port = 0
        self._late_at: float | None = None
        self._come_until: float | None = None
        """Every rank has to have connected by then."""
        self._waited = False
        """That was waited for."""
        self._ends_at: float | None = None
        """A rank is away: when the group ends, if another one is stuck then."""
        self._untold: set[int] = set()

    def __repr__(self) -> str:
        here = sum(rank.here for rank in self._ranks.values())
        state = f", refused: {self.fatal}" if self.fatal else ", lacks a rank" if self._incomplete else ""
        return (
            f"Group({self.settings.replica_id}, ranks={here}/{len(self._ranks)}, asked={len(self._asks)}, "
            f"quorum={self.quorum_id:#x}{state})"
        )

    @property
    def next_at(self) -> float | None:
        """When a Tick is due; None: not before the next event."""
        times = (self._late_at, self._come_until, self._ends_at, *(rank.lost_at for rank in self._ranks.values()))
        return min((at for at in times if at is not None), default=None)

    @property
    def untold(self) -> tuple[int, ...]:
        """Ranks that have yet to hear why the group was refused: they have not come, or are away; () if it was not."""
        return tuple(sorted(self._untold))

    def _absent(self) -> tuple[int, ...]:
        return tuple(number for number, rank in self._ranks.items() if not rank.incarnation)

    def refusal(self, join: Join) -> Exception | None:
        """Why a caller is not taken for a rank of this group; None: it is, see `RankJoined`."""
        return unwanted(join, self.settings.replica_id, self.settings.world_size, self._ranks)

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Apply one event and everything that follows from it. Returns the effects to perform, in order."""
        out: list[ev.Effect] = []
        match event:
            case ev.RankAsked():
                self._on_asked(event, now, out)
            case ev.RankVoted():
                self._on_voted(event, out)
            case ev.RankBroke():
                self._break(event.rank, event.quorum_id, event.reason, out)
            case ev.RankProgress():
                self._on_progress(event, now, out)
            case ev.RankJoined() | ev.RankGone() | ev.RankLeft() | ev.Started():
                self._on_stream(event, now, out)
            case ev.Tick():
                pass
            case _:
                self._on_lighthouse(event, now, out)
        self._age(now, out)
        return out

    def _on_lighthouse(
        self, event: ev.Welcomed | ev.DrainOrdered | ev.Answered | ev.Pushed | ev.RefusedByLighthouse, now: float,
        out: list[ev.Effect],
    ) -> None:  # fmt: skip
        match event:
            case ev.Welcomed():
                self._on_welcomed(now, out)
            case ev.Answered():
                self._on_answered(event, now, out)
            case ev.Pushed():
                self._on_pushed(event.push, now, out)
            case ev.DrainOrdered():
                self._on_drain(event.reason, out)
            case ev.RefusedByLighthouse():
                self._refuse(event.error, out)

    def _on_stream(
        self, event: ev.Started | ev.RankJoined | ev.RankGone | ev.RankLeft, now: float, out: list[ev.Effect]
    ) -> None:
        match event:
            case ev.Started():
                self._port, self._come_until = event.port, now + self.settings.connect_s
            case ev.RankJoined():
                self._on_joined(event, now, out)
            case ev.RankGone():
                rank = self._ranks[event.rank]
                rank.here = False
                if not rank.left and self.fatal is None:
                    silent = event.silence_s >= CLOSED_BEFORE * self.settings.liveness_s
                    rank.lost_at = now if silent else now + self.settings.grace_s
            case ev.RankLeft():
                rank = self._ranks[event.rank]
                rank.here, rank.left, rank.lost_at = False, True, None

    # ------------------------------------------------------------ time

    def _has_broken(self) -> bool:
        """The quorum in force has broken for somebody: a stream that is away has not just blinked."""
        broken = self._left_by_others, *self._verdicts.broken
        return self.settings.rules.r12_accused and self.quorum_id != 0 and self.quorum_id in broken

    def _age(self, now: float, out: list[ev.Effect]) -> None:
        if self._come_until is not None and now >= self._come_until:
            self._come_until, self._waited = None, True
            if absent := self._absent():
                settings = self.settings
                error = never_came(settings.replica_id, absent, self._port, settings.connect_s, settings.world_size)
                self._refuse(error, out)
        if self._late_at is not None and now >= self._late_at:
            self._tell_late(now, out)
        for number, rank in self._ranks.items():
            if rank.lost_at is not None and (now >= rank.lost_at or self._has_broken()):
                rank.lost_at = None
                self._asks.pop(number, None)
                self.late = self.late if self._asks else ""
                self._lacks_a_rank(
                    f"group rank {number} of {self.settings.replica_id} is gone or frozen (its connection to group "
                    "rank 0 ended)",
                    out,
                )
                if self.settings.rules.r12_ends:
                    self._ends_at = now + self.settings.liveness_s
        if self._ends_at is not None and now >= self._ends_at:
            self._ends_at = None
            why = stuck(self.settings.replica_id, self._ranks, self._asks)
            if why and self.fatal is None:
                out.append(ev.TellAll(Order(kill=True, reason=why)))

    # ------------------------------------------------------------ ranks come and go

    def _on_welcomed(self, now: float, out: list[ev.Effect]) -> None:
        if self._admitted or self.fatal is not None:
            return
        self._admitted = True
        for number, rank in self._ranks.items():
            if rank.here:
                self._welcome(number, now, out)

    def _on_joined(self, event: ev.RankJoined, now: float, out: list[ev.Effect]) -> None:
        rank = self._ranks[event.rank]
        rank.incarnation, rank.here, rank.left, rank.lost_at = event.incarnation, True, False, None
        self._untold.discard(event.rank)
        if not self._absent():
            self._come_until = None
        if all(other.here or other.left for other in self._ranks.values()):
            self._ends_at = None
        if self.fatal is not None:
            out.append(ev.Tell(event.rank, Refusal(self.fatal)))
        elif self._admitted:
            self._welcome(event.rank, now, out)

    def _welcome(self, rank: int, now: float, out: list[ev.Effect]) -> None:
        """Tell a rank that it has joined, and what it may have missed; it ignores what is about older quorums."""
        mine = self.settings.replica_id
        out.append(ev.Tell(rank, Welcome(self.settings.liveness_s)))
        if not self.settings.rules.r12_retold:
            return
        # A verdict comes before the break of its quorum, as it did then: else a rank whose verdict was lost on its way
        # would take the break for it, and not apply what the others have (R0). So do those of the quorum in force: it
        # may break before the rank has presented its vote again.
        if self.settings.rules.r12_verdict_first:
            known = (*self._verdicts.broken, self.quorum_id)
            out += [ev.Tell(rank, verdict) for verdict in self._verdicts.decided_in(known)]
        out += [ev.Tell(rank, Lost(quorum_id, (mine,))) for quorum_id in self._verdicts.broken]
        pauses = self._verdicts.pauses.open(now)
        out += [ev.Tell(rank, Busy(self.quorum_id, who, for_s)) for who, for_s in pauses.items()]
        if self._drain is not None:
            out.append(ev.Tell(rank, self._drain))
        if self._reason is not None:
            out.append(ev.Tell(rank, self._reason))

    def _refuse(self, error: Exception, out: list[ev.Effect]) -> None:
        if self.fatal is not None:
            return
        self.fatal, self._come_until, self._late_at, self._ends_at = error, None, None, None
        coming = () if self._waited else self._absent()
        self._untold.update(coming, (number for number, rank in self._ranks.items() if rank.lost_at is not None))
        for rank in self._ranks.values():
            rank.lost_at = None
        out.append(ev.Refuse(error))

    # ------------------------------------------------------------ asks

    def _on_asked(self, event: ev.RankAsked, now: float, out: list[ev.Effect]) -> None:
        number, ask, answered = event.rank, event.ask, self._ranks[event.rank].answered
        if answered is not None and answered[0] == ask.seq:
            out.append(ev.Announce(answered[1], ((number, ask.seq),)))
            return
        known = self._asks.get(number)
        again = known is not None and known.moves and known.quorum_id == ask.quorum_id
        if ask.moves and not again and not self._goes_on(number, ask, out):
            return
        if ask.replica_id == ANY_GROUP:  # it need not know what its group is called and how many ranks it has
            ask = replace(ask, replica_id=self.settings.replica_id, group_world_size=self.settings.world_size)
        self._room = event.room or self._room
        self._asks[number] = ask
        if not ask.moves and ask.quorum_id and (ask.failed or moving_from(self._asks)):
            self._break(number, ask.quorum_id, ask.reason or f"group rank {number} lost its process group", out)
        if self._drain is not None and self.settings.drains:
            self.late, self._late_at = "", None  # nobody is waited for any more
            out.append(ev.Tell(number, self._drain))
            return
        merged = merge_asks(self._asks, self.settings.world_size)
        if isinstance(merged, Ask):
            self._ask(merged, out)
        elif isinstance(merged, Mismatch):
            self._refuse(ConfigError(merged.reason), out)
        elif self._late_at is None and self.fatal is None:
            self._late_at = now + LATE_S

    def _ask(self, merged: Ask, out: list[ev.Effect]) -> None:
        """All have asked. What is open at the lighthouse already is not asked again, unless it was void meanwhile.

        Then it is another ask: the answer to the void one may be on its way, and that quorum is over (R14). News of
        its links makes no other ask: an answer on its way holds.
        """
        self.late, self._late_at = "", None
        before = self._open
        known = before and replace(merged, seq=before.seq, unreachable=before.unreachable, reached=before.reached)
        if known is not None and replace(merged, seq=known.seq) == before and not self._incomplete:
            return
        self._seq += known is None or known != before or (self._incomplete and self.settings.rules.r12_void_ask)
        self._open, self._reason, self._incomplete = replace(merged, seq=self._seq), None, False
        self.signature = merged.signature, merged.signature_lines
        out.append(ev.AskLighthouse(self._open, self._room))

    def _tell_late(self, now: float, out: list[ev.Effect]) -> None:
        self._late_at = None
        if moving := moving_from(self._asks):
            self._break(None, moving, "a rank of this group has neither gone on nor ended its attempt", out)
        absent = [number for number in self._ranks if number not in self._asks]
        if not self._asks or not absent:
            return
        paused_s = self._pauses.left_s(absent, now) if self.settings.rules.r12_pauses else 0.0
        self.late = not_asked(self.settings.replica_id, absent, self._ranks, paused_s)
        out += [ev.Tell(number, Reason(self.late, paused_s)) for number in self._asks]

    def _on_answered(self, event: ev.Answered, now: float, out: list[ev.Effect]) -> None:
        if self._open is None or self._open.seq != event.seq:
            return
        self._open = self._reason = None
        if len(self._asks) < self.settings.world_size:
            # No rank enters it: those that did would be a step further than the one that is away, and asks again.
            self._incomplete = True
            reason = f"a rank of {self.settings.replica_id} went while the quorum formed"
            out.append(ev.ReportIncomplete(event.quorum.quorum_id, reason))
            return
        asks, self._asks = self._asks, {}
        self.quorum_id, self.late, self._late_at = event.quorum.quorum_id, "", None
        self._verdicts.pauses.forget()
        self._pauses.new_quorum()
        for number, ask in asks.items():
            self._ranks[number].answered = (ask.seq, event.quorum)
        out.append(ev.Announce(event.quorum, tuple((number, ask.seq) for number, ask in asks.items())))
        self._share_pause(now, out)  # what was open when the quorum formed is news to it

    # ------------------------------------------------------------ votes and breaks

    def _on_voted(self, event: ev.RankVoted, out: list[ev.Effect]) -> None:
        vote = event.vote
        decided = self._verdicts.result(vote.quorum_id, vote.attempt)
        if decided is None and moving_from(self._asks) == vote.quorum_id and self.settings.rules.r12_moves:
            self._break(None, vote.quorum_id, f"group rank {event.rank} has voted already", out)
            decided = self._verdicts.result(vote.quorum_id, vote.attempt)
        verdict = self._votes.cast(event.rank, vote)
        to: tuple[int, ...] = (event.rank,)
        if decided is None:
            if verdict is None:
                return
            decided, to = verdict, tuple(self._ranks)
            self._verdicts.decided(verdict)
        out.append(ev.Decide(to, decided))
        if decided.outcome is Outcome.BROKEN:
            self._break(event.rank, vote.quorum_id, decided.reason, out)

    def _break(self, rank: int | None, quorum_id: int, reason: str, out: list[ev.Effect]) -> None:
        """`rank` cannot go on in `quorum_id`, so the group cannot. Told once per quorum."""
        if not self._verdicts.broke(quorum_id, reason):
            return
        mine = self.settings.replica_id
        out.append(ev.Note(f"{mine}: the group leaves quorum {quorum_id:#x}: {reason}"))
        for attempt, waiting in self._votes.undecided(quorum_id).items():
            out.append(ev.Decide(waiting, Verdict(quorum_id, attempt, Outcome.BROKEN, reason)))
        lost = Lost(quorum_id, (mine,))
        out += [ev.Tell(other, lost) for other in self._ranks if other != rank and other not in self._asks]
        moving = [other for other, ask in self._asks.items() if ask.moves and self.settings.rules.r12_moves]
        for other in moving:
            del self._asks[other]
        self.late = self.late if self._asks else ""
        out += [ev.Tell(other, lost) for other in moving if other != rank]
        if moving and self._open is not None:
            self._incomplete = True  # their ask is void
            out.append(ev.ReportIncomplete(quorum_id, reason))

    def _goes_on(self, number: int, ask: Ask, out: list[ev.Effect]) -> bool:
        """A rank has launched nothing of its attempt, which is to go on in the next quorum (R19): `group.moving`."""
        voted = self._votes.undecided(ask.quorum_id)
        why = why_it_stays(ask, self.quorum_id, self._asks, self._verdicts.broken, voted)
        mine = (self.settings.replica_id,)
        if why and self.settings.rules.r12_moves:
            self._break(number, ask.quorum_id, why, out)
            out.append(ev.Tell(number, Lost(ask.quorum_id, mine)))
            return False
        if not self._asks:
            news = Lost(ask.quorum_id, mine, moves=True)
            out += [ev.Tell(other, news) for other in self._ranks if other != number]
        return True

    def _lacks_a_rank(self, reason: str, out: list[ev.Effect]) -> None:
        """Without a rank the group can neither go on nor ask: the other groups learn it now, not at their timeout."""
        self._incomplete = True
        self._break(None, self.quorum_id, reason, out)
        out.append(ev.ReportIncomplete(self.quorum_id, reason))

    # ------------------------------------------------------------ pushes and pauses

    def _on_drain(self, reason: str, out: list[ev.Effect]) -> None:
        self._drain = Order(kill=False, reason=reason)
        if self.settings.drains:
            self._open = self._reason = None  # an answer that is on its way is for nobody any more
        out.append(ev.TellAll(self._drain))

    def _on_pushed(self, push: Push, now: float, out: list[ev.Effect]) -> None:
        self._verdicts.take(push, self.settings.replica_id, now)
        if isinstance(push, Lost) and push.failed:
            self._left_by_others = push.quorum_id
        if isinstance(push, Reason) and self._open is not None:
            self._reason = push
        out.append(ev.TellAll(push))

    def _on_progress(self, event: ev.RankProgress, now: float, out: list[ev.Effect]) -> None:
        if self._pauses.set(event.rank, now + event.paused_s if event.paused_s > 0 else 0.0):
            left_s = self._pauses.left_s(self._ranks, now)
            out.append(ev.RenewLease(event.phase if event.paused_s > 0 else "", left_s))
            self._share_pause(now, out)

    def _share_pause(self, now: float, out: list[ev.Effect]) -> None:
        """While a rank is busy the others' votes wait for it, and the asks of those that have asked already."""
        left_s = self._pauses.news(now) if self.settings.rules.r12_pauses else None
        if left_s is None:
            return
        busy = Busy(self.quorum_id, self.settings.replica_id, left_s)
        self._verdicts.take(busy, self.settings.replica_id, now)
        out.append(ev.TellAll(busy))
        if self.late:
            self._tell_late(now, out)

    # ------------------------------------------------------------ what always holds

    def validate(self) -> None:
        """Every invariant; tests and the simulation call it after each event."""
        world_size = self.settings.world_size
        assert set(self._asks) <= set(self._ranks), self
        whole = len(self._asks) == world_size
        drained = self._drain is not None and self.settings.drains
        assert self._open is None or self._open.seq == self._seq, "an open ask is the newest one"
        assert self._open is None or whole or self._incomplete, "an ask is open with a rank missing, and not reported"
        assert not (self._incomplete and whole) or drained or self.fatal, "all have asked, and it still counts as short"
        assert not self.late or (self._asks and not whole), self.late
        moving = {(ask.moves, ask.quorum_id if ask.moves else 0) for ask in self._asks.values()}
        assert len(moving) < 2 or not self.settings.rules.r12_moves, "some ranks go on, and others have asked"
        assert self._reason is None or self._open is not None, "a reason without an ask"
        assert self.fatal is None or self.next_at is None, "a group that was refused waits for nothing"
        assert not any(self._ranks[number].here for number in self._untold), "who is here has been told"
        assert self.fatal is not None or not self._untold, self._untold
        for quorum_id in self._verdicts.broken:
            waiting = self._votes.undecided(quorum_id)
            assert all(self._verdicts.result(quorum_id, attempt) is not None for attempt in waiting)
        for rank in self._ranks.values():
            rank.validate()
        self._votes.validate()
        self._verdicts.validate()
