"""Taking over a run in the middle, without processes: what one Trainer hands out, another one loads, and then both must
do the same with the same batches to the end.

`donor` runs to its end and hands out its state before one batch; `newcomer` has its own module, callbacks and loaders
and takes that state before its first batch. What both saw from there on is compared, and their parameters digit by
digit.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import lightning as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from ft_core.checkpointing.state_encoding import decode_tree, encode
from ft_core.errors import ConfigError
from ft_lightning.arguments import DataArguments
from ft_lightning.trainer.elastic import ElasticData
from ft_lightning.trainer.sharding import Sharding
from ft_lightning.trainer.takeover import Takeover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core import Manager

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*overfit.*"),
    pytest.mark.filterwarnings("ignore:.*set_vital.*"),
    pytest.mark.filterwarnings("ignore:.*infer the `batch_size`.*"),
    pytest.mark.filterwarnings("ignore:.*ReduceLROnPlateau conditioned on metric.*"),
    pytest.mark.filterwarnings("ignore:.*Found `dataloader_iter`.*"),
]
Batch = Any


class Samples(Dataset[torch.Tensor]):
    """Sample i is [i, f(i)]; remembers what was asked for, as far as this process did it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor([float(index), float(index * index % 17)])


class Stream(IterableDataset[torch.Tensor]):
    """The same samples in order, without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(i), float(i * i % 17)]) for i in range(self.size))


class StatefulStream(Stream):
    """Knows its position."""

    at = 0
    reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.size:
            self.at += 1
            self.reads += 1
            yield torch.tensor([float(self.at), 1.0])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Batches:
    """A loader of the user's own."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((2, 2), float(i)) for i in range(9))


def sharded(size: int, batch: int = 4, **kwargs: Any) -> DataLoader[Any]:
    data = Samples(size)
    return DataLoader(data, batch, sampler=DistributedSampler(data, 3, 1, shuffle=True), **kwargs)


def stateful(dataset: Any, **kwargs: Any) -> StatefulDataLoader[Any]:
    sampler: Any = DistributedSampler(dataset, 3, 1) if isinstance(dataset, Samples) else None
    return StatefulDataLoader(dataset, 4, sampler=sampler, **kwargs)


class Model(pl.LightningModule):
    """Linear regression that writes down everything it is called with."""

    def __init__(self, loaders: Callable[[int], Any]) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.loaders = loaders
        self.seen: list[tuple[Any, ...]] = []

    def train_dataloader(self) -> Any:
        return self.loaders(self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(3))

    def on_train_epoch_start(self) -> None:
        self.seen.append(("epoch", self.current_epoch))

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.seen.append(("start", batch_idx, ids(batch)))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        self.seen.append(("step", self.current_epoch, batch_idx, ids(batch), progress.is_last_batch))
        loss = sum(((self.net(x / 40.0) ** 2).mean() for x in tensors(batch)), start=torch.zeros(()))
        size = len(tensors(batch)[0])
        self.log("mean", loss, on_step=True, on_epoch=True, batch_size=size)
        if batch_idx == 0:
            self.log("only_at_first", loss, on_step=False, on_epoch=True, batch_size=size)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        del outputs
        self.seen.append(("end", batch_idx, ids(batch), self.trainer.global_step))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        del batch_idx
        self.log("val", self.net(batch).sum())

    def on_train_epoch_end(self) -> None:
        known = {k: round(v.item(), 6) for k, v in sorted(self.trainer.callback_metrics.items())}
        self.seen.append(("epoch end", self.current_epoch, known))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val", "strict": False}}


def tensors(batch: Batch) -> list[torch.Tensor]:
    if isinstance(batch, dict):
        batch = list(batch.values())
    return [batch] if isinstance(batch, torch.Tensor) else [x for x in batch if x is not None]


def ids(batch: Batch) -> list[list[int]]:
    return [[int(i) for i in x[:, 0]] for x in tensors(batch)]


class OneReplica:
    """What Takeover asks of a Manager."""

    members = ("replica-0:abc",)
    hooks = SimpleNamespace(participants=1, leads=True)

    @contextlib.contextmanager
    def pause(self, reason: str, max_s: float) -> Iterator[None]:
        assert reason
        assert max_s > 0
        yield


class Run:
    """A Trainer whose quorum is `before_batch(epoch, batch)`."""

    def __init__(self, loaders: Callable[[int], Any], **options: Any) -> None:
        torch.manual_seed(7)
        self.model = Model(loaders)
        self.before_batch: Callable[[int, int], None] = lambda _epoch, _batch: None
        options = {"max_epochs": 3, "num_sanity_val_steps": 0, **options}
        callbacks = [EarlyStopping("val", patience=9, strict=False), *options.pop("callbacks", ())]
        self.trainer = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=callbacks, **options,
        )  # fmt: skip
        self.sharding = Sharding(0, 1, lambda *_: None)
        self.adoption = Takeover(self.trainer, self.sharding, ElasticData(DataArguments(), lambda *_: None, None))

    def fit(self, **kwargs: Any) -> None:
        def open_quorum() -> Manager:
            fit = self.trainer.fit_loop
            self.before_batch(fit.epoch_progress.current.processed, fit.epoch_loop.batch_progress.current.ready)
            return cast("Manager", OneReplica())

        self.adoption.start(open_quorum, lambda: None)
        self.trainer.fit(self.model, **kwargs)
        self.adoption.stop()

    def digest(self) -> list[float]:
        return [float(x) for p in self.model.parameters() for x in p.detach().flatten()]


def take_over(loaders: Callable[[int], Any], at: tuple[int, int], **options: Any) -> tuple[Run, Run]:
    """Run a donor, and a newcomer that takes its state over before `at` = (epoch, batch)."""
    donor, handed = Run(loaders, **copy.deepcopy(options)), []

    def hand_out(epoch: int, batch: int) -> None:
        if (epoch, batch) == at:
            encoded = encode(donor.adoption.state())
            handed.append((encoded.skeleton, [t.clone() for t in encoded.tensors], len(donor.model.seen)))

    donor.before_batch = hand_out
    donor.fit()
    ((skeleton, leaves, seen),) = handed
    newcomer = Run(loaders, **copy.deepcopy(options))

    def take(epoch: int, batch: int) -> None:
        if handed:
            assert (epoch, batch) == (0, 0)
            handed.clear()
            newcomer.adoption.load(decode_tree(skeleton, leaves))

    newcomer.before_batch = take
    newcomer.fit()
    expected, got = donor.model.seen[seen:], newcomer.model.seen
    own = [("epoch", 0)] + ([("epoch", at[0])] if at[0] else [])
    assert got[: len(own)] == own
    assert got[len(own) :] == expected
    assert newcomer.digest() == donor.digest()
    assert newcomer.trainer.global_step == donor.trainer.global_step
    ends = [run.trainer._checkpoint_connector.dump_checkpoint(weights_only=False) for run in (donor, newcomer)]
    for state in ends:
        state["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # how workers count is their affair
    for name in ("loops", "callbacks", "lr_schedulers", "epoch", "global_step"):
        assert ends[0][name] == ends[1][name], name
    return donor, newcomer


def dict_of_three(_: int) -> dict[str, Any]:
    return {"long": sharded(100), "short": sharded(30), "shorter": sharded(24, 8)}


LOADERS: dict[str, Callable[[int], Any]] = {
    "map": lambda _: sharded(100),
    "workers": lambda _: sharded(60, num_workers=1),
    "persistent workers": lambda _: sharded(60, num_workers=1, persistent_workers=True),
    "dict, cycling": dict_of_three,
    "max_size": lambda _: CombinedLoader([sharded(100), sharded(30)], "max_size"),
    "min_size": lambda _: CombinedLoader([sharded(100), sharded(90)], "min_size"),
    "no DataLoader": lambda _: Batches(),
    "iterable": lambda _: DataLoader(Stream(33), 4),
    "stateful, map": lambda _: stateful(Samples(100)),
    "stateful, iterable, read ahead": lambda _: stateful(StatefulStream(33)),
    "stateful, workers": lambda _: stateful(Samples(60), num_workers=1),
    "stateful in a dict": lambda _: {"a": stateful(Samples(100)), "b": sharded(30)},
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_newcomer_goes_on_with_the_same_batches(name: str) -> None:
    """In the middle of an epoch, at its first batch, and at the last batch of the run."""
    take_over(LOADERS[name], (1, 4))
    if name in ("dict, cycling", "stateful, map", "stateful, iterable, read ahead"):
        take_over(LOADERS[name], (2, 0))
        take_over(LOADERS[name], (0, 3))
        take_over(LOADERS[name], (1, 6))
        take_over(LOADERS[name], (1, 8))


def test_what_is_skipped_is_not_read() -> None:
    made: list[Any] = []

    def loaders(_: int) -> Any:
        made.append(sharded(100))
        return made[-1]

    _, newcomer = take_over(loaders, (2, 5))
    asked = made[-1].dataset.asked
    assert len(asked) == 34 - 5 * 4
    assert asked == [i for kind, *rest in newcomer.model.seen if kind == "step" for i in rest[2][0]]


def test_a_stateful_iterable_is_not_read_again() -> None:
    made: list[StatefulStream] = []

    def loaders(_: int) -> Any:
        made.append(StatefulStream(33))
        return stateful(made[-1])

    take_over(loaders, (0, 5))
    donor, newcomer = made
    assert donor.reads == 3 * 33
    assert newcomer.reads <= 3 * 33 - 4 * 4 + 2 * 4  # one batch at set-up, one that the donor had read ahead


@pytest.mark.parametrize("options", [
    {"accumulate_grad_batches": 3},
    {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]},
    {"limit_train_batches": 6}, {"limit_train_batches": 0.7}, {"overfit_batches": 5},
    {"val_check_interval": 2}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}, {"max_steps": 17},
    {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5},
])  # fmt: skip
def test_trainer_options(options: dict[str, Any]) -> None:
    """The window of an accumulation begins where the newcomer begins: donors hand out state nowhere else."""
    at = (
        (3, 2)
        if "reload_dataloaders_every_n_epochs" in options
        else (1, 3 if "accumulate_grad_batches" in options else 4)
    )
    take_over(lambda epoch: sharded(90 + 10 * epoch), at, **options)


def test_a_live_replica_that_fell_behind() -> None:
    """It has trained on other batches meanwhile, and is in an older epoch."""
    donor, handed = Run(LOADERS["map"]), []
    donor.before_batch = lambda e, b: handed.append(copy.deepcopy(donor.adoption.state())) if (e, b) == (1, 5) else None
    donor.fit()
    behind = Run(LOADERS["map"])
    behind.before_batch = lambda e, b: behind.adoption.load(handed.pop()) if (e, b) == (0, 7) else None
    behind.fit()
    steps = [[x for x in run.model.seen if x[0] in ("step", "end", "epoch end")] for run in (donor, behind)]
    assert steps[1][2 * 7 :] == steps[0][2 * (9 + 5) + 1 :]
    assert behind.digest() == donor.digest()
    assert behind.adoption.adoptions == 1


def test_the_same_position_costs_nothing() -> None:
    """At the first step everybody takes one replica's weights; data that is in place is left alone."""
    donor, handed = Run(LOADERS["map"]), []
    donor.before_batch = lambda e, b: handed.append(copy.deepcopy(donor.adoption.state())) if (e, b) == (0, 0) else None
    donor.fit()
    other = Run(LOADERS["map"])
    with torch.no_grad():
        other.model.net.weight.zero_()
    iterator: list[object] = []

    def take(_epoch: int, _batch: int) -> None:
        fetcher = other.trainer.fit_loop._data_fetcher
        assert fetcher is not None
        if handed:
            iterator.append(fetcher.combined_loader._iterator)
            other.adoption.load(handed.pop())
        elif len(iterator) == 1:
            assert fetcher.combined_loader._iterator is iterator[0]
            iterator.append(None)

    other.before_batch = take
    other.fit()
    assert len(iterator) == 2
    assert other.adoption.adoptions == 0
    assert other.digest() == donor.digest()
    assert other.model.seen == donor.model.seen


def test_resuming_inside_an_epoch(tmp_path: Any) -> None:
    whole = Run(LOADERS["map"])
    path, seen = tmp_path / "middle.ckpt", []

    def save(epoch: int, batch: int) -> None:
        if (epoch, batch) == (1, 4):
            whole.trainer.save_checkpoint(path)
            seen.append(len(whole.model.seen))

    whole.before_batch = save
    whole.fit()
    resumed = Run(LOADERS["map"])
    known = inspect.signature(resumed.trainer.fit).parameters  # Lightning 2.5 loads all there is
    resumed.fit(ckpt_path=path, **({"weights_only": False} if "weights_only" in known else {}))
    steps = [[x for x in s if x[0] == "step"] for s in (whole.model.seen[seen[0] :], resumed.model.seen)]
    assert steps[1] == steps[0]
    assert resumed.digest() == whole.digest()


def test_a_group_that_joined_late_gets_its_part_in_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it reads what another one reads, so that all epochs are of one length."""

    def loaders(_: int) -> Any:
        data, run = Samples(96), runs[-1]
        place = run.sharding.kwargs({"num_replicas": 1, "rank": 0}, training=True)
        return DataLoader(data, 4, sampler=DistributedSampler(data, **place, shuffle=True))

    runs = [Run(loaders, limit_val_batches=0, callbacks=[])]
    donor, handed = runs[0], []
    donor.sharding.groups = 2

    def hand_out(epoch: int, batch: int) -> None:
        if (epoch, batch) == (1, 4):
            handed.append(copy.deepcopy(donor.adoption.state()))
            monkeypatch.setattr(OneReplica, "members", ("replica-0:abc", "replica-2:def"))

    donor.before_batch = hand_out
    donor.fit()
    runs.append(Run(loaders, limit_val_batches=0, callbacks=[]))
    late = runs[1]
    late.sharding.number, late.sharding.group, late.sharding.groups = 2, 2, 3
    late.before_batch = lambda _e, _b: late.adoption.load(handed.pop()) if handed else None
    late.fit()
    steps = [[x[1:] for x in run.model.seen if x[0] == "step"] for run in runs]
    assert [sum(x[0] == epoch for x in steps[0]) for epoch in range(3)] == [12, 12, 8]
    assert [x for x in steps[1] if x[0] == 1] == [x for x in steps[0] if x[0] == 1][4:]
    parts = []
    for rank, own in ((0, steps[0]), (2, steps[1])):
        sampler: DistributedSampler[Any] = DistributedSampler(Samples(96), 3, rank, shuffle=True)
        sampler.set_epoch(2)
        parts.append(list(sampler))
        assert [i for x in own if x[0] == 2 for i in x[2][0]] == parts[-1]


class OwnReader(Model):
    """training_step(dataloader_iter)."""

    ahead = 0

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        for _ in range(self.ahead):
            next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Lightning promises nothing about its arguments here."""


def test_dataloader_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Model", OwnReader)
    take_over(LOADERS["map"], (1, 4))
    monkeypatch.setattr(OwnReader, "ahead", 1)
    with pytest.raises(ConfigError, match="must take exactly one batch per step"):
        take_over(LOADERS["map"], (0, 2))
