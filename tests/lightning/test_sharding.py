"""Who reads what: a Trainer that is group 1 of 3, the others away, in this process, against a real lighthouse."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import lightning as pl
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
)

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError
from ft_lightning import FaultTolerantStrategy
from ft_lightning.trainer.sharding import Sharding, Unseen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*overfit.*"),
]


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, size: int = 24) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(i)]) for i in range(8))


class Model(pl.LightningModule):
    """Writes down which samples it got in which stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: dict[str, list[list[int]]] = {}

    def note(self, batch: torch.Tensor) -> torch.Tensor:
        stage = str(self.trainer.state.stage and self.trainer.state.stage.value)
        if stage == "train":
            stage += f" {self.current_epoch}"
        self.seen.setdefault(stage, []).append([int(i) for i in batch[:, 0]])
        out: torch.Tensor = self.net(batch / 10).sum()
        return out

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.note(batch)

    def validation_step(self, batch: torch.Tensor) -> None:
        self.note(batch)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.note(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class AsksEarly(pl.Callback):
    """Makes the Trainer set up training data during the sanity check."""

    steps = 0

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del pl_module
        self.steps = int(trainer.estimated_stepping_batches)


class Job:
    """Makes Trainers that are group 1 of 3, each in a job of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers: list[LighthouseServer] = []
        self._setenv = monkeypatch.setenv
        for name, value in {"REPLICA_GROUP": 1, "NUM_REPLICA_GROUPS": 3, "MIN_REPLICAS": 1}.items():
            monkeypatch.setenv(f"FT_{name}", str(value))

    def trainer(self, **options: Any) -> pl.Trainer:
        self.servers.append(LighthouseServer("127.0.0.1:0", boot_window_ms=0, token=""))
        self._setenv("FT_LIGHTHOUSE", self.servers[-1].address())
        return pl.Trainer(
            strategy=FaultTolerantStrategy(manager_kwargs={"expected_replicas": 1}), accelerator="cpu", devices=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            **{"max_epochs": 2, **options},
        )  # fmt: skip


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Job]:
    monkeypatch.chdir(tmp_path)
    job = Job(monkeypatch)
    yield job
    for server in job.servers:
        server.shutdown()


def shard(epoch: int, rank: int = 1, size: int = 24) -> list[int]:
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(size), 3, rank, shuffle=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def test_who_reads_what_in_every_stage(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Training over the groups, also when it is set up during the sanity check; the rest inside the group."""
    model, early = Model(), AsksEarly()
    run = job.trainer(callbacks=[early])
    loaders = [DataLoader(Numbers(), 4, shuffle=True), DataLoader(Numbers(10), 4)]
    with caplog.at_level(logging.WARNING, logger="ft_lightning"):
        run.fit(model, *loaders)
    assert early.steps == 4
    assert [flat(model.seen[f"train {epoch}"]) for epoch in (0, 1)] == [shard(0), shard(1)]
    assert shard(0) != shard(1)
    assert flat(model.seen["validate"]) == list(range(10)) * 2
    assert flat(model.seen["sanity_check"]) == list(range(8))
    told = [r.getMessage() for r in caplog.records if "was not read" in r.getMessage()]
    assert [text[:40] for text in told] == [f"epoch {n}: 66.7 % of the training data was" for n in (0, 1)]

    for stage, call in (("validate", run.validate), ("test", run.test), ("predict", run.predict)):
        model.seen.clear()
        call(model, DataLoader(Numbers(10), 4))
        assert flat(model.seen[stage]) == list(range(10)), stage


def test_a_sampler_of_the_users_is_divided_alike_everywhere(job: Job) -> None:
    """Whatever this process has drawn before: the order follows from the epoch."""
    orders = []
    for noise in (0, 5):
        torch.manual_seed(noise)
        model = Model()
        job.trainer().fit(model, DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * 24, 24)))
        orders.append([flat(model.seen[f"train {epoch}"]) for epoch in (0, 1)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_what_is_the_users_is_left_alone(job: Job, caplog: pytest.LogCaptureFixture) -> None:

    def messages(loader: Any, **options: Any) -> list[str]:
        caplog.clear()
        model = Model()
        job.trainer(max_epochs=1, **options).fit(model, loader)
        read.append(flat(model.seen["train 0"]))
        return [r.getMessage() for r in caplog.records if "sampler" in r.getMessage().lower()]

    read: list[list[int]] = []
    data = Numbers()
    (own,) = messages(DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0, shuffle=False)))
    assert own.startswith("your DistributedSampler is rank 0 of 1: it divides the training data only inside")
    assert messages(DataLoader(data, 4, sampler=DistributedSampler(data, 3, 1, shuffle=False))) == []
    (undivided,) = messages(DataLoader(data, 4), use_distributed_sampler=False)
    assert "each of the 3 groups reads all of it" in undivided
    assert messages(DataLoader(Stream(), 4), use_distributed_sampler=False) == []
    assert read == [list(range(24)), list(range(1, 24, 3)), list(range(24)), list(range(8))]
    with pytest.raises(ConfigError, match=r"IterableDataset, which only itself can divide among the 3 ranks"):
        messages(DataLoader(Stream(), 4))


def test_workers_are_seeded_by_their_place_in_the_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation alike in all groups: what they monitor must be the same."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    run = job.trainer(max_epochs=1)
    run.fit(Model(), DataLoader(Numbers(), 4), DataLoader(Numbers(), 4))
    ranks = []
    for loader in (run.train_dataloader, run.val_dataloaders):
        assert isinstance(loader, DataLoader)
        init: Any = loader.worker_init_fn
        assert init.func is pl_worker_init_function
        ranks.append(init.keywords["rank"])
    assert ranks == [1, 0]


def test_sharding_and_unseen() -> None:
    sharding = Sharding(2, 4, lambda *_: None)
    inside = {"num_replicas": 2, "rank": 1}
    assert sharding.kwargs(inside, training=True) == {"num_replicas": 8, "rank": 5}
    assert sharding.kwargs(inside, training=False) == inside
    with sharding.preparing([], "val", divides=True, ranks=2):
        assert sharding.kwargs(inside, training=True) == inside
    with sharding.preparing([], "train", divides=True, ranks=2):
        assert sharding.kwargs(inside, training=False)["rank"] == 5
    unseen = Unseen()
    unseen.count(4, 4)
    assert unseen.epoch_ended(0) == ""
    unseen.count(3, 4)
    unseen.count(4, 4)
    assert repr(unseen) == "Unseen(1 of 8)"
    assert unseen.epoch_ended(7).startswith("epoch 7: 12.5 % of the training data was not read")
    assert unseen.epoch_ended(8) == ""
