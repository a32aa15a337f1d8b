"""Managers as threads over a loopback lighthouse, as in tests/runtime; deterministic algorithms for every test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.runtime.conftest import cluster as cluster
from tests.runtime.conftest import lighthouse as lighthouse
from tests.runtime.conftest import store as store

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
