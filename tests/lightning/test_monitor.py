"""FaultToleranceMonitor: what it counts, and where that is shown."""

from __future__ import annotations

import csv
import pathlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import ft_lightning
from ft_core.control.lighthouse.server import LighthouseServer
from ft_lightning.trainer import monitor

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 2 and not hasattr(self, "failed"):
            self.failed = True
            self.trainer.strategy.manager.report_error(ValueError("as the test wants it"))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(Model):
    """One backward, two optimizer steps: one vote."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.net.parameters()]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = LighthouseServer("127.0.0.1:0")
    for name, value in {"FT_REPLICA_GROUP": "0", "FT_NUM_REPLICA_GROUPS": "1", "FT_HOSTNAME": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address())
    yield
    server.shutdown()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("model", "steps_per_batch"), [(Model, 1), (TwoOptimizers, 2)])
def test_it_logs_and_shows(tmp_path: pathlib.Path, model: type[Model], steps_per_batch: int) -> None:
    shown: list[Any] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            shown.append(trainer.progress_bar_metrics.get("members"))

    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    watch = ft_lightning.FaultToleranceMonitor()
    trainer = L.Trainer(
        strategy="fault_tolerant", accelerator="cpu", devices=1, max_epochs=1, logger=CSVLogger(tmp_path),
        callbacks=[watch, Look()], log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model(), torch.utils.data.DataLoader(data, 4))
    with (pathlib.Path(trainer.log_dir or "") / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert (float(last["ft/members"]), float(last["ft/vetoed"]), float(last["ft/heals"])) == (1, steps_per_batch, 0)
    assert float(last["ft/gap_s"]) == pytest.approx(watch.longest_gap_s, rel=1e-5)
    assert watch.longest_gap_s > 0
    assert "members" not in last
    assert shown[-1] == 1.0
    assert trainer.global_step == 7 * steps_per_batch


def test_without_a_manager_it_is_silent() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))

    class Plain(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    watch = ft_lightning.FaultToleranceMonitor()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=[watch], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Plain(), torch.utils.data.DataLoader(data, 4))
    assert repr(watch) == "FaultToleranceMonitor(0 members, 0 vetoed, 0 heals)"


@dataclass
class Quorum:
    """Stands for a Manager."""

    quorum_id: int
    members: tuple[str, ...] = ("a", "b")
    healing_members: tuple[str, ...] = field(default=())
    step: int = 1

    def current_step(self) -> int:
        return self.step


def test_a_newcomer_counts_on() -> None:
    old, new = ft_lightning.FaultToleranceMonitor(), ft_lightning.FaultToleranceMonitor()
    clock = iter([10.0, 11.0, 11.5, 14.5, 15.0, 20.0])
    old._clock = new._clock = lambda: next(clock)
    old._look(Quorum(1, healing_members=("b",)), 0, 1)
    old._look(Quorum(1, step=2), 0, 2)
    assert (old.heals, old.gap_s) == (0, 0.0)
    old._look(Quorum(1, step=2), 2, 2)
    old._look(Quorum(2, ("a",), step=3), 0, 3)
    assert (old.vetoed, old.heals, old.gap_s, old.members) == (2, 0, 0.5, 1)
    new.load_state_dict(old.state_dict())
    for one in (old, new):
        one._look(Quorum(3, healing_members=("b",), step=4), 0, 4)
        assert (one.vetoed, one.heals, one.members) == (2, 1, 2)
    assert (old.gap_s, new.gap_s) == (3.0, 0.5)
    old._look(Quorum(3, step=5), 0, 5)
    assert old.longest_gap_s == 3.0


def test_one_class_for_each_lightning() -> None:
    assert issubclass(monitor.monitor_class("lightning.pytorch"), L.Callback)
    other = pytest.importorskip("pytorch_lightning")
    assert issubclass(monitor.monitor_class("pytorch_lightning"), other.Callback)
