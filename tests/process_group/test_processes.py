"""Real processes, really killed. Bounds are far above what is measured (1-15 ms) and far below any timeout (20 s)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.process_group import ranks
from tests.process_group.ranks import AT_ONCE_S, HOST_KINDS, Store, Worker, call_all, workers

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture(params=[kind.__name__ for kind in HOST_KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def form(members: list[Worker], store: Store, kind: str) -> list[float]:
    address = store.fresh()
    call_all(members, ranks.use, lambda _: (kind,))
    return call_all(members, ranks.configure, lambda rank: ("main", address, rank, len(members)))


def leave_pending(members: list[Worker]) -> None:
    """Every member has an allreduce running that cannot end, and waits for it."""
    call_all(members, ranks.launch, lambda _: ("main",))
    for member in members:
        member.start(ranks.wait_for_failure, "main")


def test_one_abort_ends_every_survivors_wait_and_the_rest_goes_on(store: Store, kind: str) -> None:
    with workers(4) as members:
        form(members, store, kind)
        victim, survivors = members[1], [members[0], members[2], members[3]]
        aborting, waiting = members[0], [members[2], members[3]]
        call_all(survivors, ranks.launch, lambda _: ("main",))
        for member in waiting:
            member.start(ranks.wait_for_failure, "main")
        victim.signal(signal.SIGKILL)
        begin, took_s = aborting.call(ranks.abort, "main")
        ends = [member.answer() for member in waiting] + [aborting.call(ranks.wait_for_failure, "main")]
        assert took_s < AT_ONCE_S
        for end, error in ends:
            assert error == "CollectiveError"
            assert end - begin < AT_ONCE_S
        assert all(member.call(ranks.errored, "main") == "CollectiveError" for member in survivors)
        form(survivors, store, kind)
        assert call_all(survivors, ranks.allreduce, lambda _: ("main",)) == [3.0] * 3


def test_an_abort_ends_the_waits_of_living_peers_too(store: Store, kind: str) -> None:
    with workers(3) as members:
        form(members, store, kind)
        leave_pending(members[:2])  # the third never joins
        begin, _ = members[2].call(ranks.abort, "main")
        for member in members[:2]:
            end, error = member.answer()
            assert error == "CollectiveError"
            assert end - begin < AT_ONCE_S


def test_a_frozen_peer_does_not_hold_up_an_abort(store: Store, kind: str) -> None:
    with workers(3) as members:
        form(members, store, kind)
        call_all(members[:2], ranks.launch, lambda _: ("main",))
        members[2].signal(signal.SIGSTOP)
        for member in members[:2]:
            begin, _ = member.call(ranks.abort, "main")
            end, error = member.call(ranks.wait_for_failure, "main")
            assert error == "CollectiveError"
            assert end - begin < AT_ONCE_S
        form(members[:2], store, kind)
        members[2].signal(signal.SIGCONT)
        assert call_all(members[:2], ranks.allreduce, lambda _: ("main",)) == [2.0] * 2


def test_a_killed_process_is_noticed_though_its_forked_child_lives(store: Store, kind: str) -> None:
    with workers(2) as members:
        form(members, store, kind)
        child = members[1].call(ranks.fork_idle_child)
        try:
            # The child has not touched the connection: the group still works.
            assert call_all(members, ranks.allreduce, lambda _: ("main",)) == [2.0] * 2
            leave_pending(members[:1])
            begin = time.monotonic()
            members[1].signal(signal.SIGKILL)
            end, error = members[0].answer()
            assert error == "CollectiveError"
            assert end - begin < AT_ONCE_S
            os.kill(child, 0)  # it was alive all the time
        finally:
            os.kill(child, signal.SIGKILL)


def test_two_lanes_in_each_process_are_independent(store: Store, kind: str) -> None:
    with workers(2) as members:
        form(members, store, kind)
        address = store.fresh()
        call_all(members, ranks.configure, lambda rank: ("other", address, rank, 2))
        leave_pending(members[:1])
        members[1].call(ranks.abort, "main")
        assert members[0].answer()[1] == "CollectiveError"
        assert call_all(members, ranks.allreduce, lambda _: ("other",)) == [2.0] * 2


EXITING = """
import sys, threading
from datetime import timedelta
import torch
import ft_core.process_group
from tests.process_group.ranks import HOST_KINDS, Store, configure_all, wait_until

store = Store()
kind = getattr(ft_core.process_group, sys.argv[2])
groups = [kind(timedelta(seconds=100)) for _ in range(2)]
if sys.argv[1] == "forming":
    threading.Thread(target=lambda: groups[0].configure(store.fresh(), "replica0", 0, 2), daemon=True).start()
    assert wait_until(lambda: "forming" in repr(groups[0]))
else:
    configure_all(groups, store.fresh())
    work = groups[0].allreduce([torch.ones(9)])
    if sys.argv[1] == "waiting":
        threading.Thread(target=work.wait, daemon=True).start()
raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        ("forming pending", "ProcessGroupBabyGloo"),
        ("waiting", "ProcessGroupGloo"),
        pytest.param("forming pending", "ProcessGroupGloo", marks=pytest.mark.long),
        pytest.param("waiting", "ProcessGroupBabyGloo", marks=pytest.mark.long),
    ],
)
def test_a_process_can_always_exit(kind: str, states: str) -> None:
    """Whatever runs: no wait for a collective's timeout, no abort of the process by a destructor."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    ending = [
        subprocess.Popen([sys.executable, "-c", EXITING, state, kind], env=environment, stderr=subprocess.DEVNULL)
        for state in states.split()
    ]
    try:
        assert [process.wait(80) for process in ending] == [3] * len(ending)
    finally:
        for process in ending:
            process.kill()


LATE = """
import contextlib, ctypes, sys, threading, time
from datetime import timedelta
import torch
from ft_core import ProcessGroupGloo
from ft_core.errors import CollectiveError
from ft_core.process_group.gloo import incarnation
from ft_core.process_group.gloo.connections import GroupConnections
from tests.process_group.ranks import Store, configure_all

GroupConnections.end = lambda self: None  # the work is lost: nothing ends it but its timeout
incarnation.EXIT_WAIT_S = 0.05
store = Store()
groups = [ProcessGroupGloo(timedelta(seconds=20)) for _ in range(2)]
configure_all(groups, store.fresh())
kept = groups[1]._incarnation._held  # else it is destroyed, and closes the connection
groups[0].set_timeout(timedelta(seconds=1.5))
work = groups[0].allreduce([torch.ones(9)])
if sys.argv[1] == "future":
    future = work.get_future()
else:
    def wait():
        with contextlib.suppress(CollectiveError):  # told, if this thread comes so far before the interpreter ends
            work.wait()

    threading.Thread(target=wait, daemon=True).start()

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(3)

if sys.argv[2] == "within":
    sys.modules["slow"] = Slow()
else:
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(ctypes.cast(libc.usleep, ctypes.c_void_p), ctypes.c_void_p(3_000_000), None)
print("ends")
raise SystemExit(3)
"""


@pytest.mark.parametrize("when", ["within", "after"])
@pytest.mark.parametrize("what", ["future", "wait"])
def test_a_collective_that_outlasts_the_interpreter_does_not_end_the_process(what: str, when: str) -> None:
    """Its future is completed, or the wait for it returns, while the interpreter ends, or when it has ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", LATE, what, when], env=environment, capture_output=True, text=True, timeout=80
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "ends\n", "")


def test_an_interpreter_that_does_not_end_beside_such_threads_is_ended() -> None:
    """As where the thread that ends it is the one that std::terminate lets sleep."""
    script = """
import signal, threading
from ft_core.process_group.gloo import last_threads
signal.signal(signal.SIGALRM, signal.SIG_IGN)
last_threads.LIMIT_S = 1
last_threads.outlast()
threading.Event().wait(60)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, timeout=40, check=False)
    assert done.returncode == -signal.SIGALRM


def test_a_group_that_outlives_its_modules_ends_without_a_word(kind: str) -> None:
    """Held by torch itself, it is collected when the ending interpreter has emptied our modules already."""
    script = (
        f"import torch; from ft_core import {kind} as kind; group = kind(); "
        "group.configure('nowhere:1/x', 'a', 0, 1); torch._C.held = group"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=80)
    assert (done.returncode, done.stderr) == (0, "")
