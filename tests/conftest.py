"""Hooks for the whole test run."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _signals_as_on_a_terminal() -> Iterator[None]:
    """In the background of a script, or under nohup, some are ignored, and so they would be in every worker."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Under scripts/test: how long everything took, set-up and lint included."""
    started = os.environ.get("TEST_RUN_STARTED")
    if started is not None:
        terminalreporter.write_line(f"scripts/test took {time.time() - float(started):.0f} s in all")
