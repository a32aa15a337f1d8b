"""What a script that does not expect it prints when its job is over, or is lost: one line, and the right status."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError, JobFinishedError, StateLostError
from ft_core.protocol.types import Version
from ft_core.runtime.exit_message import LastWords
from tests.control.recorder import Replica

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = """
import os
from ft_core import Manager, ProcessGroupGloo
manager = Manager(ProcessGroupGloo(), state_dict=dict, load_state_dict=lambda _: None, min_replica_size=1,
                  replica_id="late")
manager.start_quorum()
print("trains")
"""


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", one_job=True)
    yield server
    server.shutdown()


def end_of(lighthouse: LighthouseServer, *, finished: bool) -> subprocess.CompletedProcess[str]:
    """A replica has trained and is gone; another one comes."""
    first = Replica(lighthouse.address(), "first:1")
    first.ask()
    version = Version(7, first.answer().quorum_id)
    first.lease.progress(7, "step", version)
    assert first.lease.leave("bye", finished=finished, version=version, agreed=True, timeout_s=5)
    first.close()
    environment = {"FT_LIGHTHOUSE": lighthouse.address(), "FT_WITNESS": "off", "FT_NUM_REPLICA_GROUPS": "1", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.process
def test_a_replica_that_comes_as_the_job_has_finished_says_so_in_one_line(lighthouse: LighthouseServer) -> None:
    ended = end_of(lighthouse, finished=True)
    assert ended.returncode == 0
    assert ended.stderr == "nothing left to do: training in room 'default' finished at step 7 (first:1)\n"


@pytest.mark.process
def test_a_replica_whose_job_is_lost_says_so_in_one_line(lighthouse: LighthouseServer) -> None:
    ended = end_of(lighthouse, finished=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("StateLostError: this job has committed 7 steps")


def test_other_errors_are_somebody_elses(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[BaseException] = []
    hook = LastWords(lambda _kind, error, _trace: told.append(error))
    for error in ConfigError("x"), KeyError("y"):
        hook(type(error), error, None)
    hook(StateLostError, StateLostError("all is lost"), None)
    with pytest.raises(SystemExit) as ended:
        hook(JobFinishedError, JobFinishedError("done; start another one"), None)
    assert ended.value.code == 0
    assert [str(error) for error in told] == ["x", "'y'"]
    assert capsys.readouterr().err == "StateLostError: all is lost\nnothing left to do: done\n"
