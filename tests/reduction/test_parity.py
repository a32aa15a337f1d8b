"""Over real Gloo: the same bits as torch's DDP after several steps, and the same bits on all replicas."""

from __future__ import annotations

import copy
import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore

from ft_core.ddp import DistributedDataParallel
from tests.reduction.fakes import GlooHost, open_group, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return self.sometimes(y) if x[0, 0] > 0 else y


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, dtype=torch.float64)
        self.c = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x).double()).bfloat16())
        return y.float()


def shared() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    module[2].weight = module[0].weight
    return module


def convolution() -> nn.Module:
    layers = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(54, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 3)),
    "convolution": convolution,
    "shared": shared,
    "mixed": Mixed,
    "unused": Unused,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, style: str, host: GlooHost | None) -> None:
    for step in range(6):
        if host is not None:
            host.start_quorum()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        generator = torch.Generator().manual_seed(1000 * rank + step)
        micro = 3 if style != "plain" else 1
        for index in range(micro):
            accumulate: Any = model
            x = torch.randn(5, 8, generator=generator)
            with accumulate.no_sync() if style == "no_sync" and index < micro - 1 else nullcontext():
                model(x).square().mean().backward()
        if host is not None:
            assert host.should_commit()
        optimizer.step()


def compare(rank: int, name: str, style: str, optimizer: Any, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    theirs = MODELS[name]()
    ours = copy.deepcopy(theirs)
    find_unused = name == "unused"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=find_unused)
    host = GlooHost(group)
    model = DistributedDataParallel(host, ours, bucket_cap_mb=0.001)
    train(reference, optimizer(theirs.parameters(), lr=0.05), rank, style, None)
    train(model, optimizer(ours.parameters(), lr=0.05), rank, style, host)
    buffers = dict(theirs.named_buffers())
    for key, expected in theirs.state_dict().items():
        got = ours.state_dict()[key]
        if key in buffers:
            # torch broadcasts rank 0's before the next forward, we do at the commit.
            dist.broadcast(expected, 0)
        assert torch.equal(got, expected), f"{name}, {style}: {key} differs by {(got - expected).abs().max()}"
    for ours_p, theirs_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (ours_p.grad is None) == (theirs_p.grad is None)
    reference.load_state_dict(model.state_dict())
    model.load_state_dict(reference.state_dict())


def check_everything(rank: int, world_size: int, store_path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_path}-default", rank=rank, world_size=world_size)
    group = open_group(rank, world_size, FileStore(f"{store_path}-ours", world_size))
    for name in MODELS:
        for style in ("plain", "no_sync", "every backward"):
            compare(rank, name, style, torch.optim.SGD, group)
        compare(rank, name, "plain", torch.optim.AdamW, group)
    dist.barrier()
    dist.destroy_process_group()
    del group
    gc.collect()  # a group that is still there at the interpreter's exit can end it with std::terminate


@pytest.mark.process
def test_the_same_bits_as_torchs_ddp() -> None:
    run_ranks(check_everything, 2)


def test_three_replicas_agree_bit_for_bit_whatever_they_contribute() -> None:
    """A thread each: several Managers, so several wrappers, may live in one process."""
    store = HashStore()
    torch.manual_seed(0)
    module = convolution()

    def member(rank: int) -> Tensor:
        host = GlooHost(open_group(rank, 3, store))
        model = DistributedDataParallel(host, copy.deepcopy(module), bucket_cap_mb=0.0005)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(6):
            attempt = host.start_quorum(contributing=not (rank == 2 and step % 2))
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(1000 * rank + step)
            if not (rank == 1 and step == 3):  # one member has nothing to do: its flush keeps the ring aligned
                model(torch.randn(5, 8, generator=generator)).square().mean().backward()
            assert host.should_commit()
            assert attempt.launches == len(model.gradient_reducer.plan.buckets)
            optimizer.step()
        return torch.cat([t.double().flatten() for t in model.state_dict().values()])

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(member, range(3))
    assert all(torch.equal(first, other) for other in others)
    assert nn.parallel.DistributedDataParallel._active_ddp_module is None
