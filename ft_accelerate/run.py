"""`Run`: one training run of one Accelerator, on one rank, composed of its parts.

How it works. `window` opens quorums and votes, `uneven` is what happens when this replica runs out of data first,
`sharing` divides evaluation data, `elastic` holds the training data that is divided per step. `Run` makes the Manager
when the first model is prepared, and ends: all replicas stop after the same step, or this one leaves the others.

Invariant: a run ends once; afterwards nothing is communicated. Threads: the training thread.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ft_accelerate import store
from ft_accelerate.elastic.feed import TrainedFeed
from ft_accelerate.kept import Kept
from ft_accelerate.loader import LoaderParts
from ft_accelerate.model import WrappedModel
from ft_accelerate.runs import runs_of_this_process
from ft_accelerate.sharing import Sharing
from ft_accelerate.uneven import UnevenEnd
from ft_core import Manager, default_process_group
from ft_core.errors import JobFinishedError, UsageError
from ft_core.loop.division import Division
from ft_core.loop.publishing import Publisher
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.stopping import stop_together
from ft_core.loop.window import StepWindow, nothing_left
from ft_core.settings import room_of_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_accelerate.plugin import FaultTolerancePlugin

log = logging.getLogger("ft_accelerate")
KEY = "accelerate"
"""The name of our state in what donors hand out."""
ENDED = "end_training() was called"


class Run:
    """One training run after the other of one Accelerator, on one rank.

    Args:
        plugin: the settings.
        ranks: processes of this replica group.
        rank: of this one.
        owner: the Accelerator, which is kept alive while there is a Manager: scripts may keep its models only.
        save: returns all state that must be equal on all replicas.
        load: takes it over; called between two windows only.
        opened: called after each quorum was opened.
        divide: called with the number of groups by which the data is to be divided; False: it cannot be.
    """

    def __init__(
        self,
        plugin: FaultTolerancePlugin,
        ranks: int,
        rank: int,
        owner: weakref.ref[Any],
        save: Callable[[], Any],
        load: Callable[[Any], None],
        opened: Callable[[], None],
        divide: Callable[[int], bool],
    ) -> None:
        self.plugin = plugin
        self._functions = load, save
        self._owner = owner
        self._opened = opened
        # The address once: it reads the environment, and each step would.
        place = ReplicaGroup(plugin.group, plugin.groups, ranks, rank, plugin.name, plugin.address)
        self.window = StepWindow(place, self.start_manager, opened, Division(plugin.groups, divide))
        self.publisher = Publisher(self.window, self.leave)
        self.uneven = UnevenEnd(self.window, plugin.on_exhausted, self.leave_others)
        self.sharing = Sharing(self.window) if plugin.share_evaluation else None
        self.elastic = TrainedFeed()
        self._number = -1
        """The number of this run in its process, which names its room."""
        self._begin()

    def _begin(self) -> None:
        self._number += 1
        self._kept = Kept()
        self.first_step = 0
        """The Manager's step when this run began, on all replicas alike."""
        self.owners_known = False
        """It was looked whether prepared optimizers have the parameters that get gradients."""
        self.window.begin()
        self.uneven.begin()
        self.elastic.feed = None
        if self.sharing is not None:
            self.sharing.end()

    def __repr__(self) -> str:
        return f"Run({self.window!r})"

    @property
    def manager(self) -> Manager | None:
        """The Manager, once a model is prepared."""
        return self.window.manager

    @property
    def loader_parts(self) -> LoaderParts:
        """The parts that a prepared loader asks."""
        return LoaderParts(self.window, self.uneven, self.sharing)

    # ------------------------------------------------------------ set-up

    def start_manager(self) -> Manager:
        """The Manager; made when the first model is prepared, so that evaluation needs no lighthouse.

        Raises:
            SystemExit: (0) the others have finished.
            UsageError: training has ended.
        """
        window = self.window
        if window.manager is None:
            if window.ended:
                raise UsageError(f"{window.ended}: call free_memory(), which begins another run, before prepare()")
            runs = runs_of_this_process()
            self._number = runs.begin(self.superseded, self._number)
            try:
                window.manager = manager = Manager(
                    pg=default_process_group(),
                    use_async_quorum=False,
                    warm_up=False,  # a newcomer takes over the others' position before its first batch
                    room_id=room_of_run(self._number),
                    rank=window.rank,
                    world_size=window.ranks,
                    **store.place(window.ranks, window.rank, self.plugin.address),
                    **self.plugin.for_manager(),
                )
            except JobFinishedError as error:
                window.ended = ENDED
                raise nothing_left(error) from error
            if window.ranks > 1:
                torch.distributed.barrier()  # the first rank serves the others: it may not end before they have begun
            self.first_step = runs.resume(manager, window.group)
            self._kept.owner = self._owner()
            load, save = (functools.partial(self._kept.call, function) for function in self._functions)
            manager.register_state_dict_fn(KEY, load, save)
            if self.sharing is not None:
                self.sharing.begin(manager)
        return window.manager

    def manager_state(self) -> dict[str, int]:
        """The Manager's state for a checkpoint, with steps counted from the beginning of this run; {} without one."""
        state = self.manager.state_dict() if self.manager is not None else {}
        return {**state, "step": state["step"] - self.first_step} if state else {}

    def load_manager_state(self, state: dict[str, int]) -> None:
        """Give the Manager what `manager_state` returned, before training."""
        manager = self.start_manager()
        if not manager.quorum_id:
            manager.load_state_dict({**state, "step": state["step"] + self.first_step})

    def wrap(self, module: torch.nn.Module, arguments: dict[str, Any]) -> WrappedModel:
        """A model to be trained. After training has begun this begins another run, for the models from here on.

        Raises:
            ConfigError: an argument of DistributedDataParallel cannot work here.
            UsageError: training has ended.
        """
        if self.manager is not None and self.manager.quorum_id and not self.window.ended:
            log.warning("a model is prepared after training began: the run of the models before it ends here")
            self.begin_anew()
        if self.window.ranks > 1:  # as torch's DDP does at its start
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    torch.distributed.broadcast(tensor.data, 0)
        model = WrappedModel(self.start_manager(), self.window, module, **arguments)
        self.window.trains(weakref.ref(model))
        return model

    # ------------------------------------------------------------ the end

    def begin_anew(self) -> None:
        """Another run begins in this process: the models so far are trained no more."""
        if self.manager is not None and not self.window.ended:
            self._leave("another run begins", why=ENDED)
        for model in self.window.models:
            model.unwrap()
        self._begin()

    def superseded(self) -> None:
        """Another Accelerator of this process begins a run."""
        if self.manager is not None and not self.window.ended:
            log.warning("another Accelerator prepares a model: the run of the one before it ends here")
            self._leave("another run begins", why="another Accelerator of this process has begun another run")

    def end(self) -> None:
        """All replicas stop after the same step, then this one leaves. A replica that wanted to go on stops too."""
        manager, window = self.manager, self.window
        if window.ended:
            return
        if manager is None:
            window.ended = ENDED
            return
        window.close()
        if manager.quorum_id:
            stop_together(manager, lambda: window.agree_on(None))
        self._leave("finished", why=ENDED, finished=True)

    def leave(self) -> None:
        """The script ends without a call of `end_training`."""
        if self.manager is not None and not self.window.ended:
            self._leave("the script ends", why=ENDED)

    def leave_others(self, why: str) -> None:
        """This replica ends its training, and another one leads."""
        self.window.left = True
        self._leave(why, why=why)
        self._opened()

    def _leave(self, reason: str, *, why: str, finished: bool = False) -> None:
        manager, window = self.manager, self.window
        assert manager is not None
        window.ended = why
        window.end_pauses()
        runs_of_this_process().end(manager)
        manager.leave(reason, finished=finished)
        if window.after_vote is not None:
            window.after_vote()
        manager.shutdown()
        if self.elastic.feed is not None:
            self.elastic.feed.release()
        self._kept.owner = None
