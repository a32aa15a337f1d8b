"""Fixtures: a lighthouse on loopback, and replicas that are closed after the test."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.control.lighthouse.server import LighthouseServer
from tests.control.processes import Child
from tests.control.recorder import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", boot_window_ms=20, token="")
    yield server
    server.shutdown()


@pytest.fixture
def replica(lighthouse: LighthouseServer) -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(replica_id: str, address: str = "", **more: Any) -> Replica:
        made.append(Replica(address or lighthouse.address(), replica_id, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def trio(replica: Callable[..., Replica]) -> list[Replica]:
    """Three replicas in one quorum."""
    replicas = [replica(name) for name in ("a:1", "b:1", "c:1")]
    for one in replicas:
        one.lease.wait_connected(5)
    for one in replicas:
        one.ask()
    assert len({one.answer().quorum_id for one in replicas}) == 1
    return replicas


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def make(*arguments: str, **more: Any) -> Child:
        made.append(Child(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
