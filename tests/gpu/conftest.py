"""A lighthouse for the processes that share a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse.server import LighthouseServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[str]:
    """Its address. How many replicas it waits for is MIN_REPLICAS of the test's file."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=request.module.MIN_REPLICAS, join_timeout_ms=100)
    yield server.address().removeprefix("http://")
    server.shutdown()
