"""A training script in the style of the reference implementation's DDP example, with only its imports changed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster

if TYPE_CHECKING:
    import pathlib

    from tests.forge import Forge, Forged

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]

SCRIPT = """
import os, sys
from datetime import timedelta
import torch
from torch import nn, optim
from ft_core import (
    DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo,
)
from ft_core.checkpointing import HTTPTransport
from ft_core.coordination import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer
from ft_core.futures import future_timeout, future_wait
from ft_core.local_sgd import DiLoCo, LocalSGD
from ft_core.manager import WorldSizeMode
from ft_core.process_group import ProcessGroupBabyGloo, ProcessGroupBabyNCCL, ProcessGroupNCCL

REPLICA_GROUP_ID = int(os.environ.get("REPLICA_GROUP_ID", 0))
NUM_REPLICA_GROUPS = int(os.environ.get("NUM_REPLICA_GROUPS", 2))
data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randint(0, 4, (512,)))
sampler = DistributedSampler(
    data, replica_rank=REPLICA_GROUP_ID, num_replica_groups=NUM_REPLICA_GROUPS, group_rank=0, num_replicas=1,
    shuffle=True
)
loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)

def load_state_dict(state_dict):
    m.load_state_dict(state_dict["model"])
    optimizer.load_state_dict(state_dict["optim"])

def state_dict():
    return {"model": m.state_dict(), "optim": optimizer.state_dict()}

pg = ProcessGroupGloo(timeout=timedelta(seconds=5))
transport = HTTPTransport(timeout=timedelta(seconds=10), num_chunks=0)
manager = Manager(
    pg=pg, min_replica_size=2, load_state_dict=load_state_dict, state_dict=state_dict,
    replica_id=f"train_ddp_{REPLICA_GROUP_ID}", timeout=timedelta(seconds=10), checkpoint_transport=transport,
)
m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
m = DistributedDataParallel(manager, m)
optimizer = Optimizer(manager, optim.AdamW(m.parameters()))
criterion = nn.CrossEntropyLoss()
while manager.current_step() < 40:
    for i, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        out = m(inputs)
        loss = criterion(out, labels)
        loss.backward()
        optimizer.step()
        if manager.current_step() % 10 == 0:
            print(manager.current_step(), manager.num_participants(), manager.batches_committed(), loss.item())
        if manager.current_step() >= 40:
            print("sum", sum(p.double().sum().item() for p in m.parameters()), flush=True)
            sys.exit()
"""


PROACTIVE = """
import os, sys, time
from datetime import timedelta
import torch
from torch import nn, optim
from torch.distributed.elastic.multiprocessing.errors import record
from torchdata.stateful_dataloader import StatefulDataLoader
from ft_core import (
    DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL,
)
from ft_core.checkpointing.pg_transport import PGTransport

@record
def main():
    group = int(os.environ.get("REPLICA_GROUP_ID", 0))
    groups = int(os.environ.get("NUM_REPLICA_GROUPS", 2))
    torch.manual_seed(group)
    data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randint(0, 4, (512,)))
    sampler = DistributedSampler(
        data, replica_group_id=group, num_replica_groups=groups, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = StatefulDataLoader(data, batch_size=8, num_workers=0, sampler=sampler)
    pg = ProcessGroupNCCL(timeout=timedelta(seconds=120)) if torch.cuda.is_available() else ProcessGroupGloo(
        timeout=timedelta(seconds=120))
    transport = PGTransport(pg, timeout=timedelta(seconds=10), device="cpu")
    manager = Manager(
        pg=pg, min_replica_size=1,
        load_state_dict=lambda s: (m.load_state_dict(s["model"]), optimizer.load_state_dict(s["optim"])),
        state_dict=lambda: {"model": m.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"train_ddp_{group}", timeout=timedelta(seconds=30), checkpoint_transport=transport,
    )

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.useless = nn.Embedding(1000, 4)
            self.classifier = nn.Linear(8, 4)

        def forward(self, x):
            x = self.classifier(x)
            x += self.useless.weight[0]
            return x

    m = DistributedDataParallel(manager, Net())
    optimizer = Optimizer(manager, optim.AdamW(m.parameters()))
    prof = torch.profiler.profile(schedule=torch.profiler.schedule(wait=5, warmup=1, active=2, repeat=1))
    prof.start()
    while True:
        for inputs, labels in loader:
            prof.step()
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(m(inputs), labels)
            loss.backward()
            if manager.current_step() == 3:
                if group == 0:
                    print("left at 3", flush=True)
                    manager.shutdown()
                    exit(0)
            test_tensor = torch.tensor([1.0])
            size, rank = manager._participating_replica_world_size, manager._participating_replica_rank
            print("at", manager.current_step(), "size", size, "rank", rank, flush=True)
            manager.allreduce(test_tensor)
            optimizer.step()
            if manager.current_step() >= 10:
                prof.stop()
                exit()

if __name__ == "__main__":
    main()
"""


def run(script: str, tmp_path: pathlib.Path, forge: Forge | None = None, **variables: str) -> list[str]:
    """What two groups print, started as torchx's component of the reference implementation starts them.

    `forge`: starts them; else each is a new interpreter.
    """
    path = tmp_path / "train.py"
    path.write_text(script)
    texts = [[tmp_path / f"{name}-{group}" for name in ("out", "err")] for group in range(2)]
    with Cluster() as cluster:
        base = {k: v for k, v in os.environ.items() if not k.startswith("FT_")}
        base |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{cluster.port}", "OMP_NUM_THREADS": "1"} | variables
        runs: list[subprocess.Popen[bytes] | Forged] = []
        try:
            for group, (out, err) in enumerate(texts):
                command, env = [sys.executable, "-u", str(path)], base | {"REPLICA_GROUP_ID": str(group)}
                with out.open("wb") as to_out, err.open("wb") as to_err:
                    if forge is None:
                        runs.append(subprocess.Popen(command, env=env, stdout=to_out, stderr=to_err))
                    else:
                        runs.append(forge.start(command, env, to_out.fileno(), to_err.fileno()))
            ends = [run.wait(60) for run in runs]
        finally:
            for run in runs:
                run.kill()
                run.wait()
        assert ends == [0, 0], "\n".join(err.read_text()[-2000:] for _, err in texts)
    return [out.read_text() for out, _ in texts]


def test_only_the_imports_change(tmp_path: pathlib.Path) -> None:
    outputs = run(SCRIPT, tmp_path)
    sums = {line for out in outputs for line in out.splitlines() if line.startswith("sum")}
    assert len(sums) == 1, sums


def test_the_example_in_which_a_group_goes_in_the_middle_of_a_step(tmp_path: pathlib.Path, forge: Forge) -> None:
    first, second = run(PROACTIVE, tmp_path, forge, NUM_REPLICA_GROUPS="2")
    assert first.splitlines()[-1] == "left at 3"
    assert [line for line in first.splitlines() if line.startswith("at")] == [f"at {n} size 2 rank 0" for n in range(3)]
    steps = [line for line in second.splitlines() if line.startswith("at")]
    assert steps[:3] == [f"at {n} size 2 rank 1" for n in range(3)]
    assert steps[-7:] == [f"at {n} size 1 rank 0" for n in range(3, 10)]
