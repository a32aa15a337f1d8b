"""`PeerEnds`: real TCP connections on the loopback device."""

from __future__ import annotations

import queue
import socket
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ft_core.process_group.peer_ends import SUPPORTED, PeerEnds
from tests.descriptors import descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="no epoll: nothing is watched there")
SOON_S = 5.0
NEVER_S = 0.2


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        mine = socket.create_connection(server.getsockname())
        return mine, server.accept()[0]


@pytest.fixture
def told() -> queue.Queue[int]:
    return queue.Queue()


@pytest.fixture
def ends(told: queue.Queue[int]) -> Iterator[PeerEnds]:
    watch = PeerEnds("test", told.put)
    yield watch
    watch.stop()


def test_the_end_of_one_of_several_connections_is_told_once(ends: PeerEnds, told: queue.Queue[int]) -> None:
    pairs = [pair() for _ in range(3)]
    ends.watch(7, [mine.fileno() for mine, _ in pairs])
    for _, theirs in pairs[1:]:
        theirs.close()
    assert told.get(timeout=SOON_S) == 7
    with pytest.raises(queue.Empty):
        told.get(timeout=NEVER_S)
    for mine, theirs in pairs:
        mine.close()
        theirs.close()


def test_it_is_told_also_if_what_the_peer_sent_was_not_read(ends: PeerEnds, told: queue.Queue[int]) -> None:
    mine, theirs = pair()
    with mine, theirs:
        ends.watch(1, [mine.fileno()])
        theirs.sendall(b"x" * 1000)
        with pytest.raises(queue.Empty):
            told.get(timeout=NEVER_S)
        theirs.shutdown(socket.SHUT_RDWR)
        assert told.get(timeout=SOON_S) == 1


def test_what_ended_before_it_was_watched_is_told(ends: PeerEnds, told: queue.Queue[int]) -> None:
    mine, theirs = pair()
    with mine:
        theirs.close()
        ends.watch(2, [mine.fileno()])
        assert told.get(timeout=SOON_S) == 2


def test_only_the_group_of_now_is_watched(ends: PeerEnds, told: queue.Queue[int]) -> None:
    old, new = pair(), pair()
    ends.watch(1, [old[0].fileno()])
    ends.watch(2, [new[0].fileno()])
    old[1].close()
    with pytest.raises(queue.Empty):
        told.get(timeout=NEVER_S)
    new[1].close()
    assert told.get(timeout=SOON_S) == 2
    old[0].close()
    new[0].close()


def test_it_keeps_no_connection_open(ends: PeerEnds) -> None:
    mine, theirs = pair()
    with theirs:
        ends.watch(1, [mine.fileno()])
        mine.close()
        theirs.settimeout(SOON_S)
        assert theirs.recv(1) == b""


def test_a_descriptor_that_is_closed_already_is_left_out(ends: PeerEnds, told: queue.Queue[int]) -> None:
    gone, (mine, theirs) = pair(), pair()
    fd = gone[0].fileno()
    gone[0].close()
    gone[1].close()
    with mine:
        ends.watch(3, [fd, mine.fileno()])
        theirs.close()
        assert told.get(timeout=SOON_S) == 3


def test_stop_leaves_nothing_behind(told: queue.Queue[int]) -> None:
    before = descriptors()
    mine, theirs = pair()
    watch = PeerEnds("test", told.put)
    for number in range(5):
        watch.watch(number, [mine.fileno()])
    watch.stop()
    watch.stop()
    watch.watch(9, [mine.fileno()])
    mine.close()
    theirs.close()
    assert told.empty()
    assert descriptors() - before == set()
