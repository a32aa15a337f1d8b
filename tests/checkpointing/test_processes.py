"""Real processes that are killed: the other donor finishes, the error names everybody, forked children hold nothing."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_core.checkpointing import StateServer, fetch
from ft_core.errors import HealError
from tests.checkpointing.conftest import assert_same_state, make_state

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    children: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.checkpointing.donor_process", *map(str, arguments)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        children.append(child)
        return child

    yield start
    for child in children:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.stdout.close()
        try:
            child.wait(10)
        finally:
            child.kill()


def line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_donor_killed_in_the_middle_is_replaced(spawn: Spawn, donor: Callable[..., StateServer]) -> None:
    state = make_state(3, 48)
    dying = line(spawn(3, 48, "die"))
    server = donor()
    server.offer("t", state)
    result = fetch([dying, server.address], "t", into=make_state(4, 48))
    assert_same_state(result.state, state)
    assert server.address in result.donors_used


def test_when_all_are_killed_all_are_named(spawn: Spawn) -> None:
    children = [spawn(3, 48, "die"), spawn(3, 48, "die")]
    addresses = [line(child) for child in children]
    with pytest.raises(HealError) as e:
        fetch(addresses, "t", deadline_s=20)
    assert all(f"{address}: " in str(e.value) for address in addresses)
    assert "Connection re" in str(e.value)
    assert [child.wait(5) for child in children] == [-signal.SIGKILL] * 2


def test_a_forked_child_holds_no_socket_of_a_killed_donor(spawn: Spawn) -> None:
    child = spawn(3, 8, "fork")
    worker, address = int(line(child)), line(child)
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as idle:
        idle.settimeout(5)
        assert fetch([address], "t").bytes > 8 << 20
        child.kill()
        assert idle.recv(1) == b""
        with pytest.raises(HealError, match="Connection refused"):
            fetch([address], "t", deadline_s=5)
        os.kill(worker, 0)  # it still lives, and kept nothing alive


def test_a_fork_during_a_transfer_hurts_neither(donor: Callable[..., StateServer]) -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("os.fork with threads is a DeprecationWarning, which is an error here")
    state = make_state(1)
    server = donor()
    server.offer("t", state)
    results = []
    thread = threading.Thread(target=lambda: results.append(fetch([server.address], "t")))
    thread.start()
    pids = []
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        pids.append(pid)
    thread.join(20)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 5
    assert_same_state(results[0].state, state)
