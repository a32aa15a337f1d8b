"""Everything of Lightning that is not its public API, in one place: what the strategy reads, calls and corrects.

How it works. `lightning.pytorch` and `pytorch_lightning` are two copies of one code with separate class trees; `Tree`
names what is needed of one of them. The functions below touch private attributes of the Trainer and its loops; each
says what of Lightning it relies on. Checked with Lightning 2.5 and 2.6 (tests/lightning).

Threads: the training thread.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    Trainer = Any
    Batch = Any

TREES = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")


def part(tree: str, name: str) -> Any:
    """`part("lightning.pytorch", "strategies.DDPStrategy")`: a public or private name of one of the two trees."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"{tree}.{module}"), attribute)


def dump(trainer: Trainer) -> dict[str, Any]:
    """All state that must be equal on every replica, in the form of a Lightning checkpoint.

    Relies on `_CheckpointConnector.dump_checkpoint`, which is what `trainer.save_checkpoint` writes: model, loops,
    callbacks, optimizers, schedulers, precision plugin, datamodule. Hyper-parameters do not change and are left out.
    """
    state: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for name in ("hyper_parameters", "datamodule_hyper_parameters", "hparams_name", "datamodule_hparams_name"):
        state.pop(name, None)
    return state


def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Load what `dump` returned into a Trainer in the middle of `fit`.

    Relies on the connector's own restore functions, which `fit(ckpt_path=...)` calls in this order, and on each loop's
    restarting flag: it makes a loop skip what a resumed run has behind it, but this one goes on inside the batch.
    """
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = dict(state)
    try:
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_training_state()
    finally:
        connector._loaded_checkpoint = {}
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for loop in (fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop):
        # The attribute, not the property: its setter marks every loop below as restarting, too.
        loop._restarting = False
        for name in ("_restart_stage", "_resuming", "_is_resuming", "is_resuming"):
            if name == "_restart_stage" and hasattr(loop, name):
                loop.reset_restart_stage()
            elif name != "_restart_stage" and isinstance(getattr(loop, name, None), bool):
                try:
                    setattr(loop, name, False)
                except AttributeError:  # a property of the two flags above
                    continue


def refetch(trainer: Trainer) -> Batch:
    """The training batch at the Trainer's position, on the device, after the position has changed.

    Relies on FitLoop._combined_loader and _data_fetcher, and on the order in which the epoch loop prepares a batch:
    the counter `batch_progress.current.ready` is raised before the hooks, so it counts the batch that is fetched here.
    """
    fit = trainer.fit_loop
    fetcher, loader = fit._data_fetcher, fit._combined_loader
    for part_ in loader.flattened:
        _set_epoch(part_, fit.epoch_progress.current.processed)
    iter(fetcher)
    position = fit.epoch_loop.batch_progress.current.ready
    batch = None
    for _ in range(position):
        batch, _, _ = next(fetcher)
    fit.epoch_loop.batch_progress.is_last_batch = fetcher.done
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _set_epoch(dataloader: Any, epoch: int) -> None:
    for owner in (getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)):
        for sampler in (owner, getattr(owner, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)


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
