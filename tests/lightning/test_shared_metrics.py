"""Metrics of parts, merged: what they hold is what one process over all batches would have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score, MulticlassRecall

from ft_core.checkpointing.packing import pack, unpack
from ft_lightning._compat import evaluation as compat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLASSES, BATCHES, PARTS = 4, 7, 3


class Extremes(torchmetrics.Metric):
    """States of every kind of reduction."""

    full_state_update = False
    least: Tensor
    most: Tensor
    total: Tensor
    rows: Tensor
    own: Tensor
    kept: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("least", torch.tensor(float("inf")), dist_reduce_fx="min")
        self.add_state("most", torch.tensor(-float("inf")), dist_reduce_fx="max")
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(0, CLASSES), dist_reduce_fx="cat")
        self.add_state("kept", [], dist_reduce_fx=None)
        self.add_state("own", torch.zeros(()), dist_reduce_fx=lambda stacked: stacked.sum(0))

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.least, self.most = torch.minimum(self.least, scores.min()), torch.maximum(self.most, scores.max())
        self.total = self.total + target.sum()
        self.own = self.own + len(target)
        self.rows = torch.cat([self.rows, scores])
        self.kept.append(scores.mean())

    def compute(self) -> dict[str, Tensor]:
        kept = torch.stack(list(self.kept)).sort().values
        rows = self.rows.flatten().sort().values
        return {"ends": torch.stack([self.least, self.most]), "sums": torch.stack([self.total, self.own]),
                "rows": rows, "kept": kept}  # fmt: skip


def collection() -> Any:
    """Three metrics, of which the first two share their states from the second batch on."""
    return torchmetrics.MetricCollection({
        "accuracy": MulticlassAccuracy(CLASSES), "recall": MulticlassRecall(CLASSES), "f1": MulticlassF1Score(CLASSES),
    })  # fmt: skip


METRICS: dict[str, Callable[[], Any]] = {
    "states of every kind": Extremes, "a collection": collection, "an average": lambda: torchmetrics.MeanMetric(),
    "least and most of an average": lambda: torchmetrics.MinMaxMetric(MulticlassAccuracy(CLASSES)),
    "lists of scores": lambda: BinaryAUROC(),
}  # fmt: skip


class Module(pl.LightningModule):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric
        self.other = torchmetrics.SumMetric()


def loop_of(metric: Any) -> Any:
    """As much of a loop as holds metrics."""
    strategy = SimpleNamespace(reduce=lambda value, **_: value, root_device=torch.device("cpu"))
    trainer = SimpleNamespace(lightning_module=Module(metric), strategy=strategy)
    return SimpleNamespace(trainer=trainer, _results=_ResultCollection(training=False))


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(5, CLASSES, generator=generator), torch.randint(CLASSES, (5,), generator=generator)


def feed(loop: Any, numbers: Sequence[int]) -> None:
    module, results = loop.trainer.lightning_module, loop._results
    for number in numbers:
        scores, target = batch(number)
        if isinstance(module.metric, torchmetrics.MeanMetric):
            module.metric.update(scores)
        elif isinstance(module.metric, BinaryAUROC):
            module.metric.update(scores[:, 0], (target > 1).int())
        else:
            module.metric.update(scores, target)
        for reduce in ("mean", "sum", "max", "min"):
            value = scores.mean()
            results.log("validation_step", reduce, value, reduce_fx=getattr(torch, reduce), batch_size=len(target))
        if number == 1:
            results.log("validation_step", "once", scores.sum(), batch_size=1)


def told(loop: Any) -> dict[str, Any]:
    found = loop.trainer.lightning_module.metric.compute()
    metrics = found if isinstance(found, dict) else {"value": found}
    return {**metrics, **loop._results.metrics(on_step=False)["callback"]}


def in_parts(name: str, before: Sequence[int] = ()) -> Any:
    """A loop that has evaluated one part, and merged the others', which came by wire."""
    loop = loop_of(METRICS[name]())
    feed(loop, before)
    loop.trainer.lightning_module.other.update(3.0)
    held = compat.states(loop)
    compat.clear(loop)
    feed(loop, range(0, BATCHES, PARTS))
    own = compat.states(loop)
    parts = [own]
    for part in range(1, PARTS):
        elsewhere = loop_of(METRICS[name]())
        feed(elsewhere, range(part, BATCHES, PARTS))
        parts.append(unpack(pack(compat.states(elsewhere)), own))
    merged = compat.merge(loop, [held, *parts])
    compat.clear(loop)
    compat.load(loop, merged)
    return loop


@pytest.mark.parametrize("before", [[], [100, 101]])
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore")  # of torchmetrics and Lightning, about what a user logs
def test_parts_are_worth_as_much_as_the_whole(name: str, before: Sequence[int]) -> None:
    """Also where the metrics held something before."""
    whole = loop_of(METRICS[name]())
    feed(whole, [*before, *range(BATCHES)])
    found, wanted = told(in_parts(name, before)), told(whole)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value)


def test_a_metric_that_the_evaluation_does_not_use_stays_as_it_is() -> None:
    assert in_parts("an average").trainer.lightning_module.other.compute() == 3.0
