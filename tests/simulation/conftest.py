"""The simulation makes many small objects that live for long: Python's collector is to look at them less often."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="package")
def _collect_less_often() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    yield
    gc.set_threshold(*before)
