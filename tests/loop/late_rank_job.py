"""A training whose group 1 is killed, and is started again when group 0 has finished; its rank 1 comes late then.

FOLDER has two pipes: `finished`, which group 0 writes into when its training is over, and `late`, which rank 1 of the
group that was started again reads before it makes its loop.
"""

from __future__ import annotations

import logging
import os
import pathlib
import signal

import torch
from torch import nn

from ft_core.loop import TrainingLoop

BATCHES, FATAL = 30, 5
FOLDER = pathlib.Path(os.environ["FOLDER"])
AGAIN = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"


def train() -> int:
    """Train, or hear that there is nothing left. Returns the number of this group."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loop = TrainingLoop({"model": model, "optimizer": optimizer}, min_replica_size=1)
    ddp = loop.wrap(model)
    for batch in range(BATCHES):
        if loop.open(batch) is None:
            break
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).square().mean().backward()
        if loop.vote():
            optimizer.step()
        if (loop.group, batch) == (1, FATAL):
            os.kill(os.getpid(), signal.SIGKILL)
    loop.end()
    return loop.group


def main() -> None:
    """One rank."""
    logging.basicConfig(level=logging.INFO)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if AGAIN and rank == 0:
        (FOLDER / "finished").read_bytes()
    elif AGAIN:
        (FOLDER / "late").read_bytes()
    group = train()
    torch.distributed.destroy_process_group()
    if (group, rank) == (0, 0):
        (FOLDER / "finished").write_bytes(b"!")


if __name__ == "__main__":
    main()
