"""A training script on elastic data for the tests: counts every sample that it commits (`tests.data.managed.Counting`).

Lines: `on EPOCH MEMBERS` after each commit, `faults N FIRST...` and `done DIGEST` at the end. Options in the
environment: LENGTH, EPOCHS, BATCH, ACCUMULATE, WORKERS, OWN (the script makes the loader elastic), PACE_S (of a step,
until the file HURRY is there), and those of the plugin (ACCELERATE_FT_*).
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import threading
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from ft_accelerate import FaultTolerantAccelerator as Accelerator  # noqa: E402
from ft_core import ElasticDataLoader  # noqa: E402
from tests.data.managed import Counting  # noqa: E402
from tests.data.worker import Numbers, say  # noqa: E402


def main() -> None:
    """Train until every epoch is done."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    env = os.environ
    length, count = int(env["LENGTH"]), int(env["EPOCHS"])
    pace_s, hurry, pause = float(env["PACE_S"]), pathlib.Path(env["HURRY"]), threading.Event()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(env.get("ACCUMULATE", "1")))
    counting = Counting(length, count)
    batch_size, own = int(env["BATCH"]), env.get("OWN") == "1"
    if own:
        data: Any = ElasticDataLoader(
            Numbers(length), batch_size, shuffle=True, accumulation_steps=accelerator.gradient_accumulation_steps,
            group_rank=accelerator.process_index, num_replicas=accelerator.num_processes,
        )  # fmt: skip
    else:
        data = DataLoader(Numbers(length), batch_size, shuffle=True, num_workers=int(env.get("WORKERS", "0")))
    model, optimizer, loader = accelerator.prepare(counting, torch.optim.SGD(counting.parameters(), 1.0), data)
    for epoch in accelerator.epochs(count):
        assert not own or epoch == loader.epoch  # also the first one of a newcomer
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(counting.loss(model, loader, batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                assert accelerator.manager is not None
                if not accelerator.optimizer_step_was_skipped:
                    say("on", accelerator.epoch, len(accelerator.manager.members))
                if not hurry.exists():
                    pause.wait(pace_s)
    accelerator.end_training()
    faults = counting.faults()
    say("faults", len(faults), *faults[:5])
    say("done", hashlib.sha256(counting.counts.detach().numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
