"""Errors that hit every group, with real processes: one report, one start, and a sentence that ends the job."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from tests.launch.job import job

if TYPE_CHECKING:
    import re

pytestmark = pytest.mark.process
ROOT = pathlib.Path(__file__).resolve().parents[2]
LEASED = f"""
import os, pathlib, sys, uuid
sys.path.insert(0, {str(ROOT)!r})
from tests.control.recorder import Replica
name = os.environ['FT_REPLICA_ID']
one = Replica(os.environ['FT_LIGHTHOUSE'], f'{{name}}:{{uuid.uuid4().hex}}', token=os.environ['FT_TOKEN'],
              expected=int(os.environ['FT_NUM_REPLICA_GROUPS']))
def ask():
    one.ask(from_scratch=os.environ.get('FT_FROM_SCRATCH') == '1')
    with one.recorder.changed:
        events = one.recorder.events
        one.recorder.changed.wait_for(lambda: any(e[0] in ('quorum', 'refused') for e in events), 20)
    if refused := one.recorder.of('refused'):
        raise refused[0][0]
    print('in a quorum of', len(one.answer().members), flush=True)
"""
"""A worker with a lease, without torch."""


def script(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "worker.py"
    path.write_text(f"{LEASED}\nfolder = pathlib.Path({str(folder)!r})\n{text}")
    return path


def test_an_error_in_every_group_before_the_first_commit_is_tried_once(tmp_path: pathlib.Path) -> None:
    """The lighthouse was reached: that made three starts of each group."""
    text = (
        "import threading\n"
        "one.recorder.wait('welcome')\n"
        "(folder / name).touch()\n"
        "while len(list(folder.glob('replica-*'))) < 3:\n"  # else one starts again before another fails
        "    threading.Event().wait(0.01)\n"
        "raise OverflowError('in configure_optimizers')"
    )
    worker = script(tmp_path, text)
    with job(worker, "--replicas", "3") as running:
        assert running.run() == 1
    assert running.count(r"\] started") == 3
    assert running.count("^.*Traceback") == 1
    assert running.count("fails at its start in all 3 groups .OverflowError: in configure_optimizers") == 1


def test_what_only_the_leader_writes_fails_on_one_group_after_the_other(tmp_path: pathlib.Path) -> None:
    """The next one gets there by another way, when the first one is gone: a folder that cannot be written."""
    text = (
        "(folder / 'file').touch()\n"
        "if name == 'replica-0': (folder / 'file' / 'logs').mkdir()\n"
        "one.recorder.wait('welcome')\n"
        "ask()\n"
        "(folder / 'file' / 'logs').mkdir()\n"
    )
    with job(script(tmp_path, text), "--replicas", "2") as running:
        assert running.run() == 1
    assert running.count(r"\] started") == 2
    assert running.count(r"fails at its start in all 2 groups .NotADirectoryError: \[Errno 20\].*file/logs'") == 1


def test_the_same_error_twice_in_a_row_in_every_group_ends_a_job_that_has_committed(tmp_path: pathlib.Path) -> None:
    text = (
        "from ft_core.protocol.types import Version\n"
        "ask()\n"
        "q = one.answer().quorum_id\n"
        "one.lease.progress(5, 'step', Version(4, q))\n"
        "import threading; threading.Event().wait(0.6)\n"
        "raise ValueError('a bad batch')\n"
    )
    with job(script(tmp_path, text), "--replicas", "2", "--from-scratch") as running:
        assert running.run() == 1
    assert running.count(r"\] started") <= 6
    assert running.count("with the same error again and again in all 2 groups .ValueError: a bad batch") == 1


@pytest.mark.parametrize("flag", [[], ["--from-scratch"]])
def test_a_job_that_lost_everything_ends_unless_it_may_begin_again(tmp_path: pathlib.Path, flag: list[str]) -> None:
    text = (
        "from ft_core.protocol.types import Version\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\n"
        "ask()\n"
        "if not again: one.lease.progress(3, 'step', Version(2, one.answer().quorum_id))\n"
        "if again: print('began again', flush=True); os._exit(0)\n"
        "import threading; threading.Event().wait(1.0)\n"
        "print('committed as', os.getpid(), flush=True); threading.Event().wait()\n"
    )
    pids: list[int] = []
    both = threading.Lock()

    def kill(found: re.Match[str]) -> None:
        with both:
            pids.append(int(found[1]))
            if len(pids) == 2:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)

    with job(script(tmp_path, text), "--replicas", "2", *flag) as running:
        for group in range(2):
            running.when(rf"replica-{group}/0\] committed as (\d+)", kill)
        status = running.run()
    assert status == (0 if flag else 1), running.text
    assert running.count("began again") == (2 if flag else 0)
    ended = running.count("^.*ftrun.*this job has committed 3 steps, and everybody who held them is gone")
    said = running.count("this job has committed 3 steps, and everybody who held them is gone")
    assert (said > 0) == (not flag), (ended, said)
