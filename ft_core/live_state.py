"""The state a replica can hand to a healing one: registered save/load functions, and a consistent view of them.

How it works. `register` keeps (load, save) per key. `collect` calls every save function, on the training thread, at a
step boundary, and returns one nested dict. Tensors in it are references: parameters and optimizer state do not change
until `optimizer.step`, so they are served from live memory without a copy. What the forward pass changes (module
buffers; `volatile` names their storages) is cloned at once. `apply` loads a received state, key by key.

Invariant: user functions run on the training thread only, never while reading is disallowed, never concurrently.
Ownership: the training thread calls `collect` and `apply`; the read gate may be moved from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ft_core.errors import ConfigError, HealError

StateFn = Callable[[], Any]
LoadFn = Callable[[Any], None]
DEFAULT_KEY = "default"


class LiveState:
    """Registered state functions of one Manager."""

    def __init__(self) -> None:
        self._load: dict[str, LoadFn] = {}
        self._save: dict[str, StateFn] = {}
        self._readable = threading.Event()
        self._readable.set()

    def __repr__(self) -> str:
        return f"LiveState({', '.join(self._save) or 'nothing registered'})"

    @property
    def keys(self) -> tuple[str, ...]:
        """Registered keys, in order of registration."""
        return tuple(self._save)

    def register(self, key: str, load: object, save: object) -> None:
        """Add a pair of functions.

        Raises:
            ConfigError: the key is taken, or a function is not callable.
        """
        if key in self._save:
            raise ConfigError(f"state functions for key {key!r} are already registered; use another key")
        if not callable(load) or not callable(save):
            raise ConfigError(f"state functions for key {key!r} must be callable, got {load!r} and {save!r}")
        self._load[key], self._save[key] = load, save

    def allow_read(self) -> None:
        """Let `collect` proceed again."""
        self._readable.set()

    def disallow_read(self) -> None:
        """Make `collect` wait: the caller is about to leave the state half-updated."""
        self._readable.clear()

    def collect(self, volatile: Collection[int], timeout_s: float) -> dict[str, Any]:
        """Call every save function and return {key: state}.

        Args:
            volatile: data_ptr of each storage that the forward pass changes; tensors in them are cloned.
            timeout_s: how long to wait for `allow_read`.

        Raises:
            HealError: reading stayed disallowed.
        """
        if not self._readable.wait(timeout_s):
            raise HealError(f"allow_state_dict_read was not called within {timeout_s:g} s")
        out = {key: save() for key, save in self._save.items()}
        return {key: _clone_volatile(value, volatile) for key, value in out.items()} if volatile else out

    def apply(self, state: Mapping[str, Any]) -> None:
        """Load a received state.

        Raises:
            HealError: the donor's keys are not ours; nothing has been loaded.
        """
        if set(state) != set(self._load):
            raise HealError(
                f"the donor's state has keys {sorted(state)}, ours {sorted(self._load)}: register the same state "
                "functions on every replica before the first start_quorum"
            )
        for key, load in self._load.items():
            load(state[key])


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a nest of dicts, lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return []


def _clone_volatile(value: Any, volatile: Collection[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.untyped_storage().data_ptr() in volatile else value
    if isinstance(value, dict):
        changed = {key: _clone_volatile(item, volatile) for key, item in value.items()}
        return value if all(changed[k] is value[k] for k in value) else type(value)(changed)
    if type(value) in (list, tuple):
        changed_items = [_clone_volatile(item, volatile) for item in value]
        same = all(a is b for a, b in zip(changed_items, value, strict=True))
        return value if same else type(value)(changed_items)
    return value
