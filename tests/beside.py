"""Other runs of pytest beside the first: scripts/test runs what only computes while the rest waits for processes.

How it works. Each of those beside writes a line for each test report to a file (`Writes`). At the end of its own tests
the first waits for them and takes the reports in as its own (`Reads`): progress, failures and the closing line are of
all.

Invariants: what went wrong beside is never lost: if one ended in any other way than with all its reports written, the
first one fails with its output. None outlives the first one.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import signal
import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

PR_SET_PDEATHSIG = 1
WAIT_S = 600.0
"""For what is left when the first one is through: as long as a whole part may take."""


class Writes:
    """In one beside."""

    def __init__(self, config: pytest.Config, path: str) -> None:
        self.config = config
        self.file = open(path, "w", buffering=1)  # noqa: SIM115 - closed when the process ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the first one may end without a word (tests.hangs)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.file.write(json.dumps(data) + "\n")

    def pytest_unconfigure(self) -> None:
        """All are written."""
        self.file.write("null\n")
        self.file.close()


class Reads:
    """In the first one, of one beside: the process `pid`, a child of this one. Its output is in the file `output`."""

    def __init__(self, pid: int, output: pathlib.Path) -> None:
        self.pid, self.output = pid, output
        self.ended = False

    def ends(self) -> bool:
        """The process has ended."""
        self.ended = self.ended or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self.ended

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """After the own tests."""
        result = yield
        pause = threading.Event()
        for _ in range(round(WAIT_S / 0.05)):
            if self.ends():
                break
            pause.wait(0.05)
        lines = self.output.with_suffix(".reports").read_text().splitlines()
        if not self.ended or not lines or lines.pop() != "null" or not lines:
            output = self.output.read_text()
            pytest.exit(f"the tests beside (scripts/test, {self.output.name}) did not end well:\n{output[-5000:]}", 1)
        hook = session.config.hook
        session.testscollected += len({json.loads(line)["nodeid"] for line in lines})
        for line in lines:
            data = json.loads(line)
            if isinstance(data["longrepr"], list):  # of a skip; JSON has no tuples
                data["longrepr"] = tuple(data["longrepr"])
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        return result

    def pytest_unconfigure(self) -> None:
        """Also after Ctrl-C, or the first failure of a run with -x."""
        if not self.ends():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def configure(config: pytest.Config) -> None:
    """What scripts/test asks for in the environment; tests do not see it."""
    if path := os.environ.pop("TEST_RUN_REPORTS", ""):
        config.pluginmanager.register(Writes(config, path))
    for beside in os.environ.pop("TEST_RUN_BESIDE", "").splitlines():
        pid, output = beside.split(" ", 1)
        config.pluginmanager.register(Reads(int(pid), pathlib.Path(output)))
