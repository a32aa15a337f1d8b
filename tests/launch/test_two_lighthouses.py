"""ftrun with two lighthouses: the first is killed, and pictures, orders and reports go to the second."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.control.lighthouse.server import LighthouseServer
from tests.control.processes import Child, start_lighthouse
from tests.control.recorder import wait_until
from tests.launch.job import job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from re import Match

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 1.0
"""So long the lighthouse waits for a lease that was closed, if nobody reports the end of its process."""
WORKER = f"""
import os, sys, uuid
sys.path.insert(0, {str(ROOT)!r})
from ft_core.protocol.types import UNTRAINED
from tests.control.recorder import Replica
name = "replica-" + os.environ["FT_REPLICA_GROUP"]
one = Replica(os.environ["FT_LIGHTHOUSE"], name + ":" + uuid.uuid4().hex, token=os.environ["FT_TOKEN"], expected=2)
one.ask()
print("in a quorum of", len(one.answer().members), os.getpid(), flush=True)
while len(one.recorder.of("welcome")) < 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with one.recorder.changed:
        one.recorder.changed.wait(1)
print("holds its lease again", flush=True)
one.recorder.wait("drain", timeout_s=60)
one.lease.leave("drained", finished=False, version=UNTRAINED, agreed=True, timeout_s=5)
one.close()
print("was drained by the lighthouse", flush=True)
"""


@pytest.fixture
def second() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", token="word", grace_ms=int(1000 * GRACE_S))
    yield server
    server.shutdown()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def make(*arguments: str, **more: object) -> Child:
        made.append(Child(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_a_job_outlives_its_first_lighthouse(
    child: Callable[..., Child], second: LighthouseServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_TOKEN", "word")
    process, first = start_lighthouse(child, "--bind", "127.0.0.1:0", "--http", "off")
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    both = f"{first},{second.address()}"
    env = {"FT_TOKEN": "word", "FT_LIGHTHOUSE": both}
    asked = LighthouseClient(second.address(), token="word")
    killed: list[int] = []
    took: list[float] = []

    def fail_over(_: Match[str]) -> None:
        process.process.kill()

    def kill_a_group(found: Match[str]) -> None:
        """The second lighthouse, which would wait a second for it, has it from ftrun at once that it ended."""
        watch = running.supervisor._watch
        wait_until(lambda: watch._client.active == second.address() and len(watch.look().groups) == 2)
        group = running.supervisor._groups[1]
        killed.append(next(iter(group.agent.pids().values())))
        at = time.monotonic()
        os.kill(killed[0], signal.SIGKILL)
        wait_until(lambda: any(r.life == "gone" for r in asked.status().rooms[0].replicas))
        took.append(time.monotonic() - at)

    def drain(_: Match[str]) -> None:
        wait_until(lambda: sum(r.life == "up" for r in asked.status().rooms[0].replicas) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    with job(script, "--replicas", "2", "--num-replicas", "2", env=env) as running:
        assert running.supervisor.spec.lighthouse == both
        running.when("in a quorum of 2", fail_over, after=["in a quorum of 2"])
        running.when("holds its lease again", kill_a_group, after=["holds its lease again"])
        running.when("holds its lease again", drain, after=["holds its lease again"] * 2)
        assert running.run() == 0, running.text
    asked.close()
    assert took[0] < 0.5 * GRACE_S
    assert running.count("was drained by the lighthouse") == 2, running.text
    assert running.count("replica-1.* started") == 2
