"""Elastic data under a Trainer that is alone, in this process: epochs' lengths, resuming, refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as pl
import pytest
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities import CombinedLoader
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.data import ElasticDataLoader
from ft_core.errors import ConfigError
from ft_lightning import FaultTolerantStrategy, fabric
from tests.lightning.counting import Counts, Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*overfit.*"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter`.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
]
LENGTH, EPOCHS = 22, 2


class Model(Counts):
    """Validates, and vetoes the optimizer's steps whose numbers are in `vetoes`."""

    vetoes: tuple[int, ...] = ()
    attempts = 0

    def __init__(self, epochs: int = EPOCHS, length: int = LENGTH) -> None:
        super().__init__(length, epochs)
        self.seen: list[tuple[Any, ...]] = []

    def on_before_backward(self, loss: torch.Tensor) -> None:
        loader: Any = self.trainer.train_dataloader
        if not loader.last_micro_batch:
            return
        self.attempts += 1
        strategy: Any = self.trainer.strategy
        if self.attempts in self.vetoes:
            strategy.manager.report_error(RuntimeError("injected by the test"))

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        trainer = self.trainer
        end = "last" if trainer.is_last_batch else ""
        self.seen.append((self.current_epoch, batch_idx, trainer.num_training_batches, trainer.global_step, end))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen.append(("validated", batch.tolist()))


class Runs:
    """Makes Trainers, each in a job of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers: list[LighthouseServer] = []
        self._setenv = monkeypatch.setenv
        for name in ("NUM_REPLICA_GROUPS", "MIN_REPLICAS"):
            monkeypatch.setenv(f"FT_{name}", "1")
        monkeypatch.setenv("FT_REPLICA_GROUP", "0")

    def trainer(self, strategy: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
        self.servers.append(LighthouseServer("127.0.0.1:0", boot_window_ms=0, token=""))
        self._setenv("FT_LIGHTHOUSE", self.servers[-1].address())
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        return pl.Trainer(
            strategy=FaultTolerantStrategy(**(strategy or {"elastic_data": True})), accelerator="cpu", devices=1,
            **{**dict.fromkeys(quiet, False), "max_epochs": EPOCHS, "num_sanity_val_steps": 0, **options},
        )  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Runs]:
    monkeypatch.chdir(tmp_path)
    runs = Runs(monkeypatch)
    yield runs
    for server in runs.servers:
        server.shutdown()


def numbers(batch: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(LENGTH), batch, shuffle=True, **options)


def batches(model: Model, epoch: int) -> list[Any]:
    return [(*seen[1:4],) for seen in model.seen if seen[0] == epoch]


def test_a_vetoed_batch_makes_the_epoch_longer(runs: Runs) -> None:
    """Six batches of four and less; the second and the last one are vetoed, which is then not the last."""
    model, bars = Model(), []

    class Totals(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            bars.append(trainer.progress_bar_callback.train_progress_bar.total)

    model.vetoes = (2, 7)
    trainer = runs.trainer(enable_progress_bar=True, callbacks=[TQDMProgressBar(), Totals()])
    trainer.fit(model, numbers(), DataLoader(Numbers(3), 3))
    assert batches(model, 0) == [
        (0, 6, 1), (1, 7, 1), (2, 7, 2), (3, 7, 3), (4, 7, 4), (5, 7, 5), (6, 8, 5), (7, 8, 6),
    ]  # fmt: skip
    assert batches(model, 1) == [(i, 6, 7 + i) for i in range(6)]
    assert [seen[:2] for seen in model.seen if seen[-1] == "last"] == [(0, 7), (1, 5)]
    assert [i for i, seen in enumerate(model.seen) if seen == ("validated", [0, 1, 2])] == [8, 15]
    assert bars == [6, 6, 7, 7, 7, 7, 7, 8, 6, 6, 6, 6, 6, 6]
    assert model.net.faults() == []
    assert trainer.strategy.elastic.loader is None


def test_windows_of_micro_batches(runs: Runs) -> None:
    """The last window is shorter; a vetoed one comes again as a whole. Lightning knows how many steps there will be."""
    estimates = []

    class Asks(Model):
        def configure_optimizers(self) -> Any:
            estimates.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    for strategy, options in (({}, {"accumulate_grad_batches": 4}), ({"global_batch_size": 16}, {})):
        model = Asks()
        model.vetoes = (1,)
        trainer = runs.trainer({"elastic_data": True, **strategy}, **options)
        trainer.fit(model, numbers())
        assert [batch[2] for batch in batches(model, 0)] == [0, 0, 0, 0, 0, 0, 0, 1, 1, 2]
        assert [batch[2] for batch in batches(model, 1)] == [2, 2, 2, 3, 3, 4]
        assert model.net.faults() == []
        assert trainer.accumulate_grad_batches == options.get("accumulate_grad_batches", 1)
    assert estimates == [4, 4]


@pytest.mark.parametrize("elastic", [True, False])
def test_a_schedule_of_the_whole_run_after_vetoed_steps(runs: Runs, elastic: bool) -> None:
    """Elastic data makes up for them; with plain data it ends short by as many as were vetoed, as the docs say."""

    class OneCycle(Model):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.scheduler = OneCycleLR(optimizer, 0.1, total_steps=int(self.trainer.estimated_stepping_batches))
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

        def on_before_backward(self, loss: torch.Tensor) -> None:
            self.attempts += 1
            if self.attempts in (2, 3):
                self.trainer.strategy.manager.report_error(RuntimeError("injected by the test"))

    model = OneCycle()
    trainer = runs.trainer({"elastic_data": elastic})
    if not elastic:
        model.training_step = lambda batch, batch_idx: model.net(batch) * 1.0  # type: ignore[method-assign]
    trainer.fit(model, numbers())
    assert model.scheduler.total_steps == 12
    assert (trainer.global_step, model.scheduler.last_epoch) == ((12, 12) if elastic else (10, 10))


@pytest.mark.parametrize(
    ("options", "steps", "validated", "lost"),
    [
        ({"limit_train_batches": 3}, 5, 2, 2 * LENGTH - 20),  # one of the three was vetoed in the first epoch
        ({"limit_train_batches": 0.5}, 5, 2, 2 * LENGTH - 20),
        ({"max_steps": 8}, 8, 1, LENGTH - 8),
        ({"val_check_interval": 2}, 12, 6, 0),
        ({"val_check_interval": 0.5}, 12, 4, 0),
        ({"fast_dev_run": 2}, 1, 1, 2 * LENGTH - 4),
        ({"check_val_every_n_epoch": 2}, 12, 1, 0),
    ],
)
def test_limits_and_intervals(runs: Runs, options: dict[str, Any], steps: int, validated: int, lost: int) -> None:
    model = Model()
    model.vetoes = (2,)
    trainer = runs.trainer(**options)
    trainer.fit(model, numbers(), DataLoader(Numbers(3), 3))
    assert trainer.global_step == steps
    assert len([seen for seen in model.seen if seen[0] == "validated"]) == validated
    faults = model.net.faults()
    assert len(faults) == lost
    assert all(fault.endswith(" 0.000") for fault in faults)


def test_overfitting_reads_the_same_batches_in_each_epoch(runs: Runs) -> None:
    model = Model()
    runs.trainer(overfit_batches=2).fit(model, numbers())
    read = (model.net.counts > 0.5).nonzero().flatten().tolist()
    assert read == [*range(8), *range(LENGTH, LENGTH + 8)]


def test_a_run_goes_on_from_any_checkpoint(runs: Runs, tmp_path: Path) -> None:
    """Saved after each batch and epoch of one run; each time the rest is trained on, in batches of another size."""
    model = Model()
    model.vetoes = (2, 4)
    keep = {"save_top_k": -1, "dirpath": tmp_path, "auto_insert_metric_name": False}
    callbacks = [
        ModelCheckpoint(every_n_train_steps=1, filename="batch-{epoch}-{step}", **keep),
        ModelCheckpoint(every_n_epochs=1, filename="epoch-{epoch}-{step}", save_on_train_epoch_end=True, **keep),
    ]
    runs.trainer(enable_checkpointing=True, callbacks=callbacks).fit(model, numbers())
    assert model.net.faults() == []
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 14
    for path in paths:
        resumed = Model()
        trainer = runs.trainer()
        trainer.fit(resumed, numbers(5), ckpt_path=path)
        assert resumed.net.faults() == [], path.name
        assert (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.is_last_batch) == (EPOCHS, True)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    plain = pl.Trainer(accelerator="cpu", max_epochs=3, max_steps=9, **quiet)

    class Plain(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch) * 1.0  # type: ignore[no-any-return]

        on_before_backward = pl.LightningModule.on_before_backward

    plain.fit(Plain(), numbers(), ckpt_path=next(path for path in paths if path.name == "batch-0-3.ckpt"))
    assert plain.global_step == 9


def test_a_loader_of_the_users(runs: Runs) -> None:
    """With its own accumulation; the dataset of a second fit is another one."""
    for _ in range(2):
        model = Model()
        loader = ElasticDataLoader(Numbers(LENGTH), 4, shuffle=True, accumulation_steps=2)
        trainer = runs.trainer({})
        trainer.fit(model, loader)
        assert trainer.global_step == 6
        assert model.net.faults() == []


def test_several_fits_of_one_trainer(runs: Runs) -> None:
    model, trainer = Model(4), runs.trainer()
    trainer.fit(model, numbers())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, numbers())
    assert model.net.faults() == []


def test_leaving_an_epoch_early(runs: Runs) -> None:
    """What `on_train_batch_start` breaks off is dropped, also in the middle of a window."""

    class Leaves(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    model = Leaves()
    trainer = runs.trainer(accumulate_grad_batches=2)
    trainer.fit(model, numbers())
    assert trainer.global_step == 1 + 3
    assert len(model.net.faults()) == LENGTH - 8
    assert not any(fault.startswith("epoch 1") for fault in model.net.faults())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class Manual(Model):
    automatic_optimization = False


class ReadsItself(Model):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("refused before")


ELASTIC: dict[str, Any] = {"elastic_data": True}
Case = tuple[dict[str, Any], dict[str, Any], "Callable[[], Any]", str]
REFUSED: dict[str, Case] = {
    "sampler": (
        ELASTIC, {}, lambda: DataLoader(Numbers(9), 4, sampler=DistributedSampler(Numbers(9), 2, 0)),
        "sampler=DistributedSampler",
    ),
    "stream": (ELASTIC, {}, lambda: DataLoader(Stream(), 4), "IterableDataset"),
    "drop": (ELASTIC, {}, lambda: numbers(drop_last=True), "drop_last=True"),
    "several": (ELASTIC, {}, lambda: CombinedLoader([numbers(), numbers()]), "several training loaders"),
    "another": (
        {}, {}, lambda: [ElasticDataLoader(Numbers(9)), numbers()], "several training loaders",
    ),
    "first": ({}, {}, lambda: [numbers(), ElasticDataLoader(Numbers(9))], "2 training loaders|several"),
    "list": (ELASTIC, {}, lambda: [1, 2], "a int cannot|a list cannot"),
    "reload": (ELASTIC, {"reload_dataloaders_every_n_epochs": 1}, numbers, "reload_dataloaders_every_n_epochs=1"),
    "accumulate": (
        {**ELASTIC, "global_batch_size": 8}, {"accumulate_grad_batches": 2}, numbers, "accumulate_grad_batches=2 with",
    ),
    "scheduler": (
        ELASTIC, {"callbacks": [GradientAccumulationScheduler({0: 2})]}, numbers, "GradientAccumulationScheduler",
    ),
    "other accumulation": (
        {}, {"accumulate_grad_batches": 2}, lambda: ElasticDataLoader(Numbers(9)), r"steps=1.: the loader decides",
    ),
    "other rank": ({}, {}, lambda: ElasticDataLoader(Numbers(9), num_replicas=2), r"num_replicas=2. on rank 0"),
    "too many micro-steps": (
        {**ELASTIC, "global_batch_size": 16, "max_micro_steps": 2}, {}, numbers, "need 4 micro-steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_elastic_data(runs: Runs, name: str) -> None:
    strategy, options, loader, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        runs.trainer(strategy, **options).fit(Model(), loader())


@pytest.mark.parametrize(("kind", "message"), [(Manual, "automatic_optimization=False"), (ReadsItself, "dataloader_i")])
def test_modules_that_do_not_go_with_elastic_data(runs: Runs, kind: type[Model], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.trainer().fit(kind(), numbers())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 8}, "is for elastic_data=True"),
        ({"elastic_data": True, "global_batch_size": 0}, "global_batch_size=0 must be"),
        ({"elastic_data": True, "max_micro_steps": 2}, "max_micro_steps=2 bounds"),
        ({"on_exhausted": "wait"}, "on_exhausted='wait' must be one of"),
        ({"on_exhausted": "shadow", "elastic_data": True}, "all replicas run out together"),
        ({"lr_scaling": "linear"}, "lr_scaling='linear' with reference_batch_size=None: pass both"),
        ({"lr_scaling": "cubic", "reference_batch_size": 8}, "lr_scaling='cubic' must be"),
        ({"lr_scaling": "sqrt", "reference_batch_size": 0}, "reference=0"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FaultTolerantStrategy(**arguments)


def test_fabric_says_where_its_elastic_loader_is() -> None:
    with pytest.raises(ConfigError, match="elastic_data=True is for the Trainer: with Fabric the loop is yours"):
        fabric.FaultTolerantStrategy(elastic_data=True)
