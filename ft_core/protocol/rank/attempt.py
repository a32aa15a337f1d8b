"""The attempt at a step that is open on one rank: its part in the quorum, its ballot, and the verdict on it. Pure.

How it works. A quorum's plan says who participates and who heals. Attempts follow each other in it: each builds on
`base`, the newest version that the quorum has committed. This rank's part in the sum is its ballot, and the sum of all
ballots gives the verdict (`commit_rule`), the same on all members.

Invariants: `base` is equal on all members; a rank whose `held.version` is `base` is not behind; a verdict that was
told to the group is never taken back. Ownership: written by `rank.Rank` only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.protocol.lineage import fold_lineage
from ft_core.protocol.rank.ballot import FenceInput, decode, encode, tag_of
from ft_core.protocol.rank.commit_rule import Facts, Judgement, judge
from ft_core.protocol.rank.phases import Heal
from ft_core.protocol.types import Outcome, Verdict, Version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.protocol.rank.data_pass import DataPass
    from ft_core.protocol.rank.departure import Departure
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.held import Held
    from ft_core.protocol.rank.settings import RankSettings


class Attempt:
    """The open attempt. Its numbers begin anew in each quorum."""

    def __init__(self, settings: RankSettings, held: Held, data: DataPass, departure: Departure, now: float) -> None:
        self._settings, self._held, self._data, self._departure = settings, held, data, departure
        self.plan: Plan | None = None
        """Of the quorum it belongs to; None before the first one."""
        self.number = 0
        """How many attempts of this quorum were settled before."""
        self.base = held.version
        self.base_lineage = held.lineage
        self.signature = 0
        """Digest of the model, the data and the settings that have to be equal on all members (R4)."""
        self.whole_steps = False
        """A step commits only if every participant's share is in it; the same on all members."""
        self.heal = Heal.NONE
        self.roles_switched = False
        """All planned heals were reported ready: those that healed participate (R10)."""
        self.verdict: Verdict | None = None
        """The latched one; None before the ballots have come back."""
        self.weight: int | None = None
        """Weight of this member's gradient, None: 1."""
        self.sample: int | None = None
        """Digest of a part of its state when this step was opened; None: nothing is compared (R20)."""
        self.states_differ = False
        """The ballots show that members hold different states under one version."""
        self.tolerates = False
        """A difference of states that comes again and again is not looked at any more (R20)."""
        self.soft_error = ""
        """Why this rank contributes zeros and wants the attempt vetoed."""
        self.error_sent = False
        """The soft error was there when the ballot was taken."""
        self.voted = False
        """The verdict was told to the group: whatever fails from now on belongs to the next attempt."""
        self.user_ops = 0
        """The script's collectives in this quorum: part of the tag, so a skipped one cannot pair with a later one."""
        self.op_launched = False
        """One was launched since the last verdict was settled."""
        self.early_ops = False
        """One was launched in this quorum while a step was open, and nothing of its gradients launched (R19)."""
        self.expects_user_op = False
        """One was launched in this attempt, or in the one before."""
        self.position = 0
        """The batch of the training data that the step trains on, counted from 1; 0: the script does not say.

        The others' (`meets_at`) once the quorum stands, not before: who asks again still holds its own state.
        """
        self.meets_at = 0
        """The batch at which all go on who entered this quorum between two steps; 0: this rank stays where it is."""
        self.opened_at = self.launched_at = self.lease_acked_at = now
        """When the step began, its first collective was launched, and the lighthouse acknowledged the lease last."""
        self.begun = False
        """The step is open, and nothing of its gradients is launched."""
        self.pinned = True
        """Somebody was told who takes part, or something was launched: it stays in its quorum (R19)."""
        self.awaits_lease = False
        """No member has had a lease for autonomy_s: nothing is launched until one has, or the quorum breaks (R3)."""

    def __repr__(self) -> str:
        quorum = f"{self.plan.quorum_id:#x}.{self.number}" if self.plan else "none"
        return f"Attempt({quorum} on {self.base}, heal={self.heal.value})"

    # ------------------------------------------------------------ roles

    @property
    def participants(self) -> tuple[int, ...]:
        """replica_ranks whose gradients are planned to count."""
        if self.plan is None:
            return ()
        return self.plan.participants_healed if self.roles_switched else self.plan.participants

    @property
    def source(self) -> int:
        """replica_rank of the participant whose buffers everybody takes; -1: there is none."""
        ranks = self.participants
        return ranks[self._data.source_shift % len(ranks)] if ranks else -1

    @property
    def participating(self) -> bool:
        """This member's gradient is planned to count."""
        return self.plan is not None and self.plan.replica_rank in self.participants

    @property
    def contributes(self) -> bool:
        """This member's gradient really goes into the sum (else zeros do)."""
        if self.soft_error or self._data.exhausted or not self.participating:
            return False
        return (self.heal is Heal.NONE or self.heal is Heal.READY) and self._at_base

    @property
    def _at_base(self) -> bool:
        # After a commit both are one object; a dataclass's == is a call that makes two tuples, and this is asked often.
        return self._held.version is self.base or self._held.version == self.base

    @property
    def behind(self) -> bool:
        """This member does not hold the state the attempt builds on."""
        return self._held.lineage != self.base_lineage or not self._at_base

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
        without_data = self._data.exhausted or self._data.other_trails
        return self.participating and without_data and not self._departure.leaving

    @property
    def late_error(self) -> bool:
        """A soft error was reported after the ballot was taken: too late to veto the others."""
        return bool(self.soft_error) and not self.error_sent

    @property
    def idle(self) -> bool:
        """Nothing of the script's is under way."""
        return not self.op_launched

    # ------------------------------------------------------------ a quorum begins

    def enter(self, plan: Plan) -> None:
        """The quorum of `plan` was entered."""
        self.plan, self.number = plan, 0
        self.base, self.base_lineage = plan.target, plan.target_lineage
        self.heal = Heal.PENDING if plan.heals else Heal.NONE
        # soft_error stays: it may have been reported while this quorum was still being formed.
        self.verdict = None
        self.roles_switched = self.voted = self.op_launched = self.early_ops = self.awaits_lease = False
        self.user_ops = 0

    # ------------------------------------------------------------ the ballot

    def acknowledged(self, at: float) -> None:
        """The lighthouse held this group's lease at that time: it has answered what was sent then."""
        self.lease_acked_at = max(self.lease_acked_at, at)

    def lacks_lease(self, now: float) -> bool:
        """It has had no acknowledged lease for autonomy_s (R3)."""
        return now - self.lease_acked_at > self._settings.autonomy_s

    def tag(self) -> int:
        """64 bits over everything that has to be equal on all members of this attempt."""
        assert self.plan is not None
        base, in_, ops = self.base, self.plan.quorum_id, self.user_ops if self._settings.rules.r4_user_ops else 0
        return tag_of(base.step, base.quorum_id, self.base_lineage, in_, self.number, self.signature, ops)

    def ballot(self, now: float, *, change: bool) -> list[float]:
        """What this member adds to the last all-reduce. `change`: it wants a new quorum after this attempt."""
        plan, data, contributes, behind, heal = self.plan, self._data, self.contributes, self.behind, self.heal
        assert plan is not None
        rules = self._settings.rules
        self.error_sent = bool(self.soft_error)
        failing = bool(self.soft_error) and not (rules.r11_no_veto and behind)
        failing |= not rules.r11_no_veto and heal is Heal.ABANDONED
        lags, apart = behind and heal is Heal.NONE and not plan.excluded, data.trails or data.other_trails
        ready = plan.heals and not plan.heals_first and not self.roles_switched
        return encode(
            FenceInput(
                tag=self.tag(),
                weight=(1 if self.weight is None else self.weight) if contributes else 0,
                share_of=plan.replica_rank if contributes or self._has_no_share else -1,
                failed=failing,
                change=change or self._departure.leaving or (lags and not apart),
                no_lease=self.lacks_lease(now),
                out=data.exhausted or self._adds_nothing,
                trails=data.trails and heal is not Heal.ABANDONED,  # R11: one that cannot heal holds nobody
                ready=ready and heal is not Heal.PENDING and heal is not Heal.ABANDONED,
                stop=self._departure.stop_wanted,
                ends=data.ends_for_all,
                source_lost=plan.replica_rank == self.source and not contributes,
                lags=lags,
                passed=data.ended_at == self.base and not behind,
                sample=None if behind else self.sample,
                tolerates=self.tolerates,
            )
        )

    def count(self, sums: Sequence[float], now: float) -> Judgement:
        """The verdict that the sum of all ballots gives. Latches nothing."""
        assert self.plan is not None
        facts = Facts(
            plan=self.plan, attempt=self.number, tag=self.tag(), participants=self.participants,
            soft_error=self.soft_error, lacks_lease=self.lacks_lease(now), took_s=now - self.launched_at,
            behind=self.behind, received=self.heal is Heal.READY, trails=self._data.trails,
            knows_end=self._data.ended_at == self.base, whole_steps=self.whole_steps,
        )  # fmt: skip
        found = judge(decode(sums, self.plan.size), facts, self._settings)
        if found.verdict.outcome is Outcome.COMMIT and self.late_error and self._settings.rules.r0_verdict:
            reason = f"reported too late to veto the others: {self.soft_error}"
            found = found._replace(verdict=replace(found.verdict, outcome=Outcome.BROKEN, reason=reason))
        return found

    def broken_vote(self, reason: str) -> Verdict:
        """What is told to the group of an attempt that this rank cannot follow."""
        quorum_id = self.plan.quorum_id if self.plan is not None else 0
        return Verdict(quorum_id, self.number, Outcome.BROKEN, reason)

    # ------------------------------------------------------------ the end

    def commit(self, verdict: Verdict) -> bool:
        """The quorum has made a step. True if this rank applies it."""
        assert self.plan is not None
        applies = not self.behind and not verdict.behind and not verdict.trails
        self.base_lineage = fold_lineage(self.base_lineage, self.plan.quorum_id, self.number, self.plan.quorum.ids)
        self.base = Version(self.base.step + 1, self.plan.quorum_id)
        if applies:
            self._held.committed(self.base, self.base_lineage, verdict)
        elif self.heal is Heal.PENDING and not self.plan.excluded and not verdict.trails:
            self.heal = Heal.ABANDONED  # what may still arrive is older than `base` now
        return applies

    def next(self) -> None:
        """It was settled: the next one begins in the same quorum."""
        self.number += 1
        self.soft_error, self.verdict, self.sample = "", None, None
        self.expects_user_op, self.op_launched = self.op_launched, False
