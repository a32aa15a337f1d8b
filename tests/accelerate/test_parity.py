"""Without faults: two groups of one process equal plain Accelerate with DDP on two processes, digit for digit."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from ft_core.lighthouse import LighthouseServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKER = pathlib.Path(__file__).with_name("parity_worker.py")
MODES = ("norm", "value", "bf16", "scaler", "split", "no_sync", "gan", "two")
LIMIT_S = 100.0

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]


def environment(rank: int, size: int, group: int, groups: int) -> dict[str, str]:
    """What a launcher sets."""
    env = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT),
        "READERS": str(size * groups), "READER": str(group * size + rank),
    }  # fmt: skip
    if groups > 1:
        env |= {
            "FT_REPLICA_GROUP": str(group), "FT_NUM_REPLICA_GROUPS": str(groups), "FT_REPLICA_ID": f"r{group}",
            "FT_HOSTNAME": "127.0.0.1", "FT_MIN_REPLICAS": str(groups), "FT_TIMEOUT_S": "30",
        }  # fmt: skip
    return env


@contextlib.contextmanager
def workers(started: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes; none is left."""
    running: list[subprocess.Popen[str]] = []
    try:
        for words, env in started:
            command = [sys.executable, "-u", str(WORKER), *words]
            running.append(subprocess.Popen(
                command, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ))  # fmt: skip
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def results(size: int, groups: int, modes: Sequence[str], **more: str) -> dict[str, list[str]]:
    """What each process printed for each mode; processes in order of their global rank. `more`: for the environment."""
    total = len(modes)
    # One store per run, held by this process as an elastic agent would, and one lighthouse per run.
    stores = [[TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in modes] for _ in range(groups)]
    houses = [
        LighthouseServer(bind="127.0.0.1:0", min_replicas=groups, join_timeout_ms=100)
        for _ in range(total if groups > 1 else 0)
    ]
    addresses = [house.address().removeprefix("http://") for house in houses] or ["-"] * total
    started = [
        (
            [f"{mode}={store.port}#{at}" for mode, store, at in zip(modes, stores[group], addresses, strict=True)],
            {**environment(rank, size, group, groups), **more},
        )
        for group in range(groups)
        for rank in range(size)
    ]
    found: dict[str, list[str]] = {mode: [] for mode in modes}
    try:
        with workers(started) as running:
            for process in running:
                out, _ = process.communicate(timeout=LIMIT_S)
                assert process.returncode == 0, out
                for line in out.splitlines():
                    mode, _, rest = line.partition(" ")
                    if mode in found:
                        found[mode].append(rest)
    finally:
        for house in houses:
            house.shutdown()
    return found


def test_two_groups_equal_two_processes() -> None:
    plain, ours = results(2, 1, MODES), results(1, 2, MODES)
    for mode in MODES:
        assert len({*plain[mode], *ours[mode]}) == 1, (mode, plain[mode], ours[mode])
        assert len(ours[mode]) == 2


def test_two_groups_of_two_equal_four_processes() -> None:
    """In another order of summation: within rounding, and equal among themselves digit for digit."""
    modes = ("norm", "gan", "no_sync")
    plain, ours = results(4, 1, modes, VALUES="1"), results(2, 2, modes, VALUES="1")
    for mode in modes:
        assert len(set(ours[mode])) == 1
        assert len(ours[mode]) == 4
        (values, *counts), (expected, *expected_counts) = ours[mode][0].split(), plain[mode][0].split()
        assert counts == expected_counts  # learning rate and steps
        got, wanted = (torch.tensor([float(v) for v in text.split(",")]) for text in (values, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
