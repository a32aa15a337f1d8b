"""A Lightning script under ftrun on one GPU. Lines: `step NUMBER PARTICIPANTS PID GROUP`, and at the end `done DIGEST`.

It names no process group. ACCELERATOR=cpu tries it where there is no GPU.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import warnings
from typing import Any

os.environ["NCCL_HOSTID"] = "host-" + os.environ["FT_REPLICA_GROUP"]  # tests/gpu/pair.py says why
warnings.filterwarnings("ignore")
import lightning as pl  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import ft_lightning  # noqa: E402, F401 - the strategy's name, where the package is not installed

LAST = pathlib.Path(os.environ["LAST_STEP"])
"""The test writes there where to end."""


class Model(pl.LightningModule):  # type: ignore[misc,unused-ignore]
    """Mixed precision, clipping, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        del batch_idx
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        manager = strategy.manager
        group = manager._runtime.shell.communicators.gradients.getBackendName()
        print("step", self.trainer.global_step, manager.num_participants(), os.getpid(), group, flush=True)
        self.trainer.should_stop = LAST.exists() and self.trainer.global_step >= int(LAST.read_text())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    accelerator = os.environ.get("ACCELERATOR", "gpu")
    trainer = pl.Trainer(
        strategy="fault_tolerant", accelerator=accelerator, devices=1, max_epochs=-1, logger=False,
        precision="16-mixed" if accelerator == "gpu" else "32-true", gradient_clip_val=1.0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(40_000, 32)), 16, shuffle=True))
    parts = [part.detach().cpu().contiguous().numpy().tobytes() for part in (*model.parameters(), *model.buffers())]
    print("done", hashlib.sha256(b"".join(parts)).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()
