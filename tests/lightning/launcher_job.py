"""The program of test_launcher.py, started as a user would: `python launcher_job.py <what> <devices> <folder>`."""

from __future__ import annotations

import hashlib
import importlib
import os
import pathlib
import sys
import threading
from typing import Any

import torch
from torch import nn

L: Any = importlib.import_module(os.environ.get("TREE", "lightning.pytorch"))
STEPS = 150


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        step, strategy = self.trainer.global_step, self.trainer.strategy
        if step in (10, STEPS - 10):
            print("step", step, strategy.manager.num_participants(), os.getpid(), flush=True)
        # Others that start need the processor; and the run is not to end before the one that was killed is back.
        alone = step >= 40 and strategy.manager.num_participants() < strategy.num_replica_groups
        threading.Event().wait(0.5 if alone else 0.005)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Notes(L.Callback):
    """Would tell somebody that the run has failed."""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        print("exception", type(exception).__name__, os.getpid(), flush=True)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if sys.argv[1] == "fail" and trainer.global_step == 3:
            raise ValueError("on purpose")


def main() -> None:
    what, devices, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    folder.mkdir(exist_ok=True)
    os.chdir(folder)  # a second time, from the command line's directory, where the groups start
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(4 * STEPS * devices, 4), torch.randn(4 * STEPS * devices, 2))
    strategy: Any = "fault_tolerant"
    if what == "fail":
        import ft_lightning

        strategy = ft_lightning.FaultTolerantStrategy(ftrun_options=["--max-restarts", "0"])
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_steps=STEPS if what == "kill" else 5,
        callbacks=[Notes()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=2,
    )  # fmt: skip
    model = Model()
    print("before", os.getpid(), flush=True)
    trainer.fit(model, torch.utils.data.DataLoader(data, 4))
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    print("after", trainer.global_step, digest.hexdigest()[:16], pathlib.Path.cwd(), flush=True)


if __name__ == "__main__":
    main()
