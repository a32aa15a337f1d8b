"""Optimizer steps of every mode of optimization, put to the vote: a part of the strategy.

How it works. Lightning hands the strategy an optimizer and a closure (automatic: training_step and backward; manual:
whatever the user passed, usually nothing). The closure runs, then the replicas vote, then gradients are unscaled,
clipped and the optimizer steps. A veto unwinds the closure with a private exception, so parameters, optimizer, scaler,
`global_step` and schedulers that follow steps stay as they were; gradients are dropped.

There is one quorum per batch, or per accumulation window, and any number of votes in it:
- An optimizer step after a backward is voted on. Further optimizers that step on the same gradients (one backward, two
  optimizers) share that vote.
- An optimizer step without a backward before it (training_step returned None) reduces the gradients that are there:
  a replica without any contributes zeros.
- Gradients that were reduced but that no step followed in their batch (manual accumulation) are voted on before the
  next batch, so that newcomers get in.
- If the quorum broke in a batch, backward communicates no more until the next batch, and its steps are vetoed here.
- A replica whose position is behind the others' (they vetoed a batch that it had not begun) goes through its batches as
  through one whose quorum broke, until it is where they are; the quorum it has opened waits for that.

All replicas must make the same optimizer steps in the same order: which ones may depend on the batch index, not on the
data.

Invariants: nothing changes parameters between a quorum's opening and the first vote; after a vote no attempt of this
batch is in flight. In a group of several ranks all of them make the same calls in the same order.
Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ft_core.errors import ConfigError
from ft_core.optim import learning_rates_times
from ft_lightning import _compat
from ft_lightning._compat import position as _position
from ft_lightning.trainer.elastic import LeftEpoch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core import Manager
    from ft_core.loop.window import StepWindow


class Vetoed(Exception):
    """Unwinds the optimizer's closure when the step was not committed."""


class OptimizerSteps:
    """The part of the strategy that votes; mixed in before Lightning's strategy.

    What it needs of the strategy: `manager`, `trained_model`, `crosses`, `take_part`, `lightning_module`, `world_size`,
    `root_device`, `precision_plugin`, `optimizers`, `lr_scheduler_configs`, `_takeover`, `_voted` (`Checkpoints`),
    `elastic`, `uneven`, `_data_arguments`.
    """

    manager: Manager | None
    window: StepWindow | None = None
    """While `fit` runs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step_vetoed = False
        """The last optimizer step of this batch was not committed."""
        self.committed_steps = 0
        """Optimizer steps that were made since `fit` began, on this replica."""
        self.vetoed_steps = 0
        """Optimizer steps that were skipped since `fit` began, on this replica."""
        self.lr_factor = 1.0
        """The factor of the learning rates in the last committed step."""
        self._behind = False
        """The quorum that is open belongs to a later batch than this one."""
        self._allowed: Any = None
        """The optimizer that Lightning steps, until it calls its closure; True between its vote and its end."""
        self._guards = contextlib.ExitStack()
        self._rates = contextlib.ExitStack()
        """Open while an optimizer steps with scaled learning rates."""

    # ------------------------------------------------------------ set-up and end

    def start_voting(self) -> None:
        """Put the steps of the optimizers, which are there now, to the vote.

        Raises:
            ConfigError: one of them cannot be put to the vote.
        """
        this: Any = self
        for optimizer in this.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigError(
                    f"LBFGS cannot be used with strategy={this._name!r}: it evaluates the closure several times per "
                    "step, and each evaluation would be a step of its own to agree on; use another optimizer"
                )
        self.committed_steps = self.vetoed_steps = 0
        self.step_vetoed = self._behind = False
        assert self.window is not None
        self.window.trains(weakref.ref(this.trained_model))
        self.window.on_vote = this._voted
        self._guards.close()
        self._guard_schedulers(this.lightning_module)
        self._guard_optimizers(this.lightning_module)

    def end_voting(self) -> None:
        """The run is over, or failed."""
        self._guards.close()

    def _guard_schedulers(self, module: Any) -> None:
        """A vetoed step does not advance schedulers that follow steps.

        Lightning calls the hook on the module for every scheduler that is due; the instance's attribute wins.
        """
        this: Any = self
        hook, before = module.lr_scheduler_step, dict(vars(module))

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            config = next((c for c in this.lr_scheduler_configs if c.scheduler is scheduler), None)
            if self.step_vetoed and config is not None and config.interval == "step":
                _compat.uncount_schedule(module.trainer)
            elif config is not None and config.interval == "epoch" and this.uneven.pending:
                _compat.uncount_schedule(module.trainer)  # their turn comes when all are out of data
            else:
                hook(scheduler, metric)

        def undo() -> None:
            del module.lr_scheduler_step
            if "lr_scheduler_step" in before:
                module.lr_scheduler_step = before["lr_scheduler_step"]

        module.lr_scheduler_step = lr_scheduler_step
        self._guards.callback(undo)

    def _guard_optimizers(self, module: Any) -> None:
        """Refuse optimizers of torch that step without Lightning: nobody would have agreed on it."""
        mine = {id(parameter) for parameter in module.parameters()}

        def check(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if self._allowed is True or optimizer is self._allowed:
                return
            if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
                raise ConfigError(
                    f"{type(optimizer).__name__}.step() was called past Lightning, so the replicas cannot agree on "
                    "it: return the optimizer from configure_optimizers and step what self.optimizers() returns "
                    "(not use_pl_optimizer=False)"
                )

        self._guards.callback(register_optimizer_step_pre_hook(check).remove)

    @contextlib.contextmanager
    def own_steps(self) -> Iterator[None]:
        """Inside, torch may step optimizers to make their state (with rate zero)."""
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before

    # ------------------------------------------------------------ a batch

    def open_quorum(self) -> Manager:
        """Before a batch is fetched: open its quorum, unless an accumulation window is under way."""
        this: Any = self
        manager, window, elastic = self.manager, self.window, this.elastic
        assert manager is not None
        assert window is not None
        self.step_vetoed = False
        this.uneven.batch_begins()
        if elastic.left_step:
            manager.report_error(LeftEpoch("the loop left its epoch in the middle of a step"))
            window.vote()
        elif window.unsettled:
            window.vote()  # no step followed: there is nothing to apply, but their place in the run is agreed on
        elif window.is_open and not self._behind:
            return manager
        elastic.before_quorum()
        if not self._behind:
            window.open(this._takeover.position)
        self._behind = this._takeover.behind
        window.go_through(taking_part=not self._behind)
        elastic.opened(passing=self._behind)
        this.take_part(not self._behind)
        return manager

    def close_quorum(self) -> None:
        """Vote on what no step followed, after the last batch."""
        if self.window is not None and self.window.unsettled:
            self.window.vote()

    @property
    def passes_over(self) -> bool:
        """The quorum that is open belongs to a later batch: the others are not where this replica is."""
        return self._behind

    @property
    def quorum_lost(self) -> bool:
        """The quorum broke in this batch: until the next one, nothing may be communicated with the other groups."""
        return self.window is not None and self.window.silent

    # ------------------------------------------------------------ backward

    def pre_backward(self, closure_loss: Any) -> None:
        """Arm the reduction: with manual optimization there are several backwards after one forward."""
        this: Any = self
        super().pre_backward(closure_loss)  # type: ignore[misc]
        if self.window is None:
            return
        self.window.backward_runs()
        if not this.lightning_module.automatic_optimization:
            sync = this.crosses and not self.window.silent
            this.trained_model.gradient_reducer.before_backward(sync=sync)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run backward; gradients are averaged over all ranks of all groups before any hook sees them."""
        this: Any = self
        factor = this.elastic.loss_factor
        if factor != 1.0:
            closure_loss = closure_loss * factor
        return super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------ the step

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, vote, and step if all members commit. Returns what the closure returned if they don't."""
        this: Any = self
        if self.manager is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        result: list[Any] = []

        def agreed() -> Any:
            if result:
                raise ConfigError(
                    f"{type(optimizer).__name__} evaluates its closure more than once per step, which cannot be used "
                    f"with strategy={this._name!r}: each evaluation would be a step of its own to agree on"
                )
            self._allowed = None
            result.append(closure())
            assert self.window is not None
            if not self.window.vote():
                raise Vetoed
            self._allowed = True
            self._scale_rates(optimizer)
            return self._without_loss(optimizer) if result[0] is None else result[0]

        self._allowed = optimizer
        try:
            output = super().optimizer_step(optimizer, agreed, model, **kwargs)  # type: ignore[misc]
        except Vetoed:
            self.step_vetoed = True
            self.vetoed_steps += 1
            _compat.uncount_step(this.lightning_module.trainer)
            this.elastic.settled()
            return result[0]
        except BaseException as error:
            if self._allowed is True:  # the others have the new state, this replica may have half of it
                assert self.window is not None
                self.window.torn(error)
            raise
        finally:
            self._allowed = None
            self._rates.close()
        self.step_vetoed = False
        self.committed_steps += 1
        this.elastic.settled()
        return output

    def apply_committed(self) -> None:
        """Make the step that the others have committed, to which this replica had nothing to add."""
        this: Any = self
        assert self.window is not None
        self.window.applies()
        _position.step_optimizer(this.lightning_module.trainer)

    def _scale_rates(self, optimizer: Any) -> None:
        """Until the step is made, learning rates are those for what was committed."""
        this: Any = self
        scaling = this._data_arguments.scaling
        if scaling is not None:
            assert self.manager is not None
            self.lr_factor = scaling.factor(self.manager.last_commit_weight)
            self._rates.enter_context(learning_rates_times(optimizer, self.lr_factor))

    def _without_loss(self, optimizer: Any) -> Any:
        """The loss that the closure returns where training_step returned None, but the others have gradients.

        Lightning takes a None to mean that there is nothing to unscale and to step.
        """
        this: Any = self
        if not this.lightning_module.automatic_optimization:
            return None
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            return None
        zero = torch.zeros((), device=this.root_device)
        scaler = getattr(this.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.scale(zero)  # as backward would have: it makes the scale exist
        return zero
