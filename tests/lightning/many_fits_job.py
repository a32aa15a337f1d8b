"""For `tests/runtime/test_many_runs.py`: as many fits in this process as are asked for; prints what each cost."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import lightning as L
import torch


class Timed(L.LightningModule):
    """Notes when training begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.began = self.ended = 0.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_start(self) -> None:
        self.began = time.perf_counter()

    def on_train_end(self) -> None:
        self.ended = time.perf_counter()


def main(runs: int) -> None:
    costs: dict[str, list[float]] = {name: [] for name in ("set_up", "torn_down", "threads", "descriptors")}
    data: Any = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)  # type: ignore[arg-type]
    for _ in range(runs):
        start = time.perf_counter()
        trainer = L.Trainer(
            strategy="fault_tolerant", devices=1, accelerator="cpu", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = Timed()
        trainer.fit(model, data)
        assert trainer.global_step == 2
        costs["set_up"].append(model.began - start)
        costs["torn_down"].append(time.perf_counter() - model.ended)
        costs["threads"].append(threading.active_count())
        costs["descriptors"].append(len(os.listdir("/proc/self/fd")))
    print(json.dumps(costs))


if __name__ == "__main__":
    main(int(sys.argv[1]))
