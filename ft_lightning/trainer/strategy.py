"""`Trainer(strategy="fault_tolerant")`: Lightning's DDP strategy over replica groups that may fail.

How it works. Inside its group this is DDPStrategy. Across the groups a `ft_core.Manager` drives the steps:
before each batch is fetched the quorum is opened (and, on a newcomer or a replica that fell behind, the others' whole
run taken over: `takeover`); the model is wrapped in ft_core's DistributedDataParallel, so gradients are
averaged over the groups while backward runs; the closure that Lightning hands to the optimizer votes at its end, before
gradients are clipped. A veto unwinds the closure with a private exception: parameters, optimizer, scaler, counters and
schedulers stay as they were.

Where things stand between two batches is the same on every replica: that is the state that newcomers adopt.

Threads: the training thread; the Manager has its own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ft_core import DistributedDataParallel, Manager, default_process_group
from ft_core.errors import ConfigError, LighthouseError, QuorumTimeoutError
from ft_core.loop.division import Division
from ft_core.loop.garbage import collect_once
from ft_core.loop.group_model import GroupModel
from ft_core.loop.inside_group import InsideGroup
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.runs import RUNS
from ft_core.loop.tools import check_arguments
from ft_core.loop.window import StepWindow
from ft_lightning import _compat
from ft_lightning._compat import callbacks as _callbacks
from ft_lightning._compat import position as _position
from ft_lightning.arguments import Arguments, DataArguments, check_kwargs
from ft_lightning.launcher import StartsGroups
from ft_lightning.names import NAME
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
    from datetime import timedelta

    from torch import nn

log = logging.getLogger("ft_lightning")


class FaultTolerance(OptimizerSteps, Checkpoints, StartsGroups):
    """The fault tolerance of DDPStrategy; `strategy_class` mixes the two for one of Lightning's two class trees.

    Args:
        min_replicas: smallest quorum; None: FT_MIN_REPLICAS, else 1.
        timeout: how long a collective waits for a silent peer, as a timedelta or in seconds; None: FT_TIMEOUT_S, else
            60 s.
        lighthouse: host:port; None: FT_LIGHTHOUSE, or an embedded one where `fit` starts the replica groups itself.
        manager_kwargs: further arguments of `ft_core.Manager`, for example {"max_retries": 100}.
        ftrun_options: options of ftrun for a run without a launcher, for example ["--standby", "1"].
        find_unused_parameters: False: all parameters are used in every step (their users are not counted; one that is
            unused all the same gets zeros). True: they may also be frozen for a time (toggle_optimizer). None: True
            with manual optimization, else neither is said.
        broadcast_buffers: buffers (BatchNorm's statistics) follow the first participant at each commit.
        bucket_cap_mb: size of the gradient buckets; None: torch's.
        process_group_backend: of the group's own process group; None: Lightning's choice.
        from_scratch: whether the job may begin again at step 0 if every group that held its state is lost and no
            checkpoint is loaded; otherwise it ends. None: FT_FROM_SCRATCH, else no.
        elastic_data: make the training DataLoader elastic: each sample of an epoch goes into exactly one committed
            step, whatever fails. Shuffled by Lightning's seed.
        global_batch_size: with elastic data, samples of one optimizer step, whatever the membership, by more or fewer
            micro-batches per replica.
        max_micro_steps: with `global_batch_size`, refuse more micro-batches per step and rank than this.
        lr_scaling: "linear" or "sqrt": learning rates follow the samples of each committed step (without elastic data:
            the number of replica groups in it). Schedulers see the unscaled ones.
        reference_batch_size: with lr_scaling, samples (or groups) in the steps for which the rates were chosen.
        on_exhausted: what a replica does whose loader ends before the others' in an epoch: "shadow", "stop_all" or
            "leave", see `ft_core.Manager.run_out`; None: it begins its next epoch earlier. Not with elastic data, which
            ends everywhere at once.
        share_evaluation: divide validation, test and prediction data among the replica groups; what a lost group had
            not delivered is evaluated again. Metrics and predictions are those of all data, on all groups.
        kwargs: further arguments of Lightning's DDPStrategy. Refused: ddp_comm_hook and what belongs to it,
            model_averaging_period, start_method, cluster_environment.

    Raises:
        ConfigError: an argument cannot work; names it, the value and what to do.
    """

    _tree = "lightning.pytorch"

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
        elastic_data: bool = False,
        global_batch_size: int | None = None,
        max_micro_steps: int | None = None,
        lr_scaling: str | None = None,
        reference_batch_size: int | None = None,
        on_exhausted: str | None = None,
        share_evaluation: bool = False,
        **kwargs: Any,
    ) -> None:
        self._arguments = Arguments(
            min_replicas, timeout, lighthouse, manager_kwargs or {}, ftrun_options or (), from_scratch
        )
        self._arguments.check()
        self._data_arguments = DataArguments(
            elastic_data, global_batch_size, max_micro_steps, lr_scaling, reference_batch_size, on_exhausted,
            share_evaluation,
        )  # fmt: skip
        self._data_arguments.check()
        unused = {} if find_unused_parameters is None else {"find_unused_parameters": find_unused_parameters}
        kwargs.update(unused, **({} if broadcast_buffers else {"broadcast_buffers": False}))
        kwargs.update({} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb})
        check_kwargs(kwargs, type(self))
        super().__init__(process_group_backend=process_group_backend, **kwargs)
        check_arguments(self._ddp_kwargs)  # type: ignore[attr-defined]
        self.manager: Manager | None = None
        """The Manager of this rank, while `fit` runs."""
        self._trainer: Any = None
        seeder = _position.worker_seeder(self._tree)
        self._sharding = Sharding(self.replica_group, self.num_replica_groups, seeder)
        self.elastic = ElasticData(self._data_arguments, seeder, min_replicas)
        """The training data, if it is elastic."""
        self._on_exhausted = on_exhausted
        self._shared: SharedEvaluation | None = None
        self._takeover: Takeover | None = None
        """Position in the run that all replicas share, while `fit` runs."""
        self._pause: Any = None

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
                pg=default_process_group(),
                load_state_dict=self._load_state,
                state_dict=self._takeover.state,
                use_async_quorum=False,  # a replica that is behind must know the others' position before it trains
                rank=self.global_rank,  # type: ignore[attr-defined]
                world_size=self.world_size,  # type: ignore[attr-defined]
                **self._arguments.for_manager(),
            )
            if self.manager is not None:
                self.window = self._new_window(self.manager)
                self.uneven = TrainerUnevenEnd(self, self.window, self._on_exhausted)
                self._begin(self.manager)
        if self._data_arguments.share_evaluation:
            self._shared = SharedEvaluation(trainer, self.world_size, self._evaluation_quorum)  # type: ignore[attr-defined]
            self._shared.begin()
            if self.manager is not None:
                self._shared.train_with(self.manager)
        super().setup(trainer)  # type: ignore[misc]
        if self.manager is not None and self._takeover is not None:
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
        return window

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.manager is None:
            return super()._setup_model(model)  # type: ignore[misc,no-any-return]
        options = self.wrapper_options(model, self._ddp_kwargs)  # type: ignore[attr-defined]
        inside = InsideGroup(self.world_size)  # type: ignore[attr-defined]
        if _callbacks.thaws(self._trainer):  # what is frozen now counts as unused until it is not
            options["find_unused_parameters"] = True
            with _callbacks.all_thawed(model):
                return GroupModel(self.manager, inside, model, **options)
        return GroupModel(self.manager, inside, model, **options)

    def _register_ddp_hooks(self) -> None:
        """Refuse DDP's hooks: the Manager communicates."""
        if getattr(self, "_ddp_comm_hook", None) is not None:
            raise ConfigError("ddp_comm_hook cannot be used with strategy='fault_tolerant': the Manager communicates")

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
        wrapped: Any = getattr(self, "model", None)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.gradient_reducer.remove_hooks()  # another fit wraps the same parameters again
        super().teardown()  # type: ignore[misc]

    # ------------------------------------------------------------ a batch

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """The Manager's load function, called inside `start_quorum`: a peer's state at this very point."""
        assert self._takeover is not None
        self.leader.before_adopting(state)
        self._takeover.load(state)

    # ------------------------------------------------------------ evaluation

    def _evaluation_quorum(self, stage: str, prepare: Callable[[Manager], None]) -> Manager | None:
        """Outside of `fit`: for one run of `stage`, a Manager in a namespace of its own; None: there are no others.

        `prepare` is called with it before its quorum is there.
        """
        if self.num_replica_groups < 2 or not self.lighthouse_address:
            return None
        known = {} if RUNS.members is None else {"expected_replicas": RUNS.members}
        own = {
            "pg": default_process_group(), "room_id": RUNS.evaluation(self.first_room, stage), "rank": self.global_rank,  # type: ignore[attr-defined]
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


_classes: dict[str, type] = {}


def strategy_class(tree: str = "lightning.pytorch") -> type:
    """FaultTolerantStrategy for `lightning.pytorch` or `pytorch_lightning`."""
    if tree not in _classes:
        base = _compat.part(tree, "strategies.DDPStrategy")
        _classes[tree] = type("FaultTolerantStrategy", (FaultTolerance, base), {
            "_tree": tree, "strategy_name": NAME, "__doc__": FaultTolerance.__doc__, "__module__": "ft_lightning",
            "register_strategies": classmethod(lambda cls, registry: registry.register(NAME, cls, override=True)),
        })  # fmt: skip
    return _classes[tree]
