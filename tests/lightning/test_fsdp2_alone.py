"""`strategy="fault_tolerant_fsdp2"` in this process, a group of one rank, beside plain ModelParallelStrategy.

Checkpoints of either are the other's, training gives the same bits, and `fit` may be called again.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError
from ft_lightning import FaultTolerantFSDP2Strategy
from tests.lightning import fsdp2_job
from tests.lightning.fsdp2_job import BATCH, Model, samples

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
]
MIDDLE, END = 3, 6
"""Optimizer steps, of an epoch of 24."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = LighthouseServer("127.0.0.1:0")
    for name, value in {"FT_REPLICA_GROUP": "0", "FT_NUM_REPLICA_GROUPS": "1", "FT_HOSTNAME": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address())
    yield
    server.shutdown()


def strategy_of(kind: str, *, folders: bool) -> Any:
    options: dict[str, Any] = {"data_parallel_size": 1, "tensor_parallel_size": 1}
    kinds: dict[str, Any] = {"ours": FaultTolerantFSDP2Strategy, "plain": ModelParallelStrategy}
    return kinds[kind](save_distributed_checkpoint=folders, **options)


def trained(strategy: Any, path: pathlib.Path | None = None, **options: Any) -> tuple[pl.Trainer, Model]:
    torch.manual_seed(1)
    usual: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "num_sanity_val_steps": 0,
        "enable_model_summary": False, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_steps": END,
        "enable_checkpointing": False,
    }  # fmt: skip
    trainer, model = pl.Trainer(strategy=strategy, **(usual | options)), Model("alone")
    trainer.fit(model, DataLoader(samples(), BATCH), ckpt_path=path)
    return trainer, model


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("folders", [True, False], ids=["folder", "file"])
def test_checkpoints_and_bits_are_those_of_plain_lightning(tmp_path: pathlib.Path, folders: bool) -> None:
    ends = []
    for writer, reader in (("plain", "ours"), ("ours", "plain")):
        saving = ModelCheckpoint(tmp_path / writer, "{step}", every_n_train_steps=MIDDLE, save_top_k=-1)
        _, model = trained(strategy_of(writer, folders=folders), callbacks=[saving], enable_checkpointing=True)
        ends.append(weights(model))
        path = tmp_path / writer / f"step={MIDDLE}.ckpt"
        assert path.is_dir() is folders
        trainer, _ = trained(strategy_of(reader, folders=folders), path, max_steps=MIDDLE + 1)
        assert trainer.global_step == MIDDLE + 1
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
    _, resumed = trained(strategy_of("ours", folders=folders), tmp_path / "plain" / f"step={MIDDLE}.ckpt")
    torch.testing.assert_close(weights(resumed), ends[0], rtol=0, atol=0)


def test_a_checkpoint_that_nobody_has(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*nowhere' was found by no replica"):
        trained(strategy_of("ours", folders=True), tmp_path / "nowhere")


def test_fit_again() -> None:
    """The modules are sharded already, and are replicated anew."""
    trainer, model = trained(strategy_of("ours", folders=True))
    before = weights(model)
    trainer.fit_loop.epoch_loop.max_steps = END + 2
    trainer.fit(model, DataLoader(samples(), BATCH))
    assert trainer.global_step == END + 2
    assert not torch.equal(weights(model)["net.0.weight"], before["net.0.weight"])


def test_a_step_after_a_validation_begins_with_shards() -> None:
    """Or collecting the state on one rank of a group would make it gather in the next forward, and the other not."""
    found = []

    def note(_: Any, model: Any, *__: Any) -> None:
        found.append(all(isinstance(parameter, DTensor) for parameter in model.parameters()))

    looking = pl.callbacks.LambdaCallback(on_validation_end=note, on_train_batch_start=note)
    torch.manual_seed(1)
    trainer = pl.Trainer(
        strategy=strategy_of("ours", folders=True), accelerator="cpu", devices=1, logger=False, max_steps=2,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        val_check_interval=1, callbacks=[looking],
    )  # fmt: skip
    trainer.fit(Model("alone"), DataLoader(samples(), BATCH), DataLoader(samples(), 96))
    assert found == [True, False, True, False]


class Unsharded(Model):
    """Forgets to."""

    def configure_model(self) -> None:
        self.net = fsdp2_job.net()


def test_a_model_that_is_not_sharded() -> None:
    trainer = pl.Trainer(
        strategy="fault_tolerant_fsdp2", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    with pytest.raises(ConfigError, match="Unsharded is not sharded"):
        trainer.fit(Unsharded("alone"), DataLoader(samples(), BATCH))


def test_no_checkpoint_is_written_because_of_an_exception(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("mine")

    callbacks = [OnExceptionCheckpoint(tmp_path), pl.callbacks.LambdaCallback(on_train_batch_end=fail)]
    with pytest.raises(ValueError, match="mine"):
        trained(strategy_of("ours", folders=True), callbacks=callbacks, enable_checkpointing=True)
    assert list(tmp_path.iterdir()) == []
    assert "is not saved: an exception ends this rank" in caplog.text


def test_evaluation_needs_no_lighthouse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_LIGHTHOUSE", "127.0.0.1:1")  # nobody listens there
    trainer = pl.Trainer(
        strategy="fault_tolerant_fsdp2", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    assert "val" in trainer.validate(Model("alone"), DataLoader(samples(), BATCH), verbose=False)[0]
