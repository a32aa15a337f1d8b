"""Real processes killed, frozen and kept busy; and the lighthouse as a command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse.server import LighthouseServer
from tests.control.processes import ROOT, start_lighthouse
from tests.control.recorder import Replica, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.control.processes import Child

pytestmark = pytest.mark.process
LIVENESS_S = 1.0
"""Half of it, and a machine that wrote gigabytes beside the tests stood still for so long while a pair was joining."""


@pytest.fixture
def liveness_s() -> float:
    return LIVENESS_S


@pytest.fixture
def server(liveness_s: float) -> Iterator[LighthouseServer]:
    lighthouse = LighthouseServer("127.0.0.1:0", boot_window_ms=20, liveness_ms=int(liveness_s * 1000), token="")
    yield lighthouse
    lighthouse.shutdown()


@pytest.fixture
def pair(server: LighthouseServer, child: Callable[..., Child]) -> Iterator[tuple[Replica, Child]]:
    """A replica here and one in a process, in one quorum."""
    mine = Replica(server.address(), "a:1", expected=2)
    other = child("tests.control.child", server.address(), "b:1")
    try:
        mine.lease.wait_connected(5)
        assert other.line() == "asks"  # else a quorum of one would form after join_s, however long a process starts
        mine.ask()
        assert other.line() == "quorum a:1 b:1"
        assert mine.answer().ids == ("a:1", "b:1")
        yield mine, other
    finally:
        mine.close()


@pytest.mark.parametrize("liveness_s", [5.0])  # a stall of this machine is none of theirs, and says nothing
def test_a_killed_process_is_lost_before_the_liveness_timeout(pair: tuple[Replica, Child], liveness_s: float) -> None:
    """After the grace of 0.1 s, where nothing else runs."""
    mine, other = pair
    killed = time.monotonic()
    other.process.kill()
    assert mine.recorder.wait("member_lost")[1] == ("b:1",)
    assert time.monotonic() - killed < 0.3 * liveness_s


@pytest.mark.parametrize("liveness_s", [5.0])
def test_also_while_a_forked_child_of_it_lives(pair: tuple[Replica, Child], liveness_s: float) -> None:
    mine, other = pair
    other.say("fork")
    assert other.line() == "forked"
    killed = time.monotonic()
    other.process.kill()
    assert mine.recorder.wait("member_lost")[1] == ("b:1",)
    assert time.monotonic() - killed < 0.3 * liveness_s
    assert other.end()[1] == "", "forking under an open lease prints nothing"


def test_a_frozen_process_is_lost_after_the_liveness_timeout(pair: tuple[Replica, Child]) -> None:
    mine, other = pair
    frozen = time.monotonic()
    other.process.send_signal(signal.SIGSTOP)
    assert mine.recorder.wait("member_lost")[1] == ("b:1",)
    assert 0.8 * LIVENESS_S < time.monotonic() - frozen < 2 * LIVENESS_S + 0.5
    mine.ask(step=2, failed=True)
    assert mine.answer().ids == ("a:1",)


def test_holding_the_gil_is_not_death(pair: tuple[Replica, Child]) -> None:
    mine, other = pair
    other.say(f"hold {2.5 * LIVENESS_S}")
    assert other.line() == "holding"
    assert other.line() == "held"
    assert mine.recorder.of("member_lost") == []


def test_a_trainer_that_ends_without_shutdown_ends(pair: tuple[Replica, Child]) -> None:
    _, other = pair
    other.say("exit")
    assert other.process.wait(10) == 0
    assert other.end()[1] == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_where_it_listens_and_ends_cleanly(child: Callable[..., Child], number: int) -> None:
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0", "--min_replicas", "1", "--quorum-tick-ms", "7")
    assert re.fullmatch(r"dashboard: http://localhost:\d+", process.line())
    one = Replica(address, "a:1")
    one.lease.wait_connected(5)
    one.ask()
    one.answer()
    process.process.send_signal(number)
    assert process.process.wait(10) == 0
    out, log = process.end()
    assert out == ""
    assert "quorum of 1 at step 0: a:1" in log
    assert "Traceback" not in log
    one.close()


def test_the_command_refuses_what_cannot_work(child: Callable[..., Child]) -> None:
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0")
    for arguments, words in (
        (["--bind", address.removeprefix("http://")], "in use"),
        (["--min-replicas", "0"], "--min-replicas 0 must be at least 1"),
        (["--bind", "nowhere"], "--bind 'nowhere'"),
        (["--bind", "127.0.0.1:0", "--http", address.removeprefix("http://")], "--http 127.0.0.1:"),
        (["--bind", "127.0.0.1:0", "--http", "0.0.0.0:0"], "--http 0.0.0.0:0 without FT_TOKEN"),
    ):
        wrong = child("ft_core.lighthouse", *arguments)
        out, log = wrong.process.communicate(timeout=10)
        assert wrong.process.returncode == 2
        assert out == ""
        assert words in log
        assert "Traceback" not in log
    process.process.terminate()
    assert process.process.wait(10) == 0


def test_the_command_runs_without_torch(child: Callable[..., Child]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "import ft_core.lighthouse as l, ft_core.coordination, ft_core.control.link\n"
        "try: l.main(['--version'])\nexcept SystemExit as e: sys.exit(e.code)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ft-lighthouse ")


def test_a_killed_lighthouse_is_found_again_at_once(child: Callable[..., Child]) -> None:
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0")
    one = Replica(address, "a:1")
    one.lease.wait_connected(5)
    one.ask()
    one.answer()
    process.process.kill()
    wait_until(lambda: not one.lease.connected)
    acked = one.lease.last_ack
    threading.Event().wait(1.0)  # the lighthouse stays away long enough for any back-off to reach its maximum
    start_lighthouse(child, "--bind", address.removeprefix("http://"))
    listening = time.monotonic()
    wait_until(lambda: one.lease.connected)
    assert time.monotonic() - listening < 0.5
    assert one.lease.last_ack > acked
    one.close()


def test_a_frozen_lighthouse_loses_nobody(child: Callable[..., Child]) -> None:
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0", "--liveness-ms", "500")
    replicas = [Replica(address, f"{name}:1", expected=3) for name in "abc"]
    for one in replicas:
        one.lease.wait_connected(5)
        one.ask()
    quorum_id = {one.answer().quorum_id for one in replicas}
    assert len(quorum_id) == 1
    process.process.send_signal(signal.SIGSTOP)
    threading.Event().wait(1.5)
    process.process.send_signal(signal.SIGCONT)
    thawed = time.monotonic()
    wait_until(lambda: all(one.lease.last_ack > thawed for one in replicas))
    assert time.monotonic() - thawed < 1.0
    newcomer = Replica(address, "d:1", expected=3)
    newcomer.lease.wait_connected(5)
    newcomer.ask()
    for one in replicas:
        one.recorder.wait("change_pending")
        assert one.recorder.of("member_lost") == []
    for one in (newcomer, *replicas):
        one.close()


def test_the_command_ends_at_the_first_of_many_signals(child: Callable[..., Child]) -> None:
    """Launchers repeat SIGTERM, and mean one."""
    lighthouse = child("ft_core.lighthouse", "--bind", "127.0.0.1:0")
    assert lighthouse.line().startswith("ft-lighthouse listens on ")
    while lighthouse.process.poll() is None:
        lighthouse.process.send_signal(signal.SIGTERM)
    assert lighthouse.process.wait(10) == 0


def test_the_command_ends_at_a_signal_for_which_no_handler_runs(child: Callable[..., Child]) -> None:
    """As one that came just before the main thread waited in C; a mask of the launcher's does that in every run."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        lighthouse, _ = start_lighthouse(child, "--bind", "127.0.0.1:0")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    lighthouse.process.send_signal(signal.SIGTERM)
    assert lighthouse.process.wait(10) == 0
