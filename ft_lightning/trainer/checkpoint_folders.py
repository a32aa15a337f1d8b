"""`PlacedCheckpoint`: a checkpoint of a sharded model, which all ranks of the leading group write, and where it goes.

How it works. With `save_distributed_checkpoint=True` it is a folder that each rank writes its shards to, by Lightning
and torch.distributed.checkpoint; else one file with whole tensors, which the ranks gather on the first one. Both are
written beside their place; the first rank puts them there when all replicas are known to hold the step. A folder that
is there and is a checkpoint is replaced as a whole: for a moment nothing is there, and the new one is complete beside
it. In a folder that has other things in it they stay.

Invariant: all ranks of the group call `write` at the same time. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any

from ft_core.loop.publishing import PlacedFile, PlacedFolder
from ft_lightning._compat import model_parallel

if TYPE_CHECKING:
    from collections.abc import Callable


class PlacedCheckpoint:
    """One checkpoint.

    Args:
        strategy: whose; its ranks write it.
        path: its place.
        step: of the state in it.
        save: Lightning's own function, which writes a folder to the path that it is given. On all ranks.
    """

    def __init__(self, strategy: Any, path: str, step: int, save: Callable[[str], object]) -> None:
        self._strategy, self._save = strategy, save
        self.target = os.path.abspath(path)
        self._folder = PlacedFolder(*os.path.split(self.target), step)
        self._file = PlacedFile(self.target, step)
        self._folders = model_parallel.saves_folders(strategy)

    def __repr__(self) -> str:
        return f"PlacedCheckpoint({self.target}, {'a folder' if self._folders else 'a file'})"

    @property
    def _first(self) -> bool:
        return bool(self._strategy.global_rank == 0)

    def write_folder(self) -> None:
        """Write it beside its place. On all ranks."""
        writing = self._folder.begin(self._strategy.broadcast, first=self._first)
        self._save(writing)
        self._strategy.barrier()  # each rank has written its shards
        if self._first:
            self._folder.complete(writing)

    def write_file(self, checkpoint: dict[str, Any]) -> None:
        """Write it beside its place. On all ranks.

        Args:
            checkpoint: with this rank's shards.
        """
        strategy = self._strategy
        whole = model_parallel.gathered(strategy._tree, checkpoint, strategy.lightning_module, first=self._first)
        if self._first:
            self._file.write(lambda path: strategy.checkpoint_io.save_checkpoint(whole, path))

    def place(self) -> None:
        """Put it in its place; nothing if that was done. The first rank does it."""
        if not self._first:
            return
        beside = self._folder.beside if self._folders else self._file.beside
        if os.path.exists(beside):
            replace(beside, self.target)

    def discard(self) -> None:
        """Remove it, if it is still beside its place. The first rank does it."""
        if self._first:
            (self._folder if self._folders else self._file).discard()


def is_checkpoint(folder: str) -> bool:
    """It is the folder of a distributed checkpoint."""
    return any(os.path.exists(os.path.join(folder, name)) for name in model_parallel.METADATA)


def replace(beside: str, target: str) -> None:
    """Move a file or folder to its place, over what is there.

    Raises:
        IsADirectoryError: `beside` is a file, and a folder that is no checkpoint is in its place.
    """
    if os.path.islink(target) or os.path.isfile(target):
        if os.path.isdir(beside):
            os.remove(target)
        os.replace(beside, target)
    elif not os.path.exists(target):
        os.rename(beside, target)
    elif is_checkpoint(target):
        old = f"{beside}.replaced"
        os.rename(target, old)
        os.rename(beside, target)
        shutil.rmtree(old, ignore_errors=True)
    elif os.path.isdir(beside):
        for name in sorted(os.listdir(beside), key=model_parallel.METADATA.__contains__):
            os.replace(os.path.join(beside, name), os.path.join(target, name))
        with contextlib.suppress(OSError):  # empty but for what a file system shows of its own
            os.rmdir(beside)
    else:
        raise IsADirectoryError(f"the checkpoint's place {target} is a folder, and no checkpoint: name another path")
