"""A short training per mode: one script with torch's HSDP over four processes, and with ours in two groups of two."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

STEPS, VOCABULARY, WIDTH = 4, 64, 32
RANKS = 2
"""Per group."""


@dataclass(frozen=True)
class Mode:
    """What of FSDP2 a mode uses."""

    clip: float = 0.0
    accumulate: int = 1
    by: str = "set_requires_gradient_sync"
    """How micro-batches before the last one are told apart."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of fully_shard."""
    roots: int = 1
    unused: bool = False
    recompute: bool = False
    """Activation checkpointing."""
    momentum: bool = False
    tensor_parallel: bool = False
    """Instead of data parallelism within the group, so both ranks see the same data."""
    compiled: str = ""
    """"blocks": each block before it is sharded; "whole": the sharded model."""


MODES = {
    "fp32": Mode(),
    "clip": Mode(clip=0.05),
    "accumulate whole": Mode(accumulate=3),
    "accumulate shards": Mode(accumulate=3, by="set_requires_all_reduce"),
    "bf16": Mode(options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "no reshard": Mode(options={"reshard_after_forward": False}),
    "two roots": Mode(roots=2),
    "unused": Mode(unused=True),
    "recompute": Mode(recompute=True),
    "momentum": Mode(momentum=True, clip=0.1),
    "tensor parallel": Mode(tensor_parallel=True),
    "compiled blocks": Mode(compiled="blocks"),
    "compiled whole": Mode(compiled="whole"),
    "offload": Mode(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "bf16 reduced in bf16": Mode(options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}),
}


class Block(nn.Module):
    """Its inner width is odd, so that shards are padded, where torch can do that."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        inner = 4 * WIDTH + (not mode.tensor_parallel)
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, inner)
        self.back = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        out: Tensor = x + self.back(torch.nn.functional.gelu(self.wide(self.norm(x))))
        return out


class Body(nn.Module):
    """Tokens to features; `once` is used in every other step only where the mode says so."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode, self.step = mode, 0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(mode) for _ in range(3))
        self.once = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Features."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.mode.recompute else block(x)
        return x + self.once(x) if not self.mode.unused or self.step % 2 else x


class Head(nn.Module):
    """Features to logits; `scale` has one row, so the shard of the second rank is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.out(x) + self.scale(x)
        return out


class Net(nn.Module):
    """Both in one root."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.body, self.head = Body(mode), Head()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.body(tokens))
        return out


def built(mode: Mode, mesh: DeviceMesh) -> tuple[Net, list[Any]]:
    """The sharded model, and its roots. `mesh`: its last dimension is that of the ranks of a group."""
    torch.manual_seed(1)
    net = Net(mode)
    if mode.tensor_parallel:
        for block in net.body.blocks:
            parallelize_module(block, mesh["shard"], {"wide": ColwiseParallel(), "back": RowwiseParallel()})
        mesh = mesh["replica", "data"] if "replica" in (mesh.mesh_dim_names or ()) else mesh["data"]
    for block in net.body.blocks:
        if mode.compiled == "blocks":
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, **mode.options)
    roots: list[Any] = [net] if mode.roots == 1 else [net.body, net.head]
    for root in roots:
        fully_shard(root, mesh=mesh, **mode.options)
        if mode.compiled == "whole":
            root.compile(backend="aot_eager")
    return net, roots


def batch(number: int, member: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one micro-batch, of one of all four ranks."""
    generator = torch.Generator().manual_seed(1000 * number + member)
    tokens = torch.randint(VOCABULARY, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def optimizer_of(mode: Mode, net: Net) -> torch.optim.Optimizer:
    """Without foreach: sums in one order."""
    if mode.momentum:
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False)
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def backward(mode: Mode, net: Net, roots: list[Any], step: int, member: int) -> None:
    """All micro-batches of a step."""
    net.body.step = step
    for micro in range(mode.accumulate):
        for root in roots if mode.accumulate > 1 else ():
            getattr(root, mode.by)(micro == mode.accumulate - 1)
        data = member - member % RANKS if mode.tensor_parallel else member
        tokens, targets = batch(step * mode.accumulate + micro, data)
        logits = net(tokens).float()
        (nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / mode.accumulate).backward()
    if mode.clip:
        torch.nn.utils.clip_grad_norm_(net.parameters(), mode.clip)


def digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of this rank's shards of parameters and optimizer state."""
    found = hashlib.sha256()
    for parameter in net.parameters():
        held = [parameter, *(v for v in optimizer.state[parameter].values() if isinstance(v, Tensor))]
        for tensor in held:
            found.update(getattr(tensor, "_local_tensor", tensor).detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def mesh_of(mode: Mode, groups: int) -> DeviceMesh:
    """`groups`: in the mesh; 0: it is of one group's ranks."""
    sizes = {"replica": groups, "data": 1, "shard": RANKS}
    names = [name for name in sizes if sizes[name] and (name != "data" or mode.tensor_parallel)]
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))


def native(name: str, rank: int) -> str:
    """With torch's HSDP over four processes."""
    mode = MODES[name]
    mesh = mesh_of(mode, 2)
    net, roots = built(mode, mesh)
    optimizer = optimizer_of(mode, net)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(mode, net, roots, step, rank)
        optimizer.step()
    return digest(net, optimizer)


def ours(name: str, rank: int) -> str:
    """In one of two groups."""
    from ft_core import Manager, OptimizerWrapper, ProcessGroupGloo
    from ft_core.fsdp import replicate

    mode = MODES[name]
    mesh = mesh_of(mode, 0)
    group = int(os.environ["FT_REPLICA_GROUP"])
    net, roots = built(mode, mesh)
    raw = optimizer_of(mode, net)

    def save() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": raw.state_dict()}

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        raw.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(), state_dict=save, load_state_dict=load, min_replica_size=2, room_id=name.replace(" ", "-")
    )
    replicate(manager, *roots)
    optimizer = OptimizerWrapper(manager, raw)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        backward(mode, net, roots, manager.current_step(), RANKS * group + rank)
        optimizer.step()
    found = digest(net, raw)
    manager.leave("finished", finished=True)
    manager.shutdown()
    return found


def main() -> None:
    """`native` or `ours`, then the names of modes, with underscores for blanks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    way, names = sys.argv[1], [word.replace("_", " ") for word in sys.argv[2:]]
    group = rank // RANKS if way == "native" else int(os.environ["FT_REPLICA_GROUP"])
    for name in names:
        found = native(name, rank) if way == "native" else ours(name, rank)
        line = f"DIGEST {json.dumps([name, group, rank % RANKS, found])}\n"
        os.write(1, line.encode())  # in one piece: four processes write to one pipe
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
