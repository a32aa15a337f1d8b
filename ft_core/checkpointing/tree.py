"""The tensors in a nest of containers: where they are, and a copy of the nest that later changes do not reach.

The containers are those that `state_encoding` carries: dicts, lists, tuples, deques, named tuples and dataclasses (sets
hold no tensors). What is of any other type is a single value here.

Threads: pure.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

import torch

from ft_core.checkpointing import state_types
from ft_core.checkpointing.sharded_state import LocalShard, Meshes, is_sharded, local_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

MAX_DEPTH: Final = 64
"""Deepest nesting carried; also what ends a state that contains itself."""
ROOT: Final = "state"
PLAIN: Final = frozenset((str, float, bool, int, type(None)))


def is_plain_tensor(value: object) -> bool:
    """Whether `value` is a tensor whose bytes are its value: not a subclass, sparse, quantized, nested or meta."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_nested
        and not value.is_meta
    )


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each with the end of its key path; nothing for other values."""
    if isinstance(value, LocalShard):
        yield "", value.tensor
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, tuple) and state_types.is_named_tuple(type(value)):
        for name, item in state_types.fields_of(value):
            yield f".{name}", item
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif state_types.is_open_dataclass(type(value)):
        for name, item in state_types.fields_of(value):
            yield f".{name}", item


def tensor_paths(state: object) -> dict[str, torch.Tensor]:
    """Key path -> tensor for every plain tensor in `state`, with the paths `encode` would give. Skips all else."""
    found: dict[str, torch.Tensor] = {}
    _collect(state, ROOT, 0, found)
    return found


def _collect(value: object, path: str, depth: int, found: dict[str, torch.Tensor]) -> None:
    if type(value) in PLAIN or depth > MAX_DEPTH:
        return
    if is_plain_tensor(value):
        assert isinstance(value, torch.Tensor)
        found[path] = value
        return
    for suffix, item in children(value):
        _collect(item, path + suffix, depth + 1, found)


def tensors_in(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """Every tensor in a nest, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in PLAIN or depth > MAX_DEPTH:
        return []
    return [tensor for _, item in children(value) for tensor in tensors_in(item, depth + 1)]


def restore_shards(state: Any, own: Callable[[], object]) -> Any:
    """A received state with DTensors in place of their parts.

    Args:
        state: whose containers may be changed.
        own: the receiver's own state, asked for if there are parts.

    Raises:
        HealError: a tensor is sharded otherwise here.
    """
    if not _has_shards(state, 0):
        return state
    sharded: dict[str, Any] = {}
    _collect_sharded(own(), ROOT, 0, sharded)
    return _restored(state, ROOT, Meshes(sharded))


def _has_shards(value: Any, depth: int) -> bool:
    if isinstance(value, LocalShard):
        return True
    if type(value) in PLAIN or isinstance(value, torch.Tensor) or depth > MAX_DEPTH:
        return False
    return any(_has_shards(item, depth + 1) for _, item in children(value))


def _collect_sharded(value: Any, path: str, depth: int, found: dict[str, Any]) -> None:
    if is_sharded(value):
        found[path] = value
    elif type(value) not in PLAIN and not isinstance(value, torch.Tensor) and depth <= MAX_DEPTH:
        for suffix, item in children(value):
            _collect_sharded(item, path + suffix, depth + 1, found)


def _restored(value: Any, path: str, meshes: Meshes) -> Any:
    kind = type(value)
    if isinstance(value, LocalShard):
        return meshes.sharded(value, path)
    if kind in PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _restored(item, f"{path}[{key!r}]", meshes)
        return value
    made = {suffix: _restored(item, path + suffix, meshes) for suffix, item in children(value)}
    if kind in (list, tuple):
        return kind(made.values())
    if isinstance(value, deque):
        return deque(made.values(), maxlen=value.maxlen)
    if state_types.is_named_tuple(kind):
        return state_types.build_named_tuple(kind, list(made.values()))
    if made and state_types.is_open_dataclass(kind):
        return state_types.build_dataclass(kind, {suffix.removeprefix("."): item for suffix, item in made.items()})
    return value


def snapshot(state: Any, volatile: Collection[int]) -> Any:
    """A copy of the nest. Its tensors are the same ones, but for those in a `volatile` storage, which are cloned.

    Args:
        state: any nest; values of types that `state_encoding` does not carry stay as they are.
        volatile: `data_ptr` of each storage whose content changes while the copy is in use.
    """
    return _Snapshot(volatile).of(state, 0)


class _Snapshot:
    """One copy; `_cloned` keeps tied tensors tied."""

    def __init__(self, volatile: Collection[int]) -> None:
        self._volatile = volatile
        self._cloned: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in PLAIN or depth > MAX_DEPTH:
            return value
        if is_sharded(value):
            part = local_shard(value)
            return LocalShard(self.tensor(part.tensor), part.sharding)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        depth += 1
        if kind in (dict, OrderedDict, defaultdict, Counter):
            return self.mapping(value, depth)
        if kind in (list, tuple):
            return kind([item if type(item) in PLAIN else self.of(item, depth) for item in value])
        if kind is deque:
            return deque((self.of(item, depth) for item in value), maxlen=value.maxlen)
        if kind in (set, frozenset, bytearray):
            return kind(value)
        return self.instance(value, kind, depth)

    def mapping(self, value: Any, depth: int) -> Any:
        made = copy.copy(value)  # a default factory, and what nn.Module.state_dict() hangs on it, come along
        for key, item in value.items():
            if type(item) not in PLAIN:
                made[key] = self.of(item, depth)
        return made

    def instance(self, value: Any, kind: type, depth: int) -> Any:
        entry = state_types.registered(kind)
        if entry is not None and entry.encode is not None and entry.decode is not None:
            try:
                return entry.decode(self.of(entry.encode(value), depth))
            except Exception:  # noqa: BLE001 - the user's functions; the encoder names the key path
                return value
        if state_types.is_named_tuple(kind):
            return state_types.build_named_tuple(kind, [self.of(item, depth) for item in value])
        if state_types.is_open_dataclass(kind) and not state_types.hidden_attributes(value):
            fields = {name: self.of(item, depth) for name, item in state_types.fields_of(value)}
            return state_types.build_dataclass(kind, fields)
        numpy = sys.modules.get("numpy")
        return value.copy() if numpy is not None and kind is numpy.ndarray else value

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        if not self._volatile or value.layout is not torch.strided:
            return value
        if value.untyped_storage().data_ptr() not in self._volatile:
            return value
        plain = is_plain_tensor(value)
        key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if plain else (id(value),)
        if key not in self._cloned:
            self._cloned[key] = value.detach().clone()
        return self._cloned[key]
