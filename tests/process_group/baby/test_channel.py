"""`Channel` between two ends in this process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from ft_core.errors import CollectiveError
from ft_core.process_group.baby import channel
from ft_core.process_group.baby.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in Channel.pair())
    yield one, other
    one.close()
    other.close()


def test_messages_of_any_size_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    sizes = [0, 1, channel.FRAGMENT_BYTES - 1, channel.FRAGMENT_BYTES, channel.FRAGMENT_BYTES + 1, 700_000]

    def send() -> None:
        for size in sizes:
            ends[0].send((bytes(size),))

    sender = threading.Thread(target=send)
    sender.start()
    assert [ends[1].receive() for _ in sizes] == [((bytes(size),), []) for size in sizes]
    sender.join()


def test_threads_that_send_at_the_same_time_mix_nothing(ends: tuple[Channel, Channel]) -> None:
    def send(name: int) -> None:
        for turn in range(50):
            ends[0].send((name, turn, bytes([name]) * 100_000))

    senders = [threading.Thread(target=send, args=(name,)) for name in range(3)]
    for sender in senders:
        sender.start()
    turns = [0] * 3
    for _ in range(150):
        received = ends[1].receive()
        assert received is not None
        name, turn, data = received[0]
        assert (turn, data) == (turns[name], bytes([name]) * 100_000)
        turns[name] += 1
    for sender in senders:
        sender.join()


def test_descriptors_arrive_in_order_and_are_not_inherited(ends: tuple[Channel, Channel]) -> None:
    """More than fit into one fragment."""
    count = channel.FDS_PER_FRAGMENT + 3
    files = [os.memfd_create("test") for _ in range(count)]
    for number, fd in enumerate(files):
        os.ftruncate(fd, number)
    ends[0].send(("files",), files)
    received = ends[1].receive()
    assert received is not None
    try:
        assert [os.fstat(fd).st_size for fd in received[1]] == list(range(count))
        assert not any(os.get_inheritable(fd) for fd in received[1])
    finally:
        for fd in (*files, *received[1]):
            os.close(fd)


def test_what_was_sent_before_the_end_is_still_received(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(("last",))
    assert not ends[1].has_ended()
    ends[0].close()
    assert ends[1].has_ended()
    assert ends[1].receive() == (("last",), [])
    assert ends[1].receive() is None
    with pytest.raises(OSError):
        ends[1].send(("nobody",))


def test_shutting_down_wakes_who_sends_and_who_receives(ends: tuple[Channel, Channel]) -> None:
    ended = threading.Semaphore(0)

    def send_until_it_ends() -> None:
        try:
            while True:
                ends[0].send((bytes(10_000),))
        except OSError:
            ended.release()

    def receive() -> None:
        assert ends[0].receive() is None
        ended.release()

    threads = [threading.Thread(target=do) for do in (send_until_it_ends, receive)]
    for thread in threads:
        thread.start()
    ends[0].shut_down()
    for thread in threads:
        thread.join(5)
    assert ended.acquire(blocking=False)
    assert ended.acquire(blocking=False)


def test_a_message_that_is_too_long_is_refused(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(CollectiveError, match="at most 1000"):
        ends[0].send((bytes(1000),))
