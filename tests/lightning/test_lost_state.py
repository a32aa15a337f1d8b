"""All groups of a Lightning job are killed at the same moment: it ends with a sentence, or begins again if it may."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.lightning.test_launcher import Run

if TYPE_CHECKING:
    from tests.lightning.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
PROGRAM = pathlib.Path(__file__).with_name("lost_job.py")


def kill_all(run: Run) -> None:
    """Once each of the two groups holds some steps."""
    pids: list[int] = []
    for line in run:
        if found := re.search(r"\] holds 5 (\d+)", line):
            pids.append(int(found[1]))
        if len(pids) == 2:
            break
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_without_a_checkpoint_the_job_ends_with_a_sentence(tmp_path: pathlib.Path, forge: Forge) -> None:
    with Run(str(PROGRAM), "no", "2", cwd=tmp_path, forge=forge) as run:
        kill_all(run)
        assert run.end() == 1, "\n".join(run.lines)
    said = r"this job has committed \d steps?, and everybody who held them is gone"
    assert run.found(rf"ftrun: .*{said}.*from_scratch=True \(FaultTolerantStrategy"), "\n".join(run.lines)
    assert run.found(rf"replica-\d/0\] .*StateLostError: {said}"), "\n".join(run.lines)
    assert not run.found(r"\] ended|Traceback"), "\n".join(run.lines)


@pytest.mark.parametrize("launcher", [[], ["-m", "ft_core.launch", "--replicas", "2"]], ids=["own", "ftrun"])
def test_the_strategys_argument_lets_it_begin_again(tmp_path: pathlib.Path, forge: Forge, launcher: list[str]) -> None:
    """Started by the script itself, where ftrun is told, too, and by ftrun, where the Managers say it alone."""
    with Run(*launcher, str(PROGRAM), "yes", "1" if launcher else "2", cwd=tmp_path, forge=forge) as run:
        kill_all(run)
        assert run.end() == 0, "\n".join(run.lines)
    assert len(run.found(r"replica-\d/0\] ended 5")) == 2, "\n".join(run.lines)
    assert not run.found("StateLostError"), "\n".join(run.lines)
