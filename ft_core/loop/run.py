"""`TrainingRun`: one training run of a process, from its first model to its end, composed of the kit's parts.

How it works. `window` opens quorums and votes, `leadership` says who writes, `publisher` puts in place what was
written. The Manager is made with the first model, in the room of the process's nth run, and counts on from the step at
which the run before ended (`runs`). A run ends when all have agreed to (`end`), or for this replica alone (`leave`).

A replica that comes back may find that the others have finished this run. If they are in a later one, as after two
trainings in one script, it passes over this one: nothing is trained, loops end at once, and it joins the later one. If
that one is lost with all who were in it, that is an error; else all is done, and the replica ends with status 0.

Invariant: a run ends once; afterwards nothing is communicated. Threads: the training thread.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ft_core import Manager
from ft_core.errors import ConfigError, UsageError
from ft_core.loop.garbage import collect_once
from ft_core.loop.job_checkpoint import MANAGER, JobCheckpoint
from ft_core.loop.leadership import Leadership
from ft_core.loop.model import WindowedModel
from ft_core.loop.publishing import PlacedFile, Publisher
from ft_core.loop.runs import RUNS, PassedOverError, RunLostError, Words
from ft_core.loop.stopping import stop_together
from ft_core.loop.window import StepWindow
from ft_core.process_group import ByDevice
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from ft_core.errors import JobFinishedError
    from ft_core.loop.division import Division
    from ft_core.loop.job_checkpoint import JobState
    from ft_core.loop.replica_group import ReplicaGroup
    from ft_core.loop.sharded_model import ShardedModel

log = logging.getLogger("ft_core")
WORDS = Words()
KEY = "loop"
"""The name of a run's state in what donors hand out."""


class TrainingRun:
    """A run, on one rank.

    Args:
        place: of this process.
        options: arguments of the Manager; room_id: of the first run of the process.
        load, save: all state that must be equal on all replicas; `load` is called between two steps only.
        division: of the training data.
        changed: called with True when this group begins to lead, with False when it no longer does.
        opened: called after each quorum was opened.
        by_device: makes the process group of the gradients.
        ended: said to who goes on after the end; in the words of the framework.
    """

    def __init__(
        self,
        place: ReplicaGroup,
        options: Mapping[str, Any],
        load: Callable[[Any], None],
        save: Callable[[], Any],
        *,
        division: Division,
        changed: Callable[[bool], None] | None = None,
        opened: Callable[[], None] | None = None,
        by_device: ByDevice | None = None,
        ended: str,
    ) -> None:
        self._options, self._functions, self._ended = options, (load, save), ended
        self._after_opening, self._by_device = opened, by_device or ByDevice()
        self.window = StepWindow(place, self.start_manager, self._opened, division)
        self.publisher = Publisher(self.window, self.leave)
        self.leadership = Leadership(self.window, self.publisher, changed or _nothing)
        self.window.on_finished = self._finished
        self.first_step = 0
        """The Manager's step when this run began, on all replicas alike."""
        self.passed_over = False
        """The others have finished this run, and are in a later one."""
        self._ended_together = False
        """All have agreed to end: what this replica holds, all hold."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.window!r})"

    @property
    def manager(self) -> Manager | None:
        """The Manager, once a model is wrapped."""
        return self.window.manager

    # ------------------------------------------------------------ set-up

    def start_manager(self) -> Manager:
        """The Manager; made when it is needed first, so that evaluation needs no lighthouse.

        Raises:
            SystemExit: (0) the others have finished.
            PassedOverError: this run, and they are in a later one.
            RunLostError: they were in a later one, and all of them have died.
            UsageError: training has ended.
        """
        window = self.window
        if window.manager is None:
            if self.passed_over:
                raise PassedOverError("this run is passed over")
            if window.ended:
                raise UsageError(f"{window.ended}: this run is over")
            RUNS.begin(self.superseded)
            collect_once()
            options = {
                **self._options, **self._place_of_store(), "rank": window.rank, "world_size": window.ranks,
                "use_async_quorum": False,  # what a replica that is behind reads depends on the others' state
                "warm_up": False,  # a newcomer takes over the others' position before its first batch
            }  # fmt: skip

            def make(room: str) -> Manager:
                return Manager(**{"pg": self._by_device, **options, "room_id": room})

            try:
                window.manager = manager = RUNS.join(make, window.address, self._first_room, WORDS)
            except (PassedOverError, RunLostError, SystemExit) as fate:
                self._meets(fate)
                raise
            carried = RUNS.carried(window.group)
            if carried:
                manager.load_state_dict(carried)
            self.first_step = carried.get("step", 0)
            manager.register_state_dict_fn("run", self._take_over, self._facts)
            self._started(manager)
        return window.manager

    @property
    def _first_room(self) -> str:
        return str(self._options.get("room_id") or DEFAULT_ROOM)

    def _finished(self, error: JobFinishedError) -> BaseException:
        """The others have finished this run while this replica was in it."""
        fate = RUNS.missed(error, self.window.address, self._first_room, WORDS, trained=True)
        self._meets(fate)
        return fate

    def _meets(self, fate: BaseException) -> None:
        """The others have finished this run: it is passed over, or this replica ends."""
        if isinstance(fate, PassedOverError):
            self.passed_over = self.window.stopped = True
            self.leadership.step_aside()
        else:
            self.window.ended = self._ended

    def _facts(self) -> dict[str, int]:
        return {"first_step": self.first_step}

    def _take_over(self, facts: Mapping[str, int]) -> None:
        self.first_step = facts["first_step"]  # who passed over the run before does not know where this one began

    def _place_of_store(self) -> Mapping[str, Any]:
        """`store_addr` and `store_port`, where the Manager's own defaults are not right."""
        return {}

    def _started(self, manager: Manager) -> None:
        """The Manager is there, without a quorum."""
        load, save = self._functions
        manager.register_state_dict_fn(KEY, load, save)

    def manager_state(self) -> dict[str, int]:
        """The Manager's state for a checkpoint, with steps counted from the beginning of this run; {} without one."""
        state = self.manager.state_dict() if self.manager is not None else {}
        return {**state, "step": state["step"] - self.first_step} if state else {}

    def load_manager_state(self, state: dict[str, int]) -> None:
        """Give the Manager what `manager_state` returned, before training."""
        try:
            manager = self.start_manager()
        except PassedOverError:
            return
        if not manager.quorum_id:
            manager.load_state_dict({**state, "step": state["step"] + self.first_step})

    def wrap(self, module: nn.Module, options: Mapping[str, Any], kind: type[WindowedModel] = WindowedModel) -> Any:
        """A model that this run trains.

        Args:
            module: the model.
            options: of torch's DistributedDataParallel.
            kind: of the wrapper.

        Raises:
            ConfigError: one of the options cannot work here, or the model is wrapped already.
            SystemExit, RunLostError: as `start_manager`.
            UsageError: training has ended.
        """
        self._may_train((module,), sharded=False)
        manager = self._manager_or_none()
        if manager is not None and self.window.ranks > 1:  # as torch's DDP does: a rank heals from its like only
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    torch.distributed.broadcast(tensor.data, 0)
        wrapped = kind(manager, self.window, module, **options)
        self.window.trains(weakref.ref(wrapped))
        return wrapped

    def wrap_sharded(self, modules: tuple[nn.Module, ...], bucket_cap_mb: float | None = None) -> ShardedModel | None:
        """FSDP2 modules that this run trains. They stay as they are.

        Args:
            modules: the roots, as `ft_core.fsdp.replicate`.
            bucket_cap_mb: as there.

        Returns:
            None: this run is passed over.

        Raises:
            ConfigError: as `ft_core.fsdp.replicate`, or the run trains models that are not sharded, too.
            SystemExit, RunLostError, UsageError: as `wrap`.
        """
        from ft_core.fsdp import shard_settings  # half a second, which is only for those who shard
        from ft_core.loop.sharded_model import ShardedModel

        self._may_train(modules, sharded=True)
        settings = shard_settings(modules, bucket_cap_mb)
        manager = self._manager_or_none()
        if manager is None:
            return None
        sharded = ShardedModel(manager, self.window, modules, settings)
        self.window.trains(weakref.ref(sharded))
        return sharded

    def _may_train(self, modules: tuple[nn.Module, ...], *, sharded: bool) -> None:
        for known in self.window.models:
            for module in modules:
                if any(module is root for root in known.roots):
                    raise ConfigError(
                        f"this {type(module).__name__} is wrapped already: use what the first call returned"
                    )
            if known.sharded is not sharded:
                raise ConfigError(
                    "one training run with models that are sharded (fully_shard) and models that each rank holds "
                    "whole: shard all of them, or none"
                )

    def _manager_or_none(self) -> Manager | None:
        """None: this run is passed over."""
        try:
            return self.start_manager()
        except PassedOverError:
            return None

    def _opened(self) -> None:
        self.leadership.opened()
        if self._after_opening is not None:
            self._after_opening()

    # ------------------------------------------------------------ what the leader writes

    def save_file(self, path: Any, write: Callable[[Any], object], *, beside: bool = True) -> None:
        """Write a checkpoint, if this group leads, and put it in its place when its step is stable.

        After the end that all agreed to each group writes it, as nobody would wait for the leader.

        Args:
            path: its place.
            write: writes it to a path, on the first rank of the group.
            beside: `write` makes one file, which can be moved; else it writes to `path` at once.
        """
        if not beside:
            self.leadership.writing(str(path), lambda: write(path))
            return
        if self.window.rank == 0:
            step = 0 if self.manager is None else self.manager.current_step()
            file = PlacedFile(os.path.abspath(os.fspath(path)), step)
            if self._ended_together:
                file.write_in_place(write)
                return
            self.leadership.writing(file.target, lambda: file.write(write), file.place, file.discard)

    def save_job(self, path: Any, state: JobState, *, asynchronous: bool) -> None:
        """Write a checkpoint of the job, on all ranks of the leading group; in its place when its step is stable.

        Args:
            path: its place, a folder.
            state: what is written.
            asynchronous: copy the state, and go on while it is written.
        """
        window, step = self.window, 0 if self.manager is None else self.manager.current_step()
        job = JobCheckpoint(path, step, window.rank, window.ranks)

        def write() -> None:
            job.write(state.current() | {MANAGER: self.manager_state()}, asynchronous=asynchronous)

        self.leadership.writing(job.target, write, job.place, job.discard, work=lambda: job.work, collective=True)

    def load_job(self, path: Any, state: JobState) -> None:
        """Load a checkpoint of the job: all ranks of a group together, before training. Raises as `JobState.load`."""
        self.load_manager_state(state.load(path))

    # ------------------------------------------------------------ the end

    def superseded(self) -> None:
        """Another run of this process begins."""
        if self.passed_over:
            self._end_passed_over()
        elif self.manager is not None and not self.window.ended:
            log.warning("another training run begins in this process: the one before it ends here")
            self._leave("another run begins", why="another run of this process has begun")

    def end(self) -> None:
        """All replicas stop after the same step, then this one leaves. A replica that wanted to go on stops, too."""
        manager, window = self.manager, self.window
        if window.ended:
            return
        if self.passed_over:
            self._end_passed_over()
            return
        if manager is None:
            window.ended = self._ended
            return
        window.close()
        with window.pause("ending what is still being written"):
            self.publisher.finish()
        if manager.quorum_id:
            stop_together(manager, lambda: window.go_on_at(None))
            if manager.stop_agreed:
                self.publisher.publish()  # before the others, which know the end as well, look for it
                self._ended_together = True
        self._leave("finished", why=self._ended, finished=True)

    def leave(self) -> None:
        """The script ends without a call of `end`."""
        if self.passed_over:
            self._end_passed_over()
        elif self.manager is not None and not self.window.ended:
            self._leave("the script ends", why=self._ended)

    def _end_passed_over(self) -> None:
        if not self.window.ended:
            self.window.ended = self._ended
            RUNS.over({})

    def _leave(self, reason: str, *, why: str, finished: bool = False) -> None:
        manager, window = self.manager, self.window
        assert manager is not None
        window.ended = why
        window.end_pauses()
        RUNS.over(manager.state_dict())
        manager.leave(reason, finished=finished)
        if window.after_vote is not None:
            window.after_vote()
        manager.shutdown()
        for model in window.models:
            model.retire()


def _nothing(_: bool) -> None:
    """The default: nothing depends on who leads."""
