"""`Parcel`: how the tensors of one collective reach the child process, and come back; `Unpacker`: the child's side.

How it works. A tensor in plain memory is copied into a segment that the child maps, and copied back when the collective
has ended, by the parent: so nothing is written to the user's tensor after a failure. A contiguous tensor whose storage
lies in shared memory already (torch's `share_memory_()`) goes as a handle, once per storage, and the child works on it
in place. On a device whose memory can be mapped by another process (CUDA) it goes as torch's own IPC handle, with an
event that says when the work queued before is done; where the group in the child carries CPU memory only, a device's
tensor is copied through the segment like any other.

Invariants: contents are never pickled. In a segment a tensor is contiguous, whatever its strides are outside. The
tensors of a parcel stay referenced until it is done. At most MAX_HANDLES storages are remembered.
Threads: a `Parcel` is filled by the thread that launches and taken back by the one that hears of its end; the rest
belongs to one thread each.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as torch_multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

from ft_core.errors import ConfigError
from ft_core.process_group.baby.collectives import Role
from ft_core.process_group.baby.segments import ALIGN_BYTES, SegmentViews

if TYPE_CHECKING:
    from ft_core.process_group.baby.segments import Segment, SegmentPool

MAX_HANDLES = 1024


@dataclass(frozen=True)
class InSegment:
    """A contiguous tensor in the parcel's segment."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class InStorage:
    """A tensor in a storage that lies in shared memory, or on a device; `offset` in elements."""

    storage: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    """None: that of a contiguous one."""


@dataclass(frozen=True)
class OnDevice:
    """A storage in device memory: torch's function that opens it as a tensor, and its arguments."""

    open: Any
    arguments: tuple[Any, ...]


Place = InSegment | InStorage


@dataclass(frozen=True)
class Manifest:
    """What is sent to the child instead of the tensors; the descriptors that it needs travel in this order."""

    places: tuple[Place, ...]
    segment: int | None
    new_segment_bytes: int
    """0: the child has it."""
    new_storages: tuple[tuple[int, int], ...]
    """Number and size in bytes of storages that the child does not have."""
    new_on_device: tuple[tuple[int, OnDevice], ...]
    """The same for those in device memory: number and handle."""
    gone_segments: tuple[int, ...]
    gone_storages: tuple[int, ...]
    event: tuple[torch.device, Any] | None = None
    """The device's event behind which the tensors are as the caller left them."""


class Known:
    """What one child process knows of this one's memory."""

    def __init__(self) -> None:
        self.segments: set[int] = set()
        self._storages: OrderedDict[int, tuple[StorageWeakRef, int]] = OrderedDict()
        self._last_number = 0
        self._gone: list[int] = []

    def storage(self, storage: torch.UntypedStorage) -> tuple[int, bool]:
        """Return the number of a storage in shared memory, and whether the child has it."""
        at = storage.data_ptr()
        found = self._storages.get(at)
        if found is not None and not found[0].expired() and found[0].cdata == storage._cdata:
            self._storages.move_to_end(at)
            return found[1], True
        if found is not None:
            self._gone.append(found[1])
        self._last_number += 1
        self._storages[at] = (StorageWeakRef(storage), self._last_number)
        return self._last_number, False

    def gone_storages(self, in_use: set[int]) -> list[int]:
        """Return the storages that the child may forget: dropped here, or too many."""
        for at, (reference, number) in list(self._storages.items()):
            if number not in in_use and (reference.expired() or len(self._storages) > MAX_HANDLES):
                del self._storages[at]
                self._gone.append(number)
        gone, self._gone = self._gone, []
        return gone


class Parcel:
    """The tensors of one collective, on their way; `on_device`: the group in the child works on device memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], roles: Sequence[Role], *, on_device: bool) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._roles = roles
        self._on_device = on_device
        self.is_copied = not on_device
        """Whether the child has copies only: then nothing that it still does reaches the caller's tensors."""
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._segment: Segment | None = None
        self._event: Any = None
        for tensor in tensors:
            if tensor.layout != torch.strided:
                raise ConfigError(f"a tensor of layout {tensor.layout}: a group in a child process takes dense ones")
            if on_device and tensor.device.type == "cpu":
                raise ConfigError("a tensor in CPU memory: the group in the child process works on device memory only")

    def __repr__(self) -> str:
        return f"Parcel({len(self._tensors)} tensors, {self._segment})"

    def pack(self, pool: SegmentPool, known: Known) -> tuple[Manifest, list[int]]:
        """Put everything where the child finds it; return what to send, and the descriptors that go along."""
        gone_segments = pool.gone(known.segments)
        places: list[Place] = []
        new_storages: list[tuple[int, int]] = []
        storage_fds: list[int] = []
        new_on_device: list[tuple[int, OnDevice]] = []
        copied: list[tuple[int, InSegment]] = []
        size = 0
        for number, tensor in enumerate(self._tensors):
            if self._on_device:
                # Once per storage: torch counts each handle in the storage itself until that is freed, has events for
                # 1,000 of them in a process, and then waits for the stream at each.
                storage = tensor.untyped_storage()
                key, is_known = known.storage(storage)
                if not is_known:
                    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                    new_on_device.append((key, OnDevice(*reduce_tensor(whole))))
                offset, shape, stride = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
                places.append(InStorage(key, offset, tensor.dtype, shape, stride))
                continue
            handle = _shared_storage(tensor)
            if handle is not None:
                self.is_copied = False
                key, is_known = known.storage(handle)
                if not is_known:
                    fd, size_bytes = handle._share_fd_cpu_()
                    new_storages.append((key, size_bytes))
                    storage_fds.append(fd)  # the storage's own, open as long as that is
                places.append(InStorage(key, int(tensor.storage_offset()), tensor.dtype, tuple(tensor.shape)))
                continue
            place = InSegment(size, tensor.dtype, tuple(tensor.shape))
            places.append(place)
            copied.append((number, place))
            size += -(-tensor.numel() * tensor.element_size() // ALIGN_BYTES) * ALIGN_BYTES
        in_use = {place.storage for place in places if isinstance(place, InStorage)}
        new_segment_bytes, segment_fds = self._fill(pool, known, copied, size)
        manifest = Manifest(
            places=tuple(places),
            segment=None if self._segment is None else self._segment.number,
            new_segment_bytes=new_segment_bytes,
            new_storages=tuple(new_storages),
            new_on_device=tuple(new_on_device),
            gone_segments=tuple(gone_segments),
            gone_storages=tuple(known.gone_storages(in_use)),
            event=self._record(),
        )
        return manifest, [*segment_fds, *storage_fds]

    def _fill(
        self, pool: SegmentPool, known: Known, copied: list[tuple[int, InSegment]], size: int
    ) -> tuple[int, list[int]]:
        if not copied:
            return 0, []
        segment = self._segment = pool.take(size)
        for number, place in copied:
            inside, tensor = _view(segment.memory, place), self._tensors[number]
            if Role.READ in self._roles[number]:
                inside.copy_(tensor)
            if Role.WRITTEN in self._roles[number]:
                self._back.append((tensor, inside))
        if segment.number in known.segments:
            return 0, []
        known.segments.add(segment.number)
        return segment.size_bytes, [segment.fd]

    def _record(self) -> tuple[torch.device, Any] | None:
        devices = [tensor.device for tensor in self._tensors] if self._on_device else []
        if not devices:
            return None
        self._event = torch.cuda.Event(interprocess=True)
        self._event.record(torch.cuda.current_stream(devices[0]))
        return devices[0], self._event.ipc_handle()

    def copy_back(self) -> None:
        """Put the results into the caller's tensors."""
        for tensor, inside in self._back:
            tensor.copy_(inside)

    def release(self, pool: SegmentPool, *, certain: bool) -> None:
        """Give the memory back; not `certain`: the child may still write to it."""
        segment, self._segment = self._segment, None
        self._back = []
        self._tensors = []
        self._event = None
        if segment is not None:
            if certain:
                pool.give_back(segment)
            else:
                pool.drop(segment)


class Unpacker:
    """The child's side: finds the tensors that a manifest names."""

    def __init__(self) -> None:
        self._segments = SegmentViews()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __repr__(self) -> str:
        return f"Unpacker({self._segments}, {len(self._storages)} storages)"

    def unpack(self, manifest: Manifest, fds: list[int]) -> list[torch.Tensor]:
        """Return the tensors; takes the descriptors over."""
        for number in manifest.gone_segments:
            self._segments.forget(number)
        for key in manifest.gone_storages:
            self._storages.pop(key, None)
        if manifest.new_segment_bytes:
            assert manifest.segment is not None
            self._segments.add(manifest.segment, fds.pop(0), manifest.new_segment_bytes)
        for (key, size_bytes), fd in zip(manifest.new_storages, fds, strict=True):
            try:
                self._storages[key] = torch.UntypedStorage._new_shared_fd_cpu(fd, size_bytes)  # type: ignore[attr-defined]
            finally:
                os.close(fd)
        if manifest.event is not None:
            device, handle = manifest.event
            event = torch.cuda.Event.from_ipc_handle(device, handle)
            torch.cuda.current_stream(device).wait_event(event)
        for key, handle in manifest.new_on_device:
            self._storages[key] = handle.open(*handle.arguments).untyped_storage()
        return [self._open(place, manifest) for place in manifest.places]

    def _open(self, place: Place, manifest: Manifest) -> torch.Tensor:
        if isinstance(place, InSegment):
            assert manifest.segment is not None
            return _view(self._segments[manifest.segment], place)
        storage, shape = self._storages[place.storage], torch.Size(place.shape)
        stride = torch.empty(shape, device="meta").stride() if place.stride is None else place.stride
        return torch.empty(0, dtype=place.dtype, device=storage.device).set_(storage, place.offset, shape, stride)


def _shared_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage if it lies in shared memory that a descriptor stands for.

    Only of contiguous tensors: Gloo takes any tensor for a piece of memory as long as its elements.
    """
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return None
    if torch_multiprocessing.get_sharing_strategy() != "file_descriptor":
        return None
    storage = tensor.untyped_storage()
    return storage if storage.is_shared() and storage.nbytes() > 0 else None


def _view(memory: torch.Tensor, place: InSegment) -> torch.Tensor:
    numel = 1
    for length in place.shape:
        numel *= length
    size_bytes = numel * place.dtype.itemsize
    return memory[place.offset : place.offset + size_bytes].view(place.dtype).view(place.shape)
