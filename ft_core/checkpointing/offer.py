"""One state that a donor serves: which memory each range of it is.

Capturing happens on the caller's (training) thread and copies only small leaves, leaves whose storage the caller names
(what forward changes), and what cannot be served from where it lies. Everything else is a view of live memory. A state
that was received can be relayed from where it lies.

Invariant: every range is one contiguous `memoryview`, and the offer holds the tensor that owns it.
Threads: built on the training thread, then read by connection threads; `closed`, `last_used_s` and `sending` belong to
the server and are guarded by its lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ft_core.checkpointing.ranges import Manifest, Range, dump_manifest, layout_digest, plan_ranges
from ft_core.checkpointing.state_encoding import Encoded, Leaf, encode
from ft_core.checkpointing.tensor_bytes import byte_view

if TYPE_CHECKING:
    import socket
    from collections.abc import Container, Sequence

    from ft_core.checkpointing.receive_plan import ReceivePlan


class Offer:
    """A state that is served. See the file header for who may touch what."""

    def __init__(
        self,
        tag: str,
        manifest: Manifest,
        owners: list[torch.Tensor],
        views: list[memoryview],
        *,
        live: bool = False,
        verified: Sequence[int] | None = None,
    ) -> None:
        self.tag: Final = tag
        self.live: Final = live
        self.leaves: Final[list[Leaf]] = manifest.leaves
        self.ranges: Final[list[Range]] = manifest.ranges
        self.digest: Final = manifest.digest
        self.nbytes: Final = sum(part.nbytes for part in self.ranges)
        self.verified: Final = verified
        """What the checksum of each range must be, where this replica received the state itself (`relay`)."""
        self.closed = False
        self.sending: set[socket.socket] = set()
        self.last_used_s = 0.0
        self._manifest = manifest
        self._owners = owners
        self._views = views

    @classmethod
    def capture(cls, tag: str, state: object, copy_storages: Container[int] = (), *, live: bool = False) -> Offer:
        """An offer of `state`. Raises `EncodingError`."""
        encoded = encode(state)
        ranges = plan_ranges(encoded.leaves)
        classes = {name: path for name, (_, path) in encoded.classes.items()}
        manifest = Manifest(encoded.leaves, ranges, encoded.skeleton, layout_digest(ranges), classes)
        return cls(tag, manifest, *_capture(encoded, ranges, copy_storages), live=live)

    @classmethod
    def relay(cls, tag: str, plan: ReceivePlan) -> Offer:
        """An offer of what was received and verified by `plan`, from the memory it lies in.

        Its user may write there (load it, train on it) before the offer is closed. So a range is served only while its
        checksum is the one that was verified.
        """
        ranges = plan.manifest.ranges
        owners = [
            plan.tensor(part.leaf) if part.leaf is not None else torch.frombuffer(plan.target(i), dtype=torch.uint8)
            for i, part in enumerate(ranges)
        ]
        views = [plan.target(i) for i in range(len(ranges))]
        return cls(tag, plan.manifest, owners, views, verified=plan.sums())

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"Offer({self.tag!r}, {len(self.leaves)} tensors, {self.nbytes} B, {state})"

    def manifest(self) -> bytes:
        """The manifest's bytes; built when asked for, so that the training thread does not pay for it."""
        return dump_manifest(self.leaves, self._manifest.skeleton, self._manifest.classes)

    def view(self, index: int) -> memoryview:
        """The memory of range `index`; valid while the offer is held."""
        return self._views[index]

    def intact(self, index: int) -> bool:
        """Whether the memory is still there: someone may have resized the storage under a live offer."""
        part, owner = self.ranges[index], self._owners[index]
        return owner.untyped_storage().nbytes() >= part.nbytes and (part.leaf is None or owner.data_ptr() != 0)


def _capture(
    encoded: Encoded, ranges: list[Range], copy_storages: Container[int]
) -> tuple[list[torch.Tensor], list[memoryview]]:
    """Per range the tensor that owns its memory, and the memory."""
    tensors, views = encoded.tensors, [byte_view(t) for t in encoded.tensors]
    owners: list[torch.Tensor] = []
    pieces: list[memoryview] = []
    for part in ranges:
        if part.leaf is None:
            # One flat buffer per pack: a slice assignment per leaf is several times cheaper than clone().
            owner = torch.empty(part.nbytes, dtype=torch.uint8)
            view = byte_view(owner)
            for leaf, offset in part.members:
                view[offset : offset + len(views[leaf])] = views[leaf]
            owners.append(owner)
            pieces.append(view)
            continue
        if part.start == 0 and not encoded.owned[part.leaf]:
            tensor = tensors[part.leaf]
            if tensor.untyped_storage().data_ptr() in copy_storages:
                tensors[part.leaf] = tensor.clone()
                views[part.leaf] = byte_view(tensors[part.leaf])
        owners.append(tensors[part.leaf])
        pieces.append(views[part.leaf][part.start : part.stop])
    return owners, pieces
