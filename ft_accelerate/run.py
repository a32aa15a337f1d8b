"""`Run`: one training run after the other of one Accelerator, on one rank.

How it works. It is the kit's `TrainingRun` with what Accelerate has besides: `uneven` is what happens when this replica
runs out of data first, `sharing` divides evaluation data, `elastic` holds the training data that is divided per step.

Invariant: a run ends once; afterwards nothing is communicated. Threads: the training thread.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from ft_accelerate import store
from ft_accelerate.elastic.feed import TrainedFeed
from ft_accelerate.kept import Kept
from ft_accelerate.loader import LoaderParts
from ft_accelerate.model import WrappedModel
from ft_accelerate.sharing import Sharing
from ft_accelerate.uneven import GroupUnevenEnd
from ft_core.errors import UsageError
from ft_core.loop.division import Division
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.run import TrainingRun
from ft_core.process_group import ByDevice

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Mapping

    from ft_accelerate.plugin import FaultTolerancePlugin
    from ft_core import Manager

log = logging.getLogger("ft_accelerate")
ENDED = "end_training() was called"
BY_DEVICE = ByDevice(
    "Accelerator(cpu=True), or ft-accelerate launch --cpu, trains on CPUs, and without them on the accelerator"
)
"""Makes the process group of the gradients, by the device that Accelerate puts the model on."""


class Run(TrainingRun):
    """One training run after the other of one Accelerator, on one rank.

    Args:
        plugin: the settings.
        ranks: processes of this replica group.
        rank: of this one.
        owner: the Accelerator, which is kept alive while there is a Manager: scripts may keep its models only.
        save: returns all state that must be equal on all replicas.
        load: takes it over; called between two windows only.
        changed: called with True when this group begins to lead, with False when it no longer does.
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
        changed: Callable[[bool], None],
        divide: Callable[[int], bool],
    ) -> None:
        # The address once: it reads the environment, and each step would.
        place = ReplicaGroup(plugin.group, plugin.groups, ranks, rank, plugin.name, plugin.address)
        division = Division(plugin.groups, divide)
        super().__init__(
            place, plugin.for_manager(), load, save, division=division, changed=changed, by_device=BY_DEVICE,
            ended=ENDED,
        )  # fmt: skip
        self.plugin, self._owner = plugin, owner
        self.uneven = GroupUnevenEnd(self.window, plugin.on_exhausted, self.leave_others)
        self.sharing = Sharing(self.window) if plugin.share_evaluation else None
        self.elastic = TrainedFeed()
        self._begin()

    def _begin(self) -> None:
        self._kept = Kept()
        self.first_step, self.passed_over = 0, False
        self.owners_known = False
        """It was looked whether prepared optimizers have the parameters that get gradients."""
        self.window.begin()
        self.uneven.begin_run()
        self.elastic.feed = None
        if self.sharing is not None:
            self.sharing.end()

    @property
    def loader_parts(self) -> LoaderParts:
        """The parts that a prepared loader asks."""
        return LoaderParts(self.window, self.uneven, self.sharing)

    # ------------------------------------------------------------ set-up

    def start_manager(self) -> Manager:
        """The Manager. Raises as the kit's."""
        if self.window.manager is None and self.window.ended:
            raise UsageError(f"{self.window.ended}: call free_memory(), which begins another run, before prepare()")
        return super().start_manager()

    def _place_of_store(self) -> Mapping[str, Any]:
        place = self.window.place
        return store.place(place.ranks, place.rank, place.lighthouse)

    def _started(self, manager: Manager) -> None:
        if self.window.ranks > 1:
            torch.distributed.barrier()  # the first rank serves the others: it may not end before they have begun
        self._kept.owner = self._owner()
        load, save = (functools.partial(self._kept.call, function) for function in self._functions)
        manager.register_state_dict_fn("accelerate", load, save)
        if self.sharing is not None:
            self.sharing.begin(manager)

    def prepare(self, module: torch.nn.Module, arguments: dict[str, Any]) -> WrappedModel:
        """A model to be trained. After training has begun this begins another run, for the models from here on.

        Raises:
            ConfigError: an argument of DistributedDataParallel cannot work here.
            UsageError: training has ended.
        """
        self._may_begin_anew()
        wrapped: WrappedModel = self.wrap(module, arguments, WrappedModel)
        return wrapped

    def prepare_sharded(self, module: torch.nn.Module) -> None:
        """A model that FSDP2 has sharded in this group, to be trained; it stays as it is. Otherwise as `prepare`.

        Raises:
            ConfigError: parameters that are trained and not sharded.
            UsageError: training has ended.
        """
        if any(module is root for model in self.window.models for root in model.roots):
            return  # given to Accelerator.prepare again
        self._may_begin_anew()
        if any(parameter.requires_grad for parameter in module.parameters()):
            self.wrap_sharded((module,))

    def _may_begin_anew(self) -> None:
        if self.manager is not None and self.manager.quorum_id and not self.window.ended:
            log.warning("a model is prepared after training began: the run of the models before it ends here")
            self.begin_anew()

    # ------------------------------------------------------------ the end

    def begin_anew(self) -> None:
        """Another run begins in this process: the models so far are trained no more."""
        if self.passed_over:
            self._end_passed_over()
        elif self.manager is not None and not self.window.ended:
            self._leave("another run begins", why=ENDED)
        for model in self.window.models:
            model.unwrap()
        self._begin()

    def superseded(self) -> None:
        """Another Accelerator of this process begins a run."""
        if self.passed_over:
            self._end_passed_over()
        elif self.manager is not None and not self.window.ended:
            log.warning("another Accelerator prepares a model: the run of the one before it ends here")
            self._leave("another run begins", why="another Accelerator of this process has begun another run")

    def leave_others(self, why: str) -> None:
        """This replica ends its training, and another one leads."""
        self.window.left = True
        self._leave(why, why=why)
        self.leadership.opened()

    def _leave(self, reason: str, *, why: str, finished: bool = False) -> None:
        super()._leave(reason, why=why, finished=finished)
        if self.elastic.feed is not None:
            self.elastic.feed.release()
        self._kept.owner = None
