"""`shared_gpu`: CUDA's Multi-Process Service around two processes that share one GPU, where it is there.

Without it the kernels of two processes take turns on the device, some milliseconds each: a collective of both then
waits for turns, and a step's time says more of those than of the step. Not for kills: the service is part of what a
client that is killed leaves behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTROL = "nvidia-cuda-mps-control"
LIMIT_S = 20.0


@contextlib.contextmanager
def shared_gpu(*, wanted: bool = True) -> Iterator[dict[str, str]]:
    """The environment of processes that are to share; empty where there is no such service, or it does not start."""
    if not wanted or shutil.which(CONTROL) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="ft-bench-mps-") as folder:
        ours = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if not _tell("-d", ours):
            yield {}
            return
        try:
            yield ours
        finally:
            _tell("", ours)


def _tell(argument: str, environment: dict[str, str]) -> bool:
    """Start it, or with '' end it. Whether that came true."""
    command = [CONTROL, argument] if argument else [CONTROL]
    said = None if argument else b"quit\n"
    try:
        done = subprocess.run(
            command, input=said, env={**os.environ, **environment}, timeout=LIMIT_S, capture_output=True, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
