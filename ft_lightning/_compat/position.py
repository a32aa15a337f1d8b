"""The part of `_compat` about the position of a run: loops, loaders, samplers, logged values.

How it works. As `_compat`: functions that read, call and correct what is private to Lightning; each says what it relies
on. They know how Lightning does things; `trainer.takeover` and `trainer.sharding` know what for.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from ft_core.data import ElasticDataLoader
from ft_core.errors import ConfigError
from ft_core.loop.sampling import can_skip, open_at
from ft_lightning._compat import FABRICS, TREES, part, tree_of
from ft_lightning._compat import callbacks as _callbacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    Trainer = Any


def restore(trainer: Trainer, state: Mapping[str, Any], hidden: Mapping[str, Any]) -> None:
    """Load what `dump` and `hidden` returned into a Trainer between two batches of `fit`.

    Relies on the connector's own restore functions, in the order in which `fit(ckpt_path=...)` calls them, and on the
    marks that loading leaves on the loops: they make a loop skip what a resumed run has behind it, but this one goes on
    in the middle. If the epoch changes, `on_train_epoch_start` is called for the new one: after the callbacks know
    their state, before optimizers and schedulers are loaded, which some callbacks replace there. What the hook changed
    in the callbacks' states is taken back: the donors' have it in them.
    """
    fit, before = trainer.fit_loop, epoch_and_batch(trainer)[0]
    connector = trainer._checkpoint_connector
    _callbacks.prune_likewise(trainer.lightning_module, state[_callbacks.WEIGHTS])
    connector._loaded_checkpoint = _callbacks.apart(trainer, state)
    try:
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        fit._combined_loader_states_to_load = []  # `place_data` does that
        epoch = fit.epoch_loop
        for loop in (fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop):
            # The attributes, not the property: its setter marks every loop below as restarting, too.
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            getattr(loop, "reset_restart_stage", lambda: None)()
        if epoch_and_batch(trainer)[0] != before:
            call = part(tree_of(trainer), "trainer.call._call_callback_hooks")
            call(trainer, "on_train_epoch_start")
            part(tree_of(trainer), "trainer.call._call_lightning_module_hook")(trainer, "on_train_epoch_start")
            again = part(tree_of(trainer), "trainer.call._call_callbacks_load_state_dict")
            again(trainer, connector._loaded_checkpoint)
        _callbacks.load_hidden(trainer, hidden)
        connector.restore_optimizers_and_schedulers()
    finally:
        connector._loaded_checkpoint = {}


def epoch_and_batch(trainer: Trainer) -> tuple[int, int]:
    """Position between two batches: the epoch under way, and how many of its batches are done."""
    fit = trainer.fit_loop
    return fit.epoch_progress.current.processed, fit.epoch_loop.batch_progress.current.ready


def around_each_batch(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` where the training epoch loop is about to fetch a batch: all progress stands between two batches.

    Relies on `_TrainingEpochLoop.run` calling `self.advance(data_fetcher)` per batch; the fetcher it passes was taken
    when the epoch began, so the current one is put in its place.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = type(loop).advance

    def advance_between(_: Any) -> None:
        before()
        advance(loop, trainer.fit_loop._data_fetcher)
        after()

    loop.advance = advance_between


def no_longer_around_batches(trainer: Trainer) -> None:
    """Undo what `around_each_batch` did to the loop."""
    vars(trainer.fit_loop.epoch_loop).pop("advance", None)


def resumed_mid_epoch(trainer: Trainer) -> bool:
    """`fit(ckpt_path=...)` goes on inside an epoch, with loaders that Lightning would start from their beginning."""
    fit = trainer.fit_loop
    return bool(
        (fit.restarting or fit.epoch_loop.restarting) and epoch_and_batch(trainer)[1] and not loader_states(trainer)
    )


def epoch_is_over(trainer: Trainer) -> bool:
    """The batch under way is the last of its epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def follow_micro_batches(trainer: Trainer, first: Callable[[], bool], last: Callable[[], bool]) -> None:
    """Let `first` say whether a batch begins an accumulation window, and `last` whether it ends it.

    Losses are no longer divided by the number of micro-batches, which `accumulate_grad_batches` need not be any more.
    Relies on `_TrainingEpochLoop._accumulated_batches_reached`, and on `_AutomaticOptimization` making what clears
    gradients in `_make_zero_grad_fn(batch_idx, optimizer)` (at indices that `accumulate_grad_batches` divides), and its
    result with `output_result_cls.from_training_step_output(output, normalize)`.
    """
    loop = trainer.fit_loop.epoch_loop
    automatic = loop.automatic_optimization
    clears, result = type(automatic)._make_zero_grad_fn, type(automatic).output_result_cls

    class Whole(result):  # type: ignore[misc,valid-type]
        """A loss as the module returned it."""

        @classmethod
        def from_training_step_output(cls, output: Any, normalize: int = 1) -> Any:
            """Build the result as Lightning does, without the division by micro-batches."""
            del normalize
            return super().from_training_step_output(output, 1)

    automatic.output_result_cls = Whole
    automatic._make_zero_grad_fn = lambda _batch_idx, optimizer: clears(automatic, 0, optimizer) if first() else None
    loop._accumulated_batches_reached = last


def no_longer_follow(trainer: Trainer) -> None:
    """Undo what `follow_micro_batches` did to the loop."""
    loop = trainer.fit_loop.epoch_loop
    vars(loop).pop("_accumulated_batches_reached", None)
    for name in ("output_result_cls", "_make_zero_grad_fn"):
        vars(loop.automatic_optimization).pop(name, None)


def check_single_loader(trainer: Trainer) -> None:
    """Raise ConfigError unless there is one training loader, whose batches Lightning hands to `training_step`."""
    fit = trainer.fit_loop
    if len(fit._combined_loader.flattened) != 1:
        raise ConfigError(
            f"elastic data: {len(fit._combined_loader.flattened)} training loaders, but one dataset is divided per "
            "fit; combine the datasets in one (torch.utils.data.StackDataset, ConcatDataset)"
        )
    if isinstance(fit._data_fetcher, part(tree_of(trainer), "loops.fetchers._DataLoaderIterDataFetcher")):
        raise ConfigError(
            "elastic data: training_step(dataloader_iter) reads as many batches as it likes; take (batch, batch_idx)"
        )


def data_is_over(trainer: Trainer) -> bool:
    """The batch under way is the last of its epoch, and not because training is to end."""
    fit = trainer.fit_loop
    steps = fit.max_steps != -1 and fit.epoch_loop.global_step >= fit.max_steps
    return epoch_is_over(trainer) and not steps and not trainer.should_stop


def end_epoch(trainer: Trainer) -> None:
    """The batch under way is the last of its epoch."""
    tell_length(trainer, epoch_and_batch(trainer)[1], last=True)


def lengths(trainer: Trainer) -> tuple[Any, Any]:
    """The lengths that `tell_length` changes for longer than an epoch."""
    return trainer.fit_loop.max_batches, trainer.val_check_batch


def set_lengths(trainer: Trainer, before: tuple[Any, Any]) -> None:
    """Put back the lengths that `lengths` returned."""
    trainer.fit_loop.max_batches, trainer.val_check_batch = before


def end_fit(trainer: Trainer) -> None:
    """Train no further, whatever `min_epochs` and `min_steps` say."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None


def count_batch(trainer: Trainer) -> None:
    """A step's batches of the others, of which there were none here."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for _ in range(trainer.accumulate_grad_batches):
        progress.increment_ready()
        progress.increment_started()
        progress.increment_processed()
        progress.increment_completed()


def step_optimizer(trainer: Trainer) -> None:
    """Make a step with the gradients that are there, with hooks, schedulers and counts.

    Relies on `_AutomaticOptimization._optimizer_step(batch_idx, closure)`, and on `update_lr_schedulers`, which the
    training epoch loop calls after each batch, once for those that follow a metric.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization._optimizer_step(loop.batch_idx, lambda: None)
    for plateau in (False, True):
        loop.update_lr_schedulers("step", update_plateau_schedulers=plateau)
    loop._batches_that_stepped += 1


def step_epoch_schedulers(trainer: Trainer) -> None:
    """Those that do not follow a metric, whose turn is after an epoch's last batch."""
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def limited(trainer: Trainer, total: int) -> int:
    """`limit_train_batches` of an epoch of `total` batches."""
    limit = trainer.limit_train_batches
    return min(total, limit) if isinstance(limit, int) else max(1, int(total * limit))


def tell_length(trainer: Trainer, total: int, *, last: bool | None = None) -> None:
    """The epoch under way has `total` batches.

    Relies on `FitLoop.max_batches`, the fetcher's `length` (`done` once as many were fetched), and, where the interval
    is a part of an epoch, `Trainer.val_check_batch`; on `train_progress_bar` (tqdm) and `train_progress_bar_id` (rich)
    of Lightning's progress bars.

    Args:
        trainer: in `fit`.
        total: including those that are done.
        last: whether the batch under way is the last one; None: none is under way.
    """
    fit = trainer.fit_loop
    fetcher, interval = fit._data_fetcher, trainer.val_check_interval
    changed, fit.max_batches = fit.max_batches != total, total
    fetcher.length = total
    if last is not None:
        fetcher.done = fit.epoch_loop.batch_progress.is_last_batch = last
    if isinstance(interval, float) and trainer.val_check_batch not in (None, float("inf")):
        trainer.val_check_batch = max(1, int(total * interval))
    shown = trainer.progress_bar_callback
    if not changed or shown is None or not getattr(shown, "is_enabled", True):
        return
    bar, number = getattr(shown, "_train_progress_bar", None), getattr(shown, "train_progress_bar_id", None)
    if bar is not None:
        bar.total = total
    elif number is not None and shown.progress is not None:
        shown.progress.update(number, total=total)


def forget_loaders(checkpoint: dict[str, Any]) -> None:
    """Take out the loaders' states, which a Trainer with other loaders would stumble over.

    Relies on `FitLoop.on_save_checkpoint` putting them into the loop's own state as `combined_loader`.
    """
    checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)


def was_last(trainer: Trainer) -> bool:
    """The checkpoint that this run starts from was saved at the last batch of an epoch."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def divides_data(trainer: Trainer) -> bool:
    """Whether Lightning divides the data (`Trainer(use_distributed_sampler)`)."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def around_samplers(
    trainer: Trainer, exchange: Callable[[Any, str], Any], around: Callable[[Any, str], AbstractContextManager[None]]
) -> None:
    """Enter `around(loader, stage)` while the Trainer gives a loader its sampler: the one `exchange` makes of it.

    Relies on `_DataConnector._prepare_dataloader(dataloader, shuffle, mode)`, called for each loader of each stage.
    """
    connector = trainer._data_connector
    connector._prepare_dataloader = partial(_prepare_around, connector, exchange, around)  # a closure is not picklable


def _prepare_around(connector: Any, exchange: Any, around: Any, dataloader: Any, shuffle: bool, mode: Any) -> Any:
    dataloader = exchange(dataloader, mode.dataloader_prefix)
    with around(dataloader, mode.dataloader_prefix):
        return type(connector)._prepare_dataloader(connector, dataloader, shuffle=shuffle, mode=mode)


def worker_seeder(tree: str) -> Callable[..., None]:
    """Lightning's function `pl_worker_init_function(worker_id, rank)`."""
    fabric = FABRICS[TREES.index(tree)]
    return part(fabric, "utilities.seed.pl_worker_init_function")  # type: ignore[no-any-return]


def loader_states(trainer: Trainer) -> list[dict[str, Any]]:
    """States of those training loaders that have one (StatefulDataLoader and the like), in order."""
    combined = trainer.fit_loop._combined_loader
    return combined._state_dicts() if combined is not None else []


def reads_ahead(trainer: Trainer) -> bool:
    """Loaders without a length: the fetcher holds one batch more than was trained on, and so do `loader_states`."""
    fetcher = trainer.fit_loop._data_fetcher
    return getattr(fetcher, "prefetch_batches", 0) > 0 and fetcher.length is None


def position_unknown(trainer: Trainer) -> bool:
    """`training_step(dataloader_iter)` has taken more or fewer batches than one per step."""
    fetcher = trainer.fit_loop._data_fetcher
    own = isinstance(fetcher, part(tree_of(trainer), "loops.fetchers._DataLoaderIterDataFetcher"))
    return own and fetcher.fetched != epoch_and_batch(trainer)[1]


def place_data(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    """Open the training data at `epoch_and_batch`, without reading what is before it where that is possible.

    Relies on FitLoop's combined loader and fetcher, on the combined loader's mode iterator (`iterators`, `_idx`,
    `_consumed` of max_size_cycle), and on what `iter(fetcher)` does.

    Args:
        states: `loader_states` of a peer; they go before counting.
    """
    fit = trainer.fit_loop
    fetcher, combined = fit._data_fetcher, fit._combined_loader
    epoch, batch = epoch_and_batch(trainer)
    set_epoch = part(FABRICS[TREES.index(tree_of(trainer))], "utilities.data._set_sampler_epoch")
    loaders = combined.flattened
    for loader in loaders:
        set_epoch(loader, epoch)
    cycles = combined._mode == "max_size_cycle"
    stateful = [hasattr(x, "state_dict") and hasattr(x, "load_state_dict") for x in loaders]
    known = all(s or can_skip(x) for s, x in zip(stateful, loaders, strict=True))
    if any(isinstance(loader, ElasticDataLoader) for loader in loaders):
        pass  # the only one, and its cursor is the Manager's affair
    elif stateful and states and len(states) == sum(stateful):
        combined._load_state_dicts(states)
    else:
        known = known and not any(stateful)
    # With max_size_cycle a loader that has ended began again: `consumed` since the read that found its end.
    lengths = [len(x) if cycles and known and can_skip(x) else 0 for x in loaders]
    consumed = [0 < n < batch for n in lengths]
    with contextlib.ExitStack() as stack:
        for loader, own, n in zip(loaders, stateful, lengths, strict=True):
            if known and not own:
                stack.enter_context(open_at(loader, (batch - 1) % n + 1 if 0 < n < batch else batch))
        iter(combined)
    if known:
        combined._iterator._idx = batch
        if cycles:
            combined._iterator._consumed = consumed
    else:
        with contextlib.suppress(StopIteration):
            for _ in range(batch):
                next(combined)
    fetcher.iterator = combined
    fetcher.reset()
    fetcher.fetched = batch
    if fetcher.length is not None:
        fetcher.done = batch >= fetcher.length
    for _ in range(fetcher.prefetch_batches if reads_ahead(trainer) else 0):
        with contextlib.suppress(StopIteration):
            fetcher.batches.append(part(tree_of(trainer), "loops.fetchers._DataFetcher").__next__(fetcher))


def reload_epochs(trainer: Trainer) -> list[int]:
    """Epochs in which training and validation loaders were set up last; [] without reloading."""
    fit = trainer.fit_loop
    if not trainer.reload_dataloaders_every_n_epochs:
        return []
    epochs = (fit._last_train_dl_reload_epoch, fit.epoch_loop.val_loop._last_val_dl_reload_epoch)
    return [int(e) if e != float("-inf") else -1 for e in epochs]


def reload_data(trainer: Trainer, epochs: list[int], *, training: bool) -> None:
    """Set loaders up as the others did in these epochs. The hooks of the user see the epoch of then.

    Args:
        epochs: `reload_epochs` of a peer.
        training: the training data in any case.
    """
    fit, mine = trainer.fit_loop, reload_epochs(trainer) or [-1, -1]
    now = fit.epoch_progress.current.completed
    epochs = epochs or [now if training else -1, -1]
    loops = (fit, fit.epoch_loop.val_loop)
    for loop, wanted, have, stage in zip(loops, epochs, mine, ("training", "validating"), strict=True):
        if (wanted in (have, -1) and not (training and loop is fit)) or loop._combined_loader is None:
            continue
        fit.epoch_progress.current.completed = wanted
        try:
            setattr(trainer, stage, True)
            loop._combined_loader = None
            loop.setup_data()
        finally:
            fit.epoch_progress.current.completed = now
            trainer.training = True


METADATA = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


def metrics(trainer: Trainer) -> dict[str, Any]:
    """The metrics logged so far: the values that callbacks monitor, and the sums of this epoch's means.

    Without them a newcomer's EarlyStopping, ModelCheckpoint or ReduceLROnPlateau would fail on a key that it has not
    seen yet. Relies on `_LoggerConnector` and on `_ResultCollection` of the epoch loop. Logged `torchmetrics.Metric`s
    are the user's objects and are left out.
    """
    connector = trainer._logger_connector
    results = []
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        meta = metric.meta
        if not metric.is_tensor or meta.sync.group is not None:
            continue
        results.append({
            "key": key, "meta": {name: getattr(meta, name) for name in METADATA}, "reduce": meta.reduce_fx.__name__,
            "sync": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "value": metric.value.detach(),
            "size": metric.cumulated_batch_size if meta.is_mean_reduction else None, "reset": metric.has_reset,
            "step": metric._forward_cache.detach() if metric._forward_cache is not None else None,
            "updates": metric._update_count,
        })  # fmt: skip
    return {
        "first": connector._first_loop_iter, "fx": connector._current_fx, "results": results,
        "known": [
            {k: v.detach() if hasattr(v, "detach") else v for k, v in known.items()}
            for known in (connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics)
        ],
    }  # fmt: skip


def load_metrics(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Take over what `metrics` returned."""
    connector, device = trainer._logger_connector, trainer.strategy.root_device
    module = "trainer.connectors.logger_connector.result"
    names = ("_Metadata", "_Sync", "_ResultMetric")
    new_meta, new_sync, new_metric = (part(tree_of(trainer), f"{module}.{name}") for name in names)

    def here(value: Any) -> Any:
        return value.to(device) if hasattr(value, "to") else value

    connector._first_loop_iter, connector._current_fx = state["first"], state["fx"]
    connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics = (
        {k: here(v) for k, v in known.items()} for known in state["known"]
    )
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for item in state["results"]:
        meta = new_meta(reduce_fx=item["reduce"], **item["meta"])
        meta.sync = new_sync(_should=item["sync"], fn=trainer.strategy.reduce, rank_zero_only=item["rank_zero_only"])
        results[item["key"]] = metric = new_metric(meta, True)
        metric.value, metric.has_reset, metric._update_count = here(item["value"]), item["reset"], item["updates"]
        metric._forward_cache = here(item["step"])
        if item["size"] is not None:
            metric.cumulated_batch_size = here(item["size"])
