"""One forge (`tests.forge`) for all tests that want workers which have imported Accelerate and transformers already."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.forge import Forge

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPORTS = (
    "accelerate", "accelerate.test_utils", "accelerate.test_utils.training", "accelerate.tracking", "transformers",
    "transformers.trainer", "transformers.models.llama.modeling_llama", "ft_accelerate.accelerator",
    "ft_accelerate.trainer",
)  # fmt: skip

ENDS_S = 5.0
FOR_EVER = ("ft-gloo-reaper",)
"""One in a process, whatever runs in it."""


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """Starts processes."""
    forge = Forge(IMPORTS)
    yield forge
    forge.close()


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """A test ends the threads of ours that it started in this process: Managers, lighthouses, stores."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + ENDS_S
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("ft-") and thread.name not in FOR_EVER:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"{thread} was left behind"


@pytest.fixture
def forged_workers(forge: Forge) -> Iterator[None]:
    """ftrun's workers come from the forge."""
    with forge.serves_ftrun():
        yield
