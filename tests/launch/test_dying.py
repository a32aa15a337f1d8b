"""A worker that is dead, and not gone: ftrun replaces it at once, and the new one waits before it takes anything."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from ft_core.launch.processes import dying
from ft_core.witness import robust_mutex
from tests.launch.job import Job, job
from tests.launch.lingering import PATIENCE_S, THREAD, is_there, linger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

pytestmark = [
    pytest.mark.process, pytest.mark.skipif(not robust_mutex.SUPPORTED, reason="no robust mutexes here"),
]  # fmt: skip
ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKER = f"""
import mmap, os, pathlib, select, sys, time
sys.path.insert(0, {str(ROOT)!r})
folder = pathlib.Path(__file__).parent
count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
named = os.environ.get("FT_PREDECESSORS", "-")
print("begins", count, named, flush=True)
import ft_core
print("runs", count, flush=True)
assert "FT_PREDECESSORS" not in os.environ
for one in folder.glob("holds-*"):
    try:
        pidfd = os.pidfd_open(int(one.name.partition("-")[2]))
    except ProcessLookupError:
        continue
    if one.read_text() != count and not select.select([pidfd], [], [], 0)[0]:
        print("ran beside", one.name, flush=True)
if count == os.environ["LAST"]:
    sys.exit()
memory = mmap.mmap(-1, int(os.environ.get("MB", "1")) << 20)
for at in range(0, len(memory), 4096):
    memory[at] = 1
{THREAD}
from ft_core.witness import link
notice = link.DeathNotice(lambda: [])
notice.hold()
while link._link._socket is None:
    time.sleep(0.001)
with link._link._lock:  # the witness has been told
    (folder / f"holds-{{os.getpid()}}").write_text(count)
print("holds", count, rank, os.getpid(), lingering.native_id, flush=True)
time.sleep(600)
"""
"""Dies by the test's hand, but for the run number LAST. `begins` comes before `import ft_core`, `runs` after it."""


@contextlib.contextmanager
def greedy(tmp_path: pathlib.Path, *options: str, last: int = 1, mb: int = 1) -> Iterator[tuple[Job, Victims]]:
    """A job of `WORKER`s, and those that the test has killed."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    (tmp_path / "torch.py").write_text("")  # a standby's import of torch costs nothing here
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("LAST", str(last))
        patch.setenv("MB", str(mb))
        yield stack.enter_context(job(script, *options)), Victims(stack)


class Victims:
    """Processes that linger until `release`."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._tracers = contextlib.ExitStack()
        stack.enter_context(self._tracers)
        self.pids: list[int] = []
        self.pidfds: list[int] = []

    def kill(self, found: re.Match[str]) -> None:
        """Kill who said `holds`; it is not gone before `release`."""
        self.hold_back(found)
        os.kill(self.pids[-1], signal.SIGKILL)

    def end(self, found: re.Match[str]) -> None:
        """Kill who said `holds`."""
        self.note(found)
        os.kill(self.pids[-1], signal.SIGKILL)

    def hold_back(self, found: re.Match[str]) -> None:
        """Should it die, it is not gone before `release`."""
        self._tracers.enter_context(linger(int(found["tid"])))
        self.note(found)

    def note(self, found: re.Match[str]) -> None:
        """It is about to die."""
        self.pids.append(int(found["pid"]))
        self.pidfds.append(os.pidfd_open(self.pids[-1]))
        self._stack.callback(os.close, self.pidfds[-1])

    def release(self, _: object = None) -> None:
        """They are to be gone."""
        assert self.pidfds
        assert all(is_there(pidfd) for pidfd in self.pidfds)
        self._tracers.close()

    def check_that_nothing_is_left(self) -> None:
        assert self.pids
        assert not any(os.path.exists(f"/proc/{pid}") for pid in self.pids), "reaped, too"


HOLDS = r"holds {count} {rank} (?P<pid>\d+) (?P<tid>\d+)"
WAITS = "waiting until the memory of the dead process"


def holds(count: int, rank: int = 0) -> str:
    return HOLDS.format(count=count, rank=rank)


def in_order(running: Job, patterns: Sequence[str]) -> bool:
    """Lines that match came one after the other."""
    lines = iter(running.lines.all)
    return all(any(re.search(pattern, line) for line in lines) for pattern in patterns)


def test_a_dead_worker_is_replaced_before_it_is_gone_and_the_new_one_waits(tmp_path: pathlib.Path) -> None:
    with greedy(tmp_path) as (running, victims):
        running.when(holds(0), victims.kill)
        running.when(WAITS, victims.release)
        assert running.run() == 0, running.text
        victims.check_that_nothing_is_left()
    pid = victims.pids[0]
    assert running.count(rf"\[replica-0\] rank 0 \(pid {pid}\) was ended by SIGKILL; starting again ") == 1
    assert in_order(running, [rf"begins 1 {pid}:\d+$", rf"{WAITS} {pid} is free, for at most 10 s", "runs 1"])
    assert running.count("ran beside") == 0
    assert running.count(WAITS) == 1
    assert "1 finished after" in running.lines.all[-1]


def test_a_warm_standby_waits_before_it_runs_the_script(tmp_path: pathlib.Path) -> None:
    found: list[re.Match[str]] = []
    up = threading.Event()

    def note(match: re.Match[str]) -> None:
        found.append(match)
        up.set()

    def kill(_: re.Match[str]) -> None:
        assert up.wait(PATIENCE_S)
        victims.kill(found[0])

    with greedy(tmp_path, "--standby", "1") as (running, victims):
        running.when(holds(0), note)
        running.when("standby.* ready", kill)
        running.when(WAITS, victims.release)
        assert running.run() == 0, running.text
        victims.check_that_nothing_is_left()
    assert in_order(running, ["started from a warm standby", WAITS, "begins 1 -", "runs 1"])
    assert running.count("ran beside") == 0


def test_what_is_gone_soon_is_waited_for_without_a_word(tmp_path: pathlib.Path) -> None:
    """Real memory: whatever the kernel's pace, the next one runs when it is free."""
    with greedy(tmp_path, mb=600, last=2) as (running, victims):
        running.when(holds(0), victims.end)
        running.when(holds(1), victims.end)
        assert running.run() == 0, running.text
        victims.check_that_nothing_is_left()
    assert running.count("was ended by SIGKILL; starting again") == 2
    assert running.count("ran beside") == 0


def test_a_group_waits_for_all_of_its_predecessors(tmp_path: pathlib.Path) -> None:
    """One is killed, the other is ended with it; both are dead at once and are gone late."""
    both: list[re.Match[str]] = []
    together = threading.Barrier(2)
    with greedy(tmp_path, "--nproc-per-replica", "2") as (running, victims):

        def kill(found: re.Match[str]) -> None:
            both.append(found)
            together.wait(PATIENCE_S)
            if found is both[0]:
                victims.hold_back(both[1])
                victims.kill(both[0])

        running.when(holds(0, 0), kill)
        running.when(holds(0, 1), kill)
        running.when("waiting until the memory of the dead processes", victims.release)
        assert running.run() == 0, running.text
        victims.check_that_nothing_is_left()
    first = re.search(r"rank (\d) \(pid (\d+)\) was ended by SIGKILL; starting again", running.text)
    assert first is not None
    assert int(first[2]) == victims.pids[1], "the one that was killed"
    assert running.count(r"begins 1 \d+:\d+,\d+:\d+$") == 2
    assert running.count("runs 1") == 2
    assert running.count("ran beside") == 0


def test_a_keeper_that_replaces_another_tells_of_deaths_too(tmp_path: pathlib.Path) -> None:
    with greedy(tmp_path, last=2) as (running, victims):
        running.when(holds(0), lambda _: os.kill(running.supervisor.keeper.process.pid, signal.SIGKILL))
        running.when("another one is started", lambda _: running.supervisor._groups[0].agent.send(signal.SIGKILL))
        running.when(holds(1), victims.kill)
        running.when(WAITS, victims.release)
        assert running.run() == 0, running.text
        victims.check_that_nothing_is_left()
    assert in_order(running, [rf"begins 2 {victims.pids[0]}:\d+$", WAITS, "runs 2"])
    assert running.count("was ended by SIGKILL; starting again") == 2


def test_one_that_is_killed_while_it_waits_is_replaced_as_well(tmp_path: pathlib.Path) -> None:
    """It had nothing, and its successor waits for whoever has; not for more than one run."""
    with greedy(tmp_path, last=2) as (running, victims):
        running.when(holds(0), victims.kill)
        running.when(WAITS, lambda _: running.supervisor._groups[0].agent.send(signal.SIGKILL))
        running.when("was ended by SIGKILL; starting again", victims.release, after=[WAITS])
        assert running.run() == 0, running.text
        victims.check_that_nothing_is_left()
    assert in_order(running, ["begins 1 ", WAITS, "begins 2 ", "runs 2"])
    assert running.count("ran beside") == 0


def test_a_group_that_is_given_up_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    with greedy(tmp_path, "--max-restarts", "0") as (running, victims):
        running.when(holds(0), victims.kill)
        running.when("given up", victims.release)
        assert running.run() == 1
        victims.check_that_nothing_is_left()
    assert running.count(r"rank 0 .* was ended by SIGKILL; given up") == 1


class Hanging:
    """A run's processes as `Dying` sees them: one that SIGKILL does not end, as if it hung in the kernel."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.subprocess_handlers = {0: SimpleNamespace(proc=process)}
        self.closed: list[tuple[signal.Signals, int]] = []

    def close(self, death_signal: signal.Signals, timeout: int) -> None:
        for handler in self.subprocess_handlers.values():
            handler.proc.wait()  # as torch before 2.13: without a limit
        self.closed.append((death_signal, timeout))


def test_what_hangs_in_the_kernel_is_waited_for_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dying, "REAP_S", 0.3)
    with subprocess.Popen(["sleep", "600"]) as process:
        context, waits = Hanging(process), dying.Dying()
        waits.take(cast("SubprocessContext", context))
        assert waits.names().startswith(f"{process.pid}:")
        begun = time.monotonic()
        waits.close()
        assert 0.3 <= time.monotonic() - begun < 2.0
        assert context.closed == [(signal.SIGKILL, 0)]
        assert waits.names() == ""
        process.kill()
