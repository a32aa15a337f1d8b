"""One of two processes that add up a tensor over the group of their device: whether that works at all here.

Started by `gpu_pair.py`: python -m benchmarks.gpu_probe DEVICE RANK FOLDER, with FT_BACKEND and what else it sets.
"""

from __future__ import annotations

import pathlib
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it as exported

from ft_core import default_process_group

LIMIT_S = 60.0


def address(folder: pathlib.Path, rank: int) -> tuple[str, TCPStore | None]:
    """Where both meet: rank 0 opens the store and writes its port down."""
    path = folder / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        partial = path.with_suffix(".tmp")
        partial.write_text(str(store.port))
        partial.rename(path)
        return f"127.0.0.1:{store.port}/probe", store
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"the other process has not opened its store within {LIMIT_S:g} s")
        time.sleep(0.05)
    return f"127.0.0.1:{path.read_text()}/probe", None


def main(device: str, rank: int, folder: pathlib.Path) -> None:
    """Print what came out; an error ends it."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    group = default_process_group(place)
    group.set_timeout(timedelta(seconds=LIMIT_S))
    where, store = address(folder, rank)
    group.configure(where, f"probe{rank}", rank, 2)
    tensor = torch.full((1024,), float(rank + 1), device=place)
    group.allreduce([tensor]).wait()
    total = float(tensor.sum()) / tensor.numel()
    (folder / f"done{rank}").touch()
    deadline = time.monotonic() + LIMIT_S
    while not (folder / f"done{1 - rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)  # who ends closes connections that the other may still read from
    group.shutdown()
    del store
    if total != 3.0:
        raise SystemExit(f"1 + 2 was {total} over {group.getBackendName()} on {place}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
