"""`FaultTolerantAccelerator`: Accelerate's Accelerator whose training survives the loss of replica groups.

    from ft_accelerate import FaultTolerantAccelerator as Accelerator

is the whole change to a script; `ftrun` or `ft-accelerate launch` starts its replica groups. Started without them (no
FT_* or ACCELERATE_FT_* in the environment, no plugin) it is an Accelerator and nothing else.

How it works. `prepare` gives models, optimizers, schedulers and loaders of ours (`run`, `optimizer`, `data`); what all
replicas must have alike is `heal`; who saves and logs is `leader`. Properties that speak of processes
(`num_processes`, `process_index`, `gather`, `reduce`, `wait_for_everyone`) mean the processes of this group, which is
what Accelerate's own collectives reach; only `is_main_process`, saving, tracking, `check_trigger` and `end_training`
speak of the whole job, and `gather` does in a shared evaluation (`sharing`).

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

from ft_accelerate import _compat, checkpoints, data, dispatch, elastic, elastic_loader, heal, refusals, running_out
from ft_accelerate.elastic_steps import ElasticSteps
from ft_accelerate.leader import Leadership
from ft_accelerate.optimizer import GroupScheduler, VotedOptimizer
from ft_accelerate.plugin import FaultTolerancePlugin, plugin_or_none
from ft_accelerate.run import Run
from ft_accelerate.sharing import SharedResults
from ft_accelerate.wrapping import WrappedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ft_core import Manager


def _of(owner: weakref.ref[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(owner, ...)`, which keeps no owner alive: what is called when it is gone has nothing to do any more."""

    def call(*arguments: Any) -> Any:
        alive = owner()
        return None if alive is None else function(alive, *arguments)

    return call


class FaultTolerantAccelerator(ElasticSteps, SharedResults, _compat.Accelerator):  # type: ignore[misc]
    """An Accelerator whose models train in step with those of other replica groups, any of which may fail.

    Args:
        args: of Accelerator.
        fault_tolerance_plugin: settings; None: from the environment, and no fault tolerance where that is silent.
        kwargs: of Accelerator.

    Raises:
        ConfigError: settings that cannot work, or DeepSpeed, Megatron, a TPU, communication hooks.
        NotAvailableError: FSDP, tensor or context parallelism inside a group.
    """

    trackers: list[Any]
    _models: list[Any]

    def __init__(self, *args: Any, fault_tolerance_plugin: FaultTolerancePlugin | None = None, **kwargs: Any) -> None:
        self.fault_tolerance_plugin = plugin_or_none(fault_tolerance_plugin)
        self.epoch = 0
        """The epoch under way in `epochs`."""
        self._run: Run | None = None
        self._leadership: Leadership | None = None
        self._tracking: tuple[Any, ...] | None = None
        self._names = checkpoints.Names()
        if self.fault_tolerance_plugin is not None:
            refusals.check_arguments(
                inspect.signature(_compat.Accelerator.__init__).bind(self, *args, **kwargs).arguments
            )
        super().__init__(*args, **kwargs)
        if self.fault_tolerance_plugin is not None:
            refusals.check_state(self.state)
            refusals.check_sharing(self.fault_tolerance_plugin.share_evaluation, self.dispatch_batches)
            self._begin(self.fault_tolerance_plugin)

    def _begin(self, plugin: FaultTolerancePlugin) -> None:
        kind, owner = type(self), weakref.ref(self)
        save, load, opened, divide, lead = (
            _of(owner, function) for function in (heal.save, heal.load, kind._opened, kind._divide, kind._lead)
        )
        self._run = Run(plugin, self.num_processes, self.process_index, owner, save, load, opened, divide)
        refusals.check_groups(self._run.group, plugin.expected_replicas)
        self._leadership = Leadership(self._run, lead)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None, "_leadership": None}

    # ------------------------------------------------------------ what fault tolerance adds

    @property
    def manager(self) -> Manager | None:
        """ft_core's Manager of this rank: steps, members, metrics. None before a model is prepared, or without FT."""
        return self._run.manager if self._run is not None else None

    @property
    def replica_group(self) -> int:
        """Number of this replica group in the job."""
        return self._run.group if self._run is not None else 0

    @property
    def num_replica_groups(self) -> int:
        """Replica groups by which the training data is divided."""
        return self._run.groups if self._run is not None else 1

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
        """As Accelerator's; a model with parameters to train is wrapped in ours instead of torch's DDP.

        Raises:
            ConfigError: an argument of DistributedDataParallelKwargs cannot work here.
            UsageError: training has begun.
        """
        run = self._run
        known = [wrapped for wrapped in run.models if model is wrapped or model is wrapped.module] if run else []
        if run is None or evaluation_mode or known:
            return known[0] if known else super().prepare_model(model, device_placement, evaluation_mode)
        # It may have been prepared before: for evaluation, or for another run.
        vars(model).pop("_is_accelerate_prepared", None)
        self._models = [other for other in self._models if other is not model]
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapped = run.wrap(model, _compat.ddp_arguments(self.ddp_handler))
        self._models = [wrapped if other is model else other for other in self._models]
        vars(wrapped)["_is_accelerate_prepared"] = True
        return wrapped

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As Accelerator's; the data is divided among the processes of all groups while a model trains."""
        if self._run is None or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        place = self.device_placement if device_placement is None else device_placement
        if elastic.is_elastic(data_loader) or self._run.plugin.elastic_data:
            prepared: data.GroupDataLoader = elastic_loader.prepare(self, data_loader, self._run, place)
            self._dataloaders.append(prepared)
            return prepared
        divided = data.divider(self, data_loader, self._run, place)
        if self.dispatch_batches:
            prepared = dispatch.prepare(self, divided, self._run, slice_fn_for_dispatch)
        else:
            prepared = data.prepare(self, divided, self._run)
        self._dataloaders.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerator's; its steps are put to the vote."""
        if self._run is None or getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        place = self.device_placement if device_placement is None else device_placement
        prepared = VotedOptimizer(optimizer, self._run, device_placement=place, scaler=self.scaler)
        self._optimizers.append(prepared)
        self._run.out.optimizers = len(self._optimizers)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As Accelerator's; it advances by the processes of all groups."""
        if self._run is None or getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        mine = [o for o in self._optimizers if getattr(scheduler, "optimizer", None) is o.optimizer]
        prepared = GroupScheduler(
            scheduler, mine[0] if mine else self._optimizers, self._run,
            step_with_optimizer=self.step_scheduler_with_optimizer, split_batches=self.split_batches,
        )  # fmt: skip
        self._schedulers.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As Accelerator's."""
        if isinstance(dataloader, data.GroupDataLoader):
            return dataloader.starting_at(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    # ------------------------------------------------------------ gradients

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """As Accelerator's, also in a group of one process."""
        with model.no_sync() if isinstance(model, WrappedModel) else super().no_sync(model):
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        """As Accelerator's."""
        if isinstance(model, WrappedModel) and not (model._run is not None and model._run.silent):
            model.carrier.before_backward(sync=True)
        with _compat.Accelerator.trigger_sync_in_backward(model):
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """As Accelerator's, over all groups, and also in a group of one process.

        Raises:
            ConfigError: several models or optimizers, or others than were prepared.
        """
        if self._run is None:
            return super().join_uneven_inputs(joinables, even_batches)
        return running_out.joined(self, self._run, joinables, even_batches)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As Accelerator's; afterwards gradients are averaged over all groups if they are synchronized."""
        super().backward(loss, **kwargs)
        if self._run is not None:
            if not (self._run.owners_known or self._run.aside):
                self._run.owners_known = refusals.check_owners(self._run.models, self._optimizers)
            self._run.settling.passes += any(model.require_backward_grad_sync for model in self._run.models)
            self._run.settle_gradients()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """As Accelerator's."""
        self._settle_gradients()
        super().unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """As Accelerator's."""
        self._settle_gradients()
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: Any) -> None:
        """As Accelerator's."""
        self._settle_gradients()
        super().clip_grad_value_(parameters, clip_value)

    def _settle_gradients(self) -> None:
        if self._run is not None:
            self._run.settle_gradients()

    # ------------------------------------------------------------ who writes

    @property
    def is_main_process(self) -> bool:
        """This is the first process of the leading group. It may change when the members of the quorum do."""
        first = bool(super().is_main_process)
        return first and (self._leadership is None or self._leadership.leads)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """As Accelerator's; who the main process is, is looked up at each call."""
        if self._run is None or function is None:
            return super().on_main_process(function)

        @functools.wraps(function)
        def only_there(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return only_there

    def print(self, *args: Any, **kwargs: Any) -> None:
        """As Accelerator's, in the leading group only."""
        if self._leadership is None or self._leadership.leads:
            super().print(*args, **kwargs)

    def _opened(self) -> None:
        assert self._leadership is not None
        self._leadership.opened()

    def _divide(self, groups: int) -> bool:
        """The data is divided by another number of groups, unless a batch cannot be split by it."""
        everybody = groups * self.num_processes
        loaders = heal.loaders(self)
        if self.split_batches and any(loader.total_batch_size % everybody for loader in loaders):
            return False
        for loader in loaders:
            loader.divide(groups)
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
        """As Accelerator's, in the leading group; another one does it when it begins to lead."""
        self._tracking = project_name, config, init_kwargs
        if self._leadership is None or self._leadership.leads:
            super().init_trackers(project_name, config, init_kwargs)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """As Accelerator's, in the leading group."""
        write = functools.partial(super().save, obj, f, safe_serialization)
        write() if self._leadership is None else self._leadership.writing(str(f), write)

    def save_model(self, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As Accelerator's, in the leading group."""
        write = functools.partial(super().save_model, model, save_directory, *args, **kwargs)
        write() if self._leadership is None else self._leadership.writing(str(save_directory), write)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As Accelerator's, in the leading group; another one saves again if that dies meanwhile.

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
        target = checkpoints.automatic_folder(self.project_dir, settings.iteration) if automatic else str(output_dir)
        iteration = settings.iteration
        save = functools.partial(super().save_state, safe_serialization=safe_serialization, **kwargs)

        def named(folder: str) -> None:
            settings.automatic_checkpoint_naming, now = False, settings.iteration  # later than `iteration` if made good
            try:
                with self._bare_models():
                    save(folder)
                if super(FaultTolerantAccelerator, self).is_main_process:
                    elastic.save(elastic_loader.feeds(self), folder)
            finally:
                settings.automatic_checkpoint_naming, settings.iteration = automatic, now

        doubtful = self._names.asked(target) and not automatic
        places = [target]

        def write() -> str:
            first = super(FaultTolerantAccelerator, self).is_main_process
            if doubtful:
                places[:] = [self._names.place_of(target, self.committed_steps) if first else target]
                broadcast_object_list(places)
            checkpoints.write(places[0], named, run.manager_state(), first, self.wait_for_everyone)
            return places[0]

        def place() -> None:
            if super(FaultTolerantAccelerator, self).is_main_process:
                checkpoints.place(places[0])
                if automatic:
                    checkpoints.prune(os.path.dirname(target), settings.total_limit)

        written = self._leadership.writing(target, write, place)
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
        """As Accelerator's, on every replica; before training the Manager goes to the step at which it was saved."""
        run = self._run
        if run is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        if self._leadership is not None:
            self._leadership.publish_all()
            self.wait_for_everyone()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = checkpoints.newest(self.project_dir)
        with self._bare_models():
            super().load_state(input_dir, load_kwargs, **kwargs)
        elastic.load(elastic_loader.feeds(self), str(input_dir))
        state = checkpoints.manager_state(str(input_dir))
        if state and run.models:
            run.load_manager_state(state)

    # ------------------------------------------------------------ agreements and the end

    def check_trigger(self) -> bool:
        """As Accelerator's, over all groups: True on all replicas if any process of any group set it."""
        here = bool(super().check_trigger())
        if self._run is None or self._run.manager is None:
            return here
        anywhere = self._run.any_group(here)
        if anywhere is None and here:
            self.set_trigger()  # it could not be told now: the next check does
        return bool(anywhere)

    def end_training(self) -> None:
        """As Accelerator's; all replicas stop after the same step, and this one leaves the job."""
        if self._run is not None:
            self._run.end()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerator's; this replica leaves the quorum, and what is prepared next begins another run."""
        freed = super().free_memory(*objects)
        if self._run is not None:
            self._run.begin_anew()
            self.epoch = 0
        return freed
