"""A stranger who connects to a group's port costs it nothing: no descriptor once it has formed, and no quorum ever.

Real processes where it matters who holds which descriptor: a group's ranks in one process see each other's sockets.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ft_core.process_group import ProcessGroupGloo, socket_table
from tests.process_group import ranks
from tests.process_group.ranks import Store, call_all, configure_workers, wait_until, workers

if TYPE_CHECKING:
    from ft_core.process_group.socket_table import Endpoint

pytestmark = [pytest.mark.process, pytest.mark.skipif(not socket_table.SUPPORTED, reason="needs /proc/self/fd")]


# --------------------------------------------------------------------------------------------------------- in a worker


def _port(name: str) -> Endpoint:
    incarnation = ranks._groups[name]._incarnation
    assert incarnation is not None
    where: Endpoint | None = incarnation.connections.listening
    assert where is not None
    return where


def _begin(name: str, store_addr: str, rank: int, world_size: int) -> Endpoint:
    """Begin to form, in the background; the group's port."""
    group = ranks._groups.setdefault(name, ProcessGroupGloo(ranks.GROUP_TIMEOUT))
    ranks._works[name] = pool = ThreadPoolExecutor(1)
    ranks._works[name + " formed"] = pool.submit(group.configure, store_addr, f"replica{rank}", rank, world_size)
    assert wait_until(lambda: getattr(group._incarnation, "connections", None) is not None)
    assert wait_until(lambda: group._incarnation is not None and group._incarnation.connections.listening is not None)
    return _port(name)


def _finish(name: str) -> None:
    ranks._works.pop(name + " formed").result(20)
    ranks._works.pop(name).shutdown()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _doomed(name: str) -> bool:
    incarnation = ranks._groups[name]._incarnation
    assert incarnation is not None
    return bool(incarnation.is_doomed())


# -------------------------------------------------------------------------------------------------------------- tests


def test_a_group_that_has_formed_accepts_nobody(store: Store) -> None:
    with workers(2) as both:
        configure_workers(both, "g", store.fresh())
        place = both[0].call(_port, "g")
        before = both[0].call(_descriptors)
        for _ in range(3):
            with pytest.raises(OSError, match="timed out"):
                socket.create_connection(place, 0.2)
        assert both[0].call(_descriptors) == before
        assert call_all(both, ranks.allreduce, lambda _: ("g",)) == [2.0, 2.0]
        configure_workers(both, "g", store.fresh())  # the next one has a port of its own


def test_who_connects_and_is_silent_is_not_accepted_while_the_group_forms(store: Store) -> None:
    address = store.fresh()
    with workers(2) as both:
        place = both[0].call(_begin, "g", address, 0, 2)
        before = both[0].call(_descriptors)
        strangers = [socket.create_connection(place, 5) for _ in range(20)]
        assert both[0].call(_descriptors) == before
        both[1].call(ranks.configure_only, "g", address, 1, 2)
        both[0].call(_finish, "g")
        assert call_all(both, ranks.allreduce, lambda _: ("g",)) == [2.0, 2.0]
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"], ids=["of another host", "of a peer's host"])
def test_who_talks_to_the_port_while_the_group_forms_is_not_taken_for_a_peer(store: Store, source: str) -> None:
    """Otherwise the group would count as having lost a connection as soon as the stranger goes."""
    address = store.fresh()
    with workers(2) as both:
        place = both[0].call(_begin, "g", address, 0, 2)
        before = both[0].call(_descriptors)
        with socket.create_connection(place, 5, source_address=(source, 0)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
            assert wait_until(lambda: both[0].call(_descriptors) > before)  # Gloo has accepted it
            both[1].call(ranks.configure_only, "g", address, 1, 2)
            both[0].call(_finish, "g")
        assert call_all(both, ranks.allreduce, lambda _: ("g",)) == [2.0, 2.0]
        assert not both[0].call(_doomed, "g")
        both[0].call(ranks.launch, "g")
        both[1].signal(signal.SIGKILL)  # a peer's end does count
        began = time.monotonic()
        failed_at, kind = both[0].call(ranks.wait_for_failure, "g")
        assert kind == "CollectiveError"
        assert failed_at - began < 1
