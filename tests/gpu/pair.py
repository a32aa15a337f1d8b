"""`Pair`: two processes of one program that share a GPU, over NCCL.

NCCL refuses two ranks on one GPU only where both have the same host, and the host is what NCCL_HOSTID says. They then
reach each other over sockets; their kernels have to be on the device together, so they are kept small.
"""

from __future__ import annotations

import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core.process_group.availability import lacks_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROBLEM = lacks_here("nccl")
MARKS = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(PROBLEM), reason=f"needs a GPU and NCCL: {PROBLEM}"),
]
ANSWER_S = 120.0
"""Import of torch, CUDA's context and NCCL's first communicator, of two processes at once."""


class Child:
    """One process; what it prints is kept line by line."""

    def __init__(self, rank: int, program: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self.rank = rank
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-u", program, str(rank), *arguments],
            cwd=ROOT,
            env={**os.environ, **environment, **environment_of(rank)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, name=f"gpu-child-{rank}", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._new.put(self.lines[-1])
        self._new.put(None)

    def wait_for(self, is_it: Callable[[str], bool], what: str) -> str:
        """The next line that is it; AssertionError with all that was printed if the process ends, or takes too long."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                line = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"rank {self.rank} did not say {what}:\n" + "\n".join(self.lines[-60:])
            if is_it(line):
                return line

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Pair:
    """Both, as a context: they end with it."""

    def __init__(self, program: str, *arguments: str, **environment: str) -> None:
        self._program = program
        self._arguments = arguments
        self._environment = environment
        self.children: list[Child] = []
        self._all: list[Child] = []

    def __enter__(self) -> Self:
        self.children = [self.start(rank) for rank in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._all:
            child.end()

    def start(self, rank: int, *arguments: str) -> Child:
        child = Child(rank, self._program, arguments or self._arguments, self._environment)
        self._all.append(child)
        return child


def environment_of(rank: int) -> dict[str, str]:
    """What a process needs to share the GPU with the other one."""
    return {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FT_HOSTNAME": "127.0.0.1",
        "NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        "NCCL_MAX_CTAS": "1", "NCCL_MAX_NCHANNELS": "1",
    }  # fmt: skip


def device() -> torch.device:
    """Of this process. DEVICE=cpu tries a program where there is no GPU."""
    return torch.device(os.environ.get("DEVICE", "cuda:0"))
