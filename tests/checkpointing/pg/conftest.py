"""What a test of state over process groups may leave: connections to the c10d store, which are kept for the next."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from ft_core.process_group.gloo.reaper import reaper
from tests.checkpointing.conftest import heal_threads

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Neither a thread of a pair, nor a group: with it go its sockets."""
    yield
    assert heal_threads() == []
    assert reaper.wait_empty(10)
    assert [t.name for t in threading.enumerate() if t.name == "ft-gloo-form"] == []
