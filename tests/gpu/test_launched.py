"""ftrun with two groups on one GPU, with Lightning and with Accelerate, neither of which names a process group: NCCL
between them; one is killed, is started again, and ends with the other's parameters."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.gpu.pair import ANSWER_S, MARKS, ROOT, environment_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = MARKS
MORE = 100
"""Steps that both make once they train together again."""
STEP = re.compile(r"step (\d+) (\d+) (\d+) (\S+)$")
DONE = re.compile(r"done (\w{16})$")


class Run:
    """One ftrun; all that it prints."""

    def __init__(self, script: str, last: pathlib.Path) -> None:
        gpus = "none" if os.environ.get("ACCELERATOR") == "cpu" else "share"
        options = ["--replicas", "2", "--gpus", gpus, "--http", "off"]
        environment = {**os.environ, **environment_of(0), "LAST_STEP": str(last)}
        self.lines: list[str] = []
        self.last = last
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "ft_core.launch", *options, str(pathlib.Path(__file__).with_name(script))],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="gpu-ftrun", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, participants: int, after: int = 0) -> tuple[re.Match[str], int]:
        """The first step of so many behind line `after`, and the number of the next line."""
        deadline = time.monotonic() + ANSWER_S
        at = after
        while time.monotonic() < deadline:
            while at < len(self.lines):
                found = STEP.search(self.lines[at])
                at += 1
                if found and int(found[2]) == participants and int(found[1]) > 3:
                    return found, at
            assert self.process.poll() is None, "\n".join(self.lines[-60:])
            threading.Event().wait(0.01)
        raise AssertionError(f"no step of {participants} after line {after}:\n" + "\n".join(self.lines[-60:]))

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reader.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Run]:
    made = Run(request.param, tmp_path / "last")
    yield made
    made.end()


@pytest.mark.parametrize("run", ["lightning_job.py", "accelerate_job.py"], indirect=True)
def test_two_groups_on_one_gpu_survive_a_kill(run: Run) -> None:
    step, at = run.wait_for(2)
    assert step[4] == ("ft-gloo" if os.environ.get("ACCELERATOR") == "cpu" else "ft-nccl")
    os.kill(int(step[3]), signal.SIGKILL)
    _, at = run.wait_for(1, at)
    step, _ = run.wait_for(2, at)
    partial = run.last.with_suffix(".tmp")
    partial.write_text(str(int(step[1]) + MORE))
    partial.rename(run.last)
    assert run.process.wait(ANSWER_S) == 0, "\n".join(run.lines[-60:])
    digests = [found[1] for line in run.lines if (found := DONE.search(line))]
    assert len(digests) == 2
    assert len(set(digests)) == 1
