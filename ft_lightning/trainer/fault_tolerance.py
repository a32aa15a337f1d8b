"""`FaultTolerance`: what the strategies of a Trainer share, whatever each rank of a replica group holds of the model.

How it works. Across the groups a `ft_core.Manager` drives the steps: before each batch is fetched the quorum is opened
(and, on a newcomer or a replica that fell behind, the others' whole run taken over: `takeover`); gradients are averaged
over the groups while backward runs; the closure that Lightning hands to the optimizer votes at its end, before
gradients are clipped. A veto unwinds the closure with a private exception: parameters, optimizer, scaler, counters and
schedulers stay as they were.

What is inside a group is the strategy's: `strategy` (each rank holds the whole model), `sharded_strategy` (each rank
holds shards). They say what is trained (`trained_model`) and which of its backwards cross to the other groups.

Where things stand between two batches is the same on every replica: that is the state that newcomers adopt.

Threads: the training thread; the Manager has its own.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from ft_core import Manager
from ft_core.errors import LighthouseError, QuorumTimeoutError
from ft_core.loop.division import Division
from ft_core.loop.garbage import collect_once
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.runs import RUNS
from ft_core.loop.window import StepWindow
from ft_core.process_group import host_process_group
from ft_lightning._compat import position as _position
from ft_lightning.launcher import StartsGroups
from ft_lightning.placement import BY_DEVICE
from ft_lightning.trainer.checkpoints import Checkpoints
from ft_lightning.trainer.elastic import ElasticData
from ft_lightning.trainer.optimizer_steps import OptimizerSteps
from ft_lightning.trainer.sharding import Sharding
from ft_lightning.trainer.shared_evaluation import SharedEvaluation
from ft_lightning.trainer.takeover import Takeover
from ft_lightning.trainer.uneven import TrainerUnevenEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from ft_core.loop.trained_model import TrainedModel
    from ft_lightning.arguments import Arguments, DataArguments

log = logging.getLogger("ft_lightning")


class FaultTolerance(OptimizerSteps, Checkpoints, StartsGroups):
    """The fault tolerance of a strategy of the Trainer; mixed in before one of Lightning's.

    Args:
        arguments: those about the job, checked.
        data_arguments: those about the training data, checked.
        lightning: of Lightning's strategy.
    """

    _tree = "lightning.pytorch"

    def __init__(self, arguments: Arguments, data_arguments: DataArguments, **lightning: Any) -> None:
        self._arguments, self._data_arguments = arguments, data_arguments  # Placed needs them in what follows
        super().__init__(**lightning)
        self.manager: Manager | None = None
        """The Manager of this rank, while `fit` runs."""
        self._trainer: Any = None
        seeder = _position.worker_seeder(self._tree)
        self._sharding = Sharding(self.replica_group, self.num_replica_groups, seeder)
        self.elastic = ElasticData(data_arguments, seeder, arguments.min_replicas)
        """The training data, if it is elastic."""
        self._shared: SharedEvaluation | None = None
        self._takeover: Takeover | None = None
        """Position in the run that all replicas share, while `fit` runs."""
        self._pause: Any = None

    # ------------------------------------------------------------ what is trained

    @property
    def trained_model(self) -> TrainedModel:
        """What averages the model's gradients over the groups, while `fit` runs."""
        raise NotImplementedError

    @property
    def crosses(self) -> bool:
        """The next backward is one whose gradients are averaged over the groups, if the window lets it."""
        raise NotImplementedError

    def take_part(self, taking_part: bool) -> None:
        """Before a batch: whether this replica takes part in its steps, or only goes through it."""

    def _attach_model(self) -> None:
        """Lightning has set the model up, with its optimizers: see that its gradients are averaged."""

    def _detach_model(self) -> None:
        """`fit` is over: another one sets the same model up again."""

    def group_leads(self, first: bool) -> bool:
        """Whether this group leads, on each rank that takes part in writing; `first`: what its first rank knows."""
        return first

    def handing_out(self) -> AbstractContextManager[None]:
        """Inside, the model's and the optimizers' state is collected for, or taken over from, other replicas."""
        return contextlib.nullcontext()

    # ------------------------------------------------------------ groups

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Training data is divided among all ranks of all groups, evaluation data inside the group."""
        inside: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        return self._sharding.kwargs(inside, training=self._trainer is not None and bool(self._trainer.training))

    def process_dataloader(self, dataloader: Any) -> Any:
        """Called for each loader after it got its sampler."""
        loader = super().process_dataloader(dataloader)  # type: ignore[misc]
        return self._sharding.prepared(loader, super().distributed_sampler_kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------ set-up and end

    def connect(self, model: Any) -> None:
        """Called before everything else of a run."""
        super().connect(model)  # type: ignore[misc]
        self._trainer = model._trainer if model._trainer is not None else self._trainer
        if self._trainer is not None:
            _position.around_samplers(self._trainer, self._exchange, self._preparing)

    def _exchange(self, loader: Any, stage: str) -> Any:
        if not self._trains:
            return loader
        group, groups = self.replica_group, self.num_replica_groups
        return self.elastic.prepare(self._trainer, loader, stage, group, groups, self.manager)

    def _preparing(self, loader: Any, stage: str) -> AbstractContextManager[None]:
        divides = _position.divides_data(self._trainer)
        return self._sharding.preparing(loader, stage, divides=divides, ranks=self.world_size)  # type: ignore[attr-defined]

    def setup(self, trainer: Any) -> None:
        """Build the Manager before the model is wrapped; only `fit` needs one."""
        self._trainer = trainer
        if self._trains:
            self._takeover = Takeover(trainer, self._sharding, self.elastic)
            collect_once()
            self.manager = self._new_manager(
                pg=BY_DEVICE,
                load_state_dict=self._load_state,
                state_dict=self._hand_out,
                use_async_quorum=False,  # a replica that is behind must know the others' position before it trains
                rank=self.global_rank,  # type: ignore[attr-defined]
                world_size=self.world_size,  # type: ignore[attr-defined]
                **self._arguments.for_manager(),
            )
            self.window = self._new_window(self.manager)
            self.uneven = TrainerUnevenEnd(self, self.window, self._data_arguments.on_exhausted)
            self._begin(self.manager)
        if self._data_arguments.share_evaluation:
            self._shared = SharedEvaluation(trainer, self.world_size, self._evaluation_quorum)  # type: ignore[attr-defined]
            self._shared.begin()
            if self.manager is not None:
                self._shared.train_with(self.manager)
        super().setup(trainer)  # type: ignore[misc]
        if self.manager is not None and self._takeover is not None:
            self._attach_model()
            uneven = self.uneven.policy is not None
            self._takeover.start(self.open_quorum, self.uneven.run_out, uneven=uneven)
            self.start_voting()

    def _new_window(self, manager: Manager) -> StepWindow:
        place = ReplicaGroup(
            self.replica_group, self.num_replica_groups, self.world_size, self.global_rank,  # type: ignore[attr-defined]
            lighthouse=self.lighthouse_address,
        )  # fmt: skip
        division = Division(self._sharding.groups, lambda _: False)  # a Trainer divides between two epochs: Takeover
        window = StepWindow(place, lambda: manager, self._opened, division)
        window.manager, window.opened_by_hand = manager, True
        window.on_finished = self._finished
        return window

    def on_train_end(self) -> None:
        """Training is over: all stop together, and the room is closed to latecomers."""
        if self.manager is not None:
            self.close_quorum()
            self._finish()

    def teardown(self) -> None:
        """Leave, if `fit` did not come to its end, and stop all threads."""
        if self._shared is not None:
            self._shared.end()
        if self._takeover is not None:
            self._takeover.stop()
        self.end_voting()
        self.elastic.end()
        manager, self.manager, self.window = self.manager, None, None
        self.__dict__.pop("uneven", None)  # it knows the window, and a Trainer may be pickled after `fit`
        if manager is not None:
            manager.shutdown()
            self.leader.end()
        self._end_passed()
        self._detach_model()
        super().teardown()  # type: ignore[misc]

    # ------------------------------------------------------------ a batch

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """The Manager's load function, called inside `start_quorum`: a peer's state at this very point."""
        assert self._takeover is not None
        self.leader.before_adopting(state)
        with self.handing_out():
            self._takeover.load(state)

    def _hand_out(self) -> dict[str, Any]:
        """The Manager's save function."""
        assert self._takeover is not None
        with self.handing_out():
            return self._takeover.state()

    # ------------------------------------------------------------ evaluation

    def _evaluation_quorum(self, stage: str, prepare: Callable[[Manager], None]) -> Manager | None:
        """Outside of `fit`: for one run of `stage`, a Manager in a namespace of its own; None: there are no others.

        `prepare` is called with it before its quorum is there.
        """
        if self.num_replica_groups < 2 or not self.lighthouse_address:
            return None
        known = {} if RUNS.members is None else {"expected_replicas": RUNS.members}
        own = {
            "pg": host_process_group(), "room_id": RUNS.evaluation(self.first_room, stage), "rank": self.global_rank,  # type: ignore[attr-defined]
            "world_size": self.world_size, "use_async_quorum": False, "exit_on_drain": False, "min_replica_size": 1,  # type: ignore[attr-defined]
        }  # fmt: skip
        manager: Manager | None = None
        try:
            manager = Manager(**{**self._arguments.for_manager(), **known, **own})
            prepare(manager)
            manager.start_quorum()
            RUNS.members = manager.num_participants()
        except BaseException as error:
            if manager is not None:
                manager.shutdown()
            if isinstance(error, (LighthouseError, QuorumTimeoutError)):
                log.warning("share_evaluation: this replica group reads all data of this %s run: %s", stage, error)
                return None
            raise
        return manager

    def on_validation_start(self) -> None:
        """The others wait for a replica that validates."""
        super().on_validation_start()  # type: ignore[misc]
        if self.manager is not None and self._trainer.validating and not self.uneven.left:
            self._pause = self.manager.pause("validation", max_s=3600.0)
            self._pause.__enter__()

    def on_validation_end(self) -> None:
        """The others need not wait any more."""
        if self._pause is not None:
            pause, self._pause = self._pause, None
            pause.__exit__(None, None, None)
        super().on_validation_end()  # type: ignore[misc]
