"""examples/fsdp/train.py loses a rank, ends, and is started again with another number of ranks."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import Any

import pytest

from ft_core.loop import latest
from tests.launch.job import job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples/fsdp/train.py"


def test_the_example(tmp_path: pathlib.Path) -> None:
    """The other group waits for the one that was killed, which would else come back after the last step."""
    options = ("--replicas", "2", "--min-replicas", "2", "--nproc-per-replica", "2")
    with job(f"{EXAMPLE} --steps 12 --every 4 --folder {tmp_path}", *options) as running:

        def kill(_: Any) -> None:
            group = next(g for g in running.supervisor._groups.values() if g.name == "replica-0")
            os.kill(group.agent.pids()[1], signal.SIGKILL)

        running.when("step 4: loss", kill)
        assert running.run() == 0, running.text
    assert running.count("replica-0.*was ended by SIGKILL") == 1, running.text
    assert running.count(r"replica-0:\w+: healed to step") == 1, running.text
    assert running.count(r"group \d: done at step 12") == 2, running.text
    assert latest(tmp_path) == f"{tmp_path}/step_12"
    with job(f"{EXAMPLE} --steps 14 --folder {tmp_path}", "--replicas", "1", "--nproc-per-replica", "1") as running:
        assert running.run() == 0, running.text
    assert re.search("group 0 of 1 begins at batch 12\n", running.text)
    assert running.count("group 0: done at step 14") == 1
