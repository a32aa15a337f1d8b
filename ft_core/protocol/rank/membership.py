"""How a rank comes into a quorum and out of it: it asks, its process groups form, members are lost. Pure.

How it works. A script that needs a quorum begins a `Formation`. The rank asks; with the answer it enters the quorum,
whatever else it learns of it meanwhile, and has its process groups built. Where that fails it asks again. A rank that
cannot follow its quorum is broken (R0): it launches nothing more in it, the others learn it at once, and the next
boundary asks; an attempt of which nothing was launched goes on in the next quorum (R19).

Invariants: a quorum_id is configured at most once (R14); an answer counts only for the ask that is open; bad news of
one quorum never hits another (R15).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.errors import CollectiveError, LighthouseError, QuorumTimeoutError
from ft_core.protocol.pauses import Pauses, Wait
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.departure import DrainedError
from ft_core.protocol.rank.formation import ASK_AGAIN_S, GIVEN_WITHIN, TELL_S, Formation, Wish
from ft_core.protocol.rank.heal_plan import plan
from ft_core.protocol.rank.moving import may_move, older_version, why_not_here
from ft_core.protocol.rank.phases import USABLE, WAITING, Cause, Go, Heal, MustAsk, Phase
from ft_core.protocol.rank.state import MYSELF, RankState
from ft_core.protocol.types import VOID

if TYPE_CHECKING:
    from ft_core.protocol.rank.actions import Actions
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.state import Push
    from ft_core.protocol.types import Ask, Quorum, Version

GO = Go()


class Membership(RankState):
    """A rank as a member of quorums."""

    def boundary(self) -> Go | MustAsk:
        """At a step boundary (start_quorum): stay in the quorum, or ask for the next one.

        The ranks of a group decide alike (R12), or one would wait in a collective of the group's for another that asks:
        what broke on one of them since they voted is told in their next vote, and nothing is launched there until then.
        """
        self.attempt.soft_error = ""
        if self.phase in WAITING or (self._agreed_to_stay and self.phase is Phase.BROKEN):
            return GO
        if self.plan is None:
            return MustAsk("joining", failed=False)
        if self.settings.rules.r4_aligned:
            if self.phase is Phase.REDUCING:
                self._mark_broken(
                    "start_quorum was called while collectives of the last attempt had no completed fence"
                )
            if self.phase is Phase.COUNTED:
                self._no_vote()
                self._mark_broken("the last attempt was agreed by everybody but should_commit was not called for it")
        elif self.phase in (Phase.REDUCING, Phase.COUNTED):
            self._no_vote()
            self.phase, self.attempt.verdict = Phase.OPEN, None
        if self.phase is Phase.BROKEN:
            return MustAsk(self.broken_reason, failed=True)
        if self.ask_next:
            return MustAsk(self.ask_next, failed=False)
        self.error = None
        return GO

    # ------------------------------------------------------------ a quorum forms

    def _on_wanted(self, event: on.QuorumWanted, now: float) -> Actions:
        why = self.boundary()
        if isinstance(why, Go) and event.why is not None:
            why = event.why
        if isinstance(why, Go) or self.forming:
            return ()
        self.wish = event.wish
        self.failure = self._nothing_to_wait_for()
        if self.failure is not None:
            return ()
        # The others may be waiting for this rank in a collective.
        ended = self.plan is not None and (why.failed or why is event.why)
        end: Actions = (do.Abort(self.quorum_id),) if ended else ()
        return (*end, *self._begin(why, event.wish, now))

    def _begin(self, why: MustAsk, wish: Wish, now: float, *, moves: bool = False) -> Actions:
        self._to(Cause.ASK)
        self._agreed_to_stay = False
        self.formation, self.failed_inside = Formation(why, wish, self._limit(wish, now), moves), False
        if not wish.prefetch:
            return self._send(now)
        return (do.Prefetch(wish.timeout_s * GIVEN_WITHIN if self.settings.rules.given_within else math.inf),)

    def _limit(self, wish: Wish, now: float) -> Wait:
        """How long a quorum is waited for from now on."""
        return Wait(self.quorum_pauses if self.settings.rules.pauses_extend else Pauses(), wish.timeout_s, now)

    def _on_prefetched(self, event: on.PrefetchEnded, now: float) -> Actions:
        if self.formation is None or not self.formation.prefetching:
            return ()
        self.formation.wait = self._limit(self.formation.wish, now)  # copying had a limit of its own
        return self._send(now) if event.error is None else self._no_quorum(event.error)

    def _send(self, now: float) -> Actions:
        """Ask for the first time, or anew after a quorum that could not be used."""
        formation = self.formation
        assert formation is not None
        if (error := self._nothing_to_wait_for()) is not None:
            return self._no_quorum(error)
        self.quorum_pauses.forget()
        self.reason = formation.told = ""
        if now - self.links_at > self.settings.look_s:
            self.links = ((), ())  # what was found long ago, while a step took long, is no news
        formation.tell_at = now + TELL_S
        return self._ask(now)

    def _nothing_to_wait_for(self) -> Exception | None:
        if self.refused is not None:
            return self.refused
        if self.closed:
            return LighthouseError("the manager was shut down while it waited for a quorum")
        if self.draining and self.wish is not None and not self.wish.hands_over:
            return DrainedError("this replica drains and waits for no quorum")
        return None

    def _ask(self, now: float) -> Actions:
        formation, held, settings = self.formation, self.held, self.settings
        assert formation is not None
        self.asks += 1
        ask = replace(
            formation.wish.template, replica_id=settings.replica_id, seq=self.asks, version=held.version,
            lineage=held.lineage, quorum_id=self.quorum_id, failed=formation.why.failed, reason=formation.why.reason,
            min_replicas=settings.min_replicas, group_world_size=settings.group_world_size,
            signature=self.attempt.signature, commit_failures=self.retries.vetoes, heals_late=self.heals_late,
            stable=held.stable, unbuilt=self.unbuilt, unbuilt_here=self.unbuilt_here, unreachable=self.links[0],
            reached=self.links[1], moves=self._moves_with_others, position=self.attempt.position,
            from_scratch=formation.wish.template.from_scratch or held.restored, cast=self.cast, fenced=self.fenced,
        )  # fmt: skip
        formation.asked_at = now
        return self._present(ask, now)

    def _present(self, ask: Ask, now: float) -> Actions:
        formation = self.formation
        assert formation is not None
        formation.sent, formation.send_at = ask, math.inf
        formation.look_at = now + self.settings.look_s if ask.unreachable or not ask.reached else math.inf
        return (do.SendAsk(ask, formation.wish.room),)

    def _on_links(self, event: on.LinksSeen, now: float) -> Actions:
        self.links, self.links_at = (event.unreachable, event.reached), now
        sent = self.formation.sent if self.formation is not None and self.phase is Phase.ASKING else None
        if sent is None or self.links == (sent.unreachable, sent.reached):
            return ()
        # The same ask, with news: the answer to it may be on its way, and holds. A new one would refuse that answer.
        return self._present(replace(sent, unreachable=event.unreachable, reached=event.reached), now)

    def _on_no_quorum_yet(self, event: on.NoQuorumYet, now: float) -> Actions:
        self.reason = event.reason
        self.quorum_pauses.announce("", event.paused_s, now)
        return ()

    def _on_tick(self, event: on.Tick, now: float) -> Actions:
        formation = self.formation
        if formation is None or formation.prefetching or self.phase is not Phase.ASKING:
            return ()
        if formation.wait.over(now):
            reason = event.reason or self.reason or "the lighthouse gave no reason"
            limit = f"no quorum within {formation.wish.timeout_s:g} s (quorum_timeout)"
            return self._no_quorum(QuorumTimeoutError(f"{limit}: {reason}"))
        if now >= formation.send_at:
            return self._send(now)
        out: list[do.Action] = []
        if now >= formation.tell_at:
            formation.tell_at = now + TELL_S
            if self.reason != formation.told:
                formation.told = self.reason
                out.append(do.Report(f"waiting for a quorum: {self.reason}", warns=True))
        if now >= formation.look_at:
            formation.look_at = now + self.settings.look_s
            out.append(do.LookAtLinks())
        return tuple(out)

    def _on_answered(self, event: on.QuorumAnswered, now: float) -> Actions:
        formation = self.formation
        if formation is None or self.phase is not Phase.ASKING or formation.sent is None:
            return ()
        if formation.sent.seq != event.seq:
            return ()
        if (dropped := older_version(event.quorum, formation.sent)) is not None:
            return self._no_quorum(dropped)
        try:
            new = self._enter(event.quorum)
        except ValueError as error:  # this replica is not in it: no lighthouse of ours answers so
            return self._no_quorum(error)
        self.attempt.acknowledged(formation.asked_at)  # that is what an answer shows, at least (R3)
        self.pauses.forget()  # those of its members are announced anew
        self.pauses.announce(MYSELF, self.paused_until - now, now)
        if formation.moves and (refusal := why_not_here(new, self.attempt.position, self.settings)):
            self.formation = None
            return (do.Entered(new), *self._fail(CollectiveError(refusal), now))
        self.attempt.meets_at = 0 if formation.moves or new.excluded else new.position
        early, self._early = self._early, {}
        ended: Actions = ()
        for push in early.values():  # they came before the answer
            ended += self._on_early(push, now)
        build = (do.Configure(new),) if not self.broken else ()
        return (do.Entered(new), do.Offer(new), *build, *ended)

    def _on_early(self, push: Push, now: float) -> Actions:
        if isinstance(push, on.MemberLost):
            return self._on_lost(push, now)
        return self._on_superseded(push, now) if isinstance(push, on.Superseded) else self._on_change(push, now)

    def _enter(self, quorum: Quorum) -> Plan:
        settings, held = self.settings, self.held
        new = plan(quorum, settings.replica_id, mode=settings.mode, min_replicas=settings.min_replicas)
        self._to(Cause.ANSWER)
        self.attempt.enter(new)
        self.highest_id = max(self.highest_id, quorum.quorum_id)
        held.stable = min(held.stable, new.target)  # R18: what the others never had is not stable
        self.heals_late &= new.heals
        if not new.heals and not new.excluded:
            held.lineage = new.target_lineage  # differs only at step 0 without init_sync, where lineages mean nothing
        self.ask_next = self.change_wanted = self.broken_reason = self._lost_after_vote = ""
        self.unbuilt, self.unbuilt_here, self.links, self.parted = "", False, ((), ()), ()
        self._agreed_to_stay = self.data.passed = False
        self.data.source_shift = self.retries.vetoes = 0
        if not self.attempt.soft_error:
            self.error = None
        return new

    def _on_groups_up(self, event: on.GroupsUp, now: float) -> Actions:
        if self.phase is not Phase.FORMING or self.plan is None or self.plan.quorum_id != event.quorum_id:
            return ()
        self._to(Cause.BUILT)
        self.formation = None
        self.attempt.position = self.attempt.meets_at or self.attempt.position
        if self.attempt.heal is not Heal.PENDING:
            return ()
        if self.draining:
            self._abandon_heal("this replica drains")
            return ()
        return (do.Receive(self.plan),)

    def _on_groups_failed(self, event: on.GroupsFailed, now: float) -> Actions:
        if self.phase is not Phase.FORMING or self.quorum_id != event.quorum_id:
            return ()  # a push has ended that quorum before
        self.unbuilt, self.unbuilt_here = event.reason, event.here
        return self._break(f"the process group could not be built: {event.reason}", now)

    def _ask_again(self, now: float) -> Actions:
        """The quorum of this formation ended before its process groups stood."""
        formation = self.formation
        assert formation is not None
        if (error := self._nothing_to_wait_for()) is not None:
            return self._no_quorum(error)
        if formation.wait.over(now):
            limit = f"no usable quorum within {formation.wish.timeout_s:g} s"
            return self._no_quorum(QuorumTimeoutError(f"{limit}: {self.broken_reason}"))
        formation.why, formation.again = MustAsk(self.broken_reason, failed=True), True
        formation.sent, formation.send_at = None, now + ASK_AGAIN_S
        formation.look_at = formation.tell_at = math.inf
        self._to(Cause.ASK)
        return (do.Report(f"asking again: {self.broken_reason}"),)

    def _no_quorum(self, error: Exception) -> Actions:
        """The wait ends without a quorum."""
        self.failed_inside = self.formation is not None and self.formation.moves
        moved, self.formation, self.failure = self._moves_with_others, None, error
        if self.phase is Phase.ASKING and self.plan is None:
            self._to(Cause.NONE_FORMED)
        elif self.phase is Phase.ASKING:
            self._give_up(error)
        return (do.TellGroup(self.quorum_id, self.broken_reason),) if moved else ()

    def _stop_moving(self, error: CollectiveError) -> Actions:
        """The attempt that was to be made in the next quorum is lost, here and on the group's other ranks (R12)."""
        told: Actions = (do.TellGroup(self.quorum_id, str(error)),) if self._moves_with_others else ()
        self.error = self.error or error
        self.formation = None
        self._give_up(error)
        return told

    def _give_up(self, error: Exception) -> None:
        """Why it asked is why it is broken, as before it did."""
        self._to(Cause.BREAK)
        self.broken_reason = self.broken_reason or str(error) or type(error).__name__

    def _on_state_wanted(self, event: on.StateWanted, now: float) -> Actions:
        if self.phase is not Phase.ASKING or self.formation is None:
            return ()
        if not self.formation.moves:
            return (do.OfferLive(),)
        if not self.settings.rules.r19_gives_way:
            return ()
        return self._stop_moving(CollectiveError("a newcomer needs state, which is given between two steps only"))

    def _on_refused(self, event: on.Refused, now: float) -> Actions:
        self.refused = self.refused or event.error
        self.error = self.error or event.error
        return self._no_quorum(self.refused) if self.phase is Phase.ASKING else self._fail(event.error, now)

    def _on_work_failed(self, event: on.WorkFailed, now: float) -> Actions:
        """Asking again would fail again: the script gets the error, which else would wait for what never comes."""
        if self.phase is Phase.ASKING:
            return self._no_quorum(event.error)
        if self.phase is not Phase.FORMING and not self.receiving:
            return ()
        self.formation, self.failure = None, event.error
        return self._fail(event.error, now)

    def _abandon_heal(self, reason: str) -> None:
        """Weight zero and change-wanted, never a veto (R11)."""
        self.attempt.heal = Heal.ABANDONED
        self.retries.failed()
        self.change_wanted = self.change_wanted or f"healing failed: {reason}"

    # ------------------------------------------------------------ a quorum ends

    def _mark_broken(self, reason: str) -> bool:
        """This rank cannot follow its quorum any more (R0). False if its vote stands, or there is nothing to break."""
        if self.phase not in USABLE and self.phase is not Phase.FORMING:
            return False
        if self.attempt.voted:
            if self._alike:  # too late to ask together for it
                self._lost_after_vote = self._lost_after_vote or reason
            else:
                self.ask_next = self.ask_next or reason
            return False
        self._to(Cause.BREAK)
        self.broken_reason, self.attempt.verdict = reason or "no reason was given", None
        return True

    def _no_vote(self) -> str:
        """What was told to the group binds no more. Returns what the rank has learnt of its quorum since then."""
        lost, self._lost_after_vote = self._lost_after_vote, ""
        self.attempt.voted = False
        return lost

    def _break(self, reason: str, now: float, *, abort: bool = True, tells: bool = True) -> Actions:
        """The same, and everybody learns it at once (`tells`: this group by that, else by an ask that follows)."""
        if not self._mark_broken(reason):
            return ()
        end: do.Action = do.Abort(self.quorum_id) if abort else do.CancelReceive()
        tells = tells and (self.formation is None or not self._alike)  # who asks again goes on, if the others can
        again = self._ask_again(now) if self.formation is not None else ()
        return (end, *((do.TellGroup(self.quorum_id, reason),) if tells else ()), *again)

    def _fail(self, error: Exception, now: float) -> Actions:
        self.error = self.error or error
        return self._break(str(error) or type(error).__name__, now)

    def _over(self) -> Actions:
        """What follows when an attempt has ended here."""
        out: Actions = self._tell_parted()
        if self.phase is Phase.BROKEN and not self.draining:
            out += (do.Abort(self.quorum_id),)  # the others may be waiting for this rank in a collective
        return out

    def _tell_parted(self) -> Actions:
        parted, self.parted = self.parted, ()
        return (do.TellParted(self.quorum_id, parted),) if parted else ()

    def _on_failed(self, event: on.CollectiveFailed, now: float) -> Actions:
        return self._fail(event.error, now) if event.quorum_id in (0, self.quorum_id) else ()

    def _on_lost(self, event: on.MemberLost, now: float) -> Actions:
        mine = self.settings.replica_id in event.lost
        if self._not_of_this_quorum(event):
            stays = mine and not event.moves and self._moves_with_others and self.quorum_id == event.quorum_id
            error = CollectiveError("another rank of this group could not go on with this step")
            return self._stop_moving(error) if stays and self.phase is Phase.ASKING else ()
        gone = event.held == VOID
        moves = gone and (event.moves or not mine)
        out = self._lost(f"{'lost' if gone else 'left by'} {', '.join(event.lost)}", now, event.held, moves=moves)
        if not gone and self.plan is not None:
            self.parted += tuple(rank for rank, name in enumerate(self.plan.quorum.ids) if name in event.lost)
            if self.phase is not Phase.REDUCING:
                out += self._tell_parted()
        return out

    def _on_superseded(self, event: on.Superseded, now: float) -> Actions:
        if self._not_of_this_quorum(event):
            return ()
        return self._lost("the other replicas have formed a newer quorum", now)

    def _on_peer_ended(self, event: on.PeerEnded, now: float) -> Actions:
        if self.phase is Phase.REDUCING or self.quorum_id != event.quorum_id:
            return ()  # whoever waits in a collective learns it there
        return self._lost("a peer has ended its connection", now, moves=True)

    def _lost(self, reason: str, now: float, held: Version = VOID, *, moves: bool = False) -> Actions:
        """Members of the quorum are gone.

        A completed verdict is latched (R0): it is settled first, and the next boundary asks. `held`: the state that all
        of them held when they said goodbye, VOID if one did not. Whoever leaves with the commit of this attempt has
        sent what its ballot needs, and peers may still be reading it (R16).
        """
        attempt, phase, rules = self.attempt, self.phase, self.settings.rules
        if phase is Phase.OPEN and self.ask_next:
            return ()  # nothing is launched, and the next boundary asks: an abort could only hurt who is receiving
        user_group: Actions = (do.AbortUserGroup(self.quorum_id),) if held <= attempt.base else ()
        if phase is Phase.COUNTED and rules.r0_verdict:
            if attempt.voted:
                self._mark_broken(reason)
            else:
                self.ask_next = self.ask_next or reason
            return user_group
        parted = rules.r16_parting and held >= attempt.base
        if parted and phase is Phase.REDUCING and held > attempt.base:
            self.ask_next = self.ask_next or reason
            return ()
        ends = self.departure.leaving or self.departure.drain_wanted
        moves = moves and phase is Phase.OPEN and not ends and may_move(attempt, self.settings, now)
        wish = self.wish if moves else None
        idle = phase is Phase.OPEN and attempt.idle  # nothing waits here; others may read the last ballot
        out = self._break(reason, now, abort=not (parted and idle), tells=wish is None or not self._alike)
        if out and self.error is None:
            self.error = CollectiveError(reason)
        if out and wish is not None:
            template = replace(wish.template, heals_before_forward=False)
            wish = replace(wish, template=template, prefetch=False, hands_over=False)
            out += self._begin(MustAsk(reason, failed=True), wish, now, moves=True)
        return out

    def _on_change(self, event: on.ChangePending, now: float) -> Actions:
        if not self._not_of_this_quorum(event, anyhow=True):
            self.change_wanted = self.change_wanted or event.reason
        return ()

    def _not_of_this_quorum(self, event: Push, *, anyhow: bool = False) -> bool:
        """True if it is about another quorum. A push can overtake the answer to the ask for its quorum (R15)."""
        if self.plan is not None and self.phase is not Phase.ASKING and event.quorum_id == self.quorum_id:
            return False
        if not (anyhow or self.settings.rules.r15_stale):
            return self.plan is None
        early = self._early.get(type(event))
        if event.quorum_id > self.highest_id and (early is None or event.quorum_id >= early.quorum_id):
            self._early[type(event)] = event
        return True

    def _on_paused(self, event: on.Paused, now: float) -> Actions:
        if event.replica_id == MYSELF:
            self.paused_until = now + event.for_s if event.for_s > 0 else 0.0
        elif event.quorum_id < self.quorum_id:
            return ()  # of the next quorum it may be told before this rank has entered it
        self.pauses.announce(event.replica_id, event.for_s, now)
        return ()
