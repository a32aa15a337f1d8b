"""Hooks for the whole test run, and the forge (`tests.forge`) for workers that have imported torch already."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests import beside, threads
from tests.forge import Forge
from tests.hangs import Hangs
from tests.held_ports import HeldPorts, Hold

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure(config: pytest.Config) -> None:
    """Under scripts/test: several runs side by side."""
    beside.configure(config)
    config.pluginmanager.register(Hangs())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that fork first, whatever the order of their files: servers of gRPC leave locks that a child inherits.

    (A group's first rank did not answer for 60 s.)
    """
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)


def pytest_collection_finish() -> None:
    """What is imported now lives as long as the run: a collection, of which tests make many, looks at theirs only.

    (Torch, Lightning and all tests are half a million objects, 0.3 s each time.)
    """
    gc.collect()
    gc.freeze()


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


def _living(forges: list[Forge]) -> Forge:
    if not forges or not forges[-1].alive:  # tests of ftrun's own end may end what they find
        forges.append(Forge(["torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"]))
    return forges[-1]


@pytest.fixture
def forge(_forges: list[Forge]) -> Forge:
    """Starts processes. A folder whose workers import more has one of its own."""
    return _living(_forges)


@pytest.fixture(scope="module")
def forge_of_a_file(_forges: list[Forge]) -> Forge:
    """The same, for fixtures of a file."""
    return _living(_forges)


@pytest.fixture
def forged_workers(forge: Forge) -> Iterator[None]:
    """ftrun's workers come from the forge."""
    with forge.serves_ftrun():
        yield


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Holds so many ports to the end of the test (`tests.held_ports`)."""
    with contextlib.ExitStack() as held:

        def hold(count: int = 1, *, in_row: bool = False) -> list[int]:
            return held.enter_context(HeldPorts(count, in_row=in_row)).numbers

        yield hold


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """A command that a test runs in this process sets what the whole process logs; later tests count what is logged."""
    logger = logging.getLogger("ft_core")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True, scope="module")
def _no_thread_is_left_by_a_file() -> Iterator[None]:
    """Nor by its fixtures, which outlive its tests."""
    before, loops = threads.alive(), threads.loops()
    yield
    threads.wait_for_end(before, "this file")
    threads.check_loops(loops)


@pytest.fixture(autouse=True)
def _no_thread_is_left(_no_thread_is_left_by_a_file: None) -> Iterator[None]:
    """By a test and its own fixtures: they were set up later, and are torn down first."""
    before = threads.alive()
    yield
    threads.wait_for_end(before, "this test")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Under scripts/test: how long everything took, set-up and lint included."""
    started = os.environ.get("TEST_RUN_STARTED")
    if started is not None:
        terminalreporter.write_line(f"scripts/test took {time.time() - float(started):.0f} s in all")
