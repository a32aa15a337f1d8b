"""How the ranks of one Gloo group find each other: one exchange of records through the store.

Gloo writes a blob (its listening address and the connection's identifiers) under its rank and then asks for every other
rank's, one at a time. `RendezvousStore` is the Store it is given: the first write publishes the blob together with what
this project adds (replica, listening endpoint), waits until all ranks' records are there and fetches them at once;
Gloo's own questions are then answered from memory. So forming a group costs a few round trips to the store however many
ranks it has, and afterwards every rank knows every rank's endpoint, which is what `abort` and at-fork closing go by.
While it waits it calls `checkpoint`, which raises to end the waiting (aborted, out of time).

The records are of no use once the group is formed or given up, and the store may outlive many groups: a job's own, or
that of an elastic agent. `left_records` remembers the groups of this process that have ended and of which it was rank
0; when it is in the same store next time, it deletes the records of all their ranks (some may be dead). Not earlier: a
slower rank may still be about to read them.

Invariants: written once, by Gloo's constructor, on one thread; nothing is asked of the network after that. The endpoint
is read out of Gloo's own blob by looking up this process's listening sockets in it: never guessed. `listening` is None
where it was not found (not Linux, or a Gloo that packs its addresses differently).

Threads: the one that runs Gloo's constructor, with the GIL (c10d calls into Python); `listening` and `peers` are
assigned once and may be read from any.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from ft_core.errors import CollectiveError, ConfigError
from ft_core.process_group import socket_table
from ft_core.process_group.socket_table import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

MAX_HEADER_BYTES = 64 * 1024
MAX_LEFT = 1024
"""Ended groups whose records wait to be deleted; beyond that the oldest ones stay in the store."""
POLL_FIRST_S = 0.0002
POLL_LAST_S = 0.005
POLL_GROWTH = 0.05


class RendezvousStore(Store):
    """The store that one Gloo group of `world_size` ranks is constructed over."""

    def __init__(
        self,
        store: Store | None,
        prefix: str,
        replica_id: str,
        world_size: int,
        checkpoint: Callable[[], None],
    ) -> None:
        super().__init__()
        self.listening: Endpoint | None = None
        self.peers: frozenset[Endpoint] = frozenset()
        self.missing: list[str] = []
        """The keys under which ranks have not published yet."""
        self._store = store  # None where there is nobody to exchange with
        self._prefix = prefix
        self._replica_id = replica_id
        self._world_size = world_size
        self._checkpoint = checkpoint
        self._blobs: dict[int, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Gloo publishes this rank's blob: exchange it."""
        blob = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        rank = _rank_in(key)
        found = [(fd, endpoint) for fd, endpoint in socket_table.listeners() if endpoint.packed() in blob]
        if len(found) == 1:
            fd, self.listening = found[0]
            socket_table.wait_for_data(fd)  # nobody knows the port yet
        self._blobs = {rank: blob}
        if self._store is not None:
            self._exchange(rank, blob, self._store)

    def get(self, key: str) -> bytes:
        """Gloo asks for a rank's blob: known since the exchange."""
        return self._blobs[_rank_in(key)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - Gloo's signature
        """Nothing to wait for after the exchange; a key that is not in it is an error, not a hang."""
        missing = [key for key in keys if _rank_in(key) not in self._blobs]
        if missing:
            raise CollectiveError(f"Gloo asks the store for {missing}, which is no rank of this group")

    def has_extended_api(self) -> bool:
        """Say that single-key calls are enough."""
        return False

    def _publish(self, rank: int, blob: bytes, store: Store) -> None:
        endpoint = None if self.listening is None else list(self.listening)
        header = json.dumps({"replica_id": self._replica_id, "world_size": self._world_size, "endpoint": endpoint})
        record = header.encode() + b"\n" + blob
        store.set(f"{self._prefix}/{rank}", record)  # type: ignore[arg-type]  # bytes work; a str would become UTF-8

    def _exchange(self, rank: int, blob: bytes, store: Store) -> None:
        self._checkpoint()  # what an aborted group wrote later would not be deleted
        self._publish(rank, blob, store)
        others = [f"{self._prefix}/{other}" for other in range(self._world_size) if other != rank]
        self.missing = others
        self._wait_for_missing(store)
        peers: dict[int, Endpoint | None] = {}
        for other, record in zip((int(_rank_in(key)) for key in others), store.multi_get(others), strict=True):
            peers[other], self._blobs[other] = self._read(other, bytes(record))
        self.peers = frozenset(peer for peer in peers.values() if peer is not None)
        self._refuse_mixed_loopback(rank, peers)

    def _wait_for_missing(self, store: Store) -> None:
        """Ask until all records are there.

        Not `store.wait`: nothing can end that early but cutting its connection, which c10d answers with forty lines on
        stderr. One question takes 0.1 ms; the pauses between them grow with the time waited.
        """
        began = time.monotonic()
        while not store.check(self.missing):
            self._checkpoint()
            pause_s = (time.monotonic() - began) * POLL_GROWTH
            if pause_s >= POLL_LAST_S:
                # Now that there is time: which ones, for the error message.
                self.missing = [key for key in self.missing if not store.check([key])] or self.missing
            time.sleep(min(POLL_LAST_S, max(POLL_FIRST_S, pause_s)))
        self.missing = []

    def _read(self, rank: int, record: bytes) -> tuple[Endpoint | None, bytes]:
        header, _, blob = record.partition(b"\n")
        try:
            fields = json.loads(header[:MAX_HEADER_BYTES])
            endpoint = fields["endpoint"]
            world_size = fields["world_size"]
            peer = None if endpoint is None else Endpoint(str(endpoint[0]), int(endpoint[1]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CollectiveError(f"what rank {rank} wrote to the store is not one of our records: {error}") from error
        if world_size != self._world_size:
            raise CollectiveError(
                f"rank {rank} ({fields.get('replica_id')}) configures a group of {world_size} ranks under the same "
                f"store prefix {self._prefix!r}, this rank one of {self._world_size}"
            )
        return peer, blob

    def _refuse_mixed_loopback(self, rank: int, peers: dict[int, Endpoint | None]) -> None:
        mine = self.listening
        if mine is None:
            return
        for other, peer in sorted(peers.items()):
            if peer is not None and peer.is_loopback != mine.is_loopback:
                local, remote = (rank, other) if mine.is_loopback else (other, rank)
                raise ConfigError(
                    f"rank {local} listens on a loopback address, which rank {remote} on another address cannot reach "
                    f"({mine} and {peer}): give hostname= or interface= (FT_HOSTNAME, FT_INTERFACE) on that rank"
                )


class LeftRecords:
    """The groups that have ended, and whose records this process has to delete. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: deque[tuple[Endpoint, str, int]] = deque(maxlen=MAX_LEFT)

    def __repr__(self) -> str:
        return f"LeftRecords({len(self._groups)} groups)"

    def add(self, address: Endpoint, prefix: str, world_size: int) -> None:
        """The group of `world_size` ranks that met under `prefix` in the store at `address` has ended."""
        with self._lock:
            self._groups.append((address, prefix, world_size))

    def delete(self, address: Endpoint, store: Store) -> None:
        """Delete what was left in the store at `address`; raises what the store raises."""
        with self._lock:
            mine = [group for group in self._groups if group[0] == address]
            for group in mine:
                self._groups.remove(group)
        for _, prefix, world_size in mine:
            for rank in range(world_size):
                store.delete_key(f"{prefix}/{rank}")


left_records = LeftRecords()


def _after_fork_in_child() -> None:
    global left_records
    left_records = LeftRecords()  # the parent's; and a thread that is not here may hold its lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _rank_in(key: str) -> int:
    return int(key.rsplit("/", 1)[-1])
