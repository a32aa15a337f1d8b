"""The program of test_lost_state.py: `lost_job.py yes|no DEVICES`. Both groups are killed once they hold some steps.

In its first life a group says `holds STEP PID` after 5 steps and waits for its end; in a later one `ended STEP`.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from ft_lightning import FaultTolerantStrategy

STEPS = 5


class Waits(L.Callback):
    """Until it is killed."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print("holds", trainer.global_step, os.getpid(), flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(
        strategy=FaultTolerantStrategy(min_replicas=2, from_scratch=sys.argv[1] == "yes" or None), callbacks=[Waits()],
        devices=int(sys.argv[2]), max_steps=STEPS, limit_val_batches=0, accelerator="cpu", enable_model_summary=False,
        **quiet,
    )  # fmt: skip
    trainer.fit(BoringModel())
    print("ended", trainer.global_step, flush=True)
