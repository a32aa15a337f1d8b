"""The part of `_compat` about evaluation: its loops, and what metrics hold.

How it works. As `_compat`: functions that read, call and correct what is private to Lightning and TorchMetrics; each
says what it relies on. `shared_evaluation` knows what for.

What a part of an evaluation adds is read as states: of each key that was logged (`_ResultMetric`), and of each
TorchMetrics metric in the module. States of several parts are merged by the reductions that the metrics name for
distributed training, in the order of the parts, so that all replicas get the same bits.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ft_lightning._compat import part, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Trainer = Any
    State = dict[str, Any]

REDUCTIONS = ("mean", "sum", "max", "min")
"""The reductions of `self.log(reduce_fx=)`, by the name of torch's function."""
LOGGED, METRIC, SHOWN = "logged", "metric", "shown"
"""A value that was logged; a metric of the module; that such a metric was logged."""


# ---------------------------------------------------------------- loops


def evaluation_loops(trainer: Trainer) -> list[Any]:
    """Those that call `validation_step` and `test_step`. Relies on their places in the Trainer."""
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]


def prediction_loop(trainer: Trainer) -> Any:
    """The one that calls `predict_step`."""
    return trainer.predict_loop


def around_runs(loop: Any, run: Callable[[Callable[[], Any]], Any]) -> None:
    """Let `run(what Lightning does)` make each run of a loop. Relies on the Trainer calling `loop.run()`."""
    loop.run = lambda: run(lambda: type(loop).run(loop))


def before_reset(loop: Any, before: Callable[[], None]) -> None:
    """Call `before` in a run, when the loaders are there and their lengths were looked at, and not used."""

    def reset() -> None:
        before()
        type(loop).reset(loop)

    loop.reset = reset


def before_batches(loop: Any, before: Callable[[], None]) -> None:
    """Call `before` when a run's hooks were called for its beginning: metrics may be reset and logged in them.

    Relies on `on_run_start()`.
    """

    def on_run_start() -> None:
        type(loop).on_run_start(loop)
        before()

    loop.on_run_start = on_run_start


def at_end_of_loader(loop: Any, end: Callable[[], None], computed: Callable[[], None]) -> None:
    """Call `end` when a loader's batches were evaluated, and `computed` when its metrics were computed after that.

    Relies on `_EvaluationLoop._store_dataloader_outputs()`, called once for each loader that has batches, in order.
    """

    def store() -> None:
        end()
        type(loop)._store_dataloader_outputs(loop)
        computed()

    loop._store_dataloader_outputs = store


def at_end_of_predictions(loop: Any, end: Callable[[], None]) -> None:
    """Call `end` when all batches were predicted, before any hook is called for that. Relies on `on_run_end()`."""

    def on_run_end() -> Any:
        end()
        return type(loop).on_run_end(loop)

    loop.on_run_end = on_run_end


def as_it_was(loop: Any) -> None:
    """Undo what was put around the loop."""
    for name in ("run", "reset", "on_run_start", "_store_dataloader_outputs", "on_run_end"):
        vars(loop).pop(name, None)


def unsuited(loop: Any) -> str:
    """Why the batches of a loop's run cannot be divided; "" if they can."""
    tree, combined = tree_of(loop.trainer), loop._combined_loader
    if combined._mode != "sequential":
        return f"the loaders are combined with mode={combined._mode!r}"
    select = part(tree, "loops.utilities._select_data_fetcher")
    if isinstance(
        select(loop.trainer, loop.trainer.state.stage), part(tree, "loops.fetchers._DataLoaderIterDataFetcher")
    ):
        return "the step takes a dataloader_iter, and reads as many batches as it likes"
    apart = [
        name for name, metric in _metrics(loop, logged=False)
        if any(metric._reductions[attr] is None and isinstance(default, Tensor)
               for attr, default in metric._defaults.items())
    ] if loop is not prediction_loop(loop.trainer) else []  # fmt: skip
    if apart:  # merged, they are a stack, and `compute` would make a stack of stacks of the group's ranks
        name = apart[0].removeprefix(f"{METRIC}:")
        return f"the metric {name} has a state with dist_reduce_fx=None, which cannot be merged"
    return ""


def set_epoch(loop: Any) -> None:
    """Tell samplers which epoch it is, before they are asked for their order. As `_EvaluationLoop.reset()` does."""
    set_epoch = part(tree_of(loop.trainer), "loops.evaluation_loop._set_sampler_epoch")
    for loader in loaders(loop) if loop.trainer.state.fn == "fit" else ():
        set_epoch(loader, loop.trainer.fit_loop.epoch_progress.current.processed)


def loaders(loop: Any) -> list[Any]:
    """The loaders of a loop, in order."""
    return list(loop._combined_loader.flattened)


def lengths(loop: Any) -> list[float]:
    """How many batches of each loader a run reads; `limit_val_batches` and the like are in it."""
    return list(loop.max_batches)


def set_lengths(loop: Any, batches: Sequence[float]) -> None:
    """Read so many instead. Relies on `_EvaluationLoop._max_batches`, and `max_batches` of the prediction loop."""
    setattr(loop, "_max_batches" if hasattr(loop, "_max_batches") else "max_batches", list(batches))


def evaluate_batch(loop: Any, batch: Any, index: int, loader: int) -> None:
    """Evaluate a batch as the loop does, with all hooks. Relies on `_evaluation_step` and `_predict_step`."""
    step = loop._evaluation_step if hasattr(loop, "_evaluation_step") else loop._predict_step
    step(batch, index, loader, None)


def predictions(loop: Any, loader: int) -> list[Any]:
    """The list of what `predict_step` returned, batch by batch."""
    return loop._predictions[loader]  # type: ignore[no-any-return]


def indices(loop: Any, loader: int) -> list[Any]:
    """Indices of the samples of each batch, for BasePredictionWriter: the list itself; empty without one."""
    return loop.epoch_batch_indices[loader]  # type: ignore[no-any-return]


# ---------------------------------------------------------------- metrics


def _kind(loop: Any) -> Any:
    """The class Metric of TorchMetrics."""
    return part(tree_of(loop.trainer), "trainer.connectors.logger_connector.result").Metric


def _metrics(loop: Any, *, logged: bool = True) -> Iterator[tuple[str, Any]]:
    """Metrics of the module, and values that were logged: name and object."""
    kind = _kind(loop)
    for name, module in loop.trainer.lightning_module.named_modules():
        if isinstance(module, kind):
            yield f"{METRIC}:{name}", module
    for key, result in loop._results.items() if logged else ():
        if result.is_tensor and result.meta.on_epoch:
            yield f"{LOGGED}:{key}", result


def _touched(name: str, metric: Any) -> bool:
    if name.startswith(LOGGED):
        return not metric.has_reset
    # A reset of the metric's own may keep some of its states (FrechetInceptionDistance(reset_real_features=False)).
    return bool(metric._update_count) or any(
        bool(now) if isinstance(now := getattr(metric, attr), list) else not torch.equal(now, default.to(now))
        for attr, default in metric._defaults.items()
    )


def states(loop: Any) -> dict[str, State]:
    """The metrics that something was added to since `clear`, or before it.

    Relies on `Metric._defaults` (the names of its states) and `_update_count`; on `_ResultMetric.has_reset`.
    """
    found = {}
    for name, metric in _metrics(loop):
        if _touched(name, metric):
            held = {attr: getattr(metric, attr) for attr in metric._defaults}
            values = {attr: list(v) if isinstance(v, list) else v for attr, v in held.items()}  # reset empties lists
            found[name] = {"values": values, "updates": metric._update_count, "about": _about(name, metric)}
    for key, result in loop._results.items():
        if not result.is_tensor and result.meta.on_epoch and not result.has_reset:
            found[f"{SHOWN}:{key}"] = {"values": {}, "updates": 0, "about": _about(LOGGED, result)}
    return found


def clear(loop: Any) -> None:
    """Nothing was added so far. Not by the metric's own `reset`, which may keep something."""
    kind = _kind(loop)
    for name, metric in _metrics(loop):
        if name.startswith(LOGGED):
            for attr, default in metric._defaults.items():
                setattr(metric, attr, default.detach().clone().to(getattr(metric, attr).device))
            metric.has_reset, metric._computed = True, None
        else:
            kind.reset(metric)


def load(loop: Any, merged: Mapping[str, State]) -> None:
    """Let metrics hold these states. Call after `clear`."""
    found = dict(_metrics(loop))
    for name, state in merged.items():
        if name.startswith(SHOWN):
            _show(loop, name.removeprefix(f"{SHOWN}:"), state["about"])
            continue
        metric = found.get(name)
        if metric is None and name.startswith(LOGGED):
            metric = _register(loop, name.removeprefix(f"{LOGGED}:"), state["about"])
        if metric is None:
            continue  # a metric that this module does not have: it is not the same on all replicas
        for attr, value in state["values"].items():
            now = getattr(metric, attr)
            setattr(metric, attr, _to(value, now.device if isinstance(now, Tensor) else metric.device))
        metric._update_count, metric._computed = state["updates"], None
        if name.startswith(LOGGED):
            metric.has_reset = False


def _show(loop: Any, key: str, about: Mapping[str, Any]) -> None:
    """A metric was logged by somebody. Relies on `_Metadata.metric_attribute`, its name in the module."""
    result = loop._results.get(key)
    if result is None:
        metric = dict(loop.trainer.lightning_module.named_modules()).get(about["metric_attribute"])
        if metric is None:
            return
        result = _register(loop, key, about, is_tensor=False)
        result.value, result._update_count, result.has_reset = metric, 1, True
    if result.has_reset:
        result.has_reset, result._computed = False, None


def merge(loop: Any, several: Sequence[Mapping[str, State]]) -> dict[str, State]:
    """States of parts, in one. Relies on `Metric._reductions`, and `_ResultMetric.meta` for what was logged."""
    merged: dict[str, State] = {}
    known = dict(_metrics(loop))
    for name in dict.fromkeys(name for one in several for name in one):
        given = [one[name] for one in several if name in one]
        if len(given) == 1:
            merged[name] = given[0]
            continue
        about, metric = given[0]["about"], known.get(name)
        if metric is None and name.startswith(METRIC):
            continue  # see `load`
        updates = [state["updates"] for state in given]
        values = {}
        for attr in given[0]["values"]:
            held = [state["values"][attr] for state in given]
            values[attr] = _merged(held, _reduction(name, attr, about, metric), updates)
        merged[name] = {"values": values, "updates": sum(updates), "about": about}
    return merged


def _reduction(name: str, attr: str, about: Mapping[str, Any], metric: Any) -> Callable[[Tensor], Any] | None:
    """The reduction of stacked tensors (dimension 0), or None where they are kept apart. A mean counts by updates."""
    if name.startswith(METRIC):
        return metric._reductions[attr]  # type: ignore[no-any-return]
    reduce = about["reduce_fx"]
    if reduce in ("max", "min"):
        return torch.amax if reduce == "max" else torch.amin
    return lambda stacked: torch.sum(stacked, dim=0)  # a mean is a sum and its weight


def _merged(values: Sequence[Any], reduction: Callable[[Tensor], Any] | None, updates: Sequence[int]) -> Any:
    """In one. On the CPU, as some have come over the network: other devices may add in another order."""
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    tensors = [value.cpu() for value in values]
    kind = getattr(reduction, "__name__", "")
    if kind == "dim_zero_cat":
        return torch.cat([tensor.reshape(-1) if tensor.ndim == 0 else tensor for tensor in tensors])
    stacked = torch.stack(tensors)
    if kind == "dim_zero_mean" and sum(updates):  # parts may have unlike numbers of batches
        weights = torch.tensor(updates).reshape(-1, *[1] * (stacked.ndim - 1))
        return (stacked * weights).sum(0) / sum(updates)
    if reduction in (torch.amax, torch.amin):
        return reduction(stacked, 0)
    return stacked if reduction is None else reduction(stacked)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


def _about(name: str, metric: Any) -> dict[str, Any]:
    """The facts with which another group can register a value that was logged here only."""
    if not name.startswith(LOGGED):
        return {}
    meta = metric.meta
    plain = (
        "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
        "dataloader_idx", "metric_attribute",
    )  # fmt: skip
    reduce = next(f for f in REDUCTIONS if getattr(meta, f"is_{f}_reduction"))
    sync = {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
    return {**{field: getattr(meta, field) for field in plain}, "reduce_fx": reduce, "sync": sync}


def _register(loop: Any, key: str, about: Mapping[str, Any], *, is_tensor: bool = True) -> Any:
    """Register a key, as `_ResultCollection.log` does with one that it does not know."""
    result = part(tree_of(loop.trainer), "trainer.connectors.logger_connector.result")
    fields = {name: value for name, value in about.items() if name != "sync"}
    meta = result._Metadata(**fields)
    meta.sync = result._Sync(
        _should=about["sync"]["should"], fn=loop.trainer.strategy.reduce,
        rank_zero_only=about["sync"]["rank_zero_only"],
    )  # fmt: skip
    metric = loop._results[key] = result._ResultMetric(meta, is_tensor)
    return metric.to(loop.trainer.strategy.root_device)
