"""One rank's side of the protocol: when it asks, what it builds and receives, what it commits. Pure: no clock, no I/O.

How it works. `handle` takes everything that happens to a rank and returns what its shell has to do (`actions`). What
runs in every step are a few plain methods instead, which allocate next to nothing: `boundary` (start_quorum: stay in
the quorum, or ask for the next one), `may_launch`, `ballot`, `count`, `own_vote`, `settle` (should_commit). Where a
rank is says its `phase`; `phases.TRANSITIONS` is everything that can happen to that. The shell of the product is
`runtime.RankRuntime`, that of the simulation `tests/simulation`: both perform the same actions.

`state.py` holds what a rank knows, `membership.py` how it comes into a quorum and out of it, this file its steps.

Invariants (`validate` checks them): a rank in a usable phase has a plan; it waits for a quorum if and only if there is
a formation; a verdict is latched in COUNTED only, and once told to the group it is not taken back (R0).
Ownership: one caller at a time; nothing outside protocol/rank writes a field.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ft_core.errors import CollectiveError
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.ballot import NO_LEASE
from ft_core.protocol.rank.membership import Membership
from ft_core.protocol.rank.phases import USABLE, Cause, Heal, MustAsk, Phase
from ft_core.protocol.types import VOID, Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ft_core.protocol.rank.actions import Actions


class Counted(NamedTuple):
    """The verdict of an attempt, and what follows if this rank cannot follow it."""

    verdict: Verdict
    actions: Actions


class Settled(NamedTuple):
    """Whether the optimizer is to be stepped, and what follows if the quorum is over."""

    commit: bool
    actions: Actions


class Rank(Membership):
    """The machine of one rank; see the module's text."""

    # ------------------------------------------------------------ before the first quorum

    def describe(self, signature: int) -> None:
        """Digest of what has to be equal on all members (R4). Before the first ask."""
        self.attempt.signature = signature

    def require_whole_steps(self) -> None:
        """From the first step on a step commits only if every participant's share is in it."""
        self.attempt.whole_steps = True

    # ------------------------------------------------------------ every step

    def opened(self, now: float, *, pinned: bool) -> None:
        """The step begins. `pinned`: its attempt stays in its quorum (R19)."""
        self.attempt.opened_at, self.attempt.pinned, self.attempt.begun = now, pinned, True

    def trains_on(self, position: int) -> None:
        """The batch of the training data that comes next (`Ask.position`); between two steps, before `boundary`."""
        self.attempt.position = position

    def pin(self) -> None:
        """Somebody is told who takes part, or the attempt ends: it stays in its quorum (R19)."""
        self.attempt.pinned = True

    def ended(self) -> None:
        """The step ends with its vote, or another one begins."""
        self.attempt.pinned, self.attempt.begun = True, False

    def weigh(self, weight: int | None) -> None:
        """Weight of this member's gradient in the attempt; None: 1."""
        self.attempt.weight = weight

    def sampled(self, digest: int | None) -> None:
        """Digest of a part of this rank's state when this step was opened; None: nothing is compared (R20)."""
        self.attempt.sample = digest

    def acknowledged(self, at: float) -> None:
        """The lighthouse has acknowledged this group's lease at that time."""
        self.attempt.acknowledged(at)

    def may_launch(self, now: float) -> bool:
        """A gradient collective of this attempt is about to be launched. False: nothing may be launched.

        Several backward passes in one attempt launch several reductions, each with a ballot; the last one counts.
        """
        self._agreed_to_stay = False
        attempt = self.attempt
        if self.phase is Phase.OPEN or (self.phase is Phase.COUNTED and not attempt.voted):
            self._to(Cause.LAUNCH)
            attempt.verdict, attempt.launched_at, attempt.pinned, attempt.begun = None, now, True, False
        return self.phase is Phase.REDUCING

    def may_launch_user_op(self) -> bool:
        """A collective of the script's is about to be launched. False: nothing may be launched."""
        attempt = self.attempt
        if self.phase not in USABLE:
            return False
        attempt.user_ops, attempt.op_launched, attempt.expects_user_op = attempt.user_ops + 1, True, True
        attempt.early_ops |= attempt.begun
        return True

    def ballot(self, now: float) -> list[float]:
        """What this member adds to the last all-reduce."""
        self.cast_in = self.quorum_id
        return self.attempt.ballot(now, change=bool(self.change_wanted or self.ask_next))

    def count(self, sums: Sequence[float], now: float) -> Counted:
        """The sum of all ballots has arrived: reach the verdict and latch it."""
        attempt, phase = self.attempt, self.phase
        if attempt.verdict is not None and phase is Phase.COUNTED:
            return Counted(attempt.verdict, ())
        if phase is not Phase.REDUCING:
            return Counted(attempt.broken_vote(self.broken_reason), ())
        found = attempt.count(sums, now)
        self.data.judged(found)
        attempt.states_differ = found.states_differ
        if found.verdict.outcome is Outcome.BROKEN:
            return Counted(found.verdict, self._fail(CollectiveError(found.verdict.reason), now))
        self._to(Cause.COUNT)
        attempt.verdict, self.fenced_in = found.verdict, self.quorum_id
        # Without any lease the room may long have gone on without this quorum: nothing more is published (R2, R6).
        lapsed = self.settings.rules.r3_autonomy and self.plan is not None and round(sums[NO_LEASE]) == self.plan.size
        if not attempt.behind and not lapsed:
            self.held.stable = max(self.held.stable, attempt.base)
        return Counted(found.verdict, ())

    def own_vote(self) -> Verdict:
        """What this rank tells its group about the attempt; from now on only the group's answer breaks it (R0, R12).

        Otherwise one rank would apply the commit, another not, and the group's state would be worth nothing.
        """
        attempt = self.attempt
        if self.phase is not Phase.COUNTED or attempt.verdict is None:
            return attempt.broken_vote(self.broken_reason or self._why_nothing_came())
        attempt.voted = self.settings.rules.r0_verdict
        change = attempt.verdict.change or (self._alike and bool(self.ask_next))
        if not self.departure.drain_wanted and change == attempt.verdict.change:
            return attempt.verdict  # nothing to add, as in nearly every step: `replace` makes all fields anew
        return replace(attempt.verdict, drain=self.departure.drain_wanted, change=change)

    def _why_nothing_came(self) -> str:
        if self.error is not None:
            return str(self.error)
        return "there was no quorum" if self.plan is None else "the fence was never launched"

    def settle(self, verdict: Verdict) -> Settled:
        """Apply the (group's) verdict on the latched attempt.

        A healing member must have reported StateApplied before (commit or veto), unless its heal was abandoned.
        """
        attempt, rules = self.attempt, self.settings.rules
        lost, self._agreed_to_stay = self._no_vote(), False
        if verdict.outcome is Outcome.BROKEN and self.phase in USABLE:
            self._mark_broken(verdict.reason)
        elif verdict.outcome is Outcome.COMMIT and not rules.r0_verdict and attempt.late_error:
            verdict = replace(verdict, outcome=Outcome.VETO)
        if self.phase is not Phase.COUNTED or self.plan is None:
            self.retries.failed()
            attempt.soft_error = ""
            return Settled(False, self._over())
        self.heals_late |= attempt.heal is Heal.ABANDONED
        if rules.r2_healed and not attempt.behind and attempt.verdict is not None and not attempt.verdict.lapsed:
            self.held.stable = max(self.held.stable, attempt.base)  # it was healed since its ballots were counted
        self.data.other_trails = verdict.trails and not self.data.trails
        commit, before = verdict.outcome is Outcome.COMMIT, attempt.base
        current = not attempt.behind and not verdict.behind and not verdict.trails
        if commit and not attempt.commit(verdict) and not self.plan.excluded and not verdict.trails:
            self.ask_next = self.ask_next or "left behind by a commit"  # they stay: others would wait for their asks
        self.data.settled(verdict.exhausted, before, attempt.base)
        if verdict.exhausted or (commit and (current or verdict.trails)):
            self.retries.reset()
        else:
            self.retries.skipped(own=bool(attempt.soft_error), current=current)
        attempt.roles_switched |= verdict.healed and bool(self.plan.ready_expected)
        self.departure.settled(drain=verdict.drain, stop=verdict.stop)
        if verdict.change:
            self.ask_next = self.ask_next or self.change_wanted or "a member asked for a change of membership"
        attempt.next()
        attempt.awaits_lease = verdict.lapsed and rules.r3_waits
        self._to(Cause.SETTLE)
        self._agreed_to_stay = self._alike and not self.ask_next
        told: Actions = ()
        if lost and self._mark_broken(lost) and self._alike:
            told = (do.TellGroup(self.quorum_id, lost),)  # the others may wait for this rank to go on with them (R19)
        return Settled(commit and current, (*told, *self._over()))

    def divisor(self, verdict: Verdict) -> int:
        """What the sum of the gradients is divided by: what really went into it (R10), never what was planned."""
        return verdict.weight if self.settings.rules.r10_divisor else len(self.attempt.participants)

    # ------------------------------------------------------------ everything else

    def handle(self, event: on.Event, now: float) -> Actions:
        """One event in, everything that follows from it out."""
        return HANDLERS[type(event)](self, event, now)

    def _on_soft_error(self, event: on.SoftError, now: float) -> Actions:
        """Reported after the ballot was taken it breaks this member alone (R0), after its vote it is too late."""
        attempt, error = self.attempt, event.error
        self.error = self.error or error
        if attempt.voted:
            return ()
        attempt.soft_error = attempt.soft_error or f"{type(error).__name__}: {error}"
        if self.phase is Phase.COUNTED and attempt.late_error and self.settings.rules.r0_verdict:
            self._mark_broken(f"reported too late to veto the others: {attempt.soft_error}")
        return ()

    def _on_difference(self, event: on.StatesDiffer, now: float) -> Actions:
        """Nobody commits on states that differ, and who is in the minority heals.

        A push may have broken the attempt while the states were compared: then there is nothing to veto any more.
        """
        if self.attempt.verdict is event.verdict:
            veto = replace(event.verdict, outcome=Outcome.VETO, reason=event.reason, change=True)
            self.attempt.verdict, self.ask_next = veto, event.reason
            if event.mine:
                self._tear()
        return ()

    def _on_tolerated(self, event: on.DifferenceTolerated, now: float) -> Actions:
        self.attempt.tolerates = True
        return ()

    def _on_lease(self, event: on.LeaseReturned, now: float) -> Actions:
        self.attempt.awaits_lease = False
        return ()

    # ------------------------------------------------------------ state

    def _tear(self) -> None:
        """This rank's state is nobody's donor any more (R7, R13)."""
        if self.settings.rules.r7_void:
            self.held.version = VOID

    def _on_received(self, event: on.StateReceived, now: float) -> Actions:
        if self.receiving and self.quorum_id == event.quorum_id:  # else it was planned for another quorum (R7)
            self.attempt.heal = Heal.READY
        return ()

    def _on_receive_failed(self, event: on.ReceiveFailed, now: float) -> Actions:
        if self.quorum_id != event.quorum_id or self.attempt.heal is not Heal.PENDING:
            return ()
        if event.final and self.phase is Phase.ASKING:
            return self._no_quorum(event.error)
        if event.final:
            self.failure = event.error
            return self._fail(event.error, now)
        self._abandon_heal(str(event.error))
        return (do.Report(f"healing failed, asking again: {event.error}", warns=True),)

    def _on_applied(self, event: on.StateApplied, now: float) -> Actions:
        attempt = self.attempt
        assert attempt.heal is Heal.READY
        attempt.heal, self.heals_late = Heal.NONE, False
        self.held.healed(attempt.base, attempt.base_lineage, event.batches_committed, event.commit_weight)
        self.data.healed(attempt.base, event.data_ended_at)
        return ()

    def _on_torn(self, event: on.StateTorn, now: float) -> Actions:
        self._tear()
        return ()

    def _on_untouched(self, event: on.StateUntouched, now: float) -> Actions:
        self.held.version = event.version
        return ()

    def _on_restored(self, event: on.Restored, now: float) -> Actions:
        held = self.held
        held.version, held.lineage, held.batches_committed = event.version, event.lineage, event.batches_committed
        held.restored = True
        return ()

    # ------------------------------------------------------------ data, and the end

    def hands_over(self) -> MustAsk | None:
        """Why a rank that is to leave asks for one more quorum first (R16); None: it does not.

        Who leaves a quorum that stands says so in a last ballot, and all that it holds others hold, too. Where the
        quorum broke that is not known: it may be the only one that holds the last commit. It enters one more quorum, in
        which the others are healed, and leaves that. Not in groups of several ranks: those end with the order to drain.
        """
        if self.plan is None or self.plan.size == 1 or self.settings.group_world_size > 1:
            return None
        why = self.boundary()
        known = self.held.version <= self.held.stable or self.held.version == VOID or self.attempt.behind
        return why if isinstance(why, MustAsk) and why.failed and not known else None

    def _on_data_ended(self, event: on.DataEnded, now: float) -> Actions:
        self.data.run_out(applies=event.applies, ends=event.ends)
        return ()

    def _on_data_back(self, event: on.DataBack, now: float) -> Actions:
        self.data.ran_out()
        return ()

    def _on_drain(self, event: on.DrainOrdered, now: float) -> Actions:
        if self.departure.drain_wanted:
            return ()
        self.departure.drain_reason = event.reason or "drain requested"
        told = do.Report(f"asked to drain: {self.departure.drain_reason}")
        if not self.settings.exits_on_drain:
            return (told,)
        error = self._nothing_to_wait_for() if self.phase is Phase.ASKING else None
        if self.receiving:
            self._abandon_heal("this replica drains")
        return (told, do.CancelReceive(), *(self._no_quorum(error) if error is not None else ()))

    def _on_stop(self, event: on.StopWanted, now: float) -> Actions:
        self.departure.stop_wanted = True
        return ()

    def _on_leave(self, event: on.LeaveWanted, now: float) -> Actions:
        self.departure.leaving = True
        return ()

    def _on_shut_down(self, event: on.ShutDown, now: float) -> Actions:
        """What blocks is done by a thread that ends now: process groups or state that it was to bring never come."""
        self.closed = True
        error = self._nothing_to_wait_for()
        assert error is not None, "it is closed"
        return self._on_work_failed(on.WorkFailed(error), now)


HANDLERS: Mapping[type[on.Event], Callable[[Rank, Any, float], Actions]] = {
    on.QuorumWanted: Rank._on_wanted,
    on.PrefetchEnded: Rank._on_prefetched,
    on.LinksSeen: Rank._on_links,
    on.NoQuorumYet: Rank._on_no_quorum_yet,
    on.Tick: Rank._on_tick,
    on.QuorumAnswered: Rank._on_answered,
    on.GroupsUp: Rank._on_groups_up,
    on.GroupsFailed: Rank._on_groups_failed,
    on.StateWanted: Rank._on_state_wanted,
    on.Refused: Rank._on_refused,
    on.CollectiveFailed: Rank._on_failed,
    on.MemberLost: Rank._on_lost,
    on.Superseded: Rank._on_superseded,
    on.PeerEnded: Rank._on_peer_ended,
    on.ChangePending: Rank._on_change,
    on.Paused: Rank._on_paused,
    on.SoftError: Rank._on_soft_error,
    on.StatesDiffer: Rank._on_difference,
    on.DifferenceTolerated: Rank._on_tolerated,
    on.LeaseReturned: Rank._on_lease,
    on.StateReceived: Rank._on_received,
    on.ReceiveFailed: Rank._on_receive_failed,
    on.WorkFailed: Rank._on_work_failed,
    on.StateApplied: Rank._on_applied,
    on.StateTorn: Rank._on_torn,
    on.StateUntouched: Rank._on_untouched,
    on.Restored: Rank._on_restored,
    on.DataEnded: Rank._on_data_ended,
    on.DataBack: Rank._on_data_back,
    on.DrainOrdered: Rank._on_drain,
    on.StopWanted: Rank._on_stop,
    on.LeaveWanted: Rank._on_leave,
    on.ShutDown: Rank._on_shut_down,
}
"""What is done about each event."""
