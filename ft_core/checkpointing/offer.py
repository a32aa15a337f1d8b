"""One captured state that a donor serves: which memory each range of it is.

Capturing happens on the caller's (training) thread and copies only small leaves, leaves whose storage the caller names
(what forward changes), and what cannot be served from where it lies. Everything else is a view of live memory.

Invariant: every range is one contiguous `memoryview`, and the offer holds the tensor that owns it.
Threads: built on the training thread, then read by connection threads; `closed`, `last_used_s` and `sending` belong to
the server and are guarded by its lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ft_core.checkpointing.encoding import Encoded, Leaf, encode
from ft_core.checkpointing.layout import Range, dump_manifest, layout_digest, plan_ranges
from ft_core.checkpointing.memory import byte_view

if TYPE_CHECKING:
    import socket
    from collections.abc import Container


class Offer:
    """A captured state. See the file header for who may touch what."""

    def __init__(self, tag: str, state: object, copy_storages: Container[int] = (), *, live: bool = False) -> None:
        self.tag: Final = tag
        self.live: Final = live
        encoded = encode(state)
        self.leaves: Final[list[Leaf]] = encoded.leaves
        self.ranges: Final[list[Range]] = plan_ranges(encoded.leaves)
        self.digest: Final = layout_digest(self.ranges)
        self.nbytes: Final = sum(part.nbytes for part in self.ranges)
        self.closed = False
        self.sending: set[socket.socket] = set()
        self.last_used_s = 0.0
        self._skeleton = encoded.skeleton
        self._classes = {name: path for name, (_, path) in encoded.classes.items()}
        self._owners: list[torch.Tensor] = []
        self._views: list[memoryview] = []
        self._capture(encoded, copy_storages)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"Offer({self.tag!r}, {len(self.leaves)} tensors, {self.nbytes} B, {state})"

    def manifest(self) -> bytes:
        """The manifest's bytes; built when asked for, so that the training thread does not pay for it."""
        return dump_manifest(self.leaves, self._skeleton, self._classes)

    def view(self, index: int) -> memoryview:
        """The memory of range `index`; valid while the offer is held."""
        return self._views[index]

    def intact(self, index: int) -> bool:
        """Whether the memory is still there: someone may have resized the storage under a live offer."""
        part, owner = self.ranges[index], self._owners[index]
        return owner.untyped_storage().nbytes() >= part.nbytes and (part.leaf is None or owner.data_ptr() != 0)

    def _capture(self, encoded: Encoded, copy_storages: Container[int]) -> None:
        tensors, views = encoded.tensors, [byte_view(t) for t in encoded.tensors]
        for part in self.ranges:
            if part.leaf is None:
                # One flat buffer per pack: a slice assignment per leaf is several times cheaper than clone().
                owner = torch.empty(part.nbytes, dtype=torch.uint8)
                view = byte_view(owner)
                for leaf, offset in part.members:
                    view[offset : offset + len(views[leaf])] = views[leaf]
                self._owners.append(owner)
                self._views.append(view)
                continue
            if part.start == 0 and not encoded.owned[part.leaf]:
                tensor = tensors[part.leaf]
                if tensor.untyped_storage().data_ptr() in copy_storages:
                    tensors[part.leaf] = tensor.clone()
                    views[part.leaf] = byte_view(tensors[part.leaf])
            self._owners.append(tensors[part.leaf])
            self._views.append(views[part.leaf][part.start : part.stop])
