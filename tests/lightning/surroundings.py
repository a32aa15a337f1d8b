"""What a test in this process begins with and leaves behind: no launcher's variables, no process group, no run.

Lightning puts MASTER_ADDR, LOCAL_RANK and others into the environment and leaves them there; the next Trainer would
take them for a launcher's.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

import torch

from ft_core.loop.runs import RUNS

if TYPE_CHECKING:
    from collections.abc import Iterator

FOREIGN = re.compile("(FT|TORCHFT|FTRUN|SLURM|TORCHELASTIC)_|(MASTER_ADDR|MASTER_PORT|(LOCAL_)?(RANK|WORLD_SIZE))$")


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """As in a new process, without any launcher; afterwards all is as it was."""
    RUNS.ended = 0
    before = dict(os.environ)
    for name in [name for name in os.environ if FOREIGN.match(name)]:
        del os.environ[name]
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
