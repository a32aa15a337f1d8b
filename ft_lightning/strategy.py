"""`Trainer(strategy="fault_tolerant")`: Lightning's DDP strategy over replica groups that may fail.

How it works. Inside its group this is DDPStrategy. Across the groups a `ft_core.Manager` drives the steps:
`on_train_batch_start` opens the quorum (and, on a newcomer or a replica that fell behind, adopts the others' whole run:
`_compat.restore`, then the right batch); the model is wrapped in ft_core's DistributedDataParallel, so gradients are
averaged over the groups while backward runs; the closure that Lightning hands to the optimizer votes at its end, before
gradients are clipped. A veto unwinds the closure with a private exception: parameters, optimizer, scaler, counters and
schedulers stay as they were.

Where things stand between two batches is the same on every replica: that is the state that newcomers adopt.

Threads: the training thread; the Manager has its own.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ft_core import DistributedDataParallel, Manager, ProcessGroupGloo
from ft_core.errors import ConfigError
from ft_lightning import _compat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger("ft_lightning")
NAME = "fault_tolerant"


class Vetoed(Exception):
    """Unwinds the optimizer's closure when the step was not committed."""


class FaultTolerance:
    """What is added to DDPStrategy; `strategy_class` mixes the two for one of Lightning's two class trees.

    Args:
        min_replicas: smallest quorum; None: FT_MIN_REPLICAS, else 1.
        timeout: how long a collective waits for a silent peer; None: FT_TIMEOUT_S, else 60 s.
        manager_kwargs: further arguments of `ft_core.Manager`.
        kwargs: arguments of Lightning's DDPStrategy.
    """

    _tree = "lightning.pytorch"

    def __init__(
        self,
        min_replicas: int | None = None,
        timeout: timedelta | None = None,
        manager_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._min_replicas = min_replicas
        self._ft_timeout = timeout
        self._manager_kwargs = dict(manager_kwargs or {})
        self.manager: Manager | None = None
        """Of this rank, while `fit` runs."""
        self._trainer: Any = None
        self._open = False
        """A quorum was opened for the accumulation window that is under way."""
        self._adopted: tuple[Any, int] | None = None
        """(batch, index) that replace what was fetched before this replica adopted the others' position."""
        self.step_vetoed = False
        """The last optimizer step was not committed."""
        self._pause: Any = None

    # ------------------------------------------------------------ groups

    @property
    def replica_group(self) -> int:
        """Number of this replica group in the job."""
        return int(os.environ.get("FT_REPLICA_GROUP", "0"))

    @property
    def num_replica_groups(self) -> int:
        """Groups of the job."""
        return int(os.environ.get("FT_NUM_REPLICA_GROUPS", "1"))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Training data is divided among all ranks of all groups, evaluation data inside the group."""
        inside: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        if self._trainer is None or not self._trainer.training:
            return inside
        ranks = inside["num_replicas"]
        return {
            "num_replicas": ranks * self.num_replica_groups,
            "rank": self.replica_group * ranks + inside["rank"],
        }

    # ------------------------------------------------------------ set-up and end

    def connect(self, model: Any) -> None:
        """Called before everything else of a run."""
        super().connect(model)  # type: ignore[misc]
        self._trainer = model._trainer if model._trainer is not None else self._trainer

    def setup(self, trainer: Any) -> None:
        """Build the Manager before the model is wrapped; only `fit` needs one."""
        self._trainer = trainer
        if trainer.state.fn == "fit":
            self.manager = Manager(
                pg=ProcessGroupGloo(),
                load_state_dict=self._adopt,
                state_dict=lambda: _compat.dump(trainer),
                min_replica_size=self._min_replicas,
                timeout=self._ft_timeout,
                use_async_quorum=False,  # a replica that is behind must know the others' position before it trains
                rank=self.global_rank,  # type: ignore[attr-defined]
                world_size=self.world_size,  # type: ignore[attr-defined]
                **self._manager_kwargs,
            )
        super().setup(trainer)  # type: ignore[misc]
        if self.manager is not None:
            self._guard_schedulers(trainer.lightning_module)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.manager is None:
            return super()._setup_model(model)  # type: ignore[misc,no-any-return]
        return DistributedDataParallel(self.manager, model, **self._ddp_kwargs)  # type: ignore[attr-defined]

    def _register_ddp_hooks(self) -> None:
        """Communication is the Manager's."""
        if getattr(self, "_ddp_comm_hook", None) is not None:
            raise ConfigError("ddp_comm_hook cannot be used with strategy='fault_tolerant': the Manager communicates")

    def on_train_end(self) -> None:
        """Training is over: the room closes behind us."""
        if self.manager is not None:
            self.manager.leave("finished", finished=True)

    def teardown(self) -> None:
        """Leave, if `fit` did not come to its end, and stop all threads."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.shutdown()
        super().teardown()  # type: ignore[misc]

    # ------------------------------------------------------------ a batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Open the quorum of this accumulation window; adopt the others' run if this replica is new or behind."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        self._adopted = None
        if self.manager is None or self._open:
            return
        self._open = True
        self.manager.start_quorum()

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """The Manager's load function, called inside `start_quorum`: a peer's state at this very point."""
        trainer = self._trainer
        assert self.manager is not None
        _compat.restore(trainer, state)
        with self.manager.pause("fetching the data that follows", max_s=600.0):
            batch = _compat.refetch(trainer)
        self._adopted = batch, trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's training_step, with the right batch."""
        if self._adopted is not None:
            batch, index = self._adopted
            args = (batch, *((index,) if len(args) > 1 else ()), *args[2:])
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (forward and backward), vote, and step if all members commit."""
        if self.manager is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        result: list[Any] = []

        def agreed() -> Any:
            result[:] = [closure()]
            self._vote()
            return result[0]

        try:
            output = super().optimizer_step(optimizer, agreed, model, **kwargs)  # type: ignore[misc]
        except Vetoed:
            self.step_vetoed = True
            _compat.uncount_step(self._trainer)
            return result[0]
        except BaseException as error:
            if not self._open:  # after the vote: the others have the new state, this one may have half of it
                self.manager.report_torn_state(error)
            raise
        self.step_vetoed = False
        return output

    def _vote(self) -> None:
        assert self.manager is not None
        self._open = False
        if not self.manager.should_commit():
            raise Vetoed
        self._average_inside()

    def _average_inside(self) -> None:
        """Gradients of a group's ranks: averaged over the groups by now, each on its own ring."""
        ranks = self.world_size  # type: ignore[attr-defined]
        if ranks > 1:
            for parameter in self.model.parameters():  # type: ignore[attr-defined]
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad.div_(ranks)

    def _guard_schedulers(self, module: Any) -> None:
        """A vetoed step does not advance schedulers that follow steps.

        Lightning calls the hook on the module for every scheduler that is due; the instance's attribute wins.
        """
        hook = module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            configs = self.lr_scheduler_configs  # type: ignore[attr-defined]
            config = next(c for c in configs if c.scheduler is scheduler)
            if not (self.step_vetoed and config.interval == "step"):
                hook(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step

    # ------------------------------------------------------------ validation

    def on_validation_start(self) -> None:
        """The others wait for a replica that validates."""
        super().on_validation_start()  # type: ignore[misc]
        if self.manager is not None and self._trainer.validating:
            self._pause = self.manager.pause("validation", max_s=3600.0)
            self._pause.__enter__()

    def on_validation_end(self) -> None:
        """Back."""
        if self._pause is not None:
            pause, self._pause = self._pause, None
            pause.__exit__(None, None, None)
        super().on_validation_end()  # type: ignore[misc]


_classes: dict[str, type] = {}


def strategy_class(tree: str = "lightning.pytorch") -> type:
    """FaultTolerantStrategy for `lightning.pytorch` or `pytorch_lightning`."""
    if tree not in _classes:
        base = _compat.part(tree, "strategies.DDPStrategy")
        _classes[tree] = type("FaultTolerantStrategy", (FaultTolerance, base), {
            "_tree": tree, "strategy_name": NAME, "__doc__": FaultTolerance.__doc__, "__module__": __name__,
            "register_strategies": classmethod(lambda cls, registry: registry.register(NAME, cls)),
        })  # fmt: skip
    return _classes[tree]
