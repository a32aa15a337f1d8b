"""ftrun with real training: a late start, a kill, a hang and a scale-down; the others train on; equal digests."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import TYPE_CHECKING

import pytest

from ft_core.launch.control_socket import order_resize
from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 3
LATE = f"""
import os, runpy, time
if os.environ["FT_REPLICA_ID"] == "replica-1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep({TIMEOUT_S + 1})
runpy.run_path({str(ROOT / "tests/chaos/worker.py")!r}, run_name="__main__")
"""
"""The worker, but one group needs longer than the timeout to get ready."""


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[[int], None]:
    """Lets all workers train to a step and end there."""
    path = tmp_path / "steps"
    monkeypatch.setenv("STEPS_FILE", str(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VETOES", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def end(step: int) -> None:
        partial = path.with_suffix(".tmp")
        partial.write_text(str(step))
        partial.rename(path)

    return end


def newest(running: Job) -> int:
    """The newest step that anybody has committed."""
    return max((int(n) for n in re.findall(r"\] commit (\d+) ", running.text)), default=0)


def pid_of(running: Job, name: str) -> int:
    """Rank 0 of a group."""
    return next(g for g in running.supervisor._groups.values() if g.name == name).agent.pids()[0]


def test_a_late_start_a_kill_and_a_hang(
    end: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, forged_workers: None
) -> None:
    """The first costs nobody a restart, the others one each."""
    monkeypatch.setenv("HANG_ONCE", "replica-1:60")
    monkeypatch.setenv("TIMEOUT_S", str(TIMEOUT_S))
    script = tmp_path / "late.py"
    script.write_text(LATE)

    def kill(_: re.Match[str]) -> None:
        os.kill(pid_of(running, "replica-0"), signal.SIGKILL)

    def at_full_strength(found: re.Match[str]) -> None:
        end(int(found[1]) + 40)

    with job(script, "--replicas", "3", "--timeout", str(TIMEOUT_S)) as running:
        # The two that are there do not wait for the late one: see R9.
        running.when(r"replica-2/0\] commit \d+ 3", kill)
        # Both have come back: replica-0 after the kill, replica-1 after the hang.
        back = [r"replica-1\] it stood still", r"replica-1/0\] commit \d+"]
        running.when(r"replica-2/0\] commit (\d+) 3", at_full_strength, after=back)
        assert running.run() == 0, running.text
    assert running.count(r"replica-0\] rank 0 .* was ended by SIGKILL; starting again now") == 1
    assert running.count(r"replica-1\] stands still while others wait \(replica-1:\w+ is alive but did not arrive") == 1
    # The stack of the thread that hangs: as faulthandler writes it, or py-spy where that is installed.
    assert running.count(r"worker.py.* line .* in main|main \(.*worker.py:\d+\)") >= 1
    assert running.count(r"\[replica-\d\] started") == 5, running.text
    digests = re.findall(r"\] done (\w+)", running.text)
    assert len(digests) == 3
    assert len(set(digests)) == 1


def test_a_scale_down_of_groups_of_two_costs_nobody_a_step(end: Callable[[int], None], forged_workers: None) -> None:
    answers: list[str] = []

    def shrink(_: re.Match[str]) -> None:
        answers.append(order_resize(1, "shrinking"))

    options = ("--replicas", "2", "--nproc-per-replica", "2", "--run-id", "shrinking")
    with job(ROOT / "tests/chaos/worker.py", *options) as running:
        running.when(r"replica-0/0\] commit 30 2", shrink)
        running.when(r"\] replica-1\] drained|\[replica-1\] drained", lambda _: end(newest(running) + 30))
        assert running.run() == 0, running.text
    assert answers == ["ok: 2 -> 1 groups"]
    assert "1 finished, 1 drained" in running.lines.all[-1]
    assert running.count(r"\] veto ") == 0
    steps = [int(n) for n in re.findall(r"replica-0/0\] commit (\d+) ", running.text)]
    assert steps == list(range(1, steps[-1] + 1))
    assert running.count(r"replica-0/\d\] done ") == 2
