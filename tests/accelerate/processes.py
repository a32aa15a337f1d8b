"""Worker processes without ftrun, from the forge: as torchrun would start them, or as replica groups by hand."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.forge import Forge, Forged

ROOT = pathlib.Path(__file__).resolve().parents[2]


def store() -> TCPStore:
    """Held by this process, as an elastic agent would; on any free port."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def elastic(rank: int, size: int, port: int = 0) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run", "GROUP_RANK": "0",
    }  # fmt: skip


def outputs(
    forge: Forge, folder: pathlib.Path, script: pathlib.Path, orders: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    limit_s: float,
) -> list[str]:  # fmt: skip
    """Run a script in several processes at once, all of which must end well.

    Args:
        forge: starts them.
        folder: for their output.
        script: that they run.
        orders: arguments and additional environment of each.
        limit_s: for each.

    Returns:
        What each printed.
    """
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("FT_", "ACCELERATE_FT_"))}
    base = {**inherited, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    logs = [folder / f"output-{number}.log" for number in range(len(orders))]
    running: list[Forged] = []
    try:
        for log, (words, env) in zip(logs, orders, strict=True):
            command = [sys.executable, "-u", str(script), *words]
            with log.open("wb") as file:
                running.append(forge.start(command, {**base, **env}, file.fileno(), file.fileno(), cwd=str(ROOT)))
        codes = [process.wait(limit_s) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    assert not any(codes), (codes, *(text[-5000:] for text in texts))
    return texts
