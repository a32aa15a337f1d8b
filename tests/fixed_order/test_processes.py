"""Real processes, killed with SIGKILL and started again: the losses and weights of one process without faults."""

from __future__ import annotations

import pathlib
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster
from tests.fixed_order import reference

if TYPE_CHECKING:
    from tests.chaos.cluster import Process
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
WORKER = [sys.executable, "-u", str(pathlib.Path(__file__).with_name("worker.py"))]


def ended(process: Process) -> bool:
    with process.changed:
        return any(line.startswith("done ") for _, line in process.lines)


def curve(cluster: Cluster) -> dict[int, set[str]]:
    """What was said about the loss of each step, by anybody who committed it."""
    told: dict[int, set[str]] = {}
    for process in cluster.processes:
        for _, line in process.lines:
            if line.startswith("loss "):
                _, step, loss = line.split()
                told.setdefault(int(step), set()).add(loss)
    return told


@pytest.mark.parametrize("dying", ["b", pytest.param("abc", marks=pytest.mark.long)])
def test_kills_leave_no_trace(forge: Forge, dying: str) -> None:
    """Kill one, start it again; once it trains with the others, kill the next. One is another interpreter."""
    digest, losses = reference.run(reference.PROCESSES)
    killed = 0
    with Cluster(forge, WORKERS=1, SLOW_STEP_MS=300) as cluster:
        for name in ("a", "b", "c"):
            cluster.start_command(name, WORKER)
        for process in cluster.trainers.values():
            process.wait_step(3)
        for name in dying:
            cluster.kill(name)
            killed += 1
            cluster.forge = None if name == "b" else forge
            newcomer = cluster.start_command(name, WORKER)
            newcomer.wait_for(partial(lambda p: ended(p) or len(p.commits()) >= 3, newcomer), "trained with the others")
            if ended(newcomer):
                break
        cluster.end_at(0)  # to the worker: no more slow steps
        digests = {process.wait_end() for process in cluster.trainers.values()} - {"late"}
        assert digests == {digest}
        assert curve(cluster) == {step: {loss.hex()} for step, loss in enumerate(losses, 1)}
        assert {members for p in cluster.processes for _, _, members, _ in p.commits()} >= {2, 3}
        assert killed >= min(2, len(dying))
