"""`Fabric(strategy="fault_tolerant")`: Lightning Fabric's DDP strategy over replica groups that may fail.

How it works. `fabric.setup` builds the Manager and wraps each model. Fabric has no loop and no hooks: a step begins
where the loop says `fabric.strategy.open_step()`, or else at the first forward with gradients after the last
`optimizer.step`. There the quorum is opened (`ft_core.loop.window`), and a replica that is new or behind takes over the
others' state. The step ends with a vote at `optimizer.step`, or at `fabric.clip_gradients` before it: gradients are
only final once it is known whose were counted. A veto leaves parameters, optimizer and scaler as they were and sets
`fabric.strategy.step_vetoed`.

    fabric = Fabric(strategy="fault_tolerant", accelerator="cpu", devices=3)
    fabric.launch()                                     # without a launcher: three replica groups run what follows
    model, optimizer = fabric.setup(model, optimizer)
    strategy = fabric.strategy
    progress = Progress()                               # any object with state_dict and load_state_dict
    strategy.register("progress", progress)             # a newcomer takes it over, too
    while progress.step < 1000:
        strategy.open_step()                            # progress.step is the others' from here on
        if strategy.stopped:                            # another replica has called finish()
            break
        x, y = batch(progress.step, strategy.replica_group)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        if not strategy.step_vetoed:
            progress.step += 1
    strategy.finish()

What Fabric's own functions do: `all_reduce`, `all_gather`, `barrier` and `broadcast` stay inside the group; `save`
writes on the leader only, and puts the file in its place when every replica is known to hold its step;
`setup_dataloaders` divides the data among the ranks of all groups, so evaluation data, which every group reads in full,
needs `use_distributed_sampler=False`.

Invariants: nothing is voted for twice in a step; the optimizer is touched only after a commit.
Threads: the training thread; the Manager has its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ft_core.errors import ConfigError, UsageError
from ft_core.loop.division import Division
from ft_core.loop.position import Position
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.run import TrainingRun
from ft_core.loop.tools import check_arguments
from ft_core.settings import Environment
from ft_lightning import _compat
from ft_lightning._compat import writers
from ft_lightning.arguments import Arguments, check_fabric, check_kwargs
from ft_lightning.launcher import StartsGroups
from ft_lightning.names import NAME
from ft_lightning.placement import BY_DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from ft_core import Manager
    from ft_core.loop.model import WindowedModel

ENDED = "fabric.strategy.finish() was called"
ALTERNATING = (
    "with strategy='fault_tolerant' a step ends when the first optimizer steps, and the same one has to be the first "
    "in every step, unless the loop says where its batches begin. For models that are trained in turns (GANs), call "
    "fabric.strategy.open_step() once at the beginning of each batch: every optimizer.step() after a backward is then "
    "agreed on"
)


class Vetoed(Exception):
    """Unwinds an optimizer's closure when the step was not committed."""


class FabricFaultTolerance(StartsGroups):
    """The fault tolerance of Fabric's DDPStrategy; `strategy_class` mixes the two for one of Fabric's two class trees.

    Args:
        min_replicas: smallest quorum; None: FT_MIN_REPLICAS, else 1.
        timeout: how long a collective waits for a silent peer, as a timedelta or in seconds; None: FT_TIMEOUT_S, else
            60 s.
        lighthouse: host:port, or two with a comma between; None: FT_LIGHTHOUSE, or an embedded one where `launch`
            starts the replica groups itself.
        manager_kwargs: further arguments of `ft_core.Manager`, for example {"max_retries": 100}.
        ftrun_options: options of ftrun for a run without a launcher, for example ["--standby", "1"].
        find_unused_parameters: False: all parameters are used in every step (their users are not counted; one that is
            unused all the same gets zeros). True: they may also be frozen for a time. None: neither is said.
        broadcast_buffers: buffers (BatchNorm's statistics) follow the first participant at each commit.
        bucket_cap_mb: size of the gradient buckets; None: torch's.
        process_group_backend: of the group's own process group; None: Lightning's choice.
        from_scratch: whether the job may begin again at step 0 if every group that held its state is lost and no
            checkpoint is loaded; otherwise it ends. None: FT_FROM_SCRATCH, else no.
        kwargs: further arguments of Fabric's DDPStrategy. Refused: start_method, cluster_environment.

    Raises:
        ConfigError: an argument cannot work; names it, the value and what to do.
    """

    _tree = "lightning.fabric"

    def __init__(
        self,
        min_replicas: int | None = None,
        timeout: timedelta | float | None = None,
        lighthouse: str | None = None,
        manager_kwargs: dict[str, Any] | None = None,
        ftrun_options: list[str] | None = None,
        find_unused_parameters: bool | None = None,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        process_group_backend: str | None = None,
        *,
        from_scratch: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._arguments = Arguments(
            min_replicas, timeout, lighthouse, manager_kwargs or {}, ftrun_options or (), from_scratch
        )
        self._arguments.check()
        check_fabric(kwargs)
        kwargs.update({} if find_unused_parameters is None else {"find_unused_parameters": find_unused_parameters})
        kwargs.update({} if broadcast_buffers else {"broadcast_buffers": False})
        kwargs.update({} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb})
        check_kwargs(kwargs, type(self))
        super().__init__(process_group_backend=process_group_backend, **kwargs)  # type: ignore[call-arg]
        check_arguments(self._ddp_kwargs)  # type: ignore[attr-defined]
        self.step_vetoed = False
        """The last step was not committed: nothing has changed, and its samples are lost."""
        self._knows_stop = False
        """The script had the opportunity to see that all have agreed to stop."""
        self._run: TrainingRun | None = None
        """The run that is under way, or was last; from the first `fabric.setup` on."""
        self._modules: list[WindowedModel] = []
        self._optimizers: list[Optimizer] = []
        self._registered: dict[str, Any] = {}
        self._first: Optimizer | None = None
        """The optimizer that is the first to step, where the loop does not say."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group {self.replica_group} of {self.num_replica_groups}, {self.manager!r})"

    # ------------------------------------------------------------ groups

    @property
    def manager(self) -> Manager | None:
        """The Manager of this rank, from the first `fabric.setup` to `finish`."""
        return None if self._run is None or self._run.window.ended else self._run.window.manager

    @property
    def stopped(self) -> bool:
        """All replicas have agreed to stop, because one has called `finish`: nothing is committed any more."""
        return self._run is not None and self._run.window.stopped

    @property
    def is_leader(self) -> bool:
        """This rank writes what is written once per job: rank 0 of the first group in the quorum."""
        if not self.is_global_zero:  # type: ignore[attr-defined]
            return False
        return self.replica_group == 0 if self._run is None else self._run.leadership.leads

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The data is divided among all ranks of all groups."""
        inside: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        ranks = inside["num_replicas"]
        return {
            "num_replicas": ranks * self.num_replica_groups,
            "rank": self.replica_group * ranks + inside["rank"],
        }

    # ------------------------------------------------------------ set-up and end

    def register(self, name: str, obj: Any) -> None:
        """Let a replica that heals take over this object's state, too. The same names on all replicas.

        Args:
            name: free to choose.
            obj: has `state_dict()` (numbers, texts, tensors, in dicts and lists) and `load_state_dict(state)`.

        Raises:
            ConfigError: it lacks one of them, or the name is taken.
            UsageError: after the first step.
        """
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(obj, method, None)):
                raise ConfigError(f"register({name!r}): {type(obj).__name__} has no {method}()")
        if name in self._registered:
            raise ConfigError(f"register({name!r}): the name is taken by a {type(self._registered[name]).__name__}")
        if self.manager is not None and self.manager.quorum_id:
            raise UsageError(f"register({name!r}) after the first step: newcomers take over the state as it is there")
        self._registered[name] = obj

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a model; the first one brings the Manager with it.

        Raises:
            SystemExit: (0) the others have trained to the end, and called `finish`.
        """
        if self._run is None or self._run.window.ended:
            place = ReplicaGroup(
                self.replica_group, self.num_replica_groups, self.world_size, self.global_rank,  # type: ignore[attr-defined]
                lighthouse=str(self._arguments.lighthouse or Environment.read(os.environ).lighthouse or ""),
            )  # fmt: skip
            self._run = TrainingRun(
                place, self._arguments.for_manager(), self._load, self._state,
                division=Division(place.total, _cannot_divide), by_device=BY_DEVICE, ended=ENDED,
            )  # fmt: skip
            self._knows_stop = False
            self._modules, self._optimizers, self._first = [], [], None
        wrapped: WindowedModel = self._run.wrap(module, self._ddp_kwargs)  # type: ignore[attr-defined]
        self._modules.append(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Remember an optimizer, whose state newcomers take over.

        Raises:
            ConfigError: LBFGS, which evaluates the model any number of times in a step.
        """
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS cannot be used with strategy='fault_tolerant': it evaluates the model a different number of "
                "times on each replica; use a first-order optimizer"
            )
        self._optimizers.append(optimizer)
        return optimizer

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *rest: Any) -> Any:
        """Set up a model and its optimizers; a scheduler that is set up with them is registered."""
        for scheduler in rest:
            if scheduler is not None:
                self.register(f"lr_scheduler_{len(self._registered)}", scheduler)
        return super().setup_module_and_optimizers(module, optimizers, *rest)  # type: ignore[misc]

    def finish(self) -> None:
        """Training is over: all replicas stop after the same step, and the run is closed to latecomers. Idempotent.

        A replica that wanted to go on sees `stopped` in its next step.
        """
        if self._run is not None:
            self._run.end()

    def by_itself(self, reason: str) -> AbstractContextManager[None]:
        """Inside, this replica does something alone, as a validation: the others wait at their next step, and nothing
        is communicated with them."""
        if self._run is None:
            raise UsageError("by_itself() before fabric.setup(model, optimizer)")
        return self._run.window.by_itself(reason)

    # ------------------------------------------------------------ state

    def _state(self) -> dict[str, Any]:
        return {
            "modules": [wrapped.module.state_dict() for wrapped in self._modules],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "precision": self.precision.state_dict(),  # type: ignore[attr-defined]
            "registered": {name: obj.state_dict() for name, obj in self._registered.items()},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """The Manager's load function, called inside `open_step`."""
        if self._run is not None:
            self._run.leadership.forget()
        ours = set(self._registered)
        if set(state["registered"]) != ours:
            raise ConfigError(f"registered here: {sorted(ours)}; on the others: {sorted(state['registered'])}")
        for wrapped, part in zip(self._modules, state["modules"], strict=True):
            wrapped.module.load_state_dict(part)
        for optimizer, part in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        self.precision.load_state_dict(state["precision"])  # type: ignore[attr-defined]
        for name, obj in self._registered.items():
            obj.load_state_dict(state["registered"][name])

    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """`fabric.save`: the leader writes, the others go on and wait for it at the next step.

        The file is in its place once every replica is known to hold the step that it is of: after the next step, at
        `finish`, or at once where there is one replica. A new leader writes what the former one may not have written.
        After `finish` each group writes it.
        """
        save = super().save_checkpoint  # type: ignore[misc]
        if self._run is None:
            save(path, *args, **kwargs)
        else:
            one_file = writers.writes_one_file(self.checkpoint_io, path)  # type: ignore[attr-defined]
            self._run.save_file(path, lambda there: save(there, *args, **kwargs), beside=one_file)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """`fabric.load`: what this replica has saved is there."""
        if self._run is not None:
            self._run.leadership.publisher.publish_all()
        return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------ a step

    def open_step(self, position: int | None = None) -> int | None:
        """Open the quorum of the next step, unless that is done. Call it before the step's data is chosen.

        A replica that is new or behind has the others' state when this returns, registered objects included. A loop
        that calls it once says with it where each of its steps begins: then optimizers may take turns, each
        `optimizer.step()` after a backward being voted on.

        Args:
            position: where this replica is in its data, as a number that grows (of the batch that comes next). None: it
                follows from registered state.

        Returns:
            The furthest position of all members, which is where to go on: one of them may have been through a batch
            that was vetoed, and another not. None if no position was given.

        Raises:
            UsageError: no model is set up, or it goes on after all have agreed to stop.
            ConfigError: `position` is no whole number from 0 on.
            QuorumTimeoutError, RefusedError: no quorum could be had.
            SystemExit: (0) this replica was asked to drain and has left, or the others have called `finish`.
        """
        run = self._run
        if run is None or run.window.ended:
            raise UsageError("open_step() before fabric.setup(model, optimizer), or after finish()")
        given: object = position
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
            raise ConfigError(f"open_step(position={position!r}) must be a whole number, 0 or more")
        window = run.window
        if window.stopped and self._knows_stop:
            raise UsageError(
                "open_step() after another replica has called finish(), and all have agreed to stop: leave the loop "
                "where fabric.strategy.stopped is True"
            )
        window.opened_by_hand, self._knows_stop = True, window.stopped
        mine = None if position is None else Position(0, position)
        window.before_batch(mine)
        return None if mine is None else mine.code

    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """Vote, then clip. A step that was vetoed has no gradients: nothing is clipped, the norm is zero."""
        if not self._committed(optimizer):
            return torch.zeros((), device=self.root_device)  # type: ignore[attr-defined]
        norm: Tensor = super().clip_gradients_norm(module, optimizer, *args, **kwargs)  # type: ignore[misc]
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Vote, then clip, as above."""
        if self._committed(optimizer):
            super().clip_gradients_value(module, optimizer, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Vote, and step if all members commit; a closure is run first. None if the step was vetoed."""
        if self._run is None or self._run.window.ended:
            raise UsageError("optimizer.step() after fabric.strategy.finish()")
        closure: Callable[[], Any] | None = kwargs.get("closure")
        voted = False

        def agreed() -> Any:
            nonlocal voted
            assert closure is not None
            loss = closure()
            if not self._committed(optimizer):
                raise Vetoed
            voted = True
            return loss

        if closure is not None:
            kwargs["closure"] = agreed
        elif not self._committed(optimizer):
            self._keep_scale()
            return None
        else:
            voted = True
        try:
            return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]
        except Vetoed:
            return None
        except BaseException as error:
            if voted:  # the others have the new state, this one may have half of it
                self._run.window.torn(error)
            raise

    def _committed(self, optimizer: Optimizer) -> bool:
        """The verdict of this step; the first who asks for it votes."""
        window = self._run.window if self._run is not None else None
        if window is None or window.ended or not (window.is_open or window.voted):
            raise UsageError("the step has no gradients: call the model that fabric.setup() returned before this")
        if not (window.opened_by_hand or window.voted):
            if self._first is not None and optimizer is not self._first:
                names = f"{type(optimizer).__name__} steps first where {type(self._first).__name__} did"
                raise ConfigError(f"{names}: {ALTERNATING}")
            self._first = optimizer
        self.step_vetoed = True  # also if the vote raises
        self.step_vetoed = not window.vote()
        return not self.step_vetoed

    def _keep_scale(self) -> None:
        """A vetoed step leaves the GradScaler's scale alone; what it knows of these gradients it has to forget."""
        scaler = getattr(self.precision, "scaler", None)  # type: ignore[attr-defined]
        if scaler is not None and scaler.is_enabled():
            scaler.update(scaler.get_scale())


def _cannot_divide(_: int) -> bool:
    """Fabric divided its data when the loaders were set up: it is not divided anew."""
    return False


_classes: dict[str, type] = {}


def strategy_class(tree: str = "lightning.fabric") -> type:
    """FaultTolerantStrategy for `lightning.fabric` or `lightning_fabric`."""
    if tree not in _classes:
        base = _compat.part(tree, "strategies.DDPStrategy")
        _classes[tree] = type("FaultTolerantStrategy", (FabricFaultTolerance, base), {
            "_tree": tree, "__doc__": FabricFaultTolerance.__doc__, "__module__": "ft_lightning.fabric",
            "register_strategies": classmethod(
                lambda cls, registry: registry.register(NAME, cls, override=True)
            ),
        })  # fmt: skip
    return _classes[tree]
