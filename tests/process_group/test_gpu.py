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
from torch._C._distributed_c10d import AllgatherOptions, HashStore
from torch.distributed import ReduceOp

from ft_core.errors import CollectiveError, ConfigError
from ft_core.process_group import ProcessGroupAccelerator, ProcessGroupBabyNCCL, ProcessGroupNCCL
from tests.gpu.pair import MARKS, environment_of
from tests.process_group.one_rank_cases import (
    DTYPES,
    FACTOR,
    FLOATS,
    OTHERS,
    REDUCING,
    REDUCTIONS,
    all_of,
    bits,
    multiplying,
    values,
)
from tests.process_group.ranks import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core.process_group.device.communicator import Communicator
    from tests.process_group.one_rank_cases import Arguments, Make
    from tests.process_group.ranks import Store

pytestmark = MARKS
START_S = 120.0
"""CUDA's context, NCCL's first communicator, torch's import, of two processes at once."""
ABORT_S = 10.0
FORMING_S = 0.05
"""Of a group of one rank, which needs no NCCL; with NCCL it took 0.5 s."""
SLEEP_CYCLES = 1_000_000_000
"""Of the device's clock, which is below 2 GHz: half a second or more."""

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


@pytest.fixture(scope="module")
def nccl_of_one() -> Iterator[Communicator]:
    """torch's own NCCL with one rank: what no group of ours makes any more, to compare with."""
    communicator = ProcessGroupNCCL(timedelta(seconds=60))._new_communicator()
    communicator.init(HashStore(), 0, 1, lambda: None)
    yield communicator
    communicator.abort()


@pytest.fixture(scope="module")
def of_one() -> Iterator[ProcessGroupNCCL]:
    group = ProcessGroupNCCL(timedelta(seconds=60))
    group.configure("", "r", 0, 1)
    yield group
    group.shutdown()


def compare(nccl: Communicator, group: ProcessGroupNCCL, name: str, build: Callable[[Make], Arguments]) -> None:
    """Run a collective over both, and compare all tensors, those that were only read as well."""
    for dtype in DTYPES:
        expected, ours = (build(values(dtype, group.device)) for _ in range(2))
        if dtype is torch.bool and getattr(expected[-1], "reduceOp", None) == ReduceOp.AVG:
            continue  # refused by both
        nccl.launch(name, *expected).order()
        group._launch(name, *ours).wait()
        torch.cuda.synchronize()
        assert bits(all_of(ours)) == bits(all_of(expected)), f"{name}, {dtype}"
    assert group.errored() is None


@pytest.mark.parametrize("op", [*REDUCTIONS, "average"])
@pytest.mark.parametrize("name", REDUCING)
def test_one_rank_reduces_bit_for_bit_as_nccl_does(
    nccl_of_one: Communicator, of_one: ProcessGroupNCCL, name: str, op: str
) -> None:
    reduction = REDUCTIONS.get(op, ReduceOp.AVG)
    compare(nccl_of_one, of_one, name, lambda make: REDUCING[name](make, reduction))


@pytest.mark.parametrize("case", OTHERS)
def test_one_rank_copies_bit_for_bit_as_nccl_does(
    nccl_of_one: Communicator, of_one: ProcessGroupNCCL, case: str
) -> None:
    name, build = OTHERS[case]
    compare(nccl_of_one, of_one, name, build)


@pytest.mark.parametrize("by", ["number", "tensor"])
@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype is not torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["allreduce", "allreduce_coalesced", "reduce"])
def test_one_rank_multiplies_bit_for_bit_as_nccl_does(
    nccl_of_one: Communicator, of_one: ProcessGroupNCCL, name: str, dtype: torch.dtype, by: str
) -> None:
    """Where NCCL multiplies with what it was told: seen on an H200, torch 2.11 takes a bfloat16 factor for something
    else, or refuses it, and a reduce-scatter of one rank copies. Ours multiplies there as several ranks do."""
    factor = FACTOR if by == "number" else torch.full((1,), FACTOR, dtype=dtype, device=of_one.device)
    expected, ours = (REDUCING[name](values(dtype, of_one.device), multiplying(factor)) for _ in range(2))
    nccl_of_one.launch(name, *expected).order()
    of_one._launch(name, *ours).wait()
    torch.cuda.synchronize()
    assert bits(all_of(ours)) == bits(all_of(expected))


def test_one_rank_copies_memory_in_nccls_order(nccl_of_one: Communicator, of_one: ProcessGroupNCCL) -> None:
    given = torch.arange(24.0, device=of_one.device).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    for output in (torch.zeros_like(given), torch.zeros(24, device=of_one.device)):
        ours = torch.zeros_like(output)
        nccl_of_one.launch("_allgather_base", output, given, AllgatherOptions()).order()
        of_one._allgather_base(ours, given).wait()
        torch.cuda.synchronize()
        assert torch.equal(ours, output)


def test_one_rank_forms_at_once_and_ends_when_its_stream_has_come_so_far() -> None:
    group = ProcessGroupNCCL(timedelta(seconds=60))
    tensor = (
        torch.zeros(4, device=group.device).add_(1.0).mul(2).sub_(1.0)
    )  # each kernel's first use waits for the device
    torch.cuda.synchronize()
    for _ in range(3):
        begin = time.monotonic()
        group.configure("", "r", 0, 1)
        assert time.monotonic() - begin < FORMING_S
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            tensor.add_(1.0)
            work = group.allreduce([tensor])
            done = group.barrier()
        assert not work.is_completed()
        begin = time.monotonic()
        work.wait()
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert time.monotonic() - begin < 0.25  # neither blocks the host
        done.wait()  # this does
        assert work.is_success()
        assert doubled.wait().tolist() == (tensor * 2).tolist()
        group.abort()
    assert tensor.tolist() == [4.0] * 4
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
