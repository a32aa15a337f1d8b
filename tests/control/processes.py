"""Processes of tests, whose lines are read: replicas (`child`), and the lighthouse as a command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.control.recorder import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """A process whose lines are read."""

    def __init__(self, *arguments: str, **more: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, **more,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """SIGSTOP, and wait until all its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        wait_until(
            lambda: {(one / "stat").read_text().rpartition(")")[2].split()[0] for one in tasks.iterdir()} == {"T"}
        )

    def end(self) -> tuple[str, str]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        return self.process.communicate(timeout=10)


def start_lighthouse(child: Callable[..., Child], *more: str) -> tuple[Child, str]:
    process = child("ft_core.lighthouse", *more)
    line = process.line()
    assert line.startswith("ft-lighthouse listens on http://")
    return process, line.split()[-1]
