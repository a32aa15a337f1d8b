"""Tensors that several processes see: all of them, or none."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.loop import shared_tensors

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = [(5, torch.float32), (3, torch.bfloat16), (0, torch.float32), (17, torch.float64)]


def left_open() -> list[str]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.lexists(link) and "ft-gradients" in os.readlink(link)]


def shared(change: Any = None) -> list[Any]:
    """What three ranks get. `change`: of what rank 0 tells the others of itself."""
    rows: list[Any] = [None] * 3
    barrier = Barrier(3)

    def one(rank: int) -> Any:
        def gather(row: Tensor) -> Tensor:
            rows[rank] = change(row) if change is not None and rank == 0 and row.numel() > 1 else row
            barrier.wait(10)
            found = torch.cat(rows)
            barrier.wait(10)
            return found

        return shared_tensors.share(SHAPES, 3, gather)

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(one, range(3)))


def test_each_rank_sees_what_the_others_write() -> None:
    found = shared()
    assert not left_open()
    for rank, mine in enumerate(found):
        assert [(t.numel(), t.dtype) for t in mine[rank]] == SHAPES
        assert all(not tensor.any() for tensor in mine[rank])
    for rank, mine in enumerate(found):
        for tensor in mine[rank]:
            tensor.fill_(rank + 1)
    for mine in found:
        for rank in range(3):
            assert all((tensor == rank + 1).all() for tensor in mine[rank])


@pytest.mark.parametrize("place", [0, 1, 2], ids=["process", "descriptor", "word"])
def test_what_is_not_the_file_that_was_meant_is_left_alone(place: int) -> None:
    """As on another machine, where a process id means another process: no rank gets anything."""

    def change(row: Tensor) -> Tensor:
        row = row.clone()
        row[place] += 1 << 20 if place < 2 else 1
        return row

    assert shared(change) == [None] * 3
    assert not left_open()


def test_where_there_is_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert shared() == [None] * 3
