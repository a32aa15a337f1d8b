"""Fixtures: a lighthouse with a dashboard, and a browser."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.dashboard.browser import Browser, chromium
from tests.dashboard.here import Here

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator


@pytest.fixture
def start() -> Iterator[Callable[..., Here]]:
    """Starts lighthouses."""
    made: list[Here] = []

    def make(**more: object) -> Here:
        made.append(Here(**more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def here(start: Callable[..., Here]) -> Here:
    """One lighthouse."""
    return start()


@pytest.fixture
def browser(tmp_path: pathlib.Path) -> Iterator[Browser]:
    """A real Chromium; scripts/check-dashboard insists on it."""
    if not chromium():
        missing = "Chromium is not installed (Debian: apt-get install chromium; FT_CHROMIUM names another place)"
        if os.environ.get("FT_NEEDS_CHROMIUM"):
            pytest.fail(missing)
        pytest.skip(missing)
    made = Browser(tmp_path / "chromium")
    yield made
    made.close()
