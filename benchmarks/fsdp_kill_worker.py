"""One rank of a group behind `fsdp_kill.py`: trains a sharded model until it is killed. argv: width depth pace_s by.

by: `loop` (TrainingLoop) or `manager` (the script calls start_quorum and should_commit).

Rank 0 of each group notes `commit STEP GROUPS`, `veto`, and `pids` of its ranks; every rank notes ft_core's log, with
what it has healed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.fsdp_worker import TOKENS, end_with_torchrun, sharded
from benchmarks.trainer import Notes
from ft_core import Manager, ProcessGroupGloo
from ft_core.fsdp import replicate
from ft_core.loop import TrainingLoop

if TYPE_CHECKING:
    from collections.abc import Callable


class Progress:
    batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]


def told(notes: Notes, manager: Manager, *, commits: bool) -> None:
    """Note what became of a step."""
    members = f"{manager.current_step()} {manager.num_participants()}"
    notes.note(*(("commit", members) if commits else ("veto", "")))


def by_manager(net: Any, optimizer: Any, notes: Notes | None, step: Callable[[], None]) -> None:
    """A loop over the Manager's own calls."""

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        ProcessGroupGloo(), load, lambda: {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    )
    replicate(manager, net)
    while True:
        manager.start_quorum()
        step()
        commits = manager.should_commit()
        if notes is not None:
            told(notes, manager, commits=commits)
        if commits:
            optimizer.step()


def main() -> None:
    end_with_torchrun()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, notes = dist.get_rank(), Notes()
    logging.getLogger("ft_core").addHandler(notes)
    logging.getLogger("ft_core").setLevel(logging.INFO)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    net, optimizer = sharded(mesh, int(sys.argv[1]), int(sys.argv[2]))
    tokens, targets = torch.randint(TOKENS, (8, 16)), torch.randint(TOKENS, (8, 16))

    def step() -> None:
        time.sleep(float(sys.argv[3]))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()

    if rank == 0:
        notes.note("pids", " ".join(map(str, pids)))
    if sys.argv[4] == "manager":
        by_manager(net, optimizer, notes if rank == 0 else None, step)
    progress = Progress()
    loop = TrainingLoop({"model": net, "optimizer": optimizer, "progress": progress})
    loop.replicate(net)
    while (batch := loop.open(progress.batch)) is not None:
        progress.batch = batch
        step()
        commits = loop.vote()
        assert loop.manager is not None
        if rank == 0:
            told(notes, loop.manager, commits=commits)
        if commits:
            optimizer.step()
            progress.batch += 1


if __name__ == "__main__":
    main()
