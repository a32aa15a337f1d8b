"""One try at a step, as gradient carriers see it (`interface.Attempt`): launch collectives and the fence, report.

How it works. `ready` waits for the quorum the attempt belongs to. Every launch asks the step machine first, so nothing
is launched in a broken quorum; a failed launch or wait breaks the rank and is never raised, because the caller is
inside autograd. `launch_fence` fills the reserved tail with the slots of the step machine; it first waits until a heal
that runs meanwhile has been verified or given up (R7), because the fence says whether this member can follow. If the
sum of weights that comes with the fence is not what gradients were divided by beforehand, they are rescaled at once, so
that they are right when `backward` returns.

Threads: training thread and autograd threads. Invariant: one fence per attempt decides; once judged, the verdict is
the step machine's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from ft_core.errors import CollectiveError
from ft_core.protocol.rank.phases import Heal, Phase
from ft_core.protocol.types import Outcome, Verdict
from ft_core.reduction.interface import FENCE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Work

    from ft_core.protocol.rank.phases import MustAsk
    from ft_core.reduction.batch_weights import BatchWeights
    from ft_core.reduction.interface import Carrier
    from ft_core.runtime.quorum_worker import Round
    from ft_core.runtime.session import Session


USABLE = (Phase.OPEN, Phase.LAUNCHED, Phase.FENCED)
"""Phases in which collectives may be launched; after a fence another backward pass starts another round."""


class StepAttempt:
    """The attempt that is open on this rank. Made by `Manager.start_quorum`, replaced by the next one."""

    def __init__(
        self, number: int, session: Session, round_: Round, weights: BatchWeights, carriers: Sequence[Carrier], *,
        rides: bool,
    ) -> None:  # fmt: skip
        self.number = number
        self.verdict: Verdict | None = None
        self.averaged: list[torch.Tensor] = []
        """What `Manager.allreduce(AVG)` reduced in this attempt: rescaled if the divisor differed from the plan."""
        self.participants = 1
        """How many gradients were planned to be in the sum: what everything is divided by beforehand."""
        self.planned = 1
        """What the carriers' gradients have been divided by: `participants`, then the fence's sum of weights."""
        self.source = -1
        self.used = False
        """Somebody asked whether it is usable: from then on it belongs to one step."""
        self._session = session
        self.round = round_
        """What its quorum comes from. Changed by `move` only, while the session's `movable` names this attempt."""
        self.moved = False
        self._weights = weights
        self._carriers = carriers
        self._rides = rides
        self._scale: float | None = None
        self._whole_scale = 0.0
        self._contributes = False

    def __repr__(self) -> str:
        return f"StepAttempt({self.number}, verdict={self.verdict})"

    def move(self, why: MustAsk) -> Round:
        """It goes on in the next quorum (R19): returns the round to be submitted. The session's lock is held."""
        self.round, self.moved = self.round.again(why), True
        return self.round

    def ready(self) -> bool:
        """A round of reductions begins: as `usable`, and its gradients are divided by the number of participants."""
        if not self.usable():
            return False
        self.planned = self.participants
        return True

    def usable(self) -> bool:
        """Wait for the quorum. False if nothing may be launched (the reason is in `Manager.errored`)."""
        self.used = True
        session = self._session
        if session.movable is not None:
            with session.lock:
                session.movable = None
        round_ = self.round
        if not round_.configured.is_set():  # in the steady state it is: no lock of the event's is taken
            round_.wait_configured()
        with session.lock:
            step = session.step
            if round_.error is not None or step.phase not in USABLE:
                return False
            self.participants = participants = max(1, len(step.participants))
            self.source = step.source
            self._contributes = step.contributes
            if self._contributes:
                total = 1 if step.weight is None else step.weight
                weight = total if self._weights.total is None else self._weights.reference
                self._scale, self._whole_scale = weight / participants, total / participants
            else:
                self._scale = self._whole_scale = 0.0
        return True

    @property
    def scale(self) -> float:
        """What a gradient is multiplied with before the sum: weight / participants; 0.0 if this member adds nothing."""
        return self._scale if self._scale is not None and not self._session.step.soft_error else 0.0

    @property
    def whole_scale(self) -> float:
        """The same for what the user averages: it counts for all micro-batches of the step."""
        return self._whole_scale if not self._session.step.soft_error else 0.0

    @property
    def contributes(self) -> bool:
        """What this member reduces, whatever its weight, is in the result."""
        return self._contributes and not self._session.step.soft_error

    @property
    def is_source(self) -> bool:
        """This member's buffers are the ones everybody takes."""
        plan = self._session.step.plan
        return plan is not None and plan.replica_rank == self.source

    def launch(self, tensor: torch.Tensor) -> Work | None:
        """Launch an in-place SUM on the data lane; None if the quorum is broken."""
        session = self._session
        with session.lock:
            if not session.step.launching(time.monotonic()):
                return None
        session.expect()
        try:
            return session.lanes.sum(tensor, session.lanes.main)
        except Exception as error:  # noqa: BLE001 - recorded in the step: the caller is inside autograd
            session.fail(error)
            return None

    def launch_fence(self, flat: torch.Tensor, tail: torch.Tensor) -> Work | None:
        """Fill `tail` with this member's slots and launch `flat`. If no fence rides here, only launch."""
        if self._rides:
            if not self._fill(tail):
                return None
        else:
            tail.zero_()
        return self.launch(flat)

    def fence_arrived(self, tail: torch.Tensor) -> None:
        """The sum of all members' slots has arrived, and every earlier bucket with it."""
        if not self._rides:
            return
        session = self._session
        sums = tail.tolist()
        with session.lock:
            session.step.acknowledged(session.control.last_ack)
            self.verdict = session.step.judge(sums, time.monotonic())
        session.watchdog.disarm()
        if self.verdict.outcome is Outcome.BROKEN:
            session.fail(CollectiveError(self.verdict.reason))
            session.lanes.abort(self.verdict.quorum_id)
        else:
            self.rescale(self.verdict.weight)
            self._weights.reduced()

    def rescale(self, weight: int) -> None:
        """R10: the divisor is the fence's sum of weights; dividing beforehand was only the fast form of it."""
        if weight and weight != self.planned:
            for carrier in self._carriers:
                carrier.rescale(self.planned / weight)
            self.planned = weight

    def rescale_averaged(self, weight: int) -> None:
        """The same for what the user averaged."""
        if weight and weight != self.participants:
            for tensor in self.averaged:
                tensor.mul_(self.participants / weight)

    def fail(self, error: BaseException) -> None:
        """A collective of this attempt failed."""
        self._session.fail(error)

    def report(self, error: BaseException) -> None:
        """A failure here that leaves the collectives usable: the round is completed with zeros and vetoed."""
        with self._session.lock:
            self._session.step.fail_softly(f"{type(error).__name__}: {error}")
            if self._session.error is None:
                self._session.error = error if isinstance(error, Exception) else CollectiveError(str(error))

    def own_fence(self) -> None:
        """Launch the fence as a reduction of its own, on the second lane, and wait for it."""
        session = self._session
        tail = torch.zeros(FENCE_SLOTS)
        if not self.ready() or not self._fill(tail):
            return
        with session.lock:
            if not session.step.launching(time.monotonic()):
                return
        session.expect()
        try:
            session.lanes.sum(tail, session.lanes.second()).wait()
        except Exception as error:  # noqa: BLE001 - recorded in the step
            session.fail(error)
            return
        self._rides = True
        self.fence_arrived(tail)

    def _fill(self, tail: torch.Tensor) -> bool:
        session = self._session
        if session.step.heal is Heal.PENDING:
            self.round.wait_healed()
        with session.lock:
            if session.step.phase not in USABLE:
                return False
            session.step.acknowledged(session.control.last_ack)
            slots = session.step.slots(time.monotonic())
        session.lanes.put(slots, tail)
        return True
