"""Real processes that end right after their last commit: all of them hold it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import ROOT, Cluster, Process

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
JOB = [sys.executable, "-u", str(ROOT / "tests/runtime/parting_job.py")]
ROUNDS = 12


def rounds(process: Process) -> list[str]:
    with process.changed:
        return [line for _, line in process.lines if line.startswith("round ")]


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_every_last_commit_is_held_by_all(forge: Forge, names: str) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=len(names)) as cluster:
        replicas = [cluster.start_command(name, JOB, ROUNDS=ROUNDS) for name in names]
        for replica in replicas:
            replica.wait_end()
        ends = [rounds(replica) for replica in replicas]
    assert ends == [ends[0]] * len(names)
    assert [line.split()[3:] for line in ends[0]] == [["3", str(3 * len(names))]] * ROUNDS  # nobody went on alone
