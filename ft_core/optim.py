"""The optimizer wrapper: `zero_grad` opens a quorum, `step` applies the update only if the quorum commits it.

With mixed precision, `GradScaler.step(wrapper)` votes on every replica even when the gradients overflowed (torch's own
way would skip the call, and with it the vote); the reduced gradients are the same everywhere, so all skip the update
together and the step counts as committed. The scale itself is state: register the scaler with the Manager, use
`use_async_quorum=False` (a group that heals must know the others' scale before it unscales), and keep the scale when a
step was vetoed: `scaler.update(None if optimizer.committed else scaler.get_scale())`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex, cast

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer as TorchOptimizer

from ft_core.errors import ConfigError, UsageError
from ft_core.join import JoinMember, joining_of, notify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core.data.scaling import LearningRateScaling
    from ft_core.manager import Manager

__all__ = ["CommitManager", "Optimizer", "OptimizerWrapper", "learning_rates_times"]

log = logging.getLogger("ft_core")
_factors: weakref.WeakKeyDictionary[TorchOptimizer, float] = weakref.WeakKeyDictionary()
"""What the learning rates of each optimizer were multiplied by last."""


@contextlib.contextmanager
def learning_rates_times(optimizer: TorchOptimizer, factor: float) -> Iterator[None]:
    """Inside, every learning rate of `optimizer` is multiplied by `factor`; after it schedulers see the old ones.

    A factor that changes is logged: it must not be a surprise that it follows the number of replicas.
    """
    if _factors.get(optimizer, 1.0) != factor:
        log.info(
            "learning rates are multiplied by %.4g from this step on: its weight over the reference (it counts samples "
            "with elastic data or set_batch_weight, else replicas)", factor
        )  # fmt: skip
    _factors[optimizer] = factor
    groups = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for group, rate in groups:
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in groups:
            group["lr"] = rate


class CommitHooks(Protocol):
    """What the wrapper needs of `Manager.hooks`."""

    def report_torn_state(self, error: BaseException) -> None:
        """The local state is neither the old nor the new version: it must not be given to anyone (R13)."""


class CommitManager(Protocol):
    """What the wrapper needs of a `Manager`."""

    def start_quorum(self) -> None:
        """Open the next step."""

    def should_commit(self) -> bool:
        """End the step: True if all members apply it."""

    @property
    def last_commit_weight(self) -> int:
        """Sum of the weights in the last committed step."""

    @property
    def hooks(self) -> CommitHooks:
        """What a script does not call itself."""


class OptimizerWrapper(TorchOptimizer, JoinMember):
    """Puts a Manager's step around any torch optimizer.

    `zero_grad()` starts the quorum, so call it before forward, and exactly once per step. `step()` asks the Manager and
    updates the parameters only on a commit; `committed` then tells the outcome. Everything else (`state`,
    `param_groups`, `defaults`, hooks, attributes of a special optimizer) is the inner optimizer's, so learning rate
    schedulers and checkpoints work with either of the two. A scheduler advances on vetoed steps too unless guarded
    by `if optimizer.committed`.

    Args:
        manager: the `Manager` of this rank.
        optim: the optimizer that holds the parameters.
        lr_scaling: multiply its learning rates in each step by a factor that follows the step's committed weight;
            `lr_factor` tells the last one.
    """

    # GradScaler then always calls step(), having set `found_inf` and `grad_scale`, instead of skipping the vote.
    _step_supports_amp_scaling = True

    def __init__(
        self, manager: CommitManager, optim: TorchOptimizer, lr_scaling: LearningRateScaling | None = None
    ) -> None:
        # TorchOptimizer.__init__ is not called on purpose: it would build a second state next to the inner one's.
        # What it would have set is found on the inner optimizer by __getattr__.
        if not isinstance(optim, TorchOptimizer):
            raise ConfigError(f"optim must be a torch.optim.Optimizer, got {type(optim).__name__}")
        if isinstance(optim, OptimizerWrapper):
            raise ConfigError("optim is wrapped already; two wrappers would vote twice per step")
        Joinable.__init__(self)
        self.manager = manager
        self.optim = optim
        self.committed = False
        """Outcome of the last `step`."""
        self.lr_scaling = lr_scaling
        self.lr_factor = 1.0
        """What learning rates were multiplied with in the last committed step."""

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not constructed: without this the next line would recurse
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        groups = len(self.optim.param_groups)
        return f"OptimizerWrapper({type(self.optim).__name__}, param_groups={groups}, committed={self.committed})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError("an OptimizerWrapper holds a live Manager and cannot be copied or pickled; copy its .optim")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start the quorum of the next step, then clear the gradients."""
        notify(self)
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters if every member commits the step, else leave them as they are.

        Raises:
            ConfigError: a closure was given. It may evaluate the model any number of times, a different number on
                each replica, and each would be a reduction of its own.
        """
        if closure is not None:
            raise ConfigError(
                "OptimizerWrapper.step takes no closure; optimizers that need one (LBFGS) do not work here"
            )
        self.committed = False
        if not self.manager.should_commit():
            return
        try:
            self._apply()
        except BaseException as error:
            # The vote is cast: the others have the new version, here some parameters may have changed and some not.
            self.manager.hooks.report_torn_state(error)
            raise
        self.committed = True

    def run_out(self, apply: Callable[[], object] | None = None) -> None:
        """After the last batch of an epoch: `Manager.run_out`, with this optimizer applying what others commit.

        Args:
            apply: what the training loop does after a commit, if that is more than the inner optimizer's step
                (clipping, a scheduler); it must step the inner optimizer, `optim`, itself.
        """
        cast("Manager", self.manager).run_out(self._apply if apply is None else apply)

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002 - they are for others
        """For torch's `Join`: a replica that is out of data applies what the others commit."""
        return joining_of(self.manager).add(self, self._apply)

    def _join_manager(self) -> object:
        return self.manager

    def _apply(self) -> None:
        """Run the inner step, with the learning rates that the step's weight calls for."""
        if self.lr_scaling is None:
            self._apply_inner()
            return
        self.lr_factor = self.lr_scaling.factor(self.manager.last_commit_weight)
        with learning_rates_times(self.optim, self.lr_factor):
            self._apply_inner()

    def _apply_inner(self) -> None:
        """Run the inner step; with a GradScaler in charge, as the scaler itself would have done."""
        found_inf = cast("torch.Tensor | None", self.__dict__.get("found_inf"))
        grad_scale = cast("torch.Tensor | None", self.__dict__.get("grad_scale"))
        if found_inf is None:
            self.optim.step()
        elif getattr(self.optim, "_step_supports_amp_scaling", False):
            inner = cast("Any", self.optim)
            inner.grad_scale, inner.found_inf = grad_scale, found_inf
            try:
                self.optim.step()
            finally:
                del inner.grad_scale, inner.found_inf
        elif not found_inf.item():
            if grad_scale is not None:
                self._unscale(grad_scale)
            self.optim.step()

    def _unscale(self, grad_scale: torch.Tensor) -> None:
        inverse = grad_scale.double().reciprocal().float()  # as GradScaler.unscale_ does
        with torch.no_grad():
            for group in self.optim.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this wrapper, or of the inner optimizer, returned."""
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optim.add_param_group(param_group)


Optimizer = OptimizerWrapper
