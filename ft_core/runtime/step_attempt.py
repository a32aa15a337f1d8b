"""One try at a step, as gradient reducers see it (`interface.ReductionAttempt`): launch collectives and the fence.

How it works. `ready` waits for the quorum the attempt belongs to. Every launch asks the step machine first, so nothing
is launched in a broken quorum; a failed launch or wait breaks the rank and is never raised, because the caller is
inside autograd. `launch_fence` fills the reserved tail with the slots of the step machine; it first waits until a heal
that runs meanwhile has been verified or given up (R7), because the fence says whether this member can follow. If the
sum of weights that comes with the fence is not what gradients were divided by beforehand, they are rescaled at once, so
that they are right when `backward` returns.

On a device the host learns of the sum by `read`: it marks the streams behind all that this attempt has launched, copies
a few numbers into pinned memory, and waits for the marks (`device_wait`). Where no ballot rides on gradients, each
member waits so for its device before it sends its ballot: the sum then shows that all devices have finished.

Threads: training thread and autograd threads. Invariant: one fence per attempt decides; once judged, the verdict is
the step machine's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from ft_core.device import HOST
from ft_core.errors import CollectiveError
from ft_core.protocol.rank.phases import USABLE
from ft_core.protocol.types import Outcome, Verdict
from ft_core.reduction.interface import FENCE_SLOTS
from ft_core.runtime.device_wait import outlast
from ft_core.runtime.reduce_operations import in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Work

    from ft_core.device import Device
    from ft_core.reduction.batch_weights import BatchWeights
    from ft_core.reduction.interface import GradientReducer
    from ft_core.runtime.shell import RankShell


class StepAttempt:
    """The attempt that is open on this rank. Made by `Manager.start_quorum`, replaced by the next one."""

    def __init__(
        self, number: int, shell: RankShell, weights: BatchWeights, reducers: Sequence[GradientReducer], *, rides: bool
    ) -> None:
        self.number = number
        self.verdict: Verdict | None = None
        self.averaged: list[torch.Tensor] = []
        """What `Manager.allreduce(AVG)` reduced in this attempt: rescaled if the divisor differed from the plan."""
        self.participants = 1
        """How many gradients were planned to be in the sum: what everything is divided by beforehand."""
        self.planned = 1
        """What the reducers' gradients have been divided by: `participants`, then the fence's sum of weights."""
        self.source = -1
        self.members = 1
        """Of the quorum."""
        self.leaves = False
        """It is the last one of this replica, which adds nothing to it."""
        self.used = False
        """Somebody asked whether it is usable: from then on it belongs to one step."""
        self._shell = shell
        self._rank = shell.rank
        self._weights = weights
        self._reducers = reducers
        self._rides = rides
        self._scale: float | None = None
        self._whole_scale = 0.0
        self._contributes = False
        self._counted = 0, 0
        """What a gradient counts as, and the whole step."""
        self._devices: set[torch.device] = set()
        """Where this attempt has launched something."""

    def __repr__(self) -> str:
        return f"StepAttempt({self.number}, verdict={self.verdict})"

    def ready(self) -> bool:
        """A reduction begins: as `usable`, and its gradients are divided by the number of participants."""
        if not self.usable():
            return False
        self.planned = self.participants
        return True

    def usable(self) -> bool:
        """Wait for the quorum. False if nothing may be launched (the reason is in `Manager.errored`)."""
        self.used = True
        shell, rank = self._shell, self._rank
        with shell.lock:
            rank.pin()
        if rank.forming:
            shell.wait_formed()
        with shell.lock:
            if rank.phase not in USABLE:
                return False
            mine = rank.attempt
            self.participants = participants = max(1, len(mine.participants))
            self.source = mine.source
            self._contributes = mine.contributes
            self._counted = 0, 0
            if rank.plan is not None:
                self.members = rank.plan.size
            if self._contributes:
                total = 1 if mine.weight is None else mine.weight
                weight = total if self._weights.total is None else self._weights.reference
                self._scale, self._whole_scale = weight / participants, total / participants
                self._counted = weight, total
            else:
                self._scale = self._whole_scale = 0.0
        return True

    @property
    def scale(self) -> float:
        """What a gradient is multiplied with before the sum: weight / participants; 0.0 if this member adds nothing."""
        return self._scale if self._scale is not None and not self._rank.attempt.soft_error else 0.0

    @property
    def rides(self) -> bool:
        """The ballot rides in the fence of the only reducer."""
        return self._rides

    @property
    def weights(self) -> tuple[int, int]:
        """What a gradient counts as in the sum, and this member's whole step; zeros if it adds nothing."""
        return self._counted if self.contributes else (0, 0)

    @property
    def whole_scale(self) -> float:
        """The same for what the user averages: it counts for all micro-batches of the step."""
        return self._whole_scale if not self._rank.attempt.soft_error else 0.0

    @property
    def contributes(self) -> bool:
        """What this member reduces, whatever its weight, is in the result."""
        return self._contributes and not self._rank.attempt.soft_error

    @property
    def is_source(self) -> bool:
        """This member's buffers are the ones everybody takes."""
        plan = self._rank.plan
        return plan is not None and plan.replica_rank == self.source

    def launch(self, tensor: torch.Tensor) -> Work | None:
        """Launch an in-place SUM over the group of the gradients; None if the quorum is broken."""
        shell = self._shell
        with shell.lock:
            if not self._rank.may_launch(time.monotonic()):
                return None
        shell.limits.expect()
        self._devices.add(tensor.device)
        try:
            return shell.communicators.sum(tensor, shell.communicators.gradients)
        except Exception as error:  # noqa: BLE001 - recorded in the step: the caller is inside autograd
            shell.fail(error)
            return None

    def launch_fence(self, flat: torch.Tensor, tail: torch.Tensor) -> Work | None:
        """Fill `tail` with this member's slots and launch `flat`. If no fence rides here, only launch."""
        if self._rides:
            if not self._fill(tail, self._shell.communicators.device_of(tail.device)):
                return None
        else:
            tail.zero_()
        return self.launch(flat)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A reduced tensor in CPU memory. Raises: something of this attempt was cut short."""
        device = self._shell.communicators.device_of(tensor.device)
        if device.immediate:
            return tensor
        self._devices.add(tensor.device)
        numbers = device.fetch(tensor)
        self._outlast()
        return numbers

    def _outlast(self) -> None:
        """Wait for the devices, however long peers take: until this rank's part in the quorum is over. Raises then."""
        devices = map(self._shell.communicators.device_of, self._devices)
        outlast([device.mark() for device in devices if not device.immediate], self._cut_short)

    def _cut_short(self) -> Exception | None:
        rank, group = self._rank, self._shell.communicators.gradients
        if rank.phase not in USABLE:
            return rank.error or CollectiveError(rank.broken_reason or "the quorum is over")
        return None if group.blocks_host else group.errored()

    def fence_arrived(self, tail: torch.Tensor) -> None:
        """The sum of all members' slots has arrived, and every earlier bucket with it."""
        if not self._rides:
            return
        shell, sums = self._shell, tail.tolist()
        with shell.lock:
            self._rank.acknowledged(shell.control.last_ack)
            self.verdict, actions = self._rank.count(sums, time.monotonic())
        shell.limits.disarm()
        if self.verdict.outcome is Outcome.BROKEN:
            shell.perform(actions)
        else:
            self.rescale(self.verdict.weight)
            self._weights.reduced()

    def rescale(self, weight: int) -> None:
        """R10: the divisor is the fence's sum of weights; dividing beforehand was only the fast form of it."""
        if weight and weight != self.planned:
            for reducer in self._reducers:
                reducer.rescale(self.planned / weight)
            self.planned = weight

    def rescale_averaged(self, weight: int) -> None:
        """The same for what the user averaged."""
        if weight and weight != self.participants:
            for tensor in self.averaged:
                with in_place(tensor):
                    tensor.mul_(self.participants / weight)

    def fail(self, error: BaseException) -> None:
        """A collective of this attempt failed."""
        self._shell.fail(error)

    def report(self, error: BaseException) -> None:
        """A failure here that leaves the collectives usable: the reduction is completed with zeros and vetoed."""
        self._shell.report(error)

    def own_fence(self) -> None:
        """Launch the fence as a reduction of its own, over the control group, and wait for it."""
        shell = self._shell
        tail = torch.zeros(FENCE_SLOTS)
        if not self.ready() or not self._devices_finished() or not self._fill(tail, HOST):
            return
        with shell.lock:
            if not self._rank.may_launch(time.monotonic()):
                return
        shell.limits.expect()
        try:
            shell.communicators.sum(tail, shell.communicators.control()).wait()
        except Exception as error:  # noqa: BLE001 - recorded in the step
            shell.fail(error)
            return
        self._rides = True
        self.fence_arrived(tail)

    def _devices_finished(self) -> bool:
        """What this member has launched is complete. False: it was cut short, and this rank is broken."""
        shell = self._shell
        shell.limits.expect()
        try:
            self._outlast()
        except Exception as error:  # noqa: BLE001 - recorded in the step
            shell.fail(error)
            return False
        return True

    def _fill(self, tail: torch.Tensor, memory: Device) -> bool:
        shell, rank = self._shell, self._rank
        if rank.receiving:
            shell.wait_received()
        with shell.lock:
            if rank.phase not in USABLE:
                return False
            rank.acknowledged(shell.control.last_ack)
            slots = rank.ballot(time.monotonic())
        shell.communicators.put(slots, tail, memory)
        return True
