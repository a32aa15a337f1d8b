"""Real processes, killed with SIGKILL one after the other over three epochs: every sample is committed exactly once."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import ROOT, Cluster

if TYPE_CHECKING:
    from tests.chaos.cluster import Process
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
WORKER = [sys.executable, "-u", str(ROOT / "tests/data/worker.py")]


def said(process: Process, word: str) -> str | None:
    with process.changed:
        return next((line for _, line in process.lines if line.startswith(word + " ")), None)


def trains_or_ended(process: Process) -> bool:
    return len(process.commits()) >= 5 or said(process, "done") is not None


def test_every_sample_is_committed_once_through_kills(forge: Forge) -> None:
    """Kill one, start it again; once it trains with the others, kill the next; then let them use up the data."""
    killed = 0
    with Cluster(forge, LENGTH=1200, EPOCHS=3, BATCH=4, GLOBAL=20, WORKERS=1, SLOW_STEP_MS=100) as cluster:
        for name in ("a", "b", "c"):
            cluster.start_command(name, WORKER)
        for process in cluster.trainers.values():
            process.wait_step(5)
        for name in ("a", "b", "c"):
            cluster.kill(name)
            killed += 1
            newcomer = cluster.start_command(name, WORKER)
            newcomer.wait_for(partial(trains_or_ended, newcomer), "trained with the others")
            if said(newcomer, "done"):
                break
        cluster.end_at(0)  # to the worker: no more slow steps
        digests = {process.wait_end() for process in cluster.trainers.values()} - {"late"}
        verdicts = {said(process, "faults") for process in cluster.trainers.values()} - {None}
        assert verdicts == {"faults 0"}
        assert len(digests) == 1
        assert killed >= 2
