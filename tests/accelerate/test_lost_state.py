"""All groups of an Accelerate job are killed at the same moment: it ends with a sentence, or begins again if it may."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tests.accelerate.processes import ROOT
from tests.launch.job import job

if TYPE_CHECKING:
    from tests.forge import Forge
    from tests.launch.job import Job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
PROGRAM = pathlib.Path(__file__).with_name("lost_job.py")
SAID = r"this job has committed \d steps?, and everybody who held them is gone"


def kill_all(running: Job) -> None:
    """Once each of the two groups holds some steps."""
    pids: list[int] = []
    both = threading.Lock()

    def kill(found: re.Match[str]) -> None:
        with both:
            pids.append(int(found[1]))
            if len(pids) == 2:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)

    for group in range(2):
        running.when(rf"replica-{group}/0\] holds 5 (\d+)", kill)


@pytest.mark.usefixtures("forged_workers")
@pytest.mark.parametrize("word", ["", " yes"])
def test_under_ftrun(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with job(f"{PROGRAM}{word}", "--replicas", "2") as running:
        kill_all(running)
        assert running.run() == (0 if word else 1), running.text
    assert running.count(r"replica-\d/0\] ended 5") == (2 if word else 0), running.text
    assert (running.count(rf"StateLostError: {SAID}.*from_scratch=True \(.*FaultTolerancePlugin") == 0) == bool(word)
    assert not running.count("Traceback")


@pytest.mark.parametrize("flags", [[], ["--ft_from_scratch", "true"]])
def test_under_its_own_launcher(tmp_path: pathlib.Path, forge: Forge, flags: list[str]) -> None:
    words = [sys.executable, "-u", "-m", "ft_accelerate", "launch", "--cpu", "--ft_replicas", "2", *flags, str(PROGRAM)]
    out, to_out = os.pipe()
    with open(out) as output:
        process = forge.start(
            words, {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)}, to_out, to_out,
            cwd=str(tmp_path), launches=True,
        )  # fmt: skip
        os.close(to_out)
        try:
            pids, lines = [], []
            for line in output:
                lines.append(line)
                if found := re.search(r"/0\] holds 5 (\d+)", line):
                    pids.append(int(found[1]))
                    for pid in pids if len(pids) == 2 else ():
                        os.kill(pid, signal.SIGKILL)
            may = bool(flags)
            text = "".join(lines)
            assert process.wait(20) == (0 if may else 1), text
        finally:
            process.kill()
            process.wait()
    assert len(re.findall(r"replica-\d/0\] ended 5", text)) == (2 if may else 0), text
    assert bool(re.search(rf"StateLostError: {SAID}", text)) != may, text
