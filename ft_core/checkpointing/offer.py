"""One state that a donor serves: which memory each range of it is.

Capturing happens on the caller's (training) thread and copies only small leaves, leaves whose storage the caller names
(what forward changes), and what cannot be served from where it lies. Everything else is a view of live memory. What
lies on a device stays there until a receiver asks for it (`reading`). A state that was received can be relayed from
where it lies.

Invariant: every range is one contiguous `memoryview`, or bytes on a device (in a pack: some of it), and the offer holds
the tensors that own them.
Threads: built on the training thread, then read by connection threads; `closed`, `last_used_s` and `sending` belong to
the server and are guarded by its lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from ft_core.checkpointing import devices
from ft_core.checkpointing.devices import byte_slice
from ft_core.checkpointing.ranges import Manifest, Range, dump_manifest, layout_digest, plan_ranges
from ft_core.checkpointing.staging import Reading, Staging
from ft_core.checkpointing.state_encoding import Encoded, Leaf, encode
from ft_core.checkpointing.tensor_bytes import byte_view

if TYPE_CHECKING:
    import socket
    from collections.abc import Container, Mapping, Sequence

    from ft_core.checkpointing.devices import Device
    from ft_core.checkpointing.receive_plan import ReceivePlan
    from ft_core.device import Mark


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where one range lies."""

    owners: list[torch.Tensor]
    host: memoryview | None
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(offset in the range, bytes) of what lies on a device."""


def _leaf_memory(tensor: torch.Tensor, part: Range, view: memoryview | None) -> _Memory:
    if view is not None:
        return _Memory([tensor], view)
    return _Memory([tensor], None, [(0, byte_slice(tensor, part.start, part.stop))])


class Offer:
    """A state that is served. See the file header for who may touch what."""

    def __init__(
        self,
        tag: str,
        manifest: Manifest,
        memory: list[_Memory],
        *,
        live: bool = False,
        verified: Sequence[int] | None = None,
        made: Mapping[Device, Mark] | None = None,
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
        self._memory = memory
        self._made = made

    @classmethod
    def capture(cls, tag: str, state: object, copy_storages: Container[int] = (), *, live: bool = False) -> Offer:
        """An offer of `state`. Raises `EncodingError`."""
        encoded = encode(state, on_devices=True)
        ranges = plan_ranges(encoded.leaves)
        classes = {name: path for name, (_, path) in encoded.classes.items()}
        manifest = Manifest(encoded.leaves, ranges, encoded.skeleton, layout_digest(ranges), classes)
        memory = _capture(encoded, ranges, copy_storages)
        # What is not contiguous, or named, was copied on its device just now: on this thread's stream, behind the
        # boundary's mark.
        copied = {devices.device_of(t) for t, owned in zip(encoded.tensors, encoded.owned, strict=True) if owned}
        made = {device: device.mark() for device in copied if device is not None}
        return cls(tag, manifest, memory, live=live, made=made)

    @classmethod
    def relay(cls, tag: str, plan: ReceivePlan) -> Offer:
        """An offer of what was received and verified by `plan`, from the memory it lies in.

        Its user may write there (load it, train on it) before the offer is closed. So a range is served only while its
        checksum is the one that was verified.
        """
        memory = []
        for index, part in enumerate(plan.manifest.ranges):
            view = plan.target(index)
            if part.leaf is None:
                assert view is not None  # packs are received into host memory
                memory.append(_Memory([torch.frombuffer(view, dtype=torch.uint8)], view))
            else:
                memory.append(_leaf_memory(plan.tensor(part.leaf), part, view))
        return cls(tag, plan.manifest, memory, verified=plan.sums())

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"Offer({self.tag!r}, {len(self.leaves)} tensors, {self.nbytes} B, {state})"

    def manifest(self) -> bytes:
        """The manifest's bytes; built when asked for, so that the training thread does not pay for it."""
        return dump_manifest(self.leaves, self._manifest.skeleton, self._manifest.classes)

    def reading(self, index: int, staging: Staging) -> Reading:
        """How to get at the bytes of range `index`; valid while the offer is held."""
        memory = self._memory[index]
        return Reading(staging, memory.host, memory.parts, self.ranges[index].nbytes, self._made)

    def intact(self, index: int) -> bool:
        """Whether the memory is still there: someone may have resized the storage under a live offer."""
        part, memory = self.ranges[index], self._memory[index]
        if part.leaf is None:
            return all(owner.data_ptr() != 0 for owner in memory.owners)
        return all(o.untyped_storage().nbytes() >= part.nbytes and o.data_ptr() != 0 for o in memory.owners)


def _capture(encoded: Encoded, ranges: list[Range], copy_storages: Container[int]) -> list[_Memory]:
    tensors = encoded.tensors
    for leaf, tensor in enumerate(tensors):
        if not encoded.owned[leaf] and tensor.untyped_storage().data_ptr() in copy_storages:
            tensors[leaf], encoded.owned[leaf] = tensor.clone(), True
    views = [None if devices.device_of(t) is not None else byte_view(t) for t in tensors]
    found: list[_Memory] = []
    for part in ranges:
        if part.leaf is None:
            found.append(_pack(part, tensors, views))
            continue
        view = views[part.leaf]
        found.append(_leaf_memory(tensors[part.leaf], part, None if view is None else view[part.start : part.stop]))
    return found


def _pack(part: Range, tensors: list[torch.Tensor], views: list[memoryview | None]) -> _Memory:
    # One flat buffer per pack: a slice assignment per leaf is several times cheaper than clone().
    owner = torch.empty(part.nbytes, dtype=torch.uint8)
    memory = _Memory([owner], byte_view(owner))
    assert memory.host is not None
    for leaf, offset in part.members:
        view = views[leaf]
        if view is None:
            memory.owners.append(tensors[leaf])
            memory.parts.append((offset, byte_slice(tensors[leaf], 0, tensors[leaf].nbytes)))
        else:
            memory.host[offset : offset + len(view)] = view
    return memory
