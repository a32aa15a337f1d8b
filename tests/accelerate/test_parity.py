"""Without faults: two groups of one process equal plain Accelerate with DDP on two processes, digit for digit."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core.control.lighthouse.server import LighthouseServer
from tests.accelerate.processes import elastic, outputs, store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.forge import Forge

WORKER = pathlib.Path(__file__).with_name("parity_worker.py")
MODES = ("norm", "value", "bf16", "scaler", "split", "dispatch", "dispatch_split", "no_sync", "gan", "pair", "two")
LIMIT_S = 100.0

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]


def environment(rank: int, size: int, group: int, groups: int) -> dict[str, str]:
    """What a launcher sets."""
    env = {**elastic(rank, size), "READERS": str(size * groups), "READER": str(group * size + rank)}
    if groups > 1:
        env |= {
            "FT_REPLICA_GROUP": str(group), "FT_NUM_REPLICA_GROUPS": str(groups), "FT_REPLICA_ID": f"r{group}",
            "FT_HOSTNAME": "127.0.0.1", "FT_MIN_REPLICAS": str(groups), "FT_TIMEOUT_S": "30",
        }  # fmt: skip
    return env


def results(
    forge: Forge, folder: pathlib.Path, size: int, groups: int, modes: Sequence[str], **more: str
) -> dict[str, list[str]]:
    """What each process printed for each mode; processes in order of their global rank. `more`: for the environment."""
    total = len(modes)
    # One store per run, held by this process as an elastic agent would, and one lighthouse per run.
    stores = [[store() for _ in modes] for _ in range(groups)]
    houses = [
        LighthouseServer(bind="127.0.0.1:0", min_replicas=groups, join_timeout_ms=100)
        for _ in range(total if groups > 1 else 0)
    ]
    addresses = [house.address().removeprefix("http://") for house in houses] or ["-"] * total
    started = [
        (
            [f"{mode}={held.port}#{at}" for mode, held, at in zip(modes, stores[group], addresses, strict=True)],
            {**environment(rank, size, group, groups), **more},
        )
        for group in range(groups)
        for rank in range(size)
    ]
    found: dict[str, list[str]] = {mode: [] for mode in modes}
    try:
        for out in outputs(forge, folder, WORKER, started, LIMIT_S):
            for line in out.splitlines():
                mode, _, rest = line.partition(" ")
                if mode in found:
                    found[mode].append(rest)
    finally:
        for house in houses:
            house.shutdown()
    return found


def test_two_groups_equal_two_processes(forge: Forge, tmp_path: pathlib.Path) -> None:
    plain, ours = results(forge, tmp_path, 2, 1, MODES), results(forge, tmp_path, 1, 2, MODES)
    for mode in MODES:
        assert len({*plain[mode], *ours[mode]}) == 1, (mode, plain[mode], ours[mode])
        assert len(ours[mode]) == 2


@pytest.mark.long  # Lightning's test of the same sums runs each time (test_modes.py), and FSDP2's in groups of two
def test_two_groups_of_two_equal_four_processes(forge: Forge, tmp_path: pathlib.Path) -> None:
    """In another order of summation: within rounding, and equal among themselves digit for digit."""
    modes = ("norm", "dispatch", "gan", "pair", "no_sync")
    plain = results(forge, tmp_path, 4, 1, modes, VALUES="1")
    ours = results(forge, tmp_path, 2, 2, modes, VALUES="1")
    for mode in modes:
        assert len(set(ours[mode])) == 1
        assert len(ours[mode]) == 4
        (values, *counts), (expected, *expected_counts) = ours[mode][0].split(), plain[mode][0].split()
        assert counts == expected_counts  # learning rate and steps
        got, wanted = (torch.tensor([float(v) for v in text.split(",")]) for text in (values, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
