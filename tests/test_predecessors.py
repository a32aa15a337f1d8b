"""Waiting for those that a process replaces: real processes, named as ftrun names them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from ft_core.launch.processes import predecessors

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process
ROOT = pathlib.Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def living() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that lives until its standard input ends, and its name."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        yield process, f"{process.pid}:{predecessors.start_time(process.pid)}"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predecessors, "SAY_S", 0.05)
    monkeypatch.setattr(predecessors, "WAIT_S", 0.2)


def pidfds() -> int:
    """How many this process has open: that is what waiting takes. Other threads of the test run open other files."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found += "pidfd" in os.readlink(f"/proc/self/fd/{number}")
    return found


def wait(monkeypatch: pytest.MonkeyPatch, *names: str) -> float:
    """How long it took, in seconds."""
    monkeypatch.setenv(predecessors.VARIABLE, ",".join(names))
    before, began = pidfds(), time.monotonic()
    predecessors.wait()
    assert predecessors.VARIABLE not in os.environ
    assert pidfds() == before
    return time.monotonic() - began


def test_the_wait_has_a_bound_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with living() as (one, first), living() as (two, second):
        took = wait(monkeypatch, first, second)
    pids = ", ".join(str(pid) for pid in sorted((one.pid, two.pid)))
    assert 0.2 <= took < 5.0
    assert capsys.readouterr().err.splitlines() == [
        f"ft_core: waiting until the memory of the dead processes {pids} is free, for at most 0.2 s",
        f"ft_core: the memory of the dead processes {pids} is still not free after 0.2 s: going on without it",
    ]


def test_one_that_is_gone_is_not_waited_for_nor_is_who_took_its_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predecessors, "WAIT_S", 60.0)
    with living() as (process, name):
        assert wait(monkeypatch, f"{process.pid}:1", f"{process.pid}:", "", "x:y", "-1:1", "999999999:1") < 10.0
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert wait(monkeypatch, name) < 10.0, "it has not been reaped, but it holds nothing"
    assert wait(monkeypatch, name) < 10.0
    assert capsys.readouterr().err == ""


def test_importing_the_package_waits_and_children_do_not_wait_again() -> None:
    script = "import os, ft_core; print(os.environ.get('FT_PREDECESSORS', 'waited'))"
    with living() as (process, name):
        worker = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, predecessors.VARIABLE: name}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert worker.stderr is not None
        assert worker.stderr.readline().startswith(
            f"ft_core: waiting until the memory of the dead process {process.pid}"
        )
        assert worker.poll() is None
        process.kill()
        assert worker.communicate(timeout=30) == ("waited\n", "")
        assert worker.returncode == 0


def test_without_a_variable_nothing_is_loaded_for_it() -> None:
    script = "import sys, ft_core; sys.exit('ft_core.launch.processes.predecessors' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != predecessors.VARIABLE}
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, timeout=30).returncode == 0
