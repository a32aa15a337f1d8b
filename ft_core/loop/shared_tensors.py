"""Tensors of several processes on one machine, which each of them sees: so that they need not send them to each other.

How it works. Each process makes an anonymous file in memory (memfd) that begins with a random word, and tells the
others its process id, the descriptor and the word. They open it through /proc and compare size and word; that all could
is agreed. Nothing has a name in the file system, so nothing is left behind by whoever is killed.

Invariants: only a file of the right size with the right word is mapped, as the process ids of another machine or
container may mean anything here. Either all ranks get tensors, or none does. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

ALIGNMENT_BYTES = 64
"""Of the tensors, and the size of the head, which holds the word."""
_WORD_BYTES = 8


def share(
    shapes: Sequence[tuple[int, torch.dtype]], ranks: int, gather: Callable[[Tensor], Tensor]
) -> list[list[Tensor]] | None:
    """Flat tensors of zeros of every rank, in the order of the ranks; None if they cannot see each other's.

    Args:
        shapes: number of elements and dtype of each tensor; the same on all ranks.
        ranks: how many there are.
        gather: the rows of all ranks, of a row of int64.
    """
    size = ALIGNMENT_BYTES + sum(_aligned(numel * dtype.itemsize) for numel, dtype in shapes)
    word = secrets.token_bytes(_WORD_BYTES - 1) + b"\1"  # never the zeros of an empty file
    own = _make(size, word)
    try:
        row = [os.getpid(), -1 if own is None else own, int.from_bytes(word, "little", signed=True)]
        told = gather(torch.tensor(row, dtype=torch.int64)).view(ranks, -1).tolist()
        found = [_map(pid, fd, size, number) for pid, fd, number in told]
        seen = torch.tensor([int(all(one is not None for one in found))], dtype=torch.int64)
        if not bool(gather(seen).all()):
            return None
    finally:
        if own is not None:
            os.close(own)
    return [list(_cut(one, shapes)) for one in found if one is not None]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _make(size: int, word: bytes) -> int | None:
    """A file in memory; None if there cannot be one."""
    try:
        fd = os.memfd_create("ft-gradients")
    except (AttributeError, OSError):  # not Linux, or no descriptor left
        return None
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, word, 0)
    except OSError:
        os.close(fd)
        return None
    return fd


def _map(pid: int, fd: int, size: int, number: int) -> Tensor | None:
    """The file `fd` of the process `pid`, if that is what it should be."""
    with contextlib.ExitStack() as stack:
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, opened)
            word = os.pread(opened, _WORD_BYTES, 0)
            if os.fstat(opened).st_size != size or int.from_bytes(word, "little", signed=True) != number:
                return None
            return torch.from_file(f"/proc/self/fd/{opened}", shared=True, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError):
            return None


def _cut(file: Tensor, shapes: Sequence[tuple[int, torch.dtype]]) -> Iterator[Tensor]:
    at = ALIGNMENT_BYTES
    for numel, dtype in shapes:
        yield file[at : at + numel * dtype.itemsize].view(dtype)
        at += _aligned(numel * dtype.itemsize)
