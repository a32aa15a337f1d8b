"""`TrainingLoop`: fault tolerance for a training loop of one's own, with what Lightning and Accelerate users have.

How it works. One object composed of the kit's parts: `open` starts each batch (quorum, heal, the position that all
go on at), `vote` ends it, `save` writes on one replica, `end` stops all together. The loop in full:

    loop = TrainingLoop({"model": model, "optimizer": optimizer, "progress": progress})
    model = loop.wrap(model)
    while (batch := loop.open(progress.batch)) is not None and batch < BATCHES:
        progress.batch = batch
        x, y = data(batch, loop.group, loop.groups)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if loop.vote():
            optimizer.step()
            progress.batch += 1
            if progress.batch % 100 == 0:
                loop.save(f"step_{progress.batch}.pt", lambda path: torch.save(model.module.state_dict(), path))
    loop.end()

Invariant: `optimizer.step()` is called after a vote that said so, and only then. Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim import Optimizer

from ft_core.errors import ConfigError, UsageError
from ft_core.loop.division import Division
from ft_core.loop.job_checkpoint import JobState, from_first, latest
from ft_core.loop.position import Position
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.run import TrainingRun
from ft_core.reduction.ddp_arguments import check_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from ft_core.ddp import DistributedDataParallel
    from ft_core.manager import Manager

ENDED = "loop.end() was called"
POSITION_MAX = 1 << 62


class Stateful(Protocol):
    """What has state that all replicas must hold alike: models, optimizers, schedulers, objects of the script's own."""

    def state_dict(self) -> Any:
        """All of it."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take it over from another replica."""


class TrainingLoop:
    """One training run of a script's own loop, on one rank.

    Args:
        state: by name, everything that must be equal on all replicas. A replica that is new or behind loads all of it
            inside `open`.
        on_leading: called with True when this replica begins to lead, with False when it no longer does (loggers).
        place: of this process in the job; None: as ftrun or torchrun says it in the environment. In a group of several
            ranks, call `torch.distributed.init_process_group` first.
        manager: further arguments of `ft_core.Manager`, as `min_replica_size` or `timeout`.

    Raises:
        ConfigError: something in `state` has no state_dict and load_state_dict, or an argument cannot work.
    """

    def __init__(
        self,
        state: Mapping[str, Stateful],
        *,
        on_leading: Callable[[bool], None] | None = None,
        place: ReplicaGroup | None = None,
        **manager: Any,
    ) -> None:
        for name, item in state.items():
            if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
                raise ConfigError(
                    f"state[{name!r}]={type(item).__name__} has no state_dict() and load_state_dict(): wrap it in an "
                    "object that has both"
                )
        for name in ("pg", "load_state_dict", "state_dict", "rank", "world_size", "use_async_quorum", "warm_up"):
            if name in manager:
                raise ConfigError(f"TrainingLoop({name}=...) cannot be given: the loop sets it")
        self._state = dict(state)
        self._wrapped: list[Any] = []
        self._owners_known = False
        place = place or ReplicaGroup.of()
        self._run = TrainingRun(
            place, manager, self._load, self._save, division=Division(place.total, lambda _: False),
            changed=on_leading, ended=ENDED,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"TrainingLoop({self._run.window!r})"

    # ------------------------------------------------------------ what it is in

    @property
    def manager(self) -> Manager | None:
        """The Manager of this rank; None before `wrap`."""
        return self._run.manager

    @property
    def group(self) -> int:
        """Number of this replica group, from 0: its share of the data."""
        return self._run.window.group

    @property
    def groups(self) -> int:
        """Replica groups of the complete job: the data is divided by them."""
        return self._run.window.groups

    @property
    def committed_steps(self) -> int:
        """Optimizer steps of this run, on all replicas alike."""
        return 0 if self.manager is None else self.manager.current_step() - self._run.first_step

    @property
    def leads(self) -> bool:
        """This replica does what one does for all; it may change at each `open`."""
        return self._run.leadership.leads and self._run.window.rank == 0

    # ------------------------------------------------------------ the loop

    def wrap(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        """The model as it is trained: gradients are averaged over all replicas. Before the first `open`.

        Args:
            model: whose parameters and buffers are in `state`.
            options: of torch's DistributedDataParallel.

        Raises:
            ConfigError: an option cannot work here, or the model is wrapped already.
            SystemExit: (0) the others have finished.
            RunLostError: the others were in a later run of this script, and all of them have died.
        """
        check_arguments(options)
        wrapped: DistributedDataParallel = self._run.wrap(model, options)
        self._wrapped.append(wrapped)  # the window keeps none alive
        return wrapped

    def replicate(self, *modules: nn.Module, bucket_cap_mb: float | None = None) -> None:
        """Average the gradients of a model that FSDP2 shards inside this group over the groups; before `open`.

        Args:
            modules: the roots, each a module on which `fully_shard` was called last; they are trained as they are.
            bucket_cap_mb: MiB of local shards per bucket; None: 4.

        Raises:
            ConfigError: as `ft_core.fsdp.replicate`.
            SystemExit, RunLostError: as `wrap`.
        """
        self._wrapped.append(self._run.wrap_sharded(modules, bucket_cap_mb))

    def open(self, position: int = 0) -> int | None:
        """Start a batch: every replica that is alive does. Call it before the batch is chosen.

        Args:
            position: where this replica is in its data, as a number that grows (of the batch that comes next).

        Returns:
            The furthest position of all replicas: the batch to train on. None: all have agreed to end.

        Raises:
            ConfigError: `position` is no whole number from 0 to 2^62.
            UsageError: before `wrap`, or after `end`; or an optimizer of the state has parameters of other models.
            QuorumTimeoutError, RefusedError: no quorum could be had.
            SystemExit: (0) this replica was asked to drain and has left, or the others have finished.
        """
        given: object = position
        window = self._run.window
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= POSITION_MAX:
            raise ConfigError(f"open({position!r}): the position must be a whole number from 0 to 2^62")
        if not (window.models or self._run.passed_over):
            raise UsageError("loop.open() before loop.wrap(model), or loop.replicate(model) of a sharded one")
        if not self._owners_known:
            self._check_owners()
        if window.ended:
            raise UsageError(f"loop.open(), but {window.ended}")
        window.opened_by_hand = True
        mine = Position(0, position)
        window.before_batch(mine)
        return None if window.stopped else mine.code

    def vote(self) -> bool:
        """Whether the optimizer step is everybody's; after backward (and clipping, of `settled` gradients).

        Returns:
            False: a replica was lost or reported an error; nothing has changed, gradients are dropped, and the batch
            can be tried again.

        Raises:
            UsageError: after `end`.
        """
        return self._run.window.vote()

    def settle(self) -> None:
        """Make the gradients final, before they are clipped or unscaled."""
        self._run.window.settle_gradients()

    def by_itself(self, reason: str) -> AbstractContextManager[None]:
        """Inside, this replica does something alone, as a validation: the others wait at their next step."""
        return self._run.window.by_itself(reason)

    # ------------------------------------------------------------ files, and the end

    def save(self, path: Any, write: Callable[[Any], object]) -> None:
        """Write a checkpoint on the leader. Every replica calls it, at the same step.

        The file is in its place once every replica is known to hold its step: after the next step, at `end`, or at
        once where there is one replica. A new leader writes what the former one may not have written. After `end` each
        group writes it, and it is there when this returns.

        Args:
            path: of the file, on a local or shared file system; its folder is made.
            write: writes it to the path that it is given; called on the first rank of the leading group.
        """
        self._run.save_file(path, write)

    def save_distributed(self, path: Any, *, asynchronous: bool = False) -> None:
        """Write the loop's state with torch.distributed.checkpoint: every rank of the leading group its part.

        Every replica calls it, at the same step. The folder is in its place once every replica is known to hold its
        step, and the file `latest` beside it names it then. Any number of ranks can load it, and plain torch.

        Args:
            path: of the folder, on a file system that all ranks of the group share.
            asynchronous: copy the state, and train on while it is written. Should the leader die meanwhile, that
                checkpoint is missing.

        Raises:
            ConfigError: the folder is called "latest", or an optimizer is not of the models in the state.
        """
        self._run.save_job(path, self._job_state(), asynchronous=asynchronous)

    def load_distributed(self, path: Any) -> None:
        """Load what `save_distributed` wrote: all ranks of a group together, after `wrap`, before the first `open`.

        Args:
            path: of the folder.

        Raises:
            ConfigError: there is none, or it does not fit.
        """
        self._run.load_job(path, self._job_state())

    def resume(self, folder: Any) -> str | None:
        """Load the newest checkpoint in a folder, if there is one; as `load_distributed`.

        The first rank says which one that is: the others train on, and may replace it meanwhile.

        Args:
            folder: where `save_distributed` has put its folders.

        Returns:
            The path of what was loaded; None: there is none.
        """
        window = self._run.window
        found = from_first(latest(folder) if window.rank == 0 else None, window.ranks)
        if found is not None:
            self.load_distributed(found)
        return found

    def _job_state(self) -> JobState:
        return JobState(self._state)

    def end(self) -> None:
        """All replicas stop after the same step, then this one leaves. One that wanted to go on finds None in `open`.

        Idempotent.
        """
        self._run.end()

    # ------------------------------------------------------------ state

    def _check_owners(self) -> None:
        """Refuse parameters whose gradients nobody averages: the groups would part without a word."""
        models = self._run.window.models
        known = {id(parameter) for model in models for parameter in model.parameters()}
        names = {
            id(parameter): f"{key}.{name}" for key, item in self._state.items() if isinstance(item, nn.Module)
            for name, parameter in item.named_parameters()
        }  # fmt: skip
        for key, item in self._state.items() if models else ():
            for group in item.param_groups if isinstance(item, Optimizer) else ():
                for one in group["params"]:
                    if one.requires_grad and id(one) not in known:
                        what = names.get(id(one), f"a tensor {list(one.shape)}")
                        raise UsageError(
                            f"state[{key!r}] trains {what}, which no model has that was given to loop.wrap or "
                            "loop.replicate: nobody would average its gradient over the groups. Pass that model, too "
                            "(all roots of a sharded one: loop.replicate(encoder, decoder)), or freeze it"
                        )
        self._owners_known = True

    def _save(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self._state.items()}

    def _load(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self._state):
            raise ConfigError(f"TrainingLoop(state=...) has {sorted(self._state)} here, {sorted(state)} on the others")
        self._run.leadership.forget()
        for name, item in self._state.items():
            item.load_state_dict(state[name])
