"""One rank's side of the protocol: what an attempt at a step is, and what its fence decides. Pure: no clock, no I/O.

Theory of operation. A member enters a quorum (`enter`), its process group is configured (`configured`), and attempts
at a step follow each other: collectives are launched (`launching`), the fence goes out last (`slots`) and comes back as
a sum over all members (`judge`). The verdict is a function of that sum alone, so all members reach the same one; a
member that cannot follow it is *broken* (R0): it launches nothing more in this quorum and asks for a new one. `vote`
tells it to the group, `settle` applies the group's answer. Between attempts `boundary` says whether to go on in the
quorum or to ask for the next.

What a fence carries is in `ballot`, what it decides in `commit_rule`; what a rank knows of its data, its end and its
failures in `data_pass`, `departure` and `retries`.

Invariants: `version` names the state this rank holds (VOID while it must not be used); `base` is the state the current
attempt builds on, equal on all members; version == base unless this member is behind; a verdict, once reached, is never
undone by a later abort or push.

Ownership: the Manager calls it under its own lock; nothing here is thread safe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.protocol.lineage import fold_lineage
from ft_core.protocol.rank.ballot import NO_LEASE, FenceInput, decode, encode, tag_of
from ft_core.protocol.rank.commit_rule import Facts, judge
from ft_core.protocol.rank.data_pass import DataPass
from ft_core.protocol.rank.departure import Departure
from ft_core.protocol.rank.heal_plan import Plan, plan
from ft_core.protocol.rank.phases import Go, Heal, MustAsk, Phase
from ft_core.protocol.rank.retries import Retries
from ft_core.protocol.types import VOID, Ask, Outcome, Quorum, Verdict, Version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.protocol.rank.settings import StepSettings


class Step:
    """The protocol state of one rank. See the module's theory of operation."""

    def __init__(self, settings: StepSettings, *, lineage: int, now: float) -> None:
        self.settings = settings
        self.version = self.base = Version(0, 0)
        self.lineage = lineage
        self.stable = VOID
        self.batches_committed = 0
        self.commit_weight = 0
        """Sum of weights in the commit that made `version`; 0: unknown (none was made, or a checkpoint was loaded)."""
        self.phase = Phase.OUTSIDE
        self.plan: Plan | None = None
        self.attempt = self.highest_id = 0
        self.base_lineage = lineage
        self.heal = Heal.NONE
        self.layout = 0
        self.whole_steps = False
        """A step commits only if every participant's share is in it; the same on all members."""
        self.heals_late = False
        """Its last heal failed: it asks not to be counted on before it holds the state, so that a member that never
        heals costs the others one step at most (R11)."""
        self.broken_reason = self.soft_error = self.change_wanted = self.ask_next = ""
        self.unbuilt, self.unbuilt_here = "", False
        """Why this rank could not build the process group of its quorum; '' also where a push had ended that before."""
        self.tolerates = self.restored = self.roles_switched = self.states_differ = False
        self.data, self.departure, self.retries = DataPass(), Departure(), Retries()
        self.weight: int | None = None
        self.sample: int | None = None
        """Weight of this member's gradient, None: 1; digest of a part of its state when this step was opened."""
        self.user_ops = 0
        """User collectives launched in this quorum: part of the tag, so a skipped one cannot pair with a later one."""
        self.lease_acked_at = self.launched_at = now
        self.awaits_lease = False
        """No member has had a lease for autonomy_s: nothing is launched until one has, or the quorum breaks (R3)."""
        self.verdict: Verdict | None = None
        self._op_launched = self.expects_user_op = False
        """A user collective was launched since the last verdict was settled; one was launched in this attempt or in
        the one before."""
        self.asks = 0
        self._error_sent = self._voted = False
        """The soft error was there when the fence's slots were taken; the latched verdict was told to the group:
        whatever fails from now on belongs to the next attempt."""
        self._lost_since, self._goes_on = "", False
        """Why the quorum cannot go on, heard since this rank voted. The ranks of this group agreed to stay in it, and
        none of them has launched anything since."""
        self._early: dict[str, tuple[int, str]] = {}
        """Pushes about a quorum that is announced but not entered yet: newest id per kind."""

    def __repr__(self) -> str:
        quorum = f"{self.plan.quorum_id:#x}.{self.attempt}" if self.plan else "none"
        extra = f", {self.broken_reason}" if self.phase is Phase.BROKEN else ""
        return f"Step({self.version}, quorum={quorum}, {self.phase.value}, heal={self.heal.value}{extra})"

    # ------------------------------------------------------------ roles

    @property
    def quorum(self) -> Quorum | None:
        """The quorum this rank is in."""
        return self.plan.quorum if self.plan else None

    @property
    def participants(self) -> tuple[int, ...]:
        """replica_ranks whose gradients are planned to count in the current attempt."""
        if self.plan is None:
            return ()
        return self.plan.participants_healed if self.roles_switched else self.plan.participants

    @property
    def source(self) -> int:
        """replica_rank of the participant whose buffers everybody takes; -1: there is none."""
        ranks = self.participants
        return ranks[self.data.source_shift % len(ranks)] if ranks else -1

    @property
    def participating(self) -> bool:
        """This member's gradient is planned to count in the current attempt."""
        return self.plan is not None and self.plan.replica_rank in self.participants

    @property
    def contributes(self) -> bool:
        """This member's gradient really goes into the sum (else zeros do)."""
        if self.soft_error or self.data.exhausted or not self.participating:
            return False
        return (self.heal is Heal.NONE or self.heal is Heal.READY) and self._at_base

    @property
    def broken(self) -> bool:
        """This rank cannot follow its quorum any more."""
        return self.phase is Phase.BROKEN

    @property
    def _alike(self) -> bool:
        """Other ranks of this group decide with this one whether to go on (R12)."""
        return self.settings.group_world_size > 1 and self.settings.rules.r12_alike

    @property
    def _at_base(self) -> bool:
        # After a commit both are one object; a dataclass's == is a call that makes two tuples, and this is asked often.
        return self.version is self.base or self.version == self.base

    @property
    def behind(self) -> bool:
        """This member does not hold the state the attempt builds on."""
        return self.lineage != self.base_lineage or not self._at_base

    @property
    def _adds_nothing(self) -> bool:
        """A spare, or behind for this whole quorum: the others do not go on for its sake when they are out of data."""
        if self.plan is None:
            return False
        if self.behind:
            return self.heal is not Heal.READY
        return not self.participating and self.plan.replica_rank not in self.plan.participants_healed

    @property
    def _has_no_share(self) -> bool:
        """It takes part, and has no data: nothing of it can be missing. (Who leaves gives up the share it had.)"""
        return self.participating and (self.data.exhausted or self.data.other_trails) and not self.departure.leaving

    # ------------------------------------------------------------ boundary

    def boundary(self) -> Go | MustAsk:
        """At a step boundary (start_quorum): stay in the quorum, or ask for the next one.

        The ranks of a group decide alike (R12), or one would wait in a collective of the group's for another that asks:
        what broke on one of them since they voted is told in their next vote, and nothing is launched there until then.
        """
        self.soft_error = ""
        if self.plan is None:
            return MustAsk("joining", failed=False)
        if self._goes_on and self.phase is Phase.BROKEN:
            return Go()
        if self.settings.rules.r4_aligned:
            if self.phase is Phase.LAUNCHED:
                self.break_("start_quorum was called while collectives of the last attempt had no completed fence")
            if self.phase is Phase.FENCED:
                self._voted = False
                self.break_("the last attempt was agreed by everybody but should_commit was not called for it")
        elif self.phase in (Phase.LAUNCHED, Phase.FENCED):
            self.phase = Phase.OPEN
        if self.phase is Phase.BROKEN:
            return MustAsk(self.broken_reason, failed=True)
        if self.phase is Phase.ENTERED:
            self.break_("the process group was never configured")
            return MustAsk(self.broken_reason, failed=True)
        if self.ask_next:
            return MustAsk(self.ask_next, failed=False)
        return Go()

    def ask(self, template: Ask, why: MustAsk) -> Ask:
        """Complete an ask. `template` carries the addresses and flags that are not this machine's business."""
        self.asks += 1
        return replace(
            template, replica_id=self.settings.replica_id, seq=self.asks, version=self.version, lineage=self.lineage,
            quorum_id=self.plan.quorum_id if self.plan else 0, failed=why.failed, reason=why.reason,
            min_replicas=self.settings.min_replicas, group_world_size=self.settings.group_world_size,
            layout=self.layout, commit_failures=self.retries.vetoes, heals_late=self.heals_late, stable=self.stable,
            unbuilt=self.unbuilt, unbuilt_here=self.unbuilt_here, from_scratch=template.from_scratch or self.restored,
        )  # fmt: skip

    def enter(self, quorum: Quorum) -> Plan:
        """A new quorum was announced. Returns this rank's plan; the process group is to be configured next.

        Unless `phase` is BROKEN afterwards: a push said meanwhile that the quorum is over, so ask again.
        """
        settings = self.settings
        new = plan(quorum, settings.replica_id, mode=settings.mode, min_replicas=settings.min_replicas)
        self.plan, self.phase, self.attempt = new, Phase.ENTERED, 0
        self.highest_id = max(self.highest_id, quorum.quorum_id)
        self.base, self.base_lineage, self.stable = new.target, new.target_lineage, min(self.stable, new.target)  # R18
        self.heal = Heal.PENDING if new.heals else Heal.NONE
        self.heals_late &= new.heals
        if not new.heals and not new.excluded:
            self.lineage = new.target_lineage  # differs only at step 0 without init_sync, where lineages mean nothing
        self.roles_switched = self.unbuilt_here = False
        self.ask_next = self.change_wanted = self.broken_reason = self.unbuilt = self._lost_since = ""
        # soft_error stays: it may have been reported while this quorum was still being formed.
        self.verdict = None
        self._voted = self._goes_on = self._op_launched = self.data.passed = self.awaits_lease = False
        self.user_ops = self.data.source_shift = self.retries.vetoes = 0
        early, self._early = self._early, {}
        if "change" in early:
            self.want_change(*early["change"])
        if "lost" in early:
            self.lost(*early["lost"])
        return new

    def configured(self, quorum_id: int) -> bool:
        """The process group of `quorum_id` is up. False if that quorum is not the current one any more."""
        if self.plan is None or self.plan.quorum_id != quorum_id or self.phase is not Phase.ENTERED:
            return False
        self.phase = Phase.OPEN
        return True

    def cannot_build(self, reason: str, *, here: bool) -> None:
        """The process group was not built; `here`: because of this machine. After a push it is that push's doing."""
        if self.phase is Phase.ENTERED:
            self.unbuilt, self.unbuilt_here = reason, here
        self.break_(f"the process group could not be built: {reason}")

    # ------------------------------------------------------------ events within a quorum

    def break_(self, reason: str) -> bool:
        """This rank cannot follow its quorum any more (R0). False if its vote stands, or it was broken already."""
        if self.phase in (Phase.BROKEN, Phase.OUTSIDE):
            return False
        if self._voted:
            if self._alike:  # too late to ask together for it
                self._lost_since = self._lost_since or reason
            else:
                self.ask_next = self.ask_next or reason
            return False
        self.phase = Phase.BROKEN
        self.broken_reason = reason
        self.verdict = None
        return True

    def lost(self, quorum_id: int, reason: str, held: Version = VOID) -> bool:
        """A push says that members of `quorum_id` are gone. True if the data plane has to be aborted now.

        A completed verdict is latched (R0): it is settled first, and the next boundary asks. `held`: the state that all
        of them held when they said goodbye, VOID if one did not. Whoever leaves with the commit of this attempt has
        sent what its fence needs, and peers may still be reading it (R16).
        """
        if self.settings.rules.r15_stale and (self.plan is None or self.plan.quorum_id != quorum_id):
            self._remember("lost", quorum_id, reason)
            return False
        if self.phase is Phase.FENCED and self.settings.rules.r0_verdict and not self._voted:
            self.ask_next = self.ask_next or reason
            return False
        if self.phase is Phase.OPEN and self.ask_next:
            # Nothing is launched, and the next boundary asks: an abort could only hurt who is still receiving.
            return False
        parted = self.settings.rules.r16_parting and held >= self.base
        if parted and self.phase is Phase.LAUNCHED and held > self.base:
            self.ask_next = self.ask_next or reason
            return False
        idle = self.phase is Phase.OPEN and not self._op_launched  # nothing waits here; others may read the last fence
        return self.break_(reason) and not (parted and idle)

    def want_change(self, quorum_id: int, reason: str) -> None:
        """Somebody wants to join or leave: raise the flag in the next fence."""
        if self.plan is not None and self.plan.quorum_id == quorum_id:
            self.change_wanted = self.change_wanted or reason
        else:
            self._remember("change", quorum_id, reason)

    def _remember(self, kind: str, quorum_id: int, reason: str) -> None:
        """A push can overtake the thread that is about to enter the quorum it is about."""
        if quorum_id > self.highest_id and quorum_id >= self._early.get(kind, (0, ""))[0]:
            self._early[kind] = (quorum_id, reason)

    def fail_softly(self, reason: str) -> None:
        """A failure that leaves the collectives usable: zeros and a veto for this attempt.

        Reported after the fence was launched it breaks this member alone (R0), after its vote it is too late.
        """
        if self._voted:
            return
        self.soft_error = self.soft_error or reason
        if self.phase is Phase.FENCED and self._late_error and self.settings.rules.r0_verdict:
            self.break_(f"reported too late to veto the others: {self.soft_error}")

    @property
    def _late_error(self) -> bool:
        return bool(self.soft_error) and not self._error_sent

    def vote(self) -> Verdict:
        """What this rank tells its group about the attempt; from now on only the group's answer breaks it (R0, R12).

        Otherwise one rank would apply the commit, another not, and the group's state would be worth nothing.
        """
        assert self.plan is not None
        if self.phase is Phase.FENCED and self.verdict is not None:
            self._voted = self.settings.rules.r0_verdict
            change = self.verdict.change or (self._alike and bool(self.ask_next))
            if not self.departure.drain_wanted and change == self.verdict.change:
                return self.verdict  # nothing to add, as in nearly every step: `replace` makes all fields anew
            return replace(self.verdict, drain=self.departure.drain_wanted, change=change)
        reason = self.broken_reason or "the fence has not completed"
        return Verdict(self.plan.quorum_id, self.attempt, Outcome.BROKEN, reason)

    def healed(self, quorum_id: int) -> bool:
        """The planned state was received and verified. False if it was planned for another quorum (R7)."""
        if self.plan is None or self.plan.quorum_id != quorum_id or self.heal is not Heal.PENDING:
            return False
        self.heal = Heal.READY
        return True

    def heal_applied(self, round_ended: Version | None, batches: int, weight: int) -> None:
        """The received state has been loaded: this rank holds `base` now. The arguments are the donor's."""
        assert self.heal is Heal.READY
        self.heal, self.heals_late = Heal.NONE, False
        self.version, self.lineage = self.base, self.base_lineage
        self.batches_committed, self.commit_weight = batches, weight
        self.data.healed(self.base, round_ended)

    def heal_failed(self, quorum_id: int, reason: str) -> None:
        """No donor could be received from in time: weight zero and change-wanted, never a veto (R11)."""
        if self.plan is None or self.plan.quorum_id != quorum_id or self.heal is not Heal.PENDING:
            return
        self.heal = Heal.ABANDONED
        self.retries.failed()
        self.change_wanted = self.change_wanted or f"healing failed: {reason}"

    def tear(self) -> None:
        """R7, R13: this rank's state is being overwritten or was left half-written; it is nobody's donor."""
        if self.settings.rules.r7_void:
            self.version = VOID

    def untouched(self, version: Version) -> None:
        """Nothing was written over the state after all: it is `version`, as before `tear`."""
        self.version = version

    def restore(self, version: Version, lineage: int, batches: int) -> None:
        """Adopt what a checkpoint says."""
        self.version, self.lineage, self.batches_committed, self.restored = version, lineage, batches, True

    def describe(self, layout: int) -> None:
        """Digest of what has to be equal on all members (R4). Before the first ask."""
        self.layout = layout

    def join_group(self, settings: StepSettings) -> None:
        """The ranks of the group have agreed on a replica_id. Before the first ask."""
        self.settings = settings

    def require_whole_steps(self) -> None:
        """From the first step on a step commits only if every participant's share is in it."""
        self.whole_steps = True

    def weigh(self, weight: int | None) -> None:
        """Weight of this member's gradient in the attempt; None: 1."""
        self.weight = weight

    def sampled(self, digest: int | None) -> None:
        """Digest of a part of this rank's state when this step was opened; None: nothing is compared (R20)."""
        self.sample = digest

    # ------------------------------------------------------------ the attempt

    def launching(self, now: float) -> bool:
        """A gradient collective of this attempt is about to be launched. False: nothing may be launched.

        Several backward passes in one attempt launch several rounds, each with a fence; the last one counts.
        """
        self._goes_on = False
        if self.phase in (Phase.OPEN, Phase.FENCED):
            self.phase = Phase.LAUNCHED
            self.verdict = None
            self.launched_at = now
        return self.phase is Phase.LAUNCHED

    def launching_user_op(self) -> bool:
        """A user's collective is about to be launched. False: nothing may be launched."""
        if self.phase not in (Phase.OPEN, Phase.LAUNCHED, Phase.FENCED):
            return False
        self.user_ops, self._op_launched, self.expects_user_op = self.user_ops + 1, True, True
        return True

    def acknowledged(self, at: float) -> None:
        """The lighthouse has acknowledged this group's lease at that time."""
        self.lease_acked_at = at

    def lease_returned(self) -> None:
        """A member has a lease again: the quorum goes on (R3)."""
        self.awaits_lease = False

    def lacks_lease(self, now: float) -> bool:
        """R3: it has had no acknowledged lease for autonomy_s."""
        return now - self.lease_acked_at > self.settings.autonomy_s

    def tag(self) -> int:
        """64 bits over everything that has to be equal on all members of this attempt."""
        assert self.plan is not None
        base, in_ = self.base, self.plan.quorum_id
        return tag_of(base.step, base.epoch, self.base_lineage, in_, self.attempt, self.layout, self.user_ops)

    def slots(self, now: float) -> list[float]:
        """What this member puts into the fence."""
        plan, contributes, behind, heal = self.plan, self.contributes, self.behind, self.heal
        assert plan is not None
        self._error_sent = bool(self.soft_error)
        failing = bool(self.soft_error) and not (self.settings.rules.r11_no_veto and behind)
        failing |= not self.settings.rules.r11_no_veto and heal is Heal.ABANDONED
        lags, apart = behind and heal is Heal.NONE and not plan.excluded, self.data.trails or self.data.other_trails
        ready = plan.heals and not plan.heals_first and not self.roles_switched
        return encode(
            FenceInput(
                tag=self.tag(),
                weight=(1 if self.weight is None else self.weight) if contributes else 0,
                share_of=plan.replica_rank if contributes or self._has_no_share else -1,
                failed=failing,
                change=bool(self.change_wanted or self.ask_next) or self.departure.leaving or (lags and not apart),
                no_lease=self.lacks_lease(now),
                out=self.data.exhausted or self._adds_nothing,
                trails=self.data.trails and heal is not Heal.ABANDONED,  # R11: one that cannot heal holds nobody
                ready=ready and heal is not Heal.PENDING and heal is not Heal.ABANDONED,
                stop=self.departure.stop_wanted,
                ends=self.data.ends_for_all,
                source_lost=plan.replica_rank == self.source and not contributes,
                lags=lags,
                passed=self.data.ended_at == self.base and not behind,
                sample=None if behind else self.sample,
                tolerates=self.tolerates,
            )
        )

    def judge(self, sums: Sequence[float], now: float) -> Verdict:
        """The fence has completed with these sums: reach the verdict and latch it."""
        assert self.plan is not None
        if self.verdict is not None and self.phase is Phase.FENCED:
            return self.verdict
        if self.phase is Phase.BROKEN:
            return Verdict(self.plan.quorum_id, self.attempt, Outcome.BROKEN, self.broken_reason)
        facts = Facts(
            plan=self.plan, attempt=self.attempt, tag=self.tag(), participants=self.participants,
            soft_error=self.soft_error, lacks_lease=self.lacks_lease(now), took_s=now - self.launched_at,
            behind=self.behind, received=self.heal is Heal.READY, trails=self.data.trails,
            knows_end=self.data.ended_at == self.base, whole_steps=self.whole_steps,
        )  # fmt: skip
        found = judge(decode(sums, self.plan.size), facts, self.settings)
        self.data.judged(found)
        self.states_differ = found.states_differ
        verdict = found.verdict
        if verdict.outcome is Outcome.COMMIT and self._late_error and self.settings.rules.r0_verdict:
            reason = f"reported too late to veto the others: {self.soft_error}"
            verdict = replace(verdict, outcome=Outcome.BROKEN, reason=reason)
        if verdict.outcome is Outcome.BROKEN:
            self.break_(verdict.reason)
        else:
            self.phase = Phase.FENCED
            self.verdict = verdict
            # Without any lease the room may long have gone on without this quorum: nothing more is published (R2, R6).
            lapsed = self.settings.rules.r3_autonomy and round(sums[NO_LEASE]) == self.plan.size
            if not self.behind and not lapsed:
                self.stable = max(self.stable, self.base)
        return verdict

    def tolerate(self) -> None:
        """A difference of states that comes again and again is not looked at any more (R20)."""
        self.tolerates = True

    def states_apart(self, verdict: Verdict, reason: str, *, mine: bool) -> None:
        """The members' states differ: nobody commits on them, and who is in the minority (`mine`) heals.

        A push may have broken the attempt while the states were compared: then there is nothing to veto any more.
        """
        if self.verdict is not verdict:
            return
        self.verdict = replace(verdict, outcome=Outcome.VETO, reason=reason, change=True)
        self.ask_next = reason
        if mine:
            self.tear()

    def settle(self, verdict: Verdict) -> bool:
        """Apply the (group's) verdict on the latched attempt. Returns True if the optimizer is to be stepped.

        A healing member must have called `heal_applied` before (commit or veto), unless its heal was abandoned.
        """
        self._voted = self._goes_on = False
        if verdict.outcome is Outcome.BROKEN:
            self.break_(verdict.reason)
        elif verdict.outcome is Outcome.COMMIT and not self.settings.rules.r0_verdict and self._late_error:
            verdict = replace(verdict, outcome=Outcome.VETO)
        if self.phase is not Phase.FENCED or self.plan is None:
            self.retries.failed()
            self.soft_error = ""
            return False
        self.heals_late |= self.heal is Heal.ABANDONED
        commit = verdict.outcome is Outcome.COMMIT
        self.data.other_trails = verdict.trails and not self.data.trails
        current = not self.behind and not verdict.behind and not verdict.trails
        ended_at = self.base
        if commit:
            self.base_lineage = fold_lineage(self.base_lineage, self.plan.quorum_id, self.attempt, self.plan.quorum.ids)
            self.base = Version(self.base.step + 1, self.plan.quorum_id)
            if current:
                self.version, self.lineage = self.base, self.base_lineage
                self.batches_committed += verdict.contributors
                self.commit_weight = verdict.weight
            elif not self.plan.excluded and not verdict.trails:  # they stay: others would wait for their asks
                self.ask_next = self.ask_next or "left behind by a commit"
                if self.heal is Heal.PENDING:
                    self.heal = Heal.ABANDONED  # what may still arrive is older than `base` now
        self.data.settled(verdict.exhausted, ended_at, self.base)
        if verdict.exhausted or (commit and (current or verdict.trails)):
            self.retries.reset()
        else:
            self.retries.skipped(own=bool(self.soft_error), current=current)
        if verdict.healed and self.plan.ready_expected:
            self.roles_switched = True
        self.departure.settled(drain=verdict.drain, stop=verdict.stop)
        if verdict.change:
            self.ask_next = self.ask_next or self.change_wanted or "a member asked for a change of membership"
        self.attempt += 1
        self.soft_error, self.verdict, self.sample = "", None, None
        self.awaits_lease = verdict.lapsed and self.settings.rules.r3_waits
        self.phase, self.expects_user_op, self._op_launched = Phase.OPEN, self._op_launched, False
        self._goes_on = self._alike and not self.ask_next
        if self._lost_since:
            self.break_(self._lost_since)
            self._lost_since = ""
        return commit and current

    def divisor(self, verdict: Verdict) -> int:
        """What the sum of the gradients is divided by: what really went into it (R10), never what was planned."""
        return verdict.weight if self.settings.rules.r10_divisor else len(self.participants)

    def gave_up(self) -> str:
        """Why this member must stop retrying (max_retries), or ''."""
        return self.retries.gave_up(self.settings.max_retries)
