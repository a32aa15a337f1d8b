"""A death is known before the process is gone; what is none is not taken for one. Real processes, real signals."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import pytest

from ft_core.launch.processes.keeper import NOTICE, Keeper
from ft_core.witness import robust_mutex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

pytestmark = [
    pytest.mark.process, pytest.mark.timeout(60),
    pytest.mark.skipif(not robust_mutex.SUPPORTED, reason="no robust mutexes here"),
]  # fmt: skip
ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 20.0
QUIET_S = 0.3
"""A connection that is to stay open is watched for so long."""


def readable(what: int | socket.socket | IO[str], within_s: float) -> bool:
    """Not by `select`, which knows descriptors up to 1023 only: a process of all tests may have more."""
    poll = select.poll()
    poll.register(what, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


class Watched:
    """A `subject` process, the test's end of its connection, and its witness."""

    def __init__(self, *prefix: str, **env: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        door = socket.create_server(("127.0.0.1", 0))
        with door:
            port = door.getsockname()[1]
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.witness.subject", str(port)],
                cwd=ROOT, env={**os.environ, **env},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, bufsize=1,
            )  # fmt: skip
            door.settimeout(LIMIT_S)
            self.connection, _ = door.accept()
        assert self.line() == "ready"

    def said(self) -> str:
        """On standard error, so far."""
        self.errors.seek(0)
        return self.errors.read()

    def line(self) -> str:
        assert self.process.stdout is not None
        assert readable(self.process.stdout, LIMIT_S), "it says nothing"
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")

    def do(self, *words: str) -> None:
        for word in words:
            self.tell(word)
            assert self.line() == word

    def witnesses(self) -> list[int]:
        """Its children that are witnesses."""
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task")
        children = [child for task in tasks.iterdir() for child in (task / "children").read_text().split()]
        found = []
        for child in children:
            with contextlib.suppress(OSError):
                if b"witness/process.py" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def witness(self) -> int:
        """Its own one, once that waits and has been told all: the mutex is sent before what ends with it."""
        until(lambda: bool(self.witnesses()) and sleeps(self.witnesses()[0]), "a witness that waits")
        witness = self.witnesses()[0]
        self.do("linked")
        return witness

    def ends_within(self, limit_s: float) -> bool:
        """The other side of the connection is told that this process is gone."""
        return readable(self.connection, limit_s) and self.connection.recv(1) == b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.errors.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def sleeps(pid: int) -> bool:
    """All of its threads wait: one for messages, and one for each mutex."""
    with contextlib.suppress(OSError):
        states = [
            pathlib.Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0]
            for task in os.listdir(f"/proc/{pid}/task")
        ]
        return len(states) >= 2 and set(states) == {"S"}
    return False


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"there was never {what}"
        select.select([], [], [], 0.005)


def is_gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
def test_a_killed_process_is_known_to_be_dead(watched: Watched, number: int) -> None:
    watched.do("hold")
    witness = watched.witness()
    os.kill(watched.process.pid, number)
    assert watched.ends_within(5.0)
    watched.process.wait()
    until(lambda: is_gone(witness), "an end of the witness")


def test_the_thread_that_trains_need_not_be_the_main_one(watched: Watched) -> None:
    watched.do("hold_in_a_thread")
    watched.witness()
    watched.process.kill()
    assert watched.ends_within(5.0)


@pytest.mark.parametrize(
    "words",
    [("fork",), ("fork_and_kill",), ("hold_in_a_thread_that_ends",), ("raise_in_a_thread",), ("release",)],
    ids=lambda words: words[0],
)
def test_what_is_no_death_ends_nothing(watched: Watched, words: tuple[str, ...]) -> None:
    watched.do("hold")
    watched.witness()
    watched.do(*words)
    assert not watched.ends_within(QUIET_S)


def test_a_stopped_process_is_not_dead(watched: Watched) -> None:
    """As under a debugger."""
    watched.do("hold")
    watched.witness()
    os.kill(watched.process.pid, signal.SIGSTOP)
    assert not watched.ends_within(QUIET_S)
    os.kill(watched.process.pid, signal.SIGCONT)
    watched.do("fork")
    watched.process.kill()
    assert watched.ends_within(5.0)


@pytest.mark.parametrize("how", ["exit", "raise_"])
def test_a_regular_end_is_left_to_the_kernel(watched: Watched, how: str) -> None:
    watched.do("hold")
    witness = watched.witness()
    watched.tell(how)
    watched.process.wait(LIMIT_S)
    assert not watched.ends_within(QUIET_S)  # its child has it open
    assert "ignored" not in watched.said()
    until(lambda: is_gone(witness), "an end of the witness")


def test_an_exec_is_no_death(watched: Watched) -> None:
    watched.do("hold")
    witness = watched.witness()
    watched.tell("exec")
    assert watched.line() == "new"
    assert not watched.ends_within(QUIET_S)
    until(lambda: is_gone(witness), "an end of the witness")


def test_it_can_be_released_by_any_thread_and_taken_again(watched: Watched) -> None:
    watched.do("hold", "release_from_another_thread", "hold", "hold_in_a_thread")
    watched.witness()
    watched.process.kill()
    assert watched.ends_within(5.0)


def test_several_managers_in_one_process(watched: Watched) -> None:
    """One is shut down; the death is told for the other."""
    watched.do("hold", "hold_another", "release")
    watched.witness()
    assert not watched.ends_within(QUIET_S)
    watched.process.kill()
    assert watched.ends_within(5.0)


def test_a_witness_that_was_killed_is_replaced(watched: Watched) -> None:
    watched.do("hold")
    first = watched.witness()
    os.kill(first, signal.SIGKILL)
    until(lambda: watched.witnesses() not in ([first], []), "another witness")
    watched.witness()
    watched.process.kill()
    assert watched.ends_within(5.0)


def test_ftrun_is_told_of_a_death_by_its_keeper_and_by_the_next_one() -> None:
    keeper = Keeper(tempfile.mkdtemp(prefix="keeper."))
    try:
        for _ in range(2):
            one = Watched(FT_WITNESS=keeper.witness_address)
            try:
                one.do("hold", "linked")
                assert one.witnesses() == []
                one.process.kill()
                assert one.ends_within(5.0)
                assert readable(keeper.deaths, LIMIT_S)
                assert os.read(keeper.deaths, 4096) == NOTICE.pack(one.process.pid)
            finally:
                one.close()
            keeper.process.kill()
            keeper.process.wait()
            keeper.renew()
    finally:
        keeper.close()


def test_what_was_sent_just_before_the_death_is_ended_although_it_is_read_after_it() -> None:
    keeper = Keeper(tempfile.mkdtemp(prefix="keeper."))
    try:
        keeper.process.send_signal(signal.SIGSTOP)
        one = Watched(FT_WITNESS=keeper.witness_address)
        try:
            one.do("hold", "linked")
            one.process.kill()
            one.process.wait(LIMIT_S)
            assert not one.ends_within(QUIET_S)
            keeper.process.send_signal(signal.SIGCONT)
            assert one.ends_within(5.0)
        finally:
            one.close()
    finally:
        keeper.close()


def test_ftrun_is_not_told_of_what_is_no_death() -> None:
    keeper = Keeper(tempfile.mkdtemp(prefix="keeper."))
    one = Watched(FT_WITNESS=keeper.witness_address)
    try:
        one.do("hold", "linked", "fork", "fork_and_kill", "hold_in_a_thread_that_ends", "release", "hold", "linked")
        one.tell("exit")
        one.process.wait(LIMIT_S)
        assert not readable(keeper.deaths, QUIET_S)
    finally:
        one.close()
        keeper.close()


def test_witnesses_that_always_end_are_given_up_and_said_once(watched: Watched) -> None:
    """Training goes on."""
    watched.do("hold")
    for _ in range(4):
        witness = watched.witness()
        os.kill(witness, signal.SIGKILL)
        until(functools.partial(is_gone, witness), "its end")
    until(lambda: "no witness" in watched.said(), "a word about it")
    watched.do("update", "release", "hold", "fork")
    assert watched.said().count("no witness for this process: it ended 4 times") == 1


def test_without_descriptors_there_is_no_witness_and_training_goes_on(watched: Watched) -> None:
    watched.do("limit_files", "hold", "update", "release", "hold")
    assert watched.said().count("no witness for this process") == 1


def test_it_can_be_switched_off() -> None:
    watched = Watched(FT_WITNESS="off")
    try:
        watched.do("hold", "update", "release")
        assert watched.witnesses() == []
        assert watched.said() == ""
    finally:
        watched.close()


def test_a_witness_is_small_and_not_waited_for(watched: Watched) -> None:
    watched.do("start_slowly", "hold")
    assert watched.witnesses() == []
    watched.do("start_now")
    witness = watched.witness()
    status = pathlib.Path(f"/proc/{witness}/status").read_text()
    resident_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident_kb <= 12 * 1024


def test_it_survives_the_signals_of_the_terminal(watched: Watched) -> None:
    watched.do("hold")
    witness = watched.witness()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(witness, number)
    watched.process.kill()
    assert watched.ends_within(5.0)
