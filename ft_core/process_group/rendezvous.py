"""How the ranks of one group find each other: one exchange of records through the store.

Gloo writes a blob (its listening address and an identifier per connection) under its rank and then asks for every other
rank's, one at a time. `RendezvousStore` is the Store it is given: the first write publishes the blob together with what
this project adds (replica, listening endpoint); Gloo's own questions are then answered from memory. All ranks append
their records to one key and count themselves; who is the last to come reads all records and writes them under another
key, compressed: they are nearly alike. The others ask for that one key, the less often the more they are, so that all
of them together ask the store at most ASKED_PER_S times a second. So forming a group costs each rank the same few round
trips however many there are, and afterwards every rank knows every rank's endpoint, which is what `abort` and at-fork
closing go by. While it waits it calls `checkpoint`, which raises to end the waiting (aborted, out of time).

The records are of no use once all have read them, and the store may outlive many groups: a job's own, or that of an
elastic agent. So who is the last to say that it has read them deletes them (`done`). Where the forming is given up that
rank does not exist: `left_records` remembers the groups of this process that have ended and of which it was rank 0;
when it is in the same store next time, it deletes what is left of them. Not earlier: a slower rank may still read.

Invariants: written once, by Gloo's constructor, on one thread; nothing is asked of the network after that. The endpoint
is read out of Gloo's own blob by looking up this process's listening sockets in it: never guessed. `listening` is None
where it was not found (not Linux, or a Gloo that packs its addresses differently).

What a device group exchanges is the kind of its library, by the same calls (`device/meeting.py`).

Threads: the one that runs Gloo's constructor, with the GIL (c10d calls into Python); `listening` and `peers` are
assigned once and may be read from any.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from collections import deque
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from ft_core.compression import inflate
from ft_core.errors import CollectiveError, ConfigError
from ft_core.process_group import socket_table
from ft_core.process_group.socket_table import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

MAX_HEADER_BYTES = 64 * 1024
MAX_RECORDS_BYTES = 256 << 20
"""All records of one group: of 1,000 ranks they are 8 MB."""
PACK_LEVEL = 6
"""They become 115 kB, which each of the 1,000 reads (1.5 MB at level 1)."""
MAX_LEFT = 1024
"""Ended groups whose records wait to be deleted; beyond that the oldest ones stay in the store."""
POLL_FIRST_S = 0.0002
POLL_LAST_S = 0.005
POLL_GROWTH = 0.05
ASKED_PER_S = 20_000
"""What all ranks of a group ask the store per second while they wait; one question takes it 20 to 50 us."""
NAMED_AFTER_S = 0.05
"""After so long it is found out who is missing, for the error message; again after twice as long each time."""
NAMED_UP_TO = 64
"""In larger groups it is only known how many are missing."""
RECORDS, COUNT, ALL, READ = "records", "count", "all", "read"
"""What there is under the prefix of a group that forms: the records, how many, all of them in one, who has read it."""
NAMES = "names"
"""What else was written there, one name a line: what a device group's communicator asks for (`device/meeting.py`)."""
_LENGTH = struct.Struct("<I")


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
        self.missing = "" if store is None else "who is there was not known yet"
        """What it waits for, in words: which ranks did not come. "" once all are there."""
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

    def done(self, store: Store) -> None:
        """This rank has read what it needs. The last one of the group deletes the records. Raises what `store` does."""
        if self._store is not None and store.add(self._key(READ), 1) == self._world_size:
            delete(store, self._prefix)

    def _key(self, what: str) -> str:
        return f"{self._prefix}/{what}"

    def _publish(self, rank: int, blob: bytes, store: Store) -> bool:
        """Write this rank's record. Returns whether it was the last one to come."""
        endpoint = None if self.listening is None else list(self.listening)
        header = json.dumps(
            {"rank": rank, "replica_id": self._replica_id, "world_size": self._world_size, "endpoint": endpoint}
        )
        record = header.encode() + b"\n" + blob
        store.append(self._key(RECORDS), _LENGTH.pack(len(record)) + record)  # type: ignore[attr-defined]  # not in the stub
        return store.add(self._key(COUNT), 1) == self._world_size

    def _exchange(self, rank: int, blob: bytes, store: Store) -> None:
        self._checkpoint()  # what an aborted group wrote later would not be deleted
        if self._publish(rank, blob, store):
            packed = zlib.compress(bytes(store.get(self._key(RECORDS))), PACK_LEVEL)
            store.set(self._key(ALL), packed)  # type: ignore[arg-type]  # bytes work; a str would become UTF-8
        else:
            self._wait_for_all(store)
            packed = bytes(store.get(self._key(ALL)))
        self.missing = ""
        peers: dict[int, Endpoint | None] = {}
        for record in _split(_unpack(packed)):
            other, peer, found = self._read(record)
            peers[other], self._blobs[other] = peer, found
        self._check_ranks(rank, peers)
        self._blobs[rank] = blob
        del peers[rank]
        self.peers = frozenset(peer for peer in peers.values() if peer is not None)
        self._refuse_mixed_loopback(rank, peers)

    def _wait_for_all(self, store: Store) -> None:
        """Ask until all records are there.

        Not `store.wait`: nothing can end that early but cutting its connection, which c10d answers with forty lines on
        stderr. One question takes 0.1 ms; the pauses between them grow with the time waited.
        """
        began = time.monotonic()
        name_after_s = NAMED_AFTER_S
        least_s = max(POLL_FIRST_S, self._world_size / ASKED_PER_S)
        most_s = max(POLL_LAST_S, least_s)
        while not store.check([self._key(ALL)]):
            waited_s = time.monotonic() - began
            if waited_s >= name_after_s:  # before the checkpoint, whose error says it
                name_after_s *= 2
                self.missing = f"{self._who_is_missing(store)} did not come"
            self._checkpoint()
            time.sleep(min(most_s, max(least_s, waited_s * POLL_GROWTH)))

    def _who_is_missing(self, store: Store) -> str:
        if self._world_size > NAMED_UP_TO:
            return f"{self._world_size - store.add(self._key(COUNT), 0)} of {self._world_size} ranks"
        came = {self._read(record)[0] for record in _split(bytes(store.get(self._key(RECORDS))))}
        return f"rank {', '.join(str(rank) for rank in range(self._world_size) if rank not in came)}"

    def _read(self, record: bytes) -> tuple[int, Endpoint | None, bytes]:
        """The rank of a record, where it listens, and its blob."""
        header, _, blob = record.partition(b"\n")
        try:
            fields = json.loads(header[:MAX_HEADER_BYTES])
            rank, endpoint, world_size = int(fields["rank"]), fields["endpoint"], fields["world_size"]
            peer = None if endpoint is None else Endpoint(str(endpoint[0]), int(endpoint[1]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CollectiveError(f"what was written to the store is not one of our records: {error}") from error
        if world_size != self._world_size:
            raise CollectiveError(
                f"rank {rank} ({fields.get('replica_id')}) configures a group of {world_size} ranks under the same "
                f"store prefix {self._prefix!r}, this rank one of {self._world_size}"
            )
        return rank, peer, blob

    def _check_ranks(self, rank: int, found: Mapping[int, object]) -> None:
        if rank not in found or found.keys() != set(range(self._world_size)):
            raise CollectiveError(
                f"the ranks that configure a group under the store prefix {self._prefix!r} are "
                f"{', '.join(map(str, sorted(found)))}, and not {self._world_size} different ones"
            )

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
        self._groups: deque[tuple[Endpoint, str]] = deque(maxlen=MAX_LEFT)

    def __repr__(self) -> str:
        return f"LeftRecords({len(self._groups)} groups)"

    def add(self, address: Endpoint, prefix: str) -> None:
        """The group that met under `prefix` in the store at `address` has ended."""
        with self._lock:
            self._groups.append((address, prefix))

    def delete(self, address: Endpoint, store: Store) -> None:
        """Delete what was left in the store at `address`; raises what the store raises."""
        with self._lock:
            mine = [group for group in self._groups if group[0] == address]
            for group in mine:
                self._groups.remove(group)
        for _, prefix in mine:
            delete(store, prefix)


def delete(store: Store, prefix: str) -> None:
    """Delete all that the ranks of a group wrote."""
    names = f"{prefix}/{NAMES}"
    others = [*bytes(store.get(names)).decode().split(), NAMES] if store.check([names]) else []
    for what in (RECORDS, ALL, COUNT, READ, *others):
        store.delete_key(f"{prefix}/{what}")


def _split(frames: bytes) -> Iterator[bytes]:
    """The records that were appended to each other."""
    at = 0
    while at < len(frames):
        if at + _LENGTH.size > len(frames):
            raise CollectiveError("what was written to the store is not our records: its end is missing")
        (length,) = _LENGTH.unpack_from(frames, at)
        at += _LENGTH.size
        if at + length > len(frames):
            raise CollectiveError("what was written to the store is not our records: its end is missing")
        yield frames[at : at + length]
        at += length


def _unpack(packed: bytes) -> bytes:
    try:
        return inflate(packed, MAX_RECORDS_BYTES)
    except ValueError as error:
        raise CollectiveError(f"what was written to the store is not our records: {error}") from error


left_records = LeftRecords()


def _after_fork_in_child() -> None:
    global left_records
    left_records = LeftRecords()  # the parent's; and a thread that is not here may hold its lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _rank_in(key: str) -> int:
    return int(key.rsplit("/", 1)[-1])
