"""One of two replicas that train the same model in one way after another, each over one backend after another.

argv: `RANK LIGHTHOUSE BACKENDS WAYS`, the last two with commas. Prints `way WAY BACKEND DIGEST GROUP COMMITS` for each:
the digest of parameters and optimizer state at the end, and the group that carried the gradients. Who fails prints
`failed WAY BACKEND` and what happened, and ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from ft_core import DistributedDataParallel, Manager, Optimizer
from ft_core.fsdp import replicate
from tests.gpu.pair import device

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 8
BUCKET_MB = 0.05
"""Several buckets."""


class Net(nn.Module):
    """With a layer that only rank 1 uses, and another that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
        self.sometimes, self.never = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, *, some: bool = False) -> Tensor:
        out: Tensor = self.body(x)
        return out + self.sometimes(x) if some else out


class Training:
    """One model under one Manager. The ways differ in what they override."""

    fence = "bucket"
    unused = False
    sync_quorum = False

    def __init__(self, rank: int, lighthouse: str, room: str) -> None:
        torch.manual_seed(1)
        self.rank, self.place = rank, device()
        self.model: Any = Net().to(self.place)
        self.inner = self.make_optimizer()
        self.commits = 0
        self.manager = Manager(
            min_replica_size=2, replica_id=f"{room}-{rank}", room_id=room, lighthouse_addr=lighthouse,
            timeout=timedelta(seconds=60), state_dict=self.state, load_state_dict=self.load, fence=self.fence,
            use_async_quorum=not self.sync_quorum,
        )  # fmt: skip
        self.wrapped: Any = self.wrap()
        self.optimizer = Optimizer(self.manager, self.inner)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def wrap(self) -> Any:
        return DistributedDataParallel(
            self.manager, self.model, bucket_cap_mb=BUCKET_MB, find_unused_parameters=self.unused
        )

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.inner.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def batch(self, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
        data = torch.Generator().manual_seed(1000 * step + 10 * part + self.rank)
        return torch.randn(32, 64, generator=data).to(self.place), torch.randn(32, 64, generator=data).to(self.place)

    def loss(self, step: int, part: int = 0) -> Tensor:
        x, y = self.batch(step, part)
        return nn.functional.mse_loss(self.wrapped(x), y)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def run(self) -> str:
        for step in range(STEPS):
            self.step(step)
            assert self.optimizer.committed, (step, self.manager.errored())
            self.commits += 1
        group = self.manager._runtime.shell.communicators.gradients.getBackendName()
        digest = hashlib.sha256()
        for tensor in tensors_of(self.state()):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return f"{digest.hexdigest()[:16]} {group} {self.commits}"

    def end(self) -> None:
        self.manager.leave("finished", finished=True)
        self.manager.shutdown()


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state.to_local() if hasattr(state, "to_local") else state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else []
    return [tensor.view(-1) for part in parts for tensor in tensors_of(part)]


class Fused(Training):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)


class Unused(Training):
    unused = True

    def loss(self, step: int, part: int = 0) -> Tensor:
        x, y = self.batch(step, part)
        return nn.functional.mse_loss(self.wrapped(x, some=self.rank == 1 and step % 2 == 0), y)


class OverCpu(Training):
    fence = "cpu"


class Accumulate(Training):
    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for part in range(3):
            with self.wrapped.no_sync() if part < 2 else contextlib.nullcontext():
                (self.loss(step, part) / 3).backward()
        self.optimizer.step()


class Scaler(Fused):
    """fp16 with a scaler; in step 3 the gradients of rank 0 overflow, and nobody's parameters change."""

    sync_quorum = True

    def __init__(self, rank: int, lighthouse: str, room: str) -> None:
        self.scaler = torch.amp.GradScaler(device().type, init_scale=2.0**10)
        super().__init__(rank, lighthouse, room)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "scaler": self.scaler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.scaler.load_state_dict(state["scaler"])

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.place.type, torch.float16):
            loss = self.loss(step)
        if step == 3 and self.rank == 0:
            loss = loss * torch.inf
        before = self.model.body[0].weight.detach().clone()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update(None if self.optimizer.committed else self.scaler.get_scale())
        assert torch.equal(before, self.model.body[0].weight) == (step == 3), step
        assert bool(torch.isfinite(before).all())


class ScalerPlain(Scaler):
    """An optimizer that knows nothing of the scaler."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)


class SideStream(Training):
    """Forward pass, and so the backward pass, on a stream of the script's own; long kernels before the gradients."""

    def __init__(self, rank: int, lighthouse: str, room: str) -> None:
        super().__init__(rank, lighthouse, room)
        self.module = torch.get_device_module(self.place) if self.place.type != "cpu" else None
        self.side: Any = self.module.Stream(self.place) if self.module else None
        self.slow = torch.randn(2048, 2048, device=self.place)

    def loss(self, step: int, part: int = 0) -> Tensor:
        if self.module is None:
            return super().loss(step, part)
        self.side.wait_stream(self.module.current_stream())
        with self.module.stream(self.side):
            busy = self.slow
            for _ in range(20):
                busy = torch.tanh(busy @ self.slow)
            loss = super().loss(step, part) + 0.0 * busy.mean()
        self.module.current_stream().wait_stream(self.side)
        return loss


class OwnCollectives(Training):
    """The script reduces tensors of its own between the gradients and the vote."""

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        seen = torch.full((5,), float(self.rank + 1), device=self.place)
        self.manager.allreduce(seen).wait()
        counted = torch.full((3,), float(self.rank))
        self.manager.allreduce(counted).wait()
        assert seen.tolist() == [1.5] * 5, seen
        assert counted.tolist() == [0.5] * 3, counted
        self.optimizer.step()


class Sharded(Fused):
    """FSDP2 inside the replica, over a mesh of one, with parameters in bfloat16 for compute."""

    def wrap(self) -> Any:
        del self.model.sometimes, self.model.never
        mesh = init_device_mesh(self.place.type, (1,))
        torch.manual_seed(1)
        for layer in self.model.body:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.inner = self.make_optimizer()
        replicate(self.manager, self.model, bucket_cap_mb=BUCKET_MB)
        return self.model


WAYS: dict[str, Callable[[int, str, str], Training]] = {
    "plain": Training, "fused": Fused, "unused": Unused, "fence-cpu": OverCpu, "accumulate": Accumulate,
    "scaler": Scaler, "scaler-plain": ScalerPlain, "side-stream": SideStream, "own-collectives": OwnCollectives,
    "fsdp2": Sharded,
}  # fmt: skip


def main(rank: int, lighthouse: str, backends: str, ways: str) -> None:
    warnings.simplefilter("ignore")
    place = device()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        for way in ways.split(","):
            for backend in backends.split(","):
                os.environ["FT_BACKEND"] = backend
                try:
                    training = WAYS[way](rank, lighthouse, f"{way}-{backend}")
                    print("way", way, backend, training.run(), flush=True)
                    training.end()
                except BaseException:  # noqa: BLE001 - the test reads it
                    print("failed", way, backend, traceback.format_exc(), flush=True)
                    os._exit(1)
        dist.destroy_process_group()
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5])
