"""The parts of a device group, one by one: its works, its store, its watch, and what it does to its process."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.errors import CollectiveError
from ft_core.process_group.device.backstop import Backstop
from ft_core.process_group.device.group import DeviceProcessGroup
from ft_core.process_group.device.host import EXIT_STUCK, ProcessHost
from ft_core.process_group.device.meeting import MAX_KEYS, MeetingStore
from ft_core.process_group.device.watch import Watch
from ft_core.process_group.device.work import DeviceWork
from tests.process_group.fake_communicator import HANG_S, Behaviour, FakeOfOne
from tests.process_group.ranks import wait_until, workers

if TYPE_CHECKING:
    from pathlib import Path


class _Slow:
    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self.ordered = 0
        self.asked = 0

    def order(self) -> None:
        self.ordered += 1

    def is_done(self) -> bool:
        return self.done

    def result(self) -> list[torch.Tensor]:
        return [torch.ones(1)]

    def future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def first_error(self) -> Exception | None:
        self.asked += 1
        return self.error

    def refusal(self, error: Exception) -> Exception:
        return CollectiveError(str(error))


def test_wait_orders_the_stream_and_does_not_block() -> None:
    """On a device: the collective still runs when wait() returns."""
    slow = _Slow()
    work = DeviceWork("allreduce", slow, slow)
    assert work.wait()
    assert slow.asked == 0  # nor does it ask the library: the group's watch does
    assert (slow.ordered, slow.done, repr(work)) == (1, False, "DeviceWork(allreduce, running)")
    assert work.get_future().wait() == work.result()
    with pytest.raises(CollectiveError, match=r"allreduce was not done within 0\.010 s"):
        work.wait(timedelta(milliseconds=10))
    work.synchronize()
    work.block_current_stream()
    assert slow.ordered == 3
    slow.error = RuntimeError("aborted")
    with pytest.raises(CollectiveError, match="aborted"):
        work.wait()
    assert slow.ordered == 4  # what follows comes after it all the same
    assert work.exception() is None
    slow.done = True
    assert isinstance(work.exception(), CollectiveError)
    assert repr(work) == "DeviceWork(allreduce, failed)"


def test_the_store_of_a_communicator_is_bounded_and_closes() -> None:
    store = MeetingStore(None, "", lambda: None)
    store.set("0", "id")
    assert store.multi_get(["0"]) == [b"id"]
    for number in range(1, MAX_KEYS):
        store.set(str(number), b"x")
    with pytest.raises(CollectiveError, match="more than 64 keys"):
        store.set("one more", b"x")
    store.close()
    with pytest.raises(CollectiveError, match="its store has no 'late'"):
        store.get("late")

    class GivenUpError(Exception):
        pass

    def give_up() -> None:
        raise GivenUpError

    with pytest.raises(GivenUpError):
        MeetingStore(None, "", give_up).get("0")


def test_the_watch_goes_on_after_a_group_that_cannot_be_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    looked = threading.Event()

    class Bad:
        def look(self) -> bool:
            raise RuntimeError("bad")

    class Good:
        def look(self) -> bool:
            looked.set()
            return False

    watch, bad, good = Watch(), Bad(), Good()
    watch.add(bad)
    watch.add(good)
    assert looked.wait(5)
    watch.remove(bad)
    watch.remove(good)
    assert wait_until(lambda: watch._thread is None)
    assert "could not be looked at" in caplog.text


def test_the_base_leaves_device_and_communicator_to_a_kind() -> None:
    with pytest.raises(NotImplementedError):
        DeviceProcessGroup(timedelta(seconds=1))


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter there are none; elsewhere a device that nobody can abort ends the process."""
    message, ended, done = "can't create new thread at interpreter shutdown", [], []  # type: str, list[str], list[int]

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(ProcessHost, "end_process", lambda _host, reason: ended.append(reason))
    monkeypatch.setattr(threading.Thread, "start", start)
    host = ProcessHost()
    host.start("ft-device-abort", lambda: done.append(1))
    host.start("ft-device-form", lambda: done.append(4))
    host.after(0.0, lambda: done.append(2))()
    assert (done, ended) == ([4], []), "an abort may block for ever"
    message = "can't start new thread"
    host.start("ft-device-abort", lambda: done.append(3))
    assert done == [4]
    assert "can't start new thread" in ended[0]


EXITING = """
import threading
from datetime import timedelta
import torch
from tests.process_group.fake_communicator import Behaviour, FakeOfOne

group = FakeOfOne(timedelta(seconds=60), abort_s=5.0, behaviour=Behaviour(hang_abort=threading.Event()))
group.configure("", "me", 0, 1)
group.communicators[0].fabric.hold()
group.allreduce([torch.ones(1)])
raise SystemExit(3)
"""


STUCK_IN_INIT = """
import threading
from datetime import timedelta
import torch
from ft_core.errors import CollectiveError
from ft_core.process_group.device import incarnation
from tests.process_group.fake_communicator import Behaviour, FakeNCCL, FakeOfOne

incarnation.EXIT_WAIT_S = 1.0
group = FakeOfOne(timedelta(seconds=0.1), behaviour=Behaviour(hang_init=threading.Event()))
try:
    group.configure("", "me", 0, 1)
except CollectiveError:
    group._communicator_for = super(FakeOfOne, group)._communicator_for
    group.set_timeout(timedelta(seconds=60))
    group.configure("", "me", 0, 1)
    assert group.allreduce([torch.ones(1)]).wait()
    raise SystemExit(3)
"""


DROPPING = """
import threading, time
from datetime import timedelta
from tests.process_group.fake_communicator import FakeOfOne

class Slow:
    def __del__(self):
        threading.Event().wait(3)  # torch's watchdog writes down where a failed collective was launched
        print("dropped", flush=True)

group = FakeOfOne(timedelta(seconds=60))
group.configure("", "me", 0, 1)
group.communicators[0].slow = Slow()
group.communicators.clear()
group.shutdown()
"""


def abort_that_is_stuck(path: str, behaviour: Behaviour) -> None:
    """In a worker: abort a group, and be ended by that."""
    logging.basicConfig(filename=path, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    if behaviour.abort_error is None:
        behaviour.hang_abort = threading.Event()
    group = FakeOfOne(timedelta(seconds=60), abort_s=1.0, behaviour=behaviour)
    group.configure("", "me", 0, 1)
    fabric = group.communicators[0].fabric
    assert fabric is not None
    fabric.hold()
    group.allreduce([torch.ones(1)])
    group.abort()
    threading.Event().wait(30)


@pytest.mark.process
@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (Behaviour(), "its abort has not returned 1.0 s after it was to be aborted"),
        (
            Behaviour(abort_error=RuntimeError("no abort here")),
            "its abort failed (no abort here) while a collective ran",
        ),
    ],
    ids=["hangs", "fails"],
)
def test_a_process_whose_abort_is_stuck_ends_and_says_why(tmp_path: Path, behaviour: Behaviour, why: str) -> None:
    log = tmp_path / "log"
    with workers(1) as (worker,):
        worker.start(abort_that_is_stuck, str(log), behaviour)
        assert worker.status(30) == EXIT_STUCK
    assert log.read_text().splitlines() == [
        "CRITICAL ft_core.process_group.device.host the NCCL group of 'me' (rank 0 of 1, ): "
        f"{why}; this process ends with status {EXIT_STUCK}, to be started again"
    ]


def abort_while_the_lock_is_kept() -> None:
    """In a worker: abort a group, and let no other thread of Python's run from then on."""
    group = FakeOfOne(timedelta(seconds=60), abort_s=1.0, behaviour=Behaviour(hang_abort=threading.Event()))
    group.configure("", "me", 0, 1)
    group.abort()
    ctypes.PyDLL(None).sleep(60)


@pytest.mark.process
def test_a_process_in_which_somebody_keeps_pythons_lock_is_killed_at_the_deadline_of_an_abort() -> None:
    with workers(1) as (worker,):
        worker.start(abort_while_the_lock_is_kept)
        assert worker.status(30) == -signal.SIGKILL


def arm_backstop(seconds: float) -> int | None:
    """In a worker."""
    return Backstop(seconds).pid


@pytest.mark.process
def test_a_backstop_ends_with_its_process_and_kills_nobody_else() -> None:
    with workers(1) as (worker,):
        worker.start(arm_backstop, 100.0)
        pid = worker.answer()
        assert not is_gone(pid)
    assert wait_until(lambda: is_gone(pid))


def test_a_backstop_that_is_taken_back_is_gone() -> None:
    backstop = Backstop(0.1)
    pid = backstop.pid
    assert pid is not None
    assert repr(backstop) == f"Backstop({pid})"
    for _ in range(2):
        backstop.take_back()
        assert is_gone(pid)
    assert repr(backstop) == "Backstop(none)"


def test_without_a_shell_there_is_no_backstop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    backstop = Backstop(0.1)
    assert backstop.pid is None
    backstop.take_back()
    assert "nothing ends this process should a device hang" in caplog.text


def is_gone(pid: int) -> bool:
    """Not even a zombie is left."""
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_process_can_exit_while_an_abort_hangs() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", EXITING], env=environment, capture_output=True, timeout=110)
    # By itself, after EXIT_WAIT_S, or by the deadline of the abort, where that is first.
    assert done.returncode in (3, EXIT_STUCK)


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_process_can_exit_while_an_init_hangs_that_was_given_up() -> None:
    """It may never return: the end of the process waits for EXIT_WAIT_S, and goes on without it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK_IN_INIT], env=environment, capture_output=True, timeout=110)
    assert (done.returncode, done.stderr) == (3, b"")
    assert time.monotonic() - begin < HANG_S


@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_end_of_a_process_waits_for_a_communicator_that_takes_long_to_drop() -> None:
    """On an H100 the process crashed: a thread of torch's needed the interpreter when that was gone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", DROPPING], env=environment, capture_output=True, timeout=110)
    assert (done.returncode, done.stdout.strip()) == (0, b"dropped"), done.stderr
