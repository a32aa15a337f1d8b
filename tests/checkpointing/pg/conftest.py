"""What a test of state over process groups may leave: connections to the c10d store, which are kept for the next."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest

from ft_core.process_group import reaper as reaping
from tests.checkpointing.conftest import heal_threads
from tests.process_group.ranks import set_aside_lost_groups

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Neither a thread of a pair, nor a group: with it go its sockets.

    What earlier tests of this process broke on purpose, and Gloo cannot end before its timeout, is not counted.
    """
    gc.collect()
    set_aside_lost_groups()
    yield
    assert heal_threads() == []
    assert reaping.gloo.wait_empty(10)
    assert [t.name for t in threading.enumerate() if t.name == "ft-gloo-form"] == []
