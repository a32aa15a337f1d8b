"""Many training runs in one process, one after the other: cross-validation, a search for hyperparameters."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ft_core import DistributedDataParallel, LighthouseServer, Manager, Optimizer, ProcessGroupGloo
from tests.chaos.cluster import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 0.1
"""What setting up, and tearing down, may cost a run."""
MORE_THAN_BEFORE = 8
"""Threads and descriptors that a process may have more after all runs than after the first ones."""


@dataclass
class Costs:
    """Seconds that each run took to set up and to tear down; threads and descriptors after it."""

    set_up: list[float] = field(default_factory=list)
    torn_down: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def check(self, runs: int, *, timed: bool = True) -> None:
        assert len(self.torn_down) == runs
        if timed:
            assert statistics.median(self.set_up) <= LIMIT_S
            assert statistics.median(self.torn_down) <= LIMIT_S
        for counts in (self.threads, self.descriptors):
            assert max(counts[-10:]) <= max(counts[:10]) + MORE_THAN_BEFORE, counts


@pytest.fixture
def server() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, boot_window_ms=0, token="")
    yield server
    server.shutdown()


def one_run(
    server: LighthouseServer, name: str, replicas: int, width: int, *, room: str, ends: str
) -> tuple[float, float]:
    """Two steps of a model of its own. Returns the seconds it took to set up and to tear down."""
    began = time.perf_counter()
    model = nn.Linear(width, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(
        ProcessGroupGloo(hostname="127.0.0.1"), model.load_state_dict, model.state_dict, replicas, replica_id=name,
        timeout=timedelta(seconds=20), lighthouse_addr=server.address(), hostname="127.0.0.1", room_id=room,
        expected_replicas=replicas,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    manager.start_quorum()
    manager.wait_quorum()
    ready = time.perf_counter()
    while manager.current_step() < 2:
        optimizer.zero_grad()
        ddp(torch.ones(1, width)).sum().backward()
        optimizer.step()
    if ends == "in a step":
        optimizer.zero_grad()  # a trial that is pruned
    trained = time.perf_counter()
    if ends == "finished":
        manager.leave("finished", finished=True)
    manager.shutdown()
    return ready - began, time.perf_counter() - trained


def runs_of(server: LighthouseServer, runs: int, replicas: int, rooms: bool, ends: str) -> Costs:
    """All replicas go through the runs in this process, a thread each."""
    costs, errors = Costs(), list[BaseException]()
    together = threading.Barrier(replicas)

    def go(index: int) -> None:
        try:
            for run in range(runs):
                together.wait(30)  # else the first one's wait for the others is counted
                room = f"default.{run + 2}" if rooms else "default"
                set_up, torn_down = one_run(server, f"r{index}", replicas, 1 + run % 7, room=room, ends=ends)
                together.wait(30)
                if index == 0:
                    costs.set_up.append(set_up)
                    costs.torn_down.append(torn_down)
                    costs.threads.append(threading.active_count())
                    costs.descriptors.append(len(os.listdir("/proc/self/fd")))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=go, args=(index,)) for index in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return costs


def test_more_runs_than_were_possible_once(server: LighthouseServer) -> None:
    assert len(runs_of(server, 70, 1, rooms=True, ends="finished").torn_down) == 70


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("rooms", "ends"), [(True, "finished"), (True, "shut down"), (True, "in a step"), (False, "shut down")]
)
def test_two_hundred_runs_and_more(server: LighthouseServer, replicas: int, rooms: bool, ends: str) -> None:
    """More than the lighthouse has rooms at a time."""
    runs_of(server, 300, replicas, rooms, ends).check(300)


LIGHTNING, ACCELERATE = "tests/lightning/many_fits_job.py", "tests/accelerate/many_runs_job.py"


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("job", "runs"),
    [
        (ACCELERATE, 15),
        pytest.param(LIGHTNING, 200, marks=pytest.mark.long),
        pytest.param(ACCELERATE, 200, marks=pytest.mark.long),
    ],
)
def test_runs_of_an_adapter_leave_nothing_behind(server: LighthouseServer, job: str, runs: int) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    env |= {
        "FT_LIGHTHOUSE": server.address(), "FT_HOSTNAME": "127.0.0.1", "FT_REPLICA_GROUP": "0",
        "FT_NUM_REPLICA_GROUPS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / job), str(runs)], env=env, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    Costs(**told).check(runs, timed=runs >= 200)
