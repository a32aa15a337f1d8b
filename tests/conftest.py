"""Hooks for the whole test run."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Under scripts/test: how long everything took, set-up and lint included."""
    started = os.environ.get("TEST_RUN_STARTED")
    if started is not None:
        terminalreporter.write_line(f"scripts/test took {time.time() - float(started):.0f} s in all")
