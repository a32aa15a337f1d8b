"""`FaultTolerantAccelerator`: Accelerate's Accelerator whose training survives the loss of replica groups.

    from ft_accelerate import FaultTolerantAccelerator as Accelerator

is the whole change to a script; `ftrun` or `ft-accelerate launch` starts its replica groups. Started without them (no
FT_* or ACCELERATE_FT_* in the environment, no plugin) it is an Accelerator and nothing else.

How it works. `prepare` gives models, optimizers, schedulers and loaders of ours (`run`, `optimizer`, `loader`); what
all replicas must have alike is `healed_state`; who saves and logs is `leader`. Properties about processes
(`num_processes`, `process_index`, `gather`, `reduce`, `wait_for_everyone`) mean the processes of this group, which is
what Accelerate's own collectives reach; only `is_main_process`, saving, tracking, `check_trigger` and `end_training`
are about the whole job, and `gather` is in a shared evaluation (`sharing`).

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from ft_accelerate import _compat, checkpoint_folders, dispatcher, fsdp, healed_state, loader, refusals
from ft_accelerate.elastic import loader as elastic_loader
from ft_accelerate.elastic.feed import is_elastic, load_positions, save_positions
from ft_accelerate.elastic.steps import ElasticSteps
from ft_accelerate.fsdp import ShardedPreparation
from ft_accelerate.gradients import SettledGradients
from ft_accelerate.kept import weakly
from ft_accelerate.model import WrappedModel
from ft_accelerate.optimizer import GroupScheduler, VotedOptimizer
from ft_accelerate.plugin import FaultTolerancePlugin, plugin_or_none
from ft_accelerate.run import BY_DEVICE, Run
from ft_accelerate.sharing import SharedResults
from ft_core.loop.job_checkpoint import keeping_none

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ft_accelerate.elastic.feed import TrainedFeed
    from ft_accelerate.sharing import Sharing
    from ft_core import Manager
    from ft_core.loop.leadership import Leadership
    from ft_core.loop.window import StepWindow


class FaultTolerantAccelerator(
    SettledGradients,
    ElasticSteps,
    ShardedPreparation,
    SharedResults,
    _compat.Accelerator,  # type: ignore[misc]
):
    """An Accelerator whose models train in step with those of other replica groups, any of which may fail.

    Args:
        args: of Accelerator.
        fault_tolerance_plugin: settings; None: from the environment, and no fault tolerance where that is silent.
        kwargs: of Accelerator.

    Raises:
        ConfigError: settings that cannot work, or DeepSpeed, Megatron, FSDP1, a TPU, communication hooks.
        NotAvailableError: tensor or context parallelism inside a group.
    """

    trackers: list[Any]
    _models: list[Any]

    def __init__(self, *args: Any, fault_tolerance_plugin: FaultTolerancePlugin | None = None, **kwargs: Any) -> None:
        self.fault_tolerance_plugin = plugin_or_none(fault_tolerance_plugin)
        self.epoch = 0
        """The epoch under way in `epochs`."""
        self._run: Run | None = None
        self._tracking: tuple[Any, ...] | None = None
        self._names = checkpoint_folders.Names()
        plugin = self.fault_tolerance_plugin
        if plugin is None:
            super().__init__(*args, **kwargs)
            return
        given = inspect.signature(_compat.Accelerator.__init__).bind(self, *args, **kwargs).arguments
        sharding = fsdp.plugin_in_force(given)
        refusals.check_arguments(given, sharding)
        with _compat.later_checked_parallelism():
            super().__init__(*args, **kwargs)
        fsdp.shard_on_cpus(self, sharding)
        _compat.check_parallelism(self)
        refusals.check_state(self.state)
        refusals.check_sharing(plugin.share_evaluation, self.dispatch_batches)
        self._begin(plugin)

    def _begin(self, plugin: FaultTolerancePlugin) -> None:
        BY_DEVICE.check(self.device)
        kind, owner = type(self), weakref.ref(self)
        functions = healed_state.save, healed_state.load, kind._lead, kind._divide
        save, load, lead, divide = (weakly(owner, function) for function in functions)
        self._run = Run(plugin, self.num_processes, self.process_index, owner, save, load, lead, divide)
        refusals.check_groups(plugin.group, plugin.expected_replicas)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}

    @property
    def _leadership(self) -> Leadership | None:
        return self._run.leadership if self._run is not None else None

    @property
    def _window(self) -> StepWindow | None:
        return self._run.window if self._run is not None else None

    @property
    def _trained(self) -> TrainedFeed | None:
        return self._run.elastic if self._run is not None else None

    @property
    def _evaluation(self) -> Sharing | None:
        return self._run.sharing if self._run is not None else None

    # ------------------------------------------------------------ what fault tolerance adds

    @property
    def manager(self) -> Manager | None:
        """ft_core's Manager of this rank: steps, members, metrics. None before a model is prepared, or without FT."""
        return self._run.manager if self._run is not None else None

    @property
    def replica_group(self) -> int:
        """Number of this replica group in the job."""
        return self._window.group if self._window is not None else 0

    @property
    def num_replica_groups(self) -> int:
        """Replica groups by which the training data is divided."""
        return self._window.groups if self._window is not None else 1

    @property
    def committed_steps(self) -> int:
        """Optimizer steps of the run, on all replicas alike; without fault tolerance 0."""
        run = self._run
        return run.manager.current_step() - run.first_step if run is not None and run.manager is not None else 0

    def epochs(self, number: int, start: int = 0) -> Iterator[int]:
        """`range(start, number)`, in which a newcomer goes on with the others' epoch, and ends when they end.

        Args:
            number: of epochs.
            start: the first one.
        """
        self.epoch = start
        yield from elastic_loader.epochs(self, number)

    # ------------------------------------------------------------ prepare

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model; one with parameters to train is wrapped in ours instead of torch's DDP.

        Raises:
            ConfigError: an argument of DistributedDataParallelKwargs cannot work here, or the model is sharded.
            UsageError: training has begun.
        """
        run = self._run
        known = [wrapped for wrapped in run.window.models if model in (wrapped, *wrapped.roots)] if run else []
        if run is None or evaluation_mode or known or self.is_fsdp2:
            return known[0] if known else super().prepare_model(model, device_placement, evaluation_mode)
        # It may have been prepared before: for evaluation, or for another run.
        vars(model).pop("_is_accelerate_prepared", None)
        self._models = [other for other in self._models if other is not model]
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        refusals.check_whole(model)
        wrapped = run.prepare(model, _compat.ddp_arguments(self.ddp_handler))
        self._models = [wrapped if other is model else other for other in self._models]
        vars(wrapped)["_is_accelerate_prepared"] = True
        return wrapped

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader; its data is divided among the processes of all groups while a model trains."""
        if self._run is None or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        place = self.device_placement if device_placement is None else device_placement
        parts = self._run.loader_parts
        prepared: loader.GroupDataLoader
        if is_elastic(data_loader) or self._run.plugin.elastic_data:
            prepared = elastic_loader.prepare(self, data_loader, parts, self._run.elastic, place)
        elif self.dispatch_batches:
            divided = loader.divider(self, data_loader, parts.window, place)
            prepared = dispatcher.prepare(self, divided, parts, slice_fn_for_dispatch)
        else:
            prepared = loader.prepare(self, loader.divider(self, data_loader, parts.window, place), parts)
        self._dataloaders.append(prepared)
        return prepared

    def _prepare_elastic(self, loader: Any) -> Any:
        """A loader of the user's that is elastic; without fault tolerance it is a DataLoader of the same samples."""
        run = self._run
        if run is None:
            return loader.plain(shuffle=loader.sampler.shuffle)
        return elastic_loader.prepare(self, loader, run.loader_parts, run.elastic, self.device_placement)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer; its steps are put to the vote."""
        if self._run is None or getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        place = self.device_placement if device_placement is None else device_placement
        run = self._run
        prepared = VotedOptimizer(
            optimizer, run.window, run.elastic, run.plugin.scaling, device_placement=place, scaler=self.scaler
        )
        self._optimizers.append(prepared)
        run.uneven.optimizers = len(self._optimizers)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler; it advances by the processes of all groups."""
        if self._run is None or getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        mine = [o for o in self._optimizers if getattr(scheduler, "optimizer", None) is o.optimizer]
        prepared = GroupScheduler(
            scheduler, mine[0] if mine else self._optimizers, self._run.window, self._run.elastic,
            step_with_optimizer=self.step_scheduler_with_optimizer, split_batches=self.split_batches,
        )  # fmt: skip
        self._schedulers.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader without its first batches."""
        if isinstance(dataloader, loader.GroupDataLoader):
            return dataloader.starting_at(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    # ------------------------------------------------------------ who writes

    @property
    def is_main_process(self) -> bool:
        """This is the first process of the leading group. It may change when the members of the quorum do."""
        first = bool(super().is_main_process)
        return first and (self._within > 0 or self._leadership is None or self._leadership.leads)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function for the main process, which is looked up at each call."""
        if self._run is None or function is None:
            return super().on_main_process(function)

        @functools.wraps(function)
        def only_there(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return only_there

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print in the leading group only."""
        if self._leadership is None or self._leadership.leads:
            super().print(*args, **kwargs)

    def _divide(self, groups: int) -> bool:
        """The data is divided by another number of groups, unless a batch cannot be split by it."""
        everybody = groups * self.num_processes
        prepared = healed_state.loaders(self)
        if self.split_batches and any(one.total_batch_size % everybody for one in prepared):
            return False
        for one in prepared:
            one.divide(groups)
        return True

    def _lead(self, leads: bool) -> None:
        """This group becomes the leader, or no longer is it."""
        if leads and self._tracking is not None and not self.trackers:
            super().init_trackers(*self._tracking)
        elif not leads:
            for tracker in self.trackers:
                tracker.finish()
            self.trackers = []

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Begin to track in the leading group; another one does it when it begins to lead."""
        self._tracking = project_name, config, init_kwargs
        if self._leadership is None or self._leadership.leads:
            super().init_trackers(project_name, config, init_kwargs)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object in the leading group."""
        write = functools.partial(super().save, obj, f, safe_serialization)
        write() if self._leadership is None else self._leadership.writing(str(f), write, collective=True)

    def save_model(self, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model in the leading group."""
        write = functools.partial(super().save_model, model, save_directory, *args, **kwargs)
        write() if self._leadership is None else self._leadership.writing(str(save_directory), write, collective=True)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save all state in the leading group; another one saves again if that dies meanwhile.

        With other groups in the quorum the folder is in its place after the next step, or the end of training: when all
        are known to hold the step (`load_state` finds it at once).

        A replica that came back names it by a counter of its own, perhaps, which has begun again: where a folder with a
        number in its name has the state of another step, this one is written beside it, with a warning.

        Returns:
            The folder, where it was written; None elsewhere.
        """
        run, settings = self._run, self.project_configuration
        if run is None or self._leadership is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        automatic = settings.automatic_checkpoint_naming
        target = (
            checkpoint_folders.automatic_folder(self.project_dir, settings.iteration) if automatic else str(output_dir)
        )
        iteration = settings.iteration
        save = functools.partial(super().save_state, safe_serialization=safe_serialization, **kwargs)

        def named(folder: str) -> None:
            settings.automatic_checkpoint_naming, now = False, settings.iteration  # later than `iteration` if redone
            try:
                optimizers = map(_compat.inner_optimizer, self._optimizers)
                with self._bare_models(), self.within_group(), keeping_none(optimizers):
                    save(folder)
                if super(FaultTolerantAccelerator, self).is_main_process:
                    save_positions(elastic_loader.feeds(self), folder)
            finally:
                settings.automatic_checkpoint_naming, settings.iteration = automatic, now

        doubtful = self._names.asked(target) and not automatic
        beside = functools.partial(checkpoint_folders.placed, step=self.committed_steps)
        places = [target]

        def write() -> str:
            first = super(FaultTolerantAccelerator, self).is_main_process
            if doubtful:
                places[:] = [self._names.place_of(target, self.committed_steps) if first else target]
                broadcast_object_list(places)
            checkpoint_folders.write(beside(places[0]), named, run.manager_state(), first, self.wait_for_everyone)
            return places[0]

        def place() -> None:
            if super(FaultTolerantAccelerator, self).is_main_process:
                checkpoint_folders.place(beside(places[0]), places[0])
                if automatic and os.path.isdir(os.path.dirname(target)):
                    checkpoint_folders.prune(os.path.dirname(target), settings.total_limit)

        written = self._leadership.writing(target, write, place, lambda: beside(places[0]).discard(), collective=True)
        settings.iteration = iteration + 1
        return written

    @contextlib.contextmanager
    def _bare_models(self) -> Iterator[None]:
        """Inside, what is saved and loaded are the models, not our wrappers: names in files are plain Accelerate's."""
        wrapped, self._models = self._models, [m.module if isinstance(m, WrappedModel) else m for m in self._models]
        try:
            yield
        finally:
            self._models = wrapped

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load all state, on every replica; before training the Manager goes to the step at which it was saved."""
        run = self._run
        if run is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        if self._leadership is not None:
            self._leadership.publisher.publish_all()
            self.wait_for_everyone()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = checkpoint_folders.newest(self.project_dir)
        with self._bare_models(), self.within_group():
            super().load_state(input_dir, load_kwargs, **kwargs)
        load_positions(elastic_loader.feeds(self), str(input_dir))
        state = checkpoint_folders.manager_state(str(input_dir))
        if state and run.window.models:
            run.load_manager_state(state)

    # ------------------------------------------------------------ agreements and the end

    def check_trigger(self) -> bool:
        """Whether any process of any group has set the trigger; the same on all replicas."""
        here = bool(super().check_trigger())
        if self._run is None or self._run.manager is None:
            return here
        anywhere = self._run.window.any_group(here)
        if anywhere is None and here:
            self.set_trigger()  # it could not be sent now: the next check does
        return bool(anywhere)

    def end_training(self) -> None:
        """End training: all replicas stop after the same step, and this one leaves the job."""
        if self._run is not None:
            self._run.end()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Forget all objects; this replica leaves the quorum, and what is prepared next begins another run."""
        freed = super().free_memory(*objects)
        if self._run is not None:
            self._run.begin_anew()
            self.epoch = 0
        return freed
