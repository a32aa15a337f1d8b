"""A Lightning script on elastic data, for test_elastic_kills: counts every sample that it commits.

Environment: LENGTH, EPOCHS, BATCH, GLOBAL, HURRY (a file: until it is there, steps are slow), FOLDER, MAX_STEPS.
Lines: `commit EPOCH STEP MEMBERS`, `done DIGEST STEPS faults N FIRST...`.
"""

from __future__ import annotations

import logging
import os
import pathlib
import threading
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import lightning as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from ft_lightning import FaultTolerantStrategy  # noqa: E402
from tests.data.worker import say  # noqa: E402
from tests.lightning.counting import Counts, Numbers  # noqa: E402

STEP_S = 0.06
env = os.environ
hurry = pathlib.Path(env["HURRY"])
clock = threading.Event()


class Model(Counts):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del outputs, batch, batch_idx
        strategy: Any = self.trainer.strategy
        loader: Any = self.trainer.train_dataloader
        if loader.last_micro_batch and not strategy.step_vetoed:
            say("commit", self.current_epoch, self.global_step, len(strategy.manager.members))
        if not hurry.exists():
            clock.wait(STEP_S)


def main() -> None:
    """Train to the end."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(2, verbose=False)
    length, epochs = int(env["LENGTH"]), int(env["EPOCHS"])
    trainer = pl.Trainer(
        strategy=FaultTolerantStrategy(elastic_data=True, global_batch_size=int(env["GLOBAL"])), accelerator="cpu",
        devices=1, max_epochs=epochs, max_steps=int(env.get("MAX_STEPS", "-1")), logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    model = Model(length, epochs)
    trainer.fit(model, DataLoader(Numbers(length), int(env["BATCH"]), shuffle=True, num_workers=1))
    if "MAX_STEPS" in env:
        trainer.save_checkpoint(pathlib.Path(env["FOLDER"]) / f"{trainer.strategy.replica_group}.ckpt")
    faults = model.net.faults()
    say("done", model.digest(), trainer.global_step, "faults", len(faults), *faults[:9])


if __name__ == "__main__":
    main()
