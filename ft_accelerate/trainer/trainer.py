"""`FaultTolerantTrainer`: transformers.Trainer whose training survives the loss of replica groups.

    class MyTrainer(FaultTolerantTrainerMixin, Seq2SeqTrainer): ...

makes the same of any subclass of Trainer. Started without replica groups it is that Trainer and nothing else.

How it works. The mixin gives Trainer a FaultTolerantAccelerator, and lets its own loop run:
- A window opens when the loop reads the first batch of an optimizer step (`get_batch_samples`). If this replica was
  moved (it is new, or was behind), `_Moved` leaves `_run_epoch`, which is entered again where the others are, on the
  same open iterator: with as many batches and updates less as they have made, so that accumulation ends at the same
  batches everywhere.
- A vetoed step does not count: the callback handler takes back `global_step` and the loss, and no callback is called
  for it. Training therefore goes on until `max_steps` steps were committed, if need be into a further epoch.
- `Progress` is what a newcomer receives: the TrainerState and the scheduler, which Trainer does not prepare.
- Checkpoints are Trainer's own, written by the leading group beside their place and then renamed.
- Tokens are counted over all groups, as DDP does (`average_tokens_across_devices`).

Invariants: all replicas have the same `global_step`, learning rate and best metric after every step. Threads: the
training thread.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp
from transformers import Trainer

from ft_accelerate import checkpoint_folders
from ft_accelerate._compat import trainer as _compat_trainer
from ft_accelerate.accelerator import FaultTolerantAccelerator
from ft_accelerate.checkpoint_folders import from_first
from ft_accelerate.elastic.loader import ElasticGroupLoader
from ft_accelerate.loader import GroupDataLoader
from ft_accelerate.model import WrappedModel
from ft_accelerate.position import EPOCH
from ft_accelerate.trainer import elastic_epochs
from ft_accelerate.trainer.elastic_epochs import ElasticEpochs
from ft_accelerate.trainer.progress import Progress
from ft_accelerate.trainer.sharded import ShardedTraining, check_arguments
from ft_core.errors import ConfigError, FaultToleranceError
from ft_core.loop.publishing import PlacedFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Base: Any = object
STATE = "trainer_state.json"
MORE_EPOCHS = 8
"""Beyond twice the planned ones, after which training ends although steps were vetoed all the time."""
_END = object()


class _Moved(FaultToleranceError):
    """This replica goes on at another batch, because the others are there, or in data that is divided otherwise."""


class _Continued:
    """The rest of an iterator as a loader.

    Args:
        batch: that was read already.
        iterator: where it came from.
    """

    def __init__(self, batch: Any, iterator: Iterator[Any]) -> None:
        self._rest = itertools.chain([batch], iterator)

    def __iter__(self) -> Iterator[Any]:
        return self._rest


class FaultTolerantTrainerMixin(ShardedTraining, ElasticEpochs):
    """Put in front of Trainer or a subclass of it.

    Raises:
        ConfigError: the process sees several GPUs and was started without a launcher, or settings cannot work.
        NotAvailableError: the installed transformers has another training loop.
    """

    accelerator: Any
    gather_function: Any
    callback_handler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ft_arguments: dict[str, Any] = {}
        self._ft_expected = 0
        """Code of the next batch to be read (`position.Position`)."""
        self._ft_target: int | None = None
        """Code of the batch at which the others are, while this replica is on its way there."""
        self._ft_continued: Any = None
        """The data from there on."""
        self._ft_epoch = 0, 0, 1
        """The epoch under way, the batch at which it began here, and how many batches it has."""
        self._ft_before: tuple[int, Any] = 0, None
        """Commits, and the loss since the last log, when the step under way began."""
        self._ft_stage = ""
        _compat_trainer.check(type(self))
        super().__init__(*args, **kwargs)
        if self._ft_run is not None:
            self._ft_check_model()
            self.callback_handler = _compat_trainer.follow(
                self.callback_handler, self.is_world_process_zero, self._ft_stepped, lambda: self._ft_target is not None
            )

    # ------------------------------------------------------------ the accelerator

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._ft_arguments = super()._build_accelerator_args(**kwargs)
        check_arguments(self._ft_arguments)
        return self._ft_arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which is a FaultTolerantAccelerator."""
        check_devices(self.args.n_gpu)
        super().create_accelerator_and_postprocess()
        plain = self.accelerator
        self.accelerator = FaultTolerantAccelerator(**self._ft_arguments)
        self._ft_note_sharding()
        gather = self.gather_function
        bound = gather.func if isinstance(gather, functools.partial) else gather
        if getattr(bound, "__self__", None) is plain:
            own = getattr(self.accelerator, bound.__name__)
            self.gather_function = functools.partial(own, **gather.keywords) if bound is not gather else own
        if self._ft_run is not None:
            plugin = self._ft_run.plugin
            if plugin.on_exhausted is not None and not plugin.elastic_data:
                raise ConfigError(
                    f"on_exhausted={plugin.on_exhausted!r} with transformers' Trainer, which counts the updates of an "
                    "epoch beforehand: all replicas need equally many batches; leave it out, or set elastic_data=True"
                )
            self.accelerator.register_for_checkpointing(Progress(self))

    @property
    def _ft_run(self) -> Any:
        """The run (`ft_accelerate.run`); None without fault tolerance."""
        return self.accelerator._run

    @property
    def _ft_window(self) -> Any:
        """The window of the run; None without fault tolerance."""
        return self.accelerator._window

    def is_world_process_zero(self) -> bool:
        """Whether this process writes, which is in the leading group."""
        return bool(super().is_world_process_zero()) and (self._ft_run is None or self._ft_leads)

    @property
    def _ft_leads(self) -> bool:
        leadership = self.accelerator._leadership
        return leadership is None or bool(leadership.leads)

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model; what an earlier `train` wrapped is not trained any more, and prepared anew."""
        if isinstance(model, WrappedModel) and (self._ft_run is None or model not in self._ft_window.models):
            model = model.module
        return super()._wrap_model(model, *args, **kwargs)

    # ------------------------------------------------------------ how much there is to do

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """Plan the training; lengths are those of the data divided among all groups."""
        if self._ft_run is None:
            return super().set_initial_training_values(args, dataloader, *more)
        if not isinstance(dataloader, GroupDataLoader):
            raise ConfigError(
                f"get_train_dataloader() returned a {type(dataloader).__name__} that is not prepared, so the replicas "
                "cannot divide it or agree on a batch: return self.accelerator.prepare(loader)"
            )
        planned = self._ft_planned_data(dataloader) if is_elastic(dataloader) else divided(dataloader)
        epochs, *rest = super().set_initial_training_values(args, planned, *more)
        self._ft_planned = epochs
        return min(2 * epochs + MORE_EPOCHS, sys.maxsize), *rest

    def get_total_train_batch_size(self, args: Any) -> int:
        """The samples of a step of all groups."""
        run = self._ft_run
        if run is not None and run.plugin.elastic_data and run.plugin.global_batch_size is not None:
            return int(run.plugin.global_batch_size)
        return int(super().get_total_train_batch_size(args) * self.accelerator.num_replica_groups)

    def _init_training_state(self, max_steps: int, updates: int, epochs: int, resume: Any, trial: Any) -> Any:
        planned = epochs if self._ft_run is None else self._ft_planned
        return super()._init_training_state(max_steps, updates, planned, resume, trial)

    # ------------------------------------------------------------ the loop

    def _run_epoch(self, **call: Any) -> None:
        """One epoch, from wherever the others are in it; returns at once from one that is over for them."""
        if self._ft_run is None or not isinstance(call["train_dataloader"], GroupDataLoader):
            super()._run_epoch(**call)
            return
        epoch, loader = call["epoch"], call["train_dataloader"]
        if is_elastic(loader):
            self._ft_elastic_epoch(call)
            return
        first = self._ft_resumed(call)
        data = loader.starting_at(first) if first else loader
        while True:
            if self._ft_target is not None:
                there, first = divmod(self._ft_target, EPOCH)
                if there != epoch:
                    return
                self._ft_target, data = None, self._ft_continued
            loader.position.ahead = 0
            self._ft_expected = epoch * EPOCH + first
            total, accumulated = length(loader) or call["steps_in_epoch"], self.args.gradient_accumulation_steps
            self._ft_epoch = epoch, first, total
            try:
                super()._run_epoch(**{
                    **call, "train_dataloader": data, "resume_from_checkpoint": None, "steps_in_epoch": total - first,
                    "num_update_steps_per_epoch": -(-total // accumulated) - first // accumulated,
                })  # fmt: skip
                return
            except _Moved:
                continue

    def _ft_resumed(self, call: Mapping[str, Any]) -> int:
        """The first batch of the epoch: 0, unless it is the one in which a checkpoint was saved."""
        checkpoint = call["resume_from_checkpoint"]
        if checkpoint is None or call["epoch"] != call["epochs_trained"] or self.args.ignore_data_skip:
            return 0
        self._load_rng_state(checkpoint)
        return int(call["steps_trained_in_current_epoch"])

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *more: Any, **kwargs: Any) -> Any:
        """Read the batches of a step. Reading the first one opens the window of the optimizer step that needs it."""
        window = self._ft_window
        if window is None or not self.is_in_train:
            return super().get_batch_samples(epoch_iterator, num_batches, *more, **kwargs)
        if self._ft_reading is not None:
            return self._ft_elastic_samples(self._ft_reading)
        batch = next(epoch_iterator, _END)
        if window.stopped:
            self.control.should_training_stop = True
        if batch is _END or window.stopped:
            return super().get_batch_samples(iter(()), num_batches, *more, **kwargs)
        loader = self.callback_handler.train_dataloader
        at, total = loader.position.code - 1, self._ft_epoch[2]
        if at != self._ft_expected or (length(loader) or total) != total:
            self._ft_target, self._ft_continued = at, _Continued(batch, epoch_iterator)
            raise _Moved(f"from {divmod(self._ft_expected, EPOCH)} to {divmod(at, EPOCH)}")
        self._ft_before = self.accelerator.committed_steps, self._tr_loss.clone()
        out = super().get_batch_samples(itertools.chain([batch], epoch_iterator), num_batches, *more, **kwargs)
        self._ft_expected += len(out[0])
        return out

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        items = super()._get_num_items_in_batch(*args, **kwargs)
        manager = self._ft_window.quorum if self._ft_window is not None and self.is_in_train else None
        if items is None or manager is None or not self.args.average_tokens_across_devices:
            return items
        counted = torch.as_tensor(items)
        total = counted.detach().cpu().round().to(torch.int64).reshape(1)
        manager.allreduce(total, reduce_op=ReduceOp.SUM).wait()
        # Trainer multiplies the loss by the processes of this group; the average over the groups divides by these.
        return (total[0] / max(1, manager.num_participants())).to(counted.device)

    def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
        """The loss that is logged is the average over all groups."""
        manager = self._ft_window.quorum if self._ft_window is not None else None
        if manager is not None and self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            total = tr_loss.detach().cpu().reshape(1).clone()
            manager.allreduce(total, reduce_op=ReduceOp.SUM).wait()
            if manager.errored() is None:
                tr_loss.copy_(total[0] / max(1, manager.num_participants()))
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _ft_stepped(self, state: Any) -> bool:
        """Whether the step that has just been counted was committed; take it back if it was not."""
        if self._ft_reading is not None:
            self._ft_place_of(self._ft_reading, state)
        else:
            epoch, first, total = self._ft_epoch
            within = round((state.epoch - epoch) * (total - first))  # batches: the same quotient on all replicas
            state.epoch = epoch + (first + within) / total
        commits, loss = self._ft_before
        if self.accelerator.committed_steps > commits:
            return True
        state.global_step -= 1
        self._tr_loss.copy_(loss)
        return False

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """First everybody stops together: what the leader saves last is there before it is read."""
        if self._ft_run is not None:
            self._ft_run.end()  # not end_training: the group still evaluates and saves
        return super()._finalize_training(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on all the data in each group, or shared by all (`sharing`); the others wait meanwhile."""
        window = self._ft_window
        if window is None:
            return super().evaluation_loop(*args, **kwargs)
        before = [(root, root.training) for model in window.models for root in model.roots]
        try:
            with window.by_itself("evaluating"):
                return super().evaluation_loop(*args, **kwargs)
        finally:
            for root, training in before:
                root.train(training)  # Trainer's loop does so only after it has read the next batches

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch by this group alone, also in an evaluation loop of a subclass's own."""
        window = self._ft_window
        if window is None or window.aside:
            return super().prediction_step(*args, **kwargs)
        with window.by_itself("evaluating"):
            return super().prediction_step(*args, **kwargs)

    # ------------------------------------------------------------ checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return self._ft_stage or str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._ft_run is None:
            super()._save_checkpoint(model, trial)
            return
        folder = self._get_output_dir(trial)
        name = f"checkpoint-{self.state.global_step}"
        best = self.state.best_global_step
        self.accelerator._leadership.writing(
            os.path.join(folder, name),
            functools.partial(self._ft_write, model, trial, folder, name),
            functools.partial(self._ft_place, folder, name, best),
            functools.partial(self._ft_discard, folder, name),
            collective=True,
        )
        if best and self.args.save_strategy != "no":
            self.state.best_model_checkpoint = os.path.join(folder, f"checkpoint-{best}")

    def _ft_write(self, model: Any, trial: Any, folder: str, name: str) -> None:
        """Trainer's own checkpoint, beside its place. On all processes of this group."""
        first, placed = self.args.process_index == 0, self._ft_placed(folder, name)
        self._ft_stage = stage = placed.begin(from_first, first=first)
        try:
            with self._ft_arguments_as_given():
                super()._save_checkpoint(model, trial)
        finally:
            self._ft_stage = ""
        if first:
            elastic_epochs.save(self, os.path.join(stage, name))
        self.accelerator.wait_for_everyone()
        state = self.state
        if first and state.best_model_checkpoint and state.best_model_checkpoint.startswith(stage):
            state.best_model_checkpoint = os.path.join(folder, name)
            state.save_to_json(os.path.join(stage, name, STATE))
        if first:
            placed.complete(stage)

    def _ft_placed(self, folder: str, name: str) -> PlacedFolder:
        """It has the step in its name, so the step of the state tells no more."""
        return PlacedFolder(folder, name, 0)

    def _ft_discard(self, folder: str, name: str) -> None:
        if self.args.process_index == 0:
            self._ft_placed(folder, name).discard()

    def _ft_place(self, folder: str, name: str, best: int | None) -> None:
        """Move what was written to its place, unless that was done; the oldest that are over the limit go.

        What is there already stays, as with Trainer: callbacks have written into the folder since (on_save).
        """
        stage, place = self._ft_placed(folder, name).beside, os.path.join(folder, name)
        if self.args.process_index != 0 or not os.path.isdir(stage):
            return
        checkpoint_folders.take_over(place, os.path.join(stage, name))
        shutil.rmtree(place, ignore_errors=True)
        os.replace(os.path.join(stage, name), place)
        os.rmdir(stage)
        _compat_trainer.rotate_checkpoints(
            output_dir=folder, save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=os.path.join(folder, f"checkpoint-{best}") if best else None, use_mtime=True,
        )  # fmt: skip

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model in the leading group."""
        if self._ft_stage or self._ft_run is None or self._ft_leads:
            super().save_model(output_dir, _internal_call)


class FaultTolerantTrainer(FaultTolerantTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers.Trainer with fault tolerance; all arguments are Trainer's."""


def is_elastic(loader: object) -> bool:
    """Its samples are divided per step."""
    return isinstance(loader, ElasticGroupLoader)


def divided(loader: GroupDataLoader) -> Any:
    """torch's loader of the data as it is divided among all groups for training, before and while it is read."""
    return loader._bases[0]


def length(loader: GroupDataLoader) -> int:
    """Batches of an epoch on this process; 0 for a stream."""
    try:
        return len(divided(loader))
    except TypeError:
        return 0


def check_devices(visible: int) -> None:
    """Refuse what Trainer would make a DataParallel of.

    Args:
        visible: GPUs that Trainer would use in this process.

    Raises:
        ConfigError: more than one; says how to start a replica group on each.
    """
    if visible > 1:
        command = " ".join(["ft-accelerate", "launch", "--ft_replicas", str(visible), *sys.argv])
        raise ConfigError(
            f"this process sees {visible} GPUs, and transformers would make one DataParallel model of them, which "
            f"cannot train with other replica groups. Start one group on each: {command}"
        )
