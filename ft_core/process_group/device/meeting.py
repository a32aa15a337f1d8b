"""How the ranks of a device group find each other, and the store that their communicator is made over.

How it works. First all ranks exchange a record through the quorum's store, as those of a Gloo group do (`rendezvous`):
so that a rank that does not come is named, and one that was given another number of ranks, or has another library, is
told. Only then is the communicator made. What it asks of its store (NCCL: the identifier that rank 0 invents) goes
through `MeetingStore`, which asks in small steps and so can be ended between two. `close` deletes what was written.

Invariants: nothing is asked of the network after `close`. One store client, taken from the pool and given back only
after answers. Threads: the one that forms the group; `cut` from any.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from ft_core.errors import CollectiveError, ConfigError
from ft_core.process_group import rendezvous, store_pool
from ft_core.process_group.rendezvous import RendezvousStore
from ft_core.process_group.store_pool import parse_store_addr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from ft_core.process_group.store_pool import StoreClient

POLL_FIRST_S = 0.0005
POLL_LAST_S = 0.01
MAX_KEYS = 64
"""NCCL asks for one key, or for one in 128 ranks."""


class MeetingStore(Store):
    """The store that a communicator is made over: a few keys, written by one rank and read by all."""

    def __init__(self, store: Store | None, prefix: str, checkpoint: Callable[[], None]) -> None:
        super().__init__()
        self._store = store  # None where there is nobody to meet
        self._prefix = prefix
        self._checkpoint = checkpoint
        self._known: dict[str, bytes] = {}
        self._closed = False

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key, for all ranks."""
        blob = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        self._check(key)
        self._known[key] = blob
        if self._store is not None:
            # Its name first: what is not named would not be deleted.
            self._store.append(f"{self._prefix}/{rendezvous.NAMES}", f"{key}\n")  # type: ignore[attr-defined]  # no stub
            self._store.set(self._name(key), blob)  # type: ignore[arg-type]  # bytes work; a str would become UTF-8

    def get(self, key: str) -> bytes:
        """Read a key, once it is there."""
        self.wait([key])
        if key not in self._known:
            assert self._store is not None
            self._known[key] = bytes(self._store.get(self._name(key)))
        return self._known[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        left = [key for key in keys if key not in self._known]
        for key in left:
            self._check(key)
        return not left or (self._store is not None and self._store.check([self._name(key) for key in left]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - c10d's signature
        """Wait until all of them are there, or the group is given up. Not `store.wait`: nothing could end that."""
        pause_s = POLL_FIRST_S
        while not self.check(keys):
            self._checkpoint()
            time.sleep(pause_s)
            pause_s = min(POLL_LAST_S, pause_s * 1.5)

    def has_extended_api(self) -> bool:
        """Say that single-key calls are enough."""
        return False

    def close(self) -> None:
        """Ask the network nothing any more."""
        self._store, self._closed = None, True

    def _check(self, key: str) -> None:
        if self._closed:
            raise CollectiveError(f"the group has formed, or was given up: its store has no {key!r}")
        if len(self._known) >= MAX_KEYS:
            raise CollectiveError(f"the communicator asks its store for more than {MAX_KEYS} keys ({key!r})")

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class Meeting:
    """One group's way through the quorum's store."""

    def __init__(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        self._store_addr = store_addr
        self._replica_id = replica_id
        self._rank = rank
        self._world_size = world_size
        self._exchange: RendezvousStore | None = None
        self._meeting: MeetingStore | None = None
        self._client: StoreClient | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Meeting(rank {self._rank} of {self._world_size}, {self._store_addr})"

    def waiting_for(self) -> str:
        """What is waited for, for an error message."""
        missing = self._exchange.missing if self._exchange is not None else ""
        if missing:
            return missing
        return "the ranks are all there and do not connect" if self._meeting is not None else "the store did not answer"

    def open(self, kind: str, timeout_s: float, checkpoint: Callable[[], None]) -> MeetingStore:
        """Meet the other ranks; returns the store to make the communicator over."""
        if self._world_size == 1:
            self._meeting = MeetingStore(None, "", checkpoint)
            return self._meeting
        address, prefix = parse_store_addr(self._store_addr)
        client = store_pool.pool.take(address, timeout_s)
        with self._lock:
            self._client = client
        self._exchange = RendezvousStore(client.store, prefix, self._replica_id, self._world_size, checkpoint)
        self._exchange.set(f"kind/{self._rank}", kind.encode())
        for other in range(self._world_size):
            theirs = self._exchange.get(f"kind/{other}").decode(errors="replace")
            if theirs != kind:
                raise ConfigError(
                    f"rank {self._rank} has {kind}, rank {other} has {theirs}: all replicas need the same library "
                    "in the same version"
                )
        self._meeting = MeetingStore(client.store, prefix, checkpoint)
        return self._meeting

    def close(self, error: Exception | None) -> None:
        """It has formed, or failed with `error`: stop using the store, and give its client back if it is whole."""
        if self._meeting is not None:
            self._meeting.close()
        with self._lock:
            client, self._client = self._client, None
        if client is None or isinstance(error, DistError):
            return
        try:
            if error is None and self._exchange is not None:
                self._exchange.done(client.store)
            rendezvous.left_records.delete(client.address, client.store)
        except RuntimeError:  # the store has just died, and the records with it
            return
        store_pool.pool.give_back(client)

    def left(self) -> None:
        """The group has ended: where it did not form, rank 0 deletes its records when it is in that store again."""
        if self._rank == 0 and self._world_size > 1 and self._exchange is not None:
            rendezvous.left_records.add(*parse_store_addr(self._store_addr))

    def cut(self) -> None:
        """End a question to a store that does not answer."""
        with self._lock:
            if self._client is not None:
                self._client.cut()
