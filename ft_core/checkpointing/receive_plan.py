"""Where received bytes go: into the receiver's own tensors where they match, else into fresh memory.

`ReceivePlan` pairs a donor's manifest with memory on this side: one target per range. A leaf goes *in place* if the
receiver's own state has a plain, contiguous tensor at the same key path with the same dtype and shape, and no other
leaf was given (part of) the same memory. Where that lies on a device, a range lands in a buffer of pinned memory and is
copied to the device once it was verified, while others are still on their way; the state is not handed out before all
those copies have ended. Packs of small leaves are received into a buffer and copied out at the end, when everything has
been verified.

`Prefetched` has what lies in that memory: for every range that arrived whole, the checksum of its bytes, by range key.
A later plan takes it over, so that only ranges whose checksum differs from the donor's have to travel. It is kept
true while a fetch runs (a range is forgotten before its first byte is overwritten), so a fetch that failed half way
can be continued with it.

Invariants
- No two ranges share target memory, so several threads may fill ranges at once.
- Nothing is copied to a device that was not verified, nor before the device has done what the state's owner had
  launched at the boundary.
- `Prefetched.sums[key]` is the checksum of what is in memory, provided nobody else writes there; tensors whose
  `_version` moved are checked again.

Threads: built by one worker and finished by the caller of fetch; `forget` and `arrived` are called under the fetch's
lock; workers write only into `landing(i)` of ranges they own.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ft_core.checkpointing import devices, state_types
from ft_core.checkpointing.devices import All, byte_slice, wait_for
from ft_core.checkpointing.staging import COPY_S
from ft_core.checkpointing.state_encoding import Leaf, decode_tree
from ft_core.checkpointing.tensor_bytes import byte_view, checksum, fresh, version_of
from ft_core.checkpointing.tree import is_plain_tensor, tensor_paths
from ft_core.errors import HealError, StateRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core.checkpointing.devices import Device
    from ft_core.checkpointing.own_state import OwnState
    from ft_core.checkpointing.ranges import Manifest
    from ft_core.checkpointing.staging import Staging
    from ft_core.device import Mark


@dataclass(slots=True, repr=False)
class Prefetched:
    """State copied ahead of joining; not consistent by itself. Pass it to `fetch(have=...)`, which keeps it up to date.

    Its tensors (the caller's own, where `into` matched) must not be changed in between. Changes that autograd sees are
    noticed and cost a new checksum of that tensor; ones made behind its back (`p.data.add_`) are not noticed.
    `bytes`, `seconds` and `donors_used` describe the prefetch.
    """

    bytes: int = 0
    seconds: float = 0.0
    donors_used: tuple[str, ...] = ()
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # leaf identity -> memory
    versions: dict[str, int] = field(default_factory=dict)  # leaf identity -> _version when the sums were taken
    packs: dict[str, bytearray] = field(default_factory=dict)  # range key -> contents
    sums: dict[str, int] = field(default_factory=dict)  # range key -> checksum of what lies in memory here

    def __repr__(self) -> str:
        donors = ", ".join(self.donors_used)
        return f"Prefetched({self.bytes} B in {self.seconds:.3f} s, {len(self.sums)} ranges, from {donors or 'nobody'})"


@dataclass(slots=True)
class Gauge:
    """How far a fetch or prefetch is, for whoever wants to know: written under its lock, read from any thread."""

    done: int = 0
    """Bytes that are here, verified or known to be equal."""
    total: int = 0
    """Bytes of all ranges that are needed; 0: not known yet."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the receiver brings along; see `http.client.fetch` for each."""

    into: object = None
    have: Prefetched | None = None
    only: Callable[[str], bool] | None = None
    own: OwnState | None = None
    gauge: Gauge = field(default_factory=Gauge)
    staging: Staging | None = None
    """What passes on the way to devices; None: nothing is received into device memory."""


class ReceivePlan:
    """Targets for one manifest. `known[i]` is the checksum of what range i's target already holds, or None."""

    def __init__(self, manifest: Manifest, given: Given) -> None:
        only = given.only
        self.manifest = manifest
        self.classes = given.own.classes if given.own is not None else {}
        _check_classes(manifest, self.classes)
        self.kept = given.have if given.have is not None else Prefetched()
        self._own = tensor_paths(given.into) if given.into is not None else {}
        self._staging = given.staging
        self._landed: dict[int, torch.Tensor] = {}  # range -> buffer it is received into; as many as are under way
        self._copies: deque[Mark] = deque()  # ends of copies to devices, as many as there are ranges
        self._ordered: set[Device] = set()  # those whose copies wait for the boundary: later ones come behind them
        self._claimed: dict[torch.device, list[tuple[int, int]]] = {}  # sorted, disjoint (start, stop) addresses
        self._in_place: list[torch.Tensor] = []
        self._wanted = [only is None or only(leaf.path) for leaf in manifest.leaves]
        self._tensors = [self._memory(leaf, self._wanted[i]) for i, leaf in enumerate(manifest.leaves)]
        self._views = [byte_view(t) if devices.device_of(t) is None else None for t in self._tensors]
        self._targets: list[memoryview | None] = []
        self.known: list[int | None] = []
        self.needed: list[int] = []
        packs: dict[str, bytearray] = {}
        for index, part in enumerate(manifest.ranges):
            if part.leaf is None:
                packs[part.key] = self.kept.packs.get(part.key) or bytearray(part.nbytes)
                self._targets.append(memoryview(packs[part.key]))
                use = any(self._wanted[leaf] for leaf, _ in part.members)
            else:
                view = self._views[part.leaf]
                self._targets.append(None if view is None else view[part.start : part.stop])
                use = self._wanted[part.leaf]
            if use:
                self.needed.append(index)
            self.known.append(self._known_sum(index))
        self._take_over(packs)

    @property
    def nbytes(self) -> int:
        """Bytes of the ranges that are needed, whether they have to travel or not."""
        return sum(self.manifest.ranges[i].nbytes for i in self.needed)

    def target(self, index: int) -> memoryview | None:
        """The memory that range `index` belongs to; None: it lies on a device."""
        return self._targets[index]

    def landing(self, index: int, within_s: float) -> memoryview | None:
        """The memory to receive range `index` into; None: all buffers for devices are in use for so long."""
        part, target = self.manifest.ranges[index], self._targets[index]
        if target is not None:
            return target
        buffer = self._landed.get(index)
        if buffer is None:
            assert part.leaf is not None
            assert self._staging is not None
            buffer = self._staging.take(_device(self._tensors[part.leaf]), within_s)
            if buffer is None:
                return None
            self._landed[index] = buffer
        return byte_view(buffer)[: part.nbytes]

    def abandon(self, index: int) -> None:
        """Range `index` is not received any more, by whoever had its landing; it may be given another one."""
        buffer = self._landed.pop(index, None)
        if buffer is not None:
            assert self._staging is not None
            self._staging.give_back(buffer)

    def tensor(self, leaf: int) -> torch.Tensor:
        """The memory of a leaf."""
        return self._tensors[leaf]

    def sums(self) -> list[int]:
        """The verified checksum of every range; only of a plan that is finished and left nothing out."""
        return [self.kept.sums[part.key] for part in self.manifest.ranges]

    def forget(self, index: int) -> None:
        """Range `index` is about to be overwritten."""
        self.kept.sums.pop(self.manifest.ranges[index].key, None)

    def arrived(self, index: int, value: int) -> None:
        """Range `index` has landed as a whole, with this checksum. Raises HealError: its device cannot copy it."""
        part, buffer = self.manifest.ranges[index], self._landed.get(index)
        if buffer is not None:
            assert part.leaf is not None
            end = self._copy(self._tensors[part.leaf], part.start, buffer[: part.nbytes])
            del self._landed[index]
            assert self._staging is not None
            self._staging.give_back(buffer, end)
        self.kept.sums[part.key] = value

    def finish(self) -> Any:
        """All needed ranges hold verified bytes: copy the packs out, and build the state."""
        for index in self.needed:
            target, members = self._targets[index], self.manifest.ranges[index].members
            wanted = [(leaf, offset) for leaf, offset in members if self._wanted[leaf]]
            for leaf, offset in wanted:
                assert target is not None
                view = self._views[leaf]
                if view is not None:
                    view[:] = target[offset : offset + self.manifest.leaves[leaf].nbytes]
            on_devices = [(leaf, offset) for leaf, offset in wanted if self._views[leaf] is None]
            if on_devices:
                assert target is not None
                self._copy_pack(target, on_devices)
        self.settle()
        return decode_tree(self.manifest.skeleton, self._tensors, self.classes)

    def _copy_pack(self, pack: memoryview, members: list[tuple[int, int]]) -> None:
        """Begin to copy leaves out of a pack to devices, through pinned memory.

        From any other memory a copy would block this thread until the device has come to it, whatever its deadline is.
        """
        assert self._staging is not None
        buffer = self._staging.take(_device(self._tensors[members[0][0]]), COPY_S)
        if buffer is None:
            raise HealError(f"no pinned memory was free within {COPY_S:g} s (FT_STAGING_MB)")
        byte_view(buffer)[: len(pack)] = pack
        ends: list[Mark] = []
        try:
            for leaf, offset in members:
                part = buffer[offset : offset + self.manifest.leaves[leaf].nbytes]
                ends.append(self._copy(self._tensors[leaf], 0, part))
        finally:
            self._staging.give_back(buffer, All(ends))

    def _copy(self, tensor: torch.Tensor, start: int, source: torch.Tensor) -> Mark:
        """Begin to copy bytes to a tensor on a device, behind what its owner had launched."""
        device = _device(tensor)
        assert self._staging is not None
        try:
            after = None if device in self._ordered else self._staging.boundary(device)
            end = device.copy(byte_slice(tensor, start, start + source.numel()), source, after)
        except RuntimeError as e:
            raise HealError(f"the device could not take {source.numel()} bytes: {e}") from e
        self._ordered.add(device)
        self._copies.append(end)
        return end

    def settle(self) -> None:
        """Nothing is received any more: wait for what devices copy, mark for autograd that tensors were written to.

        Raises HealError: a device did not copy what it was given.
        """
        copies = list(self._copies)
        self._copies.clear()
        try:
            done = all(wait_for(end, COPY_S) for end in copies)
        except RuntimeError as e:
            raise HealError(f"a device could not copy the received state: {e}") from e
        if not done:
            raise HealError(f"a device has not copied the received state within {COPY_S:g} s")
        for tensor in self._in_place:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        for leaf, tensor in zip(self.manifest.leaves, self._tensors, strict=True):
            self.kept.versions[leaf.identity] = version_of(tensor)

    def _take_over(self, packs: dict[str, bytearray]) -> None:
        kept, known = self.kept, zip(self.manifest.ranges, self.known, strict=True)
        kept.tensors = {leaf.identity: self._tensors[i] for i, leaf in enumerate(self.manifest.leaves)}
        kept.versions = {identity: version_of(tensor) for identity, tensor in kept.tensors.items()}
        kept.packs = packs
        kept.sums = {part.key: value for part, value in known if value is not None}

    def _memory(self, leaf: Leaf, wanted: bool) -> torch.Tensor:
        for tensor in (self.kept.tensors.get(leaf.identity), self._own.get(leaf.path)):
            if tensor is not None and self._claim(tensor, leaf):
                if wanted:
                    self._in_place.append(tensor)
                return tensor
        if not wanted:
            raise HealError(f"{leaf.path}: not to be transferred, and `into` has no such tensor ({leaf.identity})")
        try:
            return fresh(leaf.shape, leaf.dtype)
        except RuntimeError as e:
            raise HealError(f"{leaf.path}: no memory for {leaf.nbytes} bytes: {e}") from e

    def _claim(self, tensor: torch.Tensor, leaf: Leaf) -> bool:
        if (
            not is_plain_tensor(tensor)
            or tensor.dtype != leaf.dtype
            or tuple(tensor.shape) != leaf.shape
            or not self._reaches(tensor)
            or not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        if leaf.nbytes == 0:
            return True
        start, stop = tensor.data_ptr(), tensor.data_ptr() + leaf.nbytes
        claimed = self._claimed.setdefault(tensor.device, [])
        at = bisect.bisect_left(claimed, (start, stop))
        before, after = claimed[at - 1 : at], claimed[at : at + 1]
        # Tied here but not at the donor: two ranges would be written to the same memory at once.
        if (at and before[0][1] > start) or (after and after[0][0] < stop):
            return False
        claimed.insert(at, (start, stop))
        return True

    def _reaches(self, tensor: torch.Tensor) -> bool:
        """Whether a range can get there."""
        on_device = devices.device_of(tensor) is not None
        return self._staging is not None if on_device else tensor.device.type == "cpu"

    def _known_sum(self, index: int) -> int | None:
        part = self.manifest.ranges[index]
        value = self.kept.sums.get(part.key)
        if value is None or part.leaf is None:
            return value
        identity = self.manifest.leaves[part.leaf].identity
        tensor = self._tensors[part.leaf]
        if self.kept.tensors.get(identity) is not tensor:
            return None
        if self.kept.versions.get(identity) != version_of(tensor):
            target = self._targets[index]
            return None if target is None else checksum(target)
        return value


def _device(tensor: torch.Tensor) -> Device:
    device = devices.device_of(tensor)
    assert device is not None
    return device


def _check_classes(manifest: Manifest, known: Mapping[str, type]) -> None:
    """Before a byte travels: a class that cannot be rebuilt here will not be known after the transfer either."""
    for name, path in manifest.classes.items():
        if not state_types.knows(name, known):
            raise StateRefusedError(
                f"the donor's state holds an instance of {name[:200]} ({path[:200]}), a class that is neither in this "
                "replica's own state nor registered: call ft_core.checkpointing.register_state_type with it before the "
                "first start_quorum, on every replica"
            )
