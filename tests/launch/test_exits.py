"""Ends of real child processes: codes, signals, order, many at once, and the end of the watcher."""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ft_core.launch.processes.exits import Exits
from ft_core.launch.processes.keeper import NOTICE
from tests.descriptors import descriptors
from tests.launch.lingering import THREAD, linger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.process
PATIENCE_S = 20.0


@pytest.fixture
def exits() -> Iterator[Exits]:
    watcher = Exits()
    watcher.start()
    yield watcher
    watcher.close()


@contextlib.contextmanager
def waiting(count: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that end with the code they are sent as a line."""
    command = ["sh", "-c", "read code; exit $code"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def tell(process: subprocess.Popen[bytes], code: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{code}\n".encode())
    process.stdin.flush()


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_codes(exits: Exits, code: int) -> None:
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with waiting() as (process,):
        assert exits.watch(process.pid, told.put)
        assert repr(exits) == "Exits(watching 1)"
        tell(process, code)
        assert told.get(timeout=PATIENCE_S) == code
        assert repr(exits) == "Exits(watching 0)"
        assert process.wait(PATIENCE_S) == code, "nobody has reaped it before its parent"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_signals(exits: Exits, number: signal.Signals) -> None:
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with waiting() as (process,):
        assert exits.watch(process.pid, told.put)
        process.send_signal(number)
        assert told.get(timeout=PATIENCE_S) == -number
        assert process.wait(PATIENCE_S) == -number


def test_a_stopped_process_has_not_ended(exits: Exits) -> None:
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with waiting() as (process,):
        exits.watch(process.pid, told.put)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        process.send_signal(signal.SIGCONT)
        tell(process, 3)
        assert told.get(timeout=PATIENCE_S) == 3


def test_many_are_told_in_the_order_in_which_they_end(exits: Exits) -> None:
    told: queue.SimpleQueue[tuple[int, int | None]] = queue.SimpleQueue()
    go = threading.Event()
    exits_held: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def hold(code: int | None) -> None:
        exits_held.put(code)
        go.wait(PATIENCE_S)  # the rest end while the watcher looks away

    with waiting(33) as (first, *rest):
        exits.watch(first.pid, hold)
        for index, process in enumerate(rest):
            assert exits.watch(process.pid, lambda code, index=index: told.put((index, code)))  # type: ignore[misc]
        tell(first, 0)
        assert exits_held.get(timeout=PATIENCE_S) == 0
        order = list(reversed(range(len(rest))))
        for index in order:
            tell(rest[index], index)
            os.waitid(os.P_PID, rest[index].pid, os.WEXITED | os.WNOWAIT)
        go.set()
        assert [told.get(timeout=PATIENCE_S) for _ in rest] == [(index, index) for index in order]


def test_one_that_ended_before_is_told_at_once(exits: Exits) -> None:
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with waiting() as (process,):
        tell(process, 7)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert exits.watch(process.pid, told.put)
        assert told.get(timeout=PATIENCE_S) == 7


def test_one_that_is_reaped_by_somebody_else_has_no_code(exits: Exits) -> None:
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    busy, go = threading.Event(), threading.Event()

    def hold(_: int | None) -> None:
        busy.set()
        go.wait(PATIENCE_S)

    with waiting(2) as (first, second):
        exits.watch(first.pid, hold)
        exits.watch(second.pid, told.put)
        tell(first, 0)
        assert busy.wait(PATIENCE_S)
        tell(second, 5)
        second.wait(PATIENCE_S)
        go.set()
        assert told.get(timeout=PATIENCE_S) is None


def test_what_is_gone_is_not_watched(exits: Exits) -> None:
    with waiting() as (process,):
        process.kill()
        process.wait()
        assert exits.watch(process.pid, lambda _: None) is False
    assert repr(exits) == "Exits(watching 0)"


# ---------------------------------------------------------------- dead, and not gone


SUBJECT = f"""
import os, signal, sys
{THREAD}
print(lingering.native_id, flush=True)
word = sys.stdin.readline().strip()
os._exit(int(word)) if word else None
"""
"""Dies as it is told, or is killed; one thread of it may be made to linger."""


@contextlib.contextmanager
def noticing() -> Iterator[tuple[Exits, Callable[[int], None]]]:
    """A watcher, and what writes a pid into its pipe."""
    reading, writing = os.pipe()
    watcher = Exits(reading)
    watcher.start()
    try:
        yield watcher, lambda pid: (os.write(writing, NOTICE.pack(pid)), None)[1]
    finally:
        watcher.close()
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def subject() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process, and the thread that may linger."""
    process = subprocess.Popen([sys.executable, "-c", SUBJECT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def until_state(pid: int, state: str) -> None:
    """Of the main thread."""
    end = time.monotonic() + PATIENCE_S
    while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < end
        os.sched_yield()


@pytest.mark.parametrize("code", [1, 42, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV])
def test_who_is_dead_is_told_before_it_is_gone_and_once(code: int) -> None:
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with noticing() as (exits, notice), subject() as (process, tid), contextlib.ExitStack() as stack:
        assert exits.watch(process.pid, told.put)
        stack.enter_context(linger(tid))
        if code < 0:
            process.send_signal(-code)
        else:
            tell(process, code)
        until_state(process.pid, "Z")
        notice(process.pid)
        notice(process.pid)
        assert told.get(timeout=PATIENCE_S) == code
        assert process.poll() is None, "a thread of it is still there"
        stack.close()
        assert process.wait(PATIENCE_S) == code
        assert repr(exits) == "Exits(watching 0)"
    assert told.empty()


def test_who_is_dead_with_status_0_is_told_when_it_is_gone() -> None:
    """0 is what the kernel says before it knows, too."""
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with noticing() as (exits, notice), subject() as (process, tid), contextlib.ExitStack() as stack:
        assert exits.watch(process.pid, told.put)
        stack.enter_context(linger(tid))
        tell(process, 0)
        until_state(process.pid, "Z")
        notice(process.pid)
        with pytest.raises(queue.Empty):
            told.get(timeout=0.1)
        stack.close()
        assert told.get(timeout=PATIENCE_S) == 0


def test_a_notice_about_one_that_lives_or_is_not_watched_changes_nothing() -> None:
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with noticing() as (exits, notice), subject() as (process, _):
        assert exits.watch(process.pid, told.put)
        notice(os.getpid())
        notice(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        notice(process.pid)
        with pytest.raises(queue.Empty):
            told.get(timeout=0.1)
        process.send_signal(signal.SIGCONT)
        tell(process, 3)
        assert told.get(timeout=PATIENCE_S) == 3


def test_a_pipe_of_deaths_that_is_closed_costs_only_the_notices() -> None:
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    reading, writing = os.pipe()
    watcher = Exits(reading)
    watcher.start()
    os.close(writing)
    with waiting() as (process,):
        assert watcher.watch(process.pid, told.put)
        tell(process, 5)
        assert told.get(timeout=PATIENCE_S) == 5
    watcher.close()
    os.close(reading)


def test_close_ends_the_thread_and_all_descriptors_and_may_be_repeated() -> None:
    before = descriptors()
    watcher = Exits()
    watcher.start()
    with waiting() as (process,):
        watcher.watch(process.pid, lambda _: pytest.fail("told after close"))
        watcher.close()
        watcher.close()
        assert watcher.watch(process.pid, lambda _: None) is False
    assert descriptors() - before == set()
    assert "ftrun-exits" not in [thread.name for thread in threading.enumerate()]


def test_close_without_start() -> None:
    watcher = Exits()
    watcher.close()
    watcher.close()


def test_a_mistake_is_said_and_the_others_ends_are_told(
    exits: Exits, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This thread serves all groups: without it the end of no worker would be seen at once."""
    told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    turn = Exits._turn
    failing = [True]

    def fails(self: Exits) -> None:
        turn(self)
        if failing:
            failing.clear()
            raise ValueError("a mistake of ours")

    monkeypatch.setattr(Exits, "_turn", fails)
    with waiting(3) as processes:
        for process in processes:
            assert exits.watch(process.pid, told.put)
        for code, process in enumerate(processes):
            tell(process, code)
            assert told.get(timeout=PATIENCE_S) == code
    assert "in watching its workers" in caplog.text
