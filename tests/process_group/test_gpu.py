"""NCCL itself, on a real GPU. Skipped with the reason where there is none; what has run stands in docs/gpu.md.

Two processes share one GPU, as tests/gpu/pair.py says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core.errors import CollectiveError, ConfigError
from ft_core.process_group import ProcessGroupAccelerator, ProcessGroupBabyNCCL, ProcessGroupNCCL
from tests.gpu.pair import MARKS, environment_of
from tests.process_group.ranks import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.process_group.ranks import Store

pytestmark = MARKS
START_S = 120.0
"""CUDA's context, NCCL's first communicator, torch's import, of two processes at once."""
ABORT_S = 10.0

MEMBER = """
import os, sys, time
from datetime import timedelta
import torch
from ft_core.process_group import ProcessGroupNCCL

rank, address, again = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def say(*words):
    print(*words, flush=True)

torch.cuda.set_device(0)
group = ProcessGroupNCCL(timedelta(seconds=60))
group.configure(address, f"replica{rank}", rank, 2)
tensor = torch.full((1000,), float(rank + 1), device="cuda")
group.allreduce([tensor]).wait()
event = torch.cuda.Event(); event.record()
while not event.query():
    time.sleep(20e-6)
say("sum", tensor[0].item(), group.errored())
assert sys.stdin.readline()
if rank == 1:
    time.sleep(600)  # to be killed
work = group.allreduce([tensor])
say("launched")
begin = time.monotonic()
work.wait()
say("ordered", time.monotonic() - begin)
assert sys.stdin.readline()
begin = time.monotonic()
group.abort()
while not work.is_completed():
    time.sleep(0.001)
say("aborted", time.monotonic() - begin, type(group.errored()).__name__, work.is_success())
begin = time.monotonic()
group.configure(again, "replica0", 0, 1)
tensor.fill_(1.0)
group.allreduce([tensor]).wait()
torch.cuda.synchronize()
say("alone", time.monotonic() - begin, tensor[0].item(), group.errored())
group.shutdown()
"""


class Member:
    """A process with one rank of the group."""

    def __init__(self, rank: int, address: str, again: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), address, again],
            env={**os.environ, **environment_of(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def heard(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def members(store: Store) -> Iterator[list[Member]]:
    address, again = store.fresh(), store.fresh()
    started = [Member(rank, address, again) for rank in range(2)]
    try:
        yield started
    finally:
        for member in started:
            member.process.kill()
            member.process.wait()
            for pipe in (member.process.stdin, member.process.stdout):
                assert pipe is not None
                pipe.close()


def test_a_survivor_of_a_kill_aborts_in_time_and_goes_on(members: list[Member]) -> None:
    for member in members:
        assert member.heard() == ["sum", "3.0", "None"]
    survivor, victim = members
    survivor.go_on()
    victim.go_on()
    assert survivor.heard() == ["launched"]
    word, waited_s = survivor.heard()
    assert word == "ordered"
    assert float(waited_s) < 1.0  # wait() does not block the host
    victim.process.kill()
    victim.process.wait()
    survivor.go_on()
    word, took_s, error, good = survivor.heard()
    assert (word, error, good) == ("aborted", "CollectiveError", "False")
    assert float(took_s) < ABORT_S
    word, took_s, value, none = survivor.heard()
    assert (word, value, none) == ("alone", "1.0", "None")
    assert float(took_s) < ABORT_S
    assert survivor.process.wait(30) == 0


def test_one_rank_reduces_aborts_and_is_formed_again() -> None:
    group = ProcessGroupNCCL(timedelta(seconds=60))
    assert group.device == torch.device("cuda", torch.cuda.current_device())
    for _ in range(3):
        group.configure("", "r", 0, 1)
        tensor = torch.ones(4, device=group.device)
        work = group.allreduce([tensor])
        work.wait()
        assert wait_until(work.is_completed)
        assert work.is_success()
        group.barrier().wait()
        begin = time.monotonic()
        group.abort()
        assert time.monotonic() - begin < 1.0
        with pytest.raises(CollectiveError):
            group.allreduce([tensor])
    group.shutdown()


def test_a_group_in_a_child_reduces_in_device_memory_with_any_number_in_flight() -> None:
    group = ProcessGroupBabyNCCL(timedelta(seconds=60))
    for _ in range(2):
        group.configure("", "r", 0, 1)
        tensors = [torch.full((1000,), float(number), device=group.device) for number in range(400)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        for work in works:
            work.wait()
        assert [tensor[-1].item() for tensor in tensors] == [float(number) for number in range(400)]
        assert group.errored() is None
        group.abort()
        with pytest.raises(CollectiveError):
            group.allreduce([tensors[0]])
    group.shutdown()


def test_tensors_of_another_device_are_refused() -> None:
    group = ProcessGroupAccelerator(timedelta(seconds=60))
    group.configure("", "r", 0, 1)
    with pytest.raises(ConfigError, match="CPU memory need ProcessGroupGloo"):
        group.allreduce([torch.ones(2)])
    with pytest.raises(ConfigError, match=r"its tensors are on cpu and cuda"):
        group.allgather([[torch.ones(2)]], [torch.ones(2, device=group.device)])
    group.shutdown()
    with pytest.raises(ConfigError, match="this process sees"):
        ProcessGroupNCCL(device=f"cuda:{torch.cuda.device_count()}")
