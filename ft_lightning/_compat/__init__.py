"""Everything of Lightning that is not its public API, in one place: what the strategy reads, calls and corrects.

How it works. `lightning.pytorch` and `pytorch_lightning` are two copies of one code with separate class trees; `Tree`
names what is needed of one of them. The functions below touch private attributes of the Trainer and its loops; each
says what of Lightning it relies on. Checked with Lightning 2.5 and 2.6 (tests/lightning).

Threads: the training thread.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Trainer = Any

TREES = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")


def part(tree: str, name: str) -> Any:
    """`part("lightning.pytorch", "strategies.DDPStrategy")`: a public or private name of one of the two trees."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"{tree}.{module}"), attribute)


def imported(trees: tuple[str, ...]) -> str:
    """The tree of these that is imported, the first one if both are; if none is, the one that is installed."""
    loaded = [tree for tree in trees if tree in sys.modules]
    if loaded:
        return loaded[0]
    return next((tree for tree in trees if importlib.util.find_spec(tree.partition(".")[0])), trees[0])


def fabric_of(tree: str) -> str:
    """The Fabric that belongs to a tree of the Trainer, or the tree itself if it is a Fabric."""
    return tree if tree in FABRICS else FABRICS[TREES.index(tree)]


def launcher_base(tree: str) -> type:
    """Lightning's abstract launcher, of the Trainer or of Fabric. `Strategy._configure_launcher` sets `_launcher`."""
    base: type = part(tree, "strategies.launchers.launcher._Launcher")
    return base


def tunes(trainer: Trainer) -> bool:
    """`fit` was called by the Tuner: it looks for a batch size or a learning rate, and does not train.

    Relies on the Tuner setting `_early_exit` on the callback that it adds for that.
    """
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


def silence(trainer: Trainer) -> None:
    """This process will not train: an exception that ends it is no failed run, which callbacks and loggers act on.

    Relies on `_call_and_handle_interrupt` calling `on_exception` of `trainer.callbacks` (one of them may save a
    checkpoint) and `finalize("failed")` of `trainer.loggers`.
    """
    trainer.callbacks = []
    trainer.loggers = []


def end_of_fit(tree: str) -> Exception:
    """What makes `fit` return at once if it is raised inside: what it set up is taken down, and nothing has failed.

    Relies on `_call_and_handle_interrupt`, which treats the Tuner's `_TunerExitException` so.
    """
    error: Exception = part(tree, "utilities.exceptions._TunerExitException")()
    return error


def dump(trainer: Trainer) -> dict[str, Any]:
    """All state that must be equal on every replica, in the form of a Lightning checkpoint.

    Relies on `_CheckpointConnector.dump_checkpoint`, which is what `trainer.save_checkpoint` writes: model, loops,
    callbacks, optimizers, schedulers, precision plugin, datamodule. Hyper-parameters do not change and are left out.
    """
    state: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for name in ("hyper_parameters", "datamodule_hyper_parameters", "hparams_name", "datamodule_hparams_name"):
        state.pop(name, None)
    return state


def tree_of(trainer: Trainer) -> str:
    """Which of the two trees this Trainer is from."""
    return TREES[1] if type(trainer).__module__.startswith(TREES[1]) else TREES[0]


def accumulates(trainer: Trainer) -> bool:
    """This batch only adds to the gradients."""
    return bool(trainer.fit_loop._should_accumulate())


def uncount_step(trainer: Trainer) -> None:
    """An optimizer step was vetoed: take back that it was begun, and beforehand that it will be counted as completed.

    Relies on `_AutomaticOptimization._optimizer_step` and `_ManualOptimization._on_after_step` counting around the
    strategy's `optimizer_step`; `trainer.global_step` is the total of completed ones.
    """
    epoch = trainer.fit_loop.epoch_loop
    automatic = trainer.lightning_module.automatic_optimization
    progress = (
        epoch.automatic_optimization.optim_progress.optimizer.step
        if automatic
        else epoch.manual_optimization.optim_step_progress
    )
    for tracker in (progress.total, progress.current):
        tracker.ready -= 1
        tracker.completed -= 1


def uncount_schedule(trainer: Trainer) -> None:
    """A scheduler was not advanced: take back that it was begun, and beforehand that it will be counted as completed.

    Relies on `_TrainingEpochLoop._update_learning_rates` counting around the module's `lr_scheduler_step`.
    """
    progress = trainer.fit_loop.epoch_loop.scheduler_progress
    for tracker in (progress.total, progress.current):
        tracker.ready -= 1
        tracker.completed -= 1


def share_state(tree: str, module: Any) -> None:
    """Give parameters and buffers of the group's first rank to all of its ranks, as torch's DDP does at its start."""
    part(tree, "overrides.distributed._sync_module_states")(module)
