"""A trainer with a group in a child, killed in every state: nothing of it is left."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.process_group.ranks import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
ENDS_S = 20.0
"""It takes some milliseconds; two cores may have other tests' work."""

TRAINER = """
import sys, torch
from ft_core.process_group import ProcessGroupBabyGloo
from ft_core.process_group.baby import children

group = ProcessGroupBabyGloo()
group.configure("", "replica0", 0, 1)
group.allreduce([torch.ones(4)]).wait()
other = group.sibling()
print(children.children._process.pid, group._incarnation.child.pid, flush=True)
sys.stdin.read()
"""


def parent_of(pid: int) -> int:
    """0 once it has ended; who is an orphan then is waited for by init."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] == "Z" else int(fields[1])


def children_of(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("frozen", ["nobody", "child", "helper", "both"])
def test_nothing_is_left_of_a_trainer_that_is_killed(frozen: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    with trainer.stdin, trainer.stdout:
        try:
            helper, child = map(int, trainer.stdout.readline().split())
            assert wait_until(lambda: len(children_of(helper)) == 2, ENDS_S)  # the group's, and the spare
            spares = [pid for pid in children_of(helper) if pid != child]
            for pid in {"nobody": [], "child": [child], "helper": [helper], "both": [child, helper]}[frozen]:
                os.kill(pid, signal.SIGSTOP)
        finally:
            trainer.kill()
            trainer.wait()
        assert wait_until(lambda: [parent_of(pid) for pid in (helper, child, *spares)] == [0, 0, 0], ENDS_S)
