"""One of two replicas that train on one GPU until they are told the last step; one is killed and healed meanwhile.

argv: `RANK LIGHTHOUSE`. FT_TRANSPORT and FT_BACKEND as they are given. Prints `step NUMBER PARTICIPANTS`, when it has
received state `healed` and the devices it is on, and `digest DIGEST` at the end. On standard input: the last step.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ft_core import DistributedDataParallel, Manager, Optimizer
from tests.gpu.pair import device

WIDTH = 2048
"""Some 100 MB with the optimizer's state."""


class Last(threading.Thread):
    """Hears where to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.step = 1 << 60

    def run(self) -> None:
        self.step = int(sys.stdin.readline() or self.step)


def main(rank: int, lighthouse: str) -> None:
    warnings.simplefilter("ignore")
    place = device()
    torch.manual_seed(rank)  # differs: what is equal at the end was received
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(place)
    inner = torch.optim.AdamW(model.parameters(), 1e-4, fused=place.type == "cuda")
    last = Last()
    last.start()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        places = {str(p.device) for p in model.parameters()} | {
            str(t.device) for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()
        }
        print("healed", *sorted(places), flush=True)

    manager = Manager(
        min_replica_size=1, lighthouse_addr=lighthouse, replica_id=f"heal-{rank}", timeout=timedelta(seconds=60),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}, load_state_dict=load,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while True:
        step = manager.current_step()
        data = torch.Generator().manual_seed(2 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(16, WIDTH, generator=data).to(place)).square().mean().backward()
        optimizer.step()
        if not optimizer.committed:
            print("veto", manager.errored(), flush=True)
            continue
        print("step", manager.current_step(), manager.num_participants(), flush=True)
        if manager.current_step() >= last.step:
            break
    manager.leave("finished", finished=True)
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *(s["exp_avg"] for s in inner.state.values())]:
        digest.update(tensor.detach().cpu().numpy().tobytes())
    print("digest", digest.hexdigest()[:16], flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
