"""One of four processes behind `fsdp.py`: trains a model with torch's HSDP and one with ours. argv: width, depth.

The first process prints `TIMES {way: [median step of each block, s]}` and, of the last step, `EQUAL true` if both
models have the same bits on every rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.common import median
from benchmarks.fsdp import AGAIN, BASE, BLOCKS, OURS, STEPS, WARM
from ft_core import Manager, OptimizerWrapper, ProcessGroupGloo
from ft_core.fsdp import replicate

if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_PDEATHSIG = 1
RANKS = 2
TOKENS = 128


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.back, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.back(nn.functional.gelu(self.wide(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def sharded(mesh: DeviceMesh, width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(width, depth)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def step_of(net: nn.Module, optimizer: Any) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, targets = (torch.randint(TOKENS, (8, 16), generator=generator) for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return step


def end_with_torchrun() -> None:
    """It starts its workers in sessions of their own, so who kills it does not reach them."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    end_with_torchrun()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank = divmod(dist.get_rank(), RANKS)
    native = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("replica", "shard"))
    groups = [dist.new_group(list(range(RANKS * number, RANKS * number + RANKS))) for number in range(2)]
    mine = DeviceMesh.from_group(groups[group], "cpu", mesh_dim_names=("shard",))
    ports: list[Any] = [None] * dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.all_gather_object(ports, store.port)
    width, depth = int(sys.argv[1]), int(sys.argv[2])
    net, raw = sharded(mine, width, depth)
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=lambda _: None, state_dict=dict, min_replica_size=2, rank=rank,
        world_size=RANKS, store_addr="127.0.0.1", store_port=ports[RANKS * group], replica_id=f"g{group}",
        lighthouse_addr=os.environ["FT_LIGHTHOUSE"], timeout=timedelta(seconds=30), init_sync=False,
    )  # fmt: skip
    replicate(manager, net)
    base, again = sharded(native, width, depth), sharded(native, width, depth)
    steps = {
        BASE: step_of(*base), OURS: step_of(net, OptimizerWrapper(manager, raw)), AGAIN: step_of(*again),
    }  # fmt: skip
    times: dict[str, list[float]] = {way: [] for way in steps}
    for block in range(WARM + BLOCKS):
        for way in list(steps) if block % 2 else reversed(steps):
            dist.barrier()
            took = []
            for _ in range(STEPS):
                began = time.perf_counter()
                steps[way]()
                took.append(time.perf_counter() - began)
            if block >= WARM:
                times[way].append(median(took))
    pairs: Any = zip(net.parameters(), base[0].parameters(), strict=True)
    alike = [torch.equal(ours._local_tensor, theirs._local_tensor) for ours, theirs in pairs]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, all(alike))
    if dist.get_rank() == 0:
        print("TIMES", json.dumps(times), flush=True)
        print("EQUAL", json.dumps(all(everywhere)), flush=True)
    dist.barrier()
    manager.leave("finished", finished=True)
    manager.shutdown()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
