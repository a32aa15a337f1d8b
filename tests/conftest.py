"""Hooks for the whole test run, and the forge (`tests.forge`) for workers that have imported torch already."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests import beside
from tests.forge import Forge

if TYPE_CHECKING:
    from collections.abc import Iterator

MAY_STAY = ("ft-gloo-reaper", "ft-timer", "ft-gloo-form", "ft-witness")
"""Threads of ours that live as long as the process; and a Gloo constructor, which cannot be interrupted: when abandoned
it ends after the group's timeout (DESIGN R14)."""
LEFT_S = 10.0
"""How long a test's threads may outlive it."""


def pytest_configure(config: pytest.Config) -> None:
    """Under scripts/test: two runs side by side."""
    beside.configure(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that fork first, whatever the order of their files: servers of gRPC leave locks that a child inherits.

    (A group's first rank did not answer for 60 s.)
    """
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)


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


@pytest.fixture(scope="session")
def _forges() -> Iterator[list[Forge]]:
    forges: list[Forge] = []
    yield forges
    for forge in forges:
        forge.close()


@pytest.fixture
def forge(_forges: list[Forge]) -> Forge:
    """Starts processes. A folder whose workers import more has one of its own."""
    if not _forges or not _forges[-1].alive:  # tests of ftrun's own end may end what they find
        _forges.append(Forge(["torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"]))
    return _forges[-1]


@pytest.fixture
def forged_workers(forge: Forge) -> Iterator[None]:
    """ftrun's workers come from the forge."""
    with forge.serves_ftrun():
        yield


@pytest.fixture(autouse=True)
def _no_thread_of_ours_is_left() -> Iterator[None]:
    """Else a later test that looks for such threads fails, and nobody knows why."""
    before = set(threading.enumerate())
    yield
    pause, until = threading.Event(), time.monotonic() + LEFT_S
    while left := [thread for thread in threading.enumerate() if thread not in before and ours(thread)]:
        assert time.monotonic() < until, f"this test has left {left}: a Manager, lease or server that was not shut down"
        pause.wait(0.005)


def ours(thread: threading.Thread) -> bool:
    """It has a name that we give, and belongs to an object that can be shut down."""
    return thread.name.startswith("ft-") and thread.name not in MAY_STAY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Under scripts/test: how long everything took, set-up and lint included."""
    started = os.environ.get("TEST_RUN_STARTED")
    if started is not None:
        terminalreporter.write_line(f"scripts/test took {time.time() - float(started):.0f} s in all")
