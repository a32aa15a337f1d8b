"""`JobCheckpoint`: the state of a whole job in a folder, as torch.distributed.checkpoint (DCP) writes it.

How it works. The ranks of the leading group write together, each its shards; other groups hold the same. The state of
models and of optimizers is named by parameters (`torch.distributed.checkpoint.state_dict`), so any number of ranks can
load it, and so can plain torch: `{"model": ..., "optimizer": ...}` under the names that the loop's state has.

The folder is written beside its place, renamed when its step is stable, and then the file `latest` beside it is
replaced, which has its name. With an asynchronous write the state is copied first, and training goes on meanwhile; the
folder is complete, and may be put in its place, when that has ended. The next write waits for it: two of them would
communicate on one process group, in an order of their own on each rank, and each holds a copy of the state.

A checkpoint is taken without a trace. torch makes the state of an optimizer that has made no step by a step with zero
gradients, which Adam counts; so such an optimizer is saved without a state. Neither has a parameter any that nobody has
used yet; what a checkpoint has no optimizer state of is loaded without.

Invariants: all ranks of the group make the same calls; `latest` never names a folder that is not whole.
Threads: the training thread; what completes an asynchronous write runs on DCP's thread, on the first rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import warnings
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ft_core.errors import ConfigError
from ft_core.loop.publishing import PlacedFolder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from torch.distributed import ProcessGroup

T = TypeVar("T")
log = logging.getLogger("ft_core")
MANAGER = "ft_manager"
"""The name of the Manager's state in a checkpoint."""
LATEST = "latest"
"""The file beside the checkpoints that has the name of the newest."""


def latest(folder: Any) -> str | None:
    """Path of the newest checkpoint in a folder; None: there is none.

    Args:
        folder: where `TrainingLoop.save_distributed` has put some.
    """
    parent = os.fspath(folder)
    try:
        with open(os.path.join(parent, LATEST), encoding="utf-8") as file:
            return os.path.join(parent, file.read().strip())
    except FileNotFoundError:
        return None


def known_to_all_ranks(error: BaseException) -> bool:
    """It is an error of DCP's, which tells all ranks of the group what has failed on any of them."""
    api: Any = sys.modules.get("torch.distributed.checkpoint.api")
    return api is not None and isinstance(error, api.CheckpointException)


def from_first(value: T, ranks: int) -> T:
    """What the first of the group's ranks calls it with; all of them call it."""
    shared = [value]
    if ranks > 1:
        dist.broadcast_object_list(shared)
    return shared[0]


class JobState:
    """The state of a job, as DCP wants it.

    Args:
        items: by name; models, optimizers of their parameters, and others with state_dict and load_state_dict.

    Raises:
        ConfigError: an optimizer has parameters that no model in `items` has.
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        if MANAGER in items:
            raise ConfigError(f"state[{MANAGER!r}]: the Manager's own state has that name in a checkpoint")
        self._items = dict(items)
        self._models = {name: item for name, item in items.items() if isinstance(item, nn.Module)}
        self._owners = {
            name: self._owner(name, item) for name, item in items.items() if isinstance(item, torch.optim.Optimizer)
        }
        """The module that names an optimizer's parameters."""

    def __repr__(self) -> str:
        return f"JobState({', '.join(self._items)})"

    def _owner(self, name: str, optimizer: torch.optim.Optimizer) -> nn.Module:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        having = {
            key: model for key, model in self._models.items() if any(id(one) in ids for one in model.parameters())
        }
        known = {id(parameter) for model in having.values() for parameter in model.parameters()}
        if not ids <= known:
            raise ConfigError(
                f"state[{name!r}] has parameters of no model in the state: their names are those in the model"
            )
        return next(iter(having.values())) if len(having) == 1 else nn.ModuleDict(having)

    def current(self) -> dict[str, Any]:
        """Names to tensors (this rank's shards, as DTensors) and other values. May communicate inside the group."""
        return self._collected(made=False)

    def _collected(self, *, made: bool) -> dict[str, Any]:
        """`made`: torch shall make the state of optimizers that have none."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        state: dict[str, Any] = {}
        for name, item in self._items.items():
            if name in self._models:
                state[name] = get_model_state_dict(item)
            elif name in self._owners:
                with contextlib.nullcontext() if made else _as_it_is(item):
                    state[name] = get_optimizer_state_dict(self._owners[name], item)
            else:
                state[name] = item.state_dict()
        return state

    def _wanted(self, known: Collection[str]) -> dict[str, Any]:
        """What is loaded of a checkpoint that has the entries `known`; tensors to load it into."""
        for name in self._owners:
            self._items[name].zero_grad()  # where there are gradients torch makes no state
        state = self._collected(made=True)
        for name in self._owners:
            parts = state[name]["state"]
            for parameter in list(parts):
                if not any(key.startswith(f"{name}.state.{parameter}.") for key in known):
                    del parts[parameter]
        names = (key.removeprefix(f"{MANAGER}.") for key in known if key.startswith(f"{MANAGER}."))
        return state | {MANAGER: dict.fromkeys(names, 0)}

    def load(self, folder: Any) -> dict[str, int]:
        """Load a checkpoint. All ranks of the group together.

        Args:
            folder: where it is.

        Returns:
            The Manager's state in it; {} if somebody else has written it.

        Raises:
            ConfigError: there is none, or it lacks something of this state.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        path, dcp = os.fspath(folder), _dcp()
        if not os.path.exists(os.path.join(path, ".metadata")):
            raise ConfigError(f"load_distributed({path!r}): no checkpoint of torch.distributed.checkpoint is there")
        try:
            with _quietly():
                state = self._wanted(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
                dcp.load(state, checkpoint_id=path)
        except (Exception, dcp.CheckpointException) as error:
            raise ConfigError(
                f"load_distributed({path!r}): it does not fit this job's state, or is not whole: {_said(error)}"
            ) from error
        for name, item in self._items.items():
            if name in self._models:
                set_model_state_dict(item, state[name])
            elif name in self._owners:  # not strict: unused parameters have none
                options = StateDictOptions(strict=False)
                set_optimizer_state_dict(self._owners[name], item, state[name], options=options)
            else:
                item.load_state_dict(state[name])
        return dict(state[MANAGER])


class JobCheckpoint:
    """One checkpoint that is written.

    Args:
        path: its place.
        step: of the state in it.
        rank, ranks: of this process in its group.
    """

    _asynchronous: tuple[ProcessGroup, ProcessGroup] | None = None
    """The process group of the job, and one of the same ranks, for writes during which these communicate otherwise."""
    _under_way: Future[Any] | None = None
    """The last asynchronous write of this process."""

    def __init__(self, path: Any, step: int, rank: int, ranks: int) -> None:
        self.target = os.path.abspath(os.fspath(path))
        parent, name = os.path.split(self.target)
        if name in (LATEST, ""):
            raise ConfigError(f"save_distributed({path!r}): the file {LATEST!r} beside the checkpoints has that name")
        self.work: Future[Any] | None = None
        """An asynchronous write; None: it was none."""
        self._folder, self._rank, self._ranks = PlacedFolder(parent, name, step), rank, ranks
        self._lock = threading.Lock()
        self._unwanted = False

    def write(self, state: dict[str, Any], *, asynchronous: bool) -> None:
        """Write `state` beside its place. All ranks of the group together. Raises what DCP does."""
        dcp = _dcp()
        if JobCheckpoint._under_way is not None:
            JobCheckpoint._under_way.exception()  # waits; what it was concerns whoever holds that checkpoint
            JobCheckpoint._under_way = None
        stage = self._folder.begin(lambda path: from_first(path, self._ranks), first=self._rank == 0)
        try:
            with _quietly():
                if not asynchronous:
                    dcp.save(state, checkpoint_id=stage)
                    self._written(stage)
                    return
                started = dcp.async_save(state, checkpoint_id=stage, process_group=self._own_group())
        except BaseException:
            self._failed(stage)
            raise
        work: Future[Any] = Future()
        self.work = JobCheckpoint._under_way = work
        started.add_done_callback(lambda done: self._ended(done, stage, work))

    def place(self) -> None:
        """Put it in its place, if that was not done."""
        beside, target = self._folder.beside, self.target
        if self._rank or not os.path.isdir(beside):
            return
        parent, name = os.path.split(target)
        old = os.path.join(parent, f".{name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        if os.path.exists(target):
            os.rename(target, old)
        os.rename(beside, target)
        shutil.rmtree(old, ignore_errors=True)
        marker = os.path.join(parent, f".{LATEST}.partial")
        with open(marker, "w", encoding="utf-8") as file:
            file.write(f"{name}\n")
        os.replace(marker, os.path.join(parent, LATEST))

    def discard(self) -> None:
        """Remove it, if it is not in its place."""
        with self._lock:
            self._unwanted = True
        if self._rank == 0:
            self._folder.discard()

    def _written(self, stage: str) -> None:
        if self._rank:
            return
        with self._lock:
            if self._unwanted:
                shutil.rmtree(stage, ignore_errors=True)
            else:
                self._folder.complete(stage)

    def _ended(self, done: Future[Any], stage: str, work: Future[Any]) -> None:
        """Whoever waits for DCP's own future may be told before this, and find nothing beside the place."""
        error = done.exception()
        try:
            self._failed(stage) if error is not None else self._written(stage)
        except Exception as mine:  # noqa: BLE001 - for whoever puts it in its place
            error = mine
        work.set_result(None) if error is None else work.set_exception(error)

    def _failed(self, stage: str) -> None:
        if self._rank == 0:  # where there is no room what was written takes some
            shutil.rmtree(stage, ignore_errors=True)

    def _own_group(self) -> ProcessGroup | None:
        whole = dist.group.WORLD
        if self._ranks == 1 or whole is None:
            return None
        if JobCheckpoint._asynchronous is None or JobCheckpoint._asynchronous[0] is not whole:
            group: Any = dist.new_group(backend="gloo")
            JobCheckpoint._asynchronous = whole, group
        return JobCheckpoint._asynchronous[1]


def _dcp() -> Any:
    """Half a second to import, which is only for those who write such checkpoints."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without DCP's remarks on a process that is alone, and on its own internals."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.(checkpoint|_shard|_state_dict_utils)")
        yield


@contextlib.contextmanager
def _as_it_is(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, torch makes no state for it: where there are gradients it takes an optimizer for one that needs none."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or not parameters or any(parameter.grad is not None for parameter in parameters):
        yield
        return
    parameters[0].grad = torch.zeros_like(parameters[0])
    try:
        yield
    finally:
        parameters[0].grad = None


@contextlib.contextmanager
def keeping_none(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """What is read inside may make state of optimizers that have none, by a step of torch's: it is gone afterwards.

    For formats that hold such state (Lightning's, Accelerate's). One group writes, so it alone would be a step further.
    """
    without = [optimizer for optimizer in optimizers if not optimizer.state]
    try:
        yield
    finally:
        for optimizer in without:
            optimizer.state.clear()


def _said(error: BaseException) -> str:
    """In one line: DCP's own errors hold those of all ranks, with their tracebacks."""
    failures = getattr(error, "failures", None)
    of = {f"rank {rank}: {failure[0]}" for rank, failure in failures.items()} if failures else {str(error)}
    return "; ".join(sorted(of))
