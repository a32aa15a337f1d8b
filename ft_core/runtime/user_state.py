"""The state a replica can hand to a healing one: registered save/load functions, and a consistent view of them.

How it works. `register` keeps (load, save) per key. `collect` calls every save function, on the training thread, at a
step boundary, and returns one nested dict. Tensors in it are references: parameters and optimizer state do not change
until `optimizer.step`, so they are served from live memory without a copy. What changes earlier is copied at once: what
the forward pass writes to (module buffers; `volatile` names their storages), and all containers. `apply` loads a
received state, key by key.

Invariant: user functions run on the training thread only, never while reading is disallowed, never concurrently.
Ownership: the training thread calls `collect` and `apply`; the read gate may be moved from any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ft_core.checkpointing.tree import restore_shards, snapshot
from ft_core.errors import ConfigError, HealError
from ft_core.runtime.no_collectives import NoCollectives

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

    @staticmethod
    def of(load: LoadFn | None, save: StateFn | None) -> LiveState:
        """With one pair of functions, or none yet. Raises ConfigError for half a pair."""
        live = LiveState()
        if (load is None) != (save is None):
            raise ConfigError("pass both load_state_dict and state_dict, or neither and register_state_dict_fn later")
        if load is not None:
            live.register(DEFAULT_KEY, load, save)
        return live

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

    def collect(self, volatile: Collection[int], timeout_s: float, *, checked: bool = False) -> dict[str, Any]:
        """Call every save function and return {key: state}.

        Args:
            volatile: data_ptr of each storage that the forward pass changes; tensors in them are cloned.
            timeout_s: how long to wait for `allow_read`.
            checked: refuse functions that communicate inside the group.

        Raises:
            HealError: reading stayed disallowed.
            ConfigError: a function communicates.
        """
        if not self._readable.wait(timeout_s):
            raise HealError(f"allow_state_dict_read was not called within {timeout_s:g} s")
        state = {}
        for key, save in self._save.items():
            with NoCollectives(key) if checked else contextlib.nullcontext():
                state[key] = snapshot(save(), volatile)
        return state

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
            load(restore_shards(state[key], self._save[key]))
