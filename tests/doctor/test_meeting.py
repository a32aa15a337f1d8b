"""The meeting itself: rounds among those that are there, whoever comes, goes, falls silent or is something else."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.doctor import meeting as meeting_
from ft_core.doctor.meeting import Meeting
from ft_core.doctor.member import Member
from ft_core.errors import ConfigError, LighthouseError
from tests.doctor import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.held_ports import Hold


WAIT_S = 20.0


@contextlib.contextmanager
def held(hosts: int) -> Iterator[Meeting]:
    made = Meeting(0, hosts, WAIT_S)
    made.start()
    try:
        yield made
    finally:
        made.close()
        made.close()  # idempotent


@contextlib.contextmanager
def members(meeting: Meeting, count: int) -> Iterator[list[Member]]:
    """They have joined, one after the other."""
    with contextlib.ExitStack() as stack:
        made = [Member("127.0.0.1", meeting.port, WAIT_S) for _ in range(count)]
        for one in made:
            stack.callback(one.close)
            one.join()
        yield made


def at_once(work: Callable[[Member], Any], those: list[Member]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(those)) as threads:
        return list(threads.map(work, those))


def test_all_get_the_values_of_all() -> None:
    with held(3) as meeting, members(meeting, 3) as three:
        assert [one.index for one in three] == [0, 1, 2]
        assert len({one.nonce for one in three}) == 1
        for name in ("first", "second"):
            found = at_once(lambda one, name=name: one.round(name, f"{name} of {one.index}"), three)  # type: ignore[misc]
            assert found == [{i: f"{name} of {i}" for i in range(3)}] * 3


def test_as_many_as_a_big_job_has() -> None:
    """Each with facts of a host's size; what all get is encoded once."""
    many = 100
    with held(many) as meeting, members(meeting, many) as those:
        found = at_once(lambda one: one.round("facts", "x" * 3000), those)
    assert [len(values) for values in found] == [many] * many


def test_clocks_are_compared() -> None:
    with held(1) as meeting:
        late = Member("127.0.0.1", meeting.port, WAIT_S, clock=lambda: 100.0)
        meeting._clock = lambda: 60.0
        late.join()
        assert late.offset() == (40.0, 0.0)
        late.close()


def test_who_has_not_come_in_time_is_not_waited_for_and_not_let_in_later() -> None:
    with held(3) as meeting, members(meeting, 2) as two:
        assert meeting._loop is not None
        meeting._loop.call_soon_threadsafe(meeting.begin)  # as after --wait
        assert at_once(lambda one: one.round("facts", 1), two) == [{0: 1, 1: 1}] * 2
        with pytest.raises(LighthouseError, match="began without you"):
            Member("127.0.0.1", meeting.port, WAIT_S).join()


def test_more_hosts_than_expected_are_refused() -> None:
    with (
        held(2) as meeting,
        members(meeting, 2),
        pytest.raises(LighthouseError, match="all 2 hosts have come already: is --hosts 2 right"),
    ):
        Member("127.0.0.1", meeting.port, WAIT_S).join()


def test_who_leaves_before_it_begins_may_come_again() -> None:
    """Somebody has pressed Ctrl-C on one host, and starts ft-doctor there again."""
    with held(2) as meeting, members(meeting, 1) as (stays,), concurrent.futures.ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(stays.round, "facts", "a")
        with members(meeting, 1) as (goes,):
            assert goes._socket is not None
            goes._socket.sendall(b'{"round": "other", "value": 1}\n')
        with members(meeting, 1) as (again,):
            assert again.round("facts", "b") == {0: "a", 2: "b"}
            assert waiting.result(WAIT_S) == {0: "a", 2: "b"}


def test_who_leaves_in_the_middle_is_not_waited_for() -> None:
    with held(3) as meeting, members(meeting, 3) as three:
        at_once(lambda one: one.round("facts", 1), three)
        three[2].close()
        assert at_once(lambda one: one.round("reach", 2), three[:2]) == [{0: 2, 1: 2}] * 2


def test_who_falls_silent_is_left_out_and_all_others_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_, "ROUND_S", 2.0)
    with held(3) as meeting, members(meeting, 3) as three:
        at_once(lambda one: one.round("facts", 1), three)
        assert at_once(lambda one: one.round("reach", 2), three[:2]) == [{0: 2, 1: 2}] * 2
        assert at_once(lambda one: one.round("rates", 3), three[:2]) == [{0: 3, 1: 3}] * 2
        with pytest.raises(LighthouseError, match="does not go on"):
            three[2].round("reach", 2)


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n", b"[]\n", b"{}\n", b'"text"\n', b'{"ft-doctor": 99}\n', b"\xff\xfe\n", b""]
)
def test_nonsense_ends_its_own_connection_only(line: bytes) -> None:
    with held(1) as meeting:
        with socket.create_connection(("127.0.0.1", meeting.port), 5) as stranger:
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            answer = stranger.recv(1000)
            assert answer == b"" or "version 1" in json.loads(answer)["refused"]
        with members(meeting, 1) as (one,):
            assert one.round("facts", 7) == {0: 7}


@pytest.mark.parametrize("message", [{"round": "x"}, {"value": 1}, {"unknown": 1}])
def test_a_member_that_sends_nonsense_is_out(message: dict[str, Any]) -> None:
    with held(2) as meeting, members(meeting, 2) as (good, bad):
        with pytest.raises(LighthouseError, match="it has ended"):
            bad._ask(message, 5)
        with members(meeting, 1) as (instead,):
            assert at_once(lambda one: one.round("facts", 1), [good, instead]) == [{0: 1, 2: 1}] * 2


def test_there_are_not_more_rounds_than_there_should_be() -> None:
    with held(1) as meeting, members(meeting, 1) as (one,):
        for number in range(meeting_.ROUNDS_MAX):
            one.round(str(number), None)
        with pytest.raises(LighthouseError, match="it has ended"):
            one.round("more", None)


def test_a_meeting_that_ends_ends_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_, "END_S", 0.1)
    with held(2) as meeting, members(meeting, 1) as (one,), concurrent.futures.ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(one.round, "facts", 1)
        meeting.close()
        with pytest.raises(LighthouseError, match="does not go on"):
            waiting.result(WAIT_S)


def test_nobody_holds_it(hold: Hold) -> None:
    (port,) = hold()
    with pytest.raises(ConfigError, match=f"nobody holds the meeting at 127.0.0.1:{port} .Connection refused."):
        Member("127.0.0.1", port, 0.1).join()


@pytest.mark.parametrize(
    "unasked",
    [
        b"SSH-2.0-x\r\n",
        b"[1]\n",
        b"x" * 100 + b"\n",
        b'{"error":"bad request"}\n',
        b'{"index":"x","hosts":2,"nonce":"n"}\n',
    ],
)
def test_something_else_answers_there(unasked: bytes) -> None:
    with servers.server(unasked) as where:
        one = Member("127.0.0.1", int(where.rpartition(":")[2]), 1.0)
        with pytest.raises(LighthouseError, match="is no meeting of ft-doctor"):
            one.join()
        one.close()


@pytest.mark.parametrize("then", [b'{"error":1}\n', b'{"t":"x","values":[]}\n', b'{"t":null,"values":{"x":1}}\n'])
def test_something_else_answers_there_later(then: bytes) -> None:
    hello = b'{"ft-doctor":1,"index":0,"hosts":2,"nonce":"n"}\n'
    with servers.server(hello + then + then) as where:
        one = Member("127.0.0.1", int(where.rpartition(":")[2]), 1.0)
        one.join()
        with pytest.raises(LighthouseError, match="is no meeting of ft-doctor"):
            one.offset()
        with pytest.raises(LighthouseError, match="is no meeting of ft-doctor"):
            one.round("facts", None)
        one.close()


@pytest.mark.parametrize("hosts", [0, -1, 100_000])
def test_a_number_of_hosts_that_cannot_be(hosts: int) -> None:
    with pytest.raises(ConfigError, match=r"--hosts .* must be between 1 and"):
        Meeting(0, hosts, 1.0)


def test_what_they_say_of_themselves() -> None:
    with held(2) as meeting, members(meeting, 1) as (one,):
        assert repr(meeting) == f"Meeting(port={meeting.port}, 1 of 2 hosts)"
        assert repr(one) == f"Member(('127.0.0.1', {meeting.port}), index=0)"
