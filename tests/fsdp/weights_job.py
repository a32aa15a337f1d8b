"""Two groups of two ranks with different batch weights: each rank's gradient against what it computes by itself.

WEIGHTS: of each rank of each group, as "3,3 1,1".

Nobody leaves the first step before all have its end: a group that is refused and exits could break the quorum of one
whose last collective is not through. FOLDER is where each rank says that it has it.

Lines: `weighted GROUP RANK ERROR NORM` (largest difference, and largest gradient), or `vetoed GROUP RANK`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ft_core import Manager, ProcessGroupGloo
from ft_core.fsdp import replicate
from tests.fsdp.modes import MODES, RANKS, batch, built, mesh_of
from tests.process_group.ranks import wait_until

WEIGHTS = [[int(weight) for weight in group.split(",")] for group in os.environ.get("WEIGHTS", "3,3 1,1").split()]
MODE = MODES["fp32"]
PATIENCE_S = 20.0


def gradients(net: Any, member: int) -> list[torch.Tensor]:
    """This rank's shards."""
    net.zero_grad()
    tokens, targets = batch(0, member)
    nn.functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
    return [parameter.grad._local_tensor.clone() for parameter in net.parameters()]


def ended(manager: Manager, group: int, rank: int) -> bool:
    """Whether the step was committed, when all ranks of all groups have come to its end, however it was."""
    folder = Path(os.environ["FOLDER"])
    try:
        return manager.should_commit()
    finally:
        (folder / f"{group}-{rank}").touch()
        wait_until(lambda: len(list(folder.iterdir())) == sum(map(len, WEIGHTS)), PATIENCE_S)


def main() -> None:
    """One step, and another."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank = int(os.environ["FT_REPLICA_GROUP"]), dist.get_rank()
    alone, _ = built(MODE, mesh_of(MODE, 0))
    parts = [gradients(alone, RANKS * number + rank) for number in range(len(WEIGHTS))]
    mine = [weights[rank] for weights in WEIGHTS]
    wanted = [(mine[0] * first + mine[1] * second) / sum(mine) for first, second in zip(*parts, strict=True)]
    net, roots = built(MODE, mesh_of(MODE, 0))
    manager = Manager(
        pg=ProcessGroupGloo(), state_dict=net.state_dict, load_state_dict=net.load_state_dict, min_replica_size=2
    )
    replicate(manager, *roots)
    manager.start_quorum()
    manager.set_batch_weight(mine[group])
    gradients(net, RANKS * group + rank)
    if not ended(manager, group, rank):
        os.write(1, f"vetoed {group} {rank}\n".encode())
        manager.shutdown()
        return
    reduced: list[Any] = [parameter.grad for parameter in net.parameters()]
    found = [gradient._local_tensor for gradient in reduced]
    error = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True) if a.numel())
    norm = max(float(part.abs().max()) for part in wanted if part.numel())
    os.write(1, f"weighted {group} {rank} {error} {norm}\n".encode())
    manager.start_quorum()  # for this the ranks of a group need each other
    manager.set_batch_weight(1)
    gradients(net, RANKS * group + rank)
    assert manager.should_commit()
    manager.leave("finished", finished=True)
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
