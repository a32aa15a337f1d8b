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


def test_only_the_imports_change(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train_ddp.py"
    script.write_text(SCRIPT)
    with Cluster() as cluster:
        base = {k: v for k, v in os.environ.items() if not k.startswith("FT_")}
        base |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{cluster.port}", "OMP_NUM_THREADS": "1"}
        runs = [
            subprocess.Popen(
                [sys.executable, str(script)], env=base | {"REPLICA_GROUP_ID": str(group)}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for group in range(2)
        ]  # fmt: skip
        try:
            outputs = [run.communicate(timeout=60) for run in runs]
        finally:
            for run in runs:
                run.kill()
        assert [run.returncode for run in runs] == [0, 0], "\n".join(err[-2000:] for _, err in outputs)
        sums = {line for out, _ in outputs for line in out.splitlines() if line.startswith("sum")}
        assert len(sums) == 1, sums
