"""The end of a run whose test hangs where pytest-timeout cannot interrupt it, with the stacks of all threads.

How it works. pytest-timeout's signal is handled by Python code on the main thread; one that blocks in C (a lock, a wait
of Gloo's) never comes to it; and once a test has failed the signal is off, while its fixtures may hang as well. So a
thread of faulthandler's, which needs neither the GIL nor a signal, waits for longer than the test may take, prints all
stacks, and ends the process with status 1.

Invariants: a test ends within its own limit and `GRACE_S`, what follows its failure within `GRACE_S`, and so does the
interpreter after the run.
"""

from __future__ import annotations

import faulthandler
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

GRACE_S = 30.0
"""What a test that was interrupted may need to be torn down."""


class Hangs:
    """One run's."""

    def __init__(self) -> None:
        self.terminal = os.dup(2)
        """The run's stderr: a test's own is captured, and lost when the process ends."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        """A test begins; it may take so long."""
        faulthandler.dump_traceback_later(settings.timeout + GRACE_S, exit=True, file=self.terminal)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """It has ended, with its fixtures."""
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> Generator[None, object, object]:
        """It has failed: pytest has called faulthandler off, as pytest-timeout its timer; its fixtures go on."""
        result = yield
        if isinstance(node, pytest.Item):
            faulthandler.dump_traceback_later(GRACE_S, exit=True, file=self.terminal)
        return result

    def pytest_enter_pdb(self) -> None:
        """Somebody looks at a test, and takes their time."""
        faulthandler.cancel_dump_traceback_later()

    def pytest_unconfigure(self) -> None:
        """The interpreter ends, and waits for threads."""
        faulthandler.dump_traceback_later(GRACE_S, exit=True, file=self.terminal)
