"""`Hooks`: what the library's own parts need of a Manager, and no training script does (`Manager.hooks`).

Model wrappers and their reducers implement `reduction.interface.ReducerHost` against it, samplers
`data.interface.DataHooks`; torch's Join, `OptimizerWrapper` and the front ends use the rest.

Threads: the training thread; `current_attempt` also on the threads that run backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import ConfigError, UsageError
from ft_core.runtime.reduce_operations import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed import ReduceOp

    from ft_core.data.interface import DataListener
    from ft_core.device import Device
    from ft_core.process_group import ProcessGroup
    from ft_core.reduction.interface import GradientReducer
    from ft_core.runtime.step_attempt import StepAttempt
    from ft_core.runtime.steps import Steps
    from ft_core.runtime.uneven_end import UnevenEnd


class Hooks:
    """The other face of one `RankRuntime`."""

    def __init__(self, steps: Steps, uneven: UnevenEnd) -> None:
        self._steps, self._uneven, self._rank = steps, uneven, steps.rank

    def __repr__(self) -> str:
        return f"Hooks({len(self._steps.reducers)} reducers, {self._rank!r})"

    # ------------------------------------------------------------ gradients

    def register_reducer(self, reducer: GradientReducer) -> None:
        """Announce a reducer: with exactly one, its last bucket carries the ballot.

        Raises:
            UsageError: after the first start_quorum, where the ballot rides is fixed by then (R4); or a parameter has a
                reducer already, and its gradient would be summed twice.
            ConfigError: no process group carries gradients on its devices, or the Manager's does not.
        """
        if self._rank.wish is not None:
            raise UsageError("wrap the model in DistributedDataParallel before the first start_quorum")
        reduced = {id(parameter) for other in self._steps.reducers for parameter in other.parameters}
        twice = next((parameter for parameter in reducer.parameters if id(parameter) in reduced), None)
        if twice is not None:
            raise UsageError(
                f"a parameter of shape {tuple(twice.shape)} is in a model that is wrapped for this Manager already: "
                "its gradient would be summed twice. Use the first wrapper, or call its unwrap() and wrap again; "
                "models that share parameters are wrapped as one module"
            )
        self._steps.serve([*self._steps.reducers, reducer])
        self._steps.reducers.append(reducer)

    def unregister_reducer(self, reducer: GradientReducer) -> None:
        """Forget a reducer again; without effect after the first start_quorum."""
        if reducer in self._steps.reducers and self._rank.wish is None:
            self._steps.reducers.remove(reducer)

    def current_attempt(self) -> StepAttempt | None:
        """The open attempt; None before the first start_quorum."""
        return self._steps.attempt

    @property
    def ranks(self) -> int:
        """Processes of this replica group."""
        return self._steps.config.world_size

    @property
    def backend(self) -> str:
        """Backend of the gradients' process group, for example "gloo"."""
        return str(self._steps.shell.communicators.gradients.getBackendName())

    @property
    def process_group(self) -> ProcessGroup | None:
        """The gradients' process group; None: it is chosen with the first model, or the first quorum."""
        return self._steps.shell.communicators.chosen

    def check_allreduce(self, name: str, tensors: Sequence[torch.Tensor], reduce_op: ReduceOp.RedOpType) -> None:
        """See that an allreduce of the script's can have all of these tensors, before the first is launched.

        Raises:
            ConfigError: one of them is on a device that no process group of this Manager carries, or the operation has
                no rule, or is not defined for its dtype.
        """
        for tensor in tensors:
            name_of(reduce_op, tensor.dtype)
        if self.process_group is not None:
            self._steps.shell.communicators.check(name, tensors)

    @property
    def through_host(self) -> bool:
        """That group reduces in CPU memory, so gradients on other devices are copied there and back."""
        return self._steps.shell.communicators.gradients.carries_cpu_memory

    def device_of(self, device: torch.device) -> Device:
        """What the host does with the memory of a device."""
        return self._steps.shell.communicators.device_of(device)

    @property
    def leads(self) -> bool:
        """This replica does what one does for all: of those that held the newest state when the quorum formed, it is
        the first. So nobody leads who does not know what a former leader was to write."""
        plan = self._rank.plan
        return plan is not None and plan.first_holder == plan.replica_rank

    @property
    def batch_ratio(self) -> float:
        """What the outputs of the next forward are weighed with; 1.0 without batch weights."""
        return self._steps.weights.ratio

    # ------------------------------------------------------------ data

    def trains_on(self, position: int | None) -> None:
        """Say which batch of its data the script trains on next, before `start_quorum`; it travels with each ask.

        Args:
            position: a number that grows; None: it does not say.
        """
        steps = self._steps
        steps.says_positions = True
        with steps.shell.lock:
            steps.rank.trains_on(0 if position is None else position + 1)

    @property
    def meeting(self) -> tuple[int, int | None]:
        """The quorum in force, and the batch at which all go on who entered it between two steps (`Plan.position`).

        None: this replica stays where it is, as it took an open step along into the quorum (R19), or none of those who
        hold the newest state said where they were. Does not pin the step to its quorum: who takes part is not told.
        """
        rank = self._rank
        return rank.quorum_id, rank.attempt.meets_at - 1 if rank.attempt.meets_at else None

    @property
    def participants(self) -> int:
        """How many take part in the open step, unless it goes on in another quorum: the step is not pinned to this one.

        Nothing of the step may depend on it; `Manager.num_participants` is for that.
        """
        return len(self._rank.attempt.participants)

    @property
    def next_quorum(self) -> bool:
        """The last vote has shown that a new quorum comes next; known to all who voted, unless it has ended since."""
        return self._steps.next_quorum

    def keep_steps_in_quorums(self, wanted: bool) -> None:
        """Whether a step that is opened from now on is lost if a death finds it open, and none goes on (R19).

        For whoever has to do something at the next boundary, before the state changes, if a member dies.
        """
        self._steps.stays = wanted

    def stay(self) -> int:
        """Keep the step that is open in the quorum that it is in; waits for that, if one forms. Returns its id."""
        shell = self._steps.shell
        with shell.lock:
            self._rank.pin()
        shell.wait_formed()
        return self._rank.quorum_id

    def attach_data(self, listener: DataListener) -> None:
        """Announce a sampler.

        Raises:
            UsageError: after the first start_quorum.
            ConfigError: there is one already.
        """
        if self._steps.data is not None:
            raise ConfigError("this Manager has an elastic sampler already: one dataset is divided per Manager")
        if self._rank.plan is not None:
            raise UsageError("an elastic sampler was attached after the first start_quorum: make it before")
        self._steps.data = listener

    def weigh(self, weight: int) -> None:
        """`Manager.set_batch_weight` for elastic data: who divides samples weighs them. Raises as it does."""
        self._steps.weigh(weight)

    # ------------------------------------------------------------ uneven ends, torn state

    def shadow_step(
        self,
        apply: Callable[[], object] | None = None,
        *,
        ends: bool = False,
        opened: Callable[[], object] | None = None,
    ) -> bool:
        """One attempt without data; see `runtime.uneven_end`. Returns True if the pass is over."""
        return self._uneven.shadow_step(apply, ends=ends, opened=opened)

    @property
    def everyone_out(self) -> bool:
        """The last fence said that every member is out of data by itself."""
        return self._rank.data.everyone_out

    def report_torn_state(self, error: BaseException) -> None:
        """optimizer.step raised after a commit: this state is neither old nor new and must be healed (R13)."""
        self._uneven.torn(error)
