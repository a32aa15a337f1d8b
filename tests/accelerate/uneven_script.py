"""A training script for the tests whose groups have different numbers of batches: a stream of COUNTS[group] each.

Lines: `on GROUP EPOCH BATCH MEMBERS` for each batch, `done DIGEST STEPS LR` at the end: the digest is of parameters and
momentum. Options in the environment: COUNTS ("10,30"), PACE_S (of a step), END (a file; the last epoch is the one in
which it comes).
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import threading
import warnings
from typing import TYPE_CHECKING, Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from ft_accelerate import FaultTolerantAccelerator as Accelerator  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 2


class Stream(IterableDataset[torch.Tensor]):
    """So many batches for each process that reads a part of it."""

    def __init__(self, count: int, everybody: int) -> None:
        self.rows = count * everybody * BATCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(self.rows):
            yield torch.tensor([row % 7, row % 11, row % 13]) / 10


def main() -> None:
    """Train until told."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    env = os.environ
    pace_s, end, pause = float(env["PACE_S"]), pathlib.Path(env["END"]), threading.Event()
    accelerator = Accelerator(cpu=True)
    group, everybody = accelerator.replica_group, accelerator.num_processes * accelerator.num_replica_groups
    torch.manual_seed(group)
    module = nn.Linear(3, 2)
    inner = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    stream = Stream(int(env["COUNTS"].split(",")[group]), everybody)
    prepared = accelerator.prepare(
        module, inner, DataLoader(stream, BATCH), torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.99**step)
    )
    model, optimizer, loader, scheduler = prepared
    for _ in accelerator.epochs(10**6):
        with accelerator.join_uneven_inputs([model, optimizer], even_batches=False):
            for x in loader:
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                assert accelerator.manager is not None
                place: Any = loader.position
                print("on", group, place.epoch, place.batch - 1, len(accelerator.manager.members), flush=True)
                pause.wait(pace_s)
        if end.exists():
            break
    accelerator.end_training()
    parts = [*module.parameters(), *(state["momentum_buffer"] for state in inner.state.values())]
    digest = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()[:16]
    print("done", digest, accelerator.committed_steps, f"{scheduler.get_last_lr()[0]:.9g}", flush=True)


if __name__ == "__main__":
    main()
