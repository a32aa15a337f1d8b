"""Clients of c10d's TCPStore that connect within their time, can be cut off, and wait ready for the next recovery.

`create_store_client` is the public form: a client of one's own. `pool` keeps a few connected clients per address for
`ProcessGroupGloo.configure`, because opening a connection in the middle of a recovery costs time and can hang;
`warm_store(store_addr)` puts one there ahead of need (at join).

Why not just `TCPStore(...)`: against a dead host it takes more than twice its timeout, and a frozen one holds it for
ever. So the address is probed with a plain connection first, and the client is then made on a thread that is given up
at the deadline. Why one user per client: a TCPStore client holds its own lock during a blocking wait, so two groups
that configure at once over one client block each other, across ranks even for good.

Invariants: a client in the pool is idle and has one owner, the pool; taken out, its owner is the taker, who gives it
back only after an exchange that succeeded. At most MAX_IDLE idle clients, the least recently used goes first; those of
stores that have ended go when the next one is given back.
`StoreClient.fd` is the client's socket, found as the one new connection to that address while connections to it were
made one at a time; where that is ambiguous (foreign code connecting at the same moment), another attempt is made,
then it is None.

Threads: everything here from any thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import OrderedDict
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ft_core.errors import ConfigError, PeerError
from ft_core.process_group import host_names, socket_table
from ft_core.process_group.fork_safety import close_in_child
from ft_core.process_group.socket_table import Connection, Endpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

MAX_IDLE = 16
MAX_ADDRESS_LOCKS = 256
IDENTIFY_ATTEMPTS = 3
MIN_TIMEOUT_S = 0.001
"""c10d counts timeouts in milliseconds, and takes none below the first."""
STORE_TIMEOUT = timedelta(minutes=5)  # c10d's own default


class StoreClient:
    """One TCPStore connection: `.store` to use it, `cut()` to end whatever it is doing, from any thread."""

    def __init__(self, address: Endpoint, store: TCPStore, fd: int | None) -> None:
        self.address = address
        self.store = store
        self.fd = fd
        self.connection = None if fd is None else socket_table.connection_of(fd)
        self._pid = os.getpid()

    @property
    def local_host(self) -> str | None:
        """The address of this machine that the connection goes out from, where it is known."""
        return None if self.connection is None else self.connection.local.host

    def is_alive(self) -> bool:
        """Whether the server has not closed the connection (no round trip; an unknown socket counts as alive)."""
        if os.getpid() != self._pid:
            return False  # parked by the fork
        if self.fd is None or self.connection is None:
            return True
        if socket_table.connection_of(self.fd) != self.connection:
            return False
        poll = select.poll()
        poll.register(self.fd, select.POLLRDHUP | select.POLLIN)
        return not poll.poll(0)  # an idle client is never sent anything: readable means ended

    def cut(self) -> None:
        """End the connection: a call that is blocked in it raises at once. Nothing happens without a known socket."""
        mine = self.connection
        if mine is not None:
            socket_table.shut_down(lambda connection: connection == mine)


class StorePool:
    """Idle, connected clients by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[tuple[Endpoint, int], StoreClient] = OrderedDict()
        self._count = 0

    def __repr__(self) -> str:
        return f"StorePool({len(self._idle)} idle)"

    def take(self, address: Endpoint, timeout_s: float) -> StoreClient:
        """Return a client of the taker's own, an idle one if there is one; raises PeerError like `connect`.

        `timeout_s` is the timeout of what is asked of it, too: an idle client has that of whoever used it before.
        """
        while True:
            client = self._pop(address)
            if client is None:
                return connect(address, timeout_s)
            if client.is_alive():
                _set_timeout(client.store, timeout_s)
                return client

    def give_back(self, client: StoreClient) -> None:
        """Put a client that works, and that nobody uses any more, back; let go of those whose server has ended."""
        if not client.is_alive():
            return
        with self._lock:
            self._count += 1
            self._idle[client.address, self._count] = client
            dropped = self._idle.popitem(last=False) if len(self._idle) > MAX_IDLE else None
            held = list(self._idle.items())
        ended = [key for key, idle in held if not idle.is_alive()]  # or taken meanwhile: then it is there no more
        with self._lock:
            gone = [self._idle.pop(key, None) for key in ended]
        del dropped, held, gone  # closes their connections, outside the lock

    def idle(self, address: Endpoint) -> int:
        """Return the number of idle clients for `address`."""
        with self._lock:
            return sum(1 for held, _ in self._idle if held == address)

    def clear(self) -> None:
        """Close every idle connection."""
        with self._lock:
            dropped, self._idle = self._idle, OrderedDict()
        dropped.clear()

    def after_fork(self) -> None:
        """In a forked child: the sockets are parked, and the lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        self._idle = OrderedDict()

    def _pop(self, address: Endpoint) -> StoreClient | None:
        with self._lock:
            newest = next((key for key in reversed(self._idle) if key[0] == address), None)
            return None if newest is None else self._idle.pop(newest)


pool = StorePool()
_opened: dict[int, Connection] = {}
"""Every identified client socket that is still open, by descriptor; what ended is dropped when the next is opened."""
_address_locks: OrderedDict[Endpoint, threading.Lock] = OrderedDict()
_address_locks_lock = threading.Lock()


def parse_store_addr(store_addr: str) -> tuple[Endpoint, str]:
    """Split "host:port/prefix" ("[v6]:port/prefix" too; the prefix may be empty); raises ConfigError."""
    place, _, prefix = store_addr.partition("/")
    host, colon, port = place.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f'store_addr={store_addr!r}: expected "host:port/prefix", for example "10.0.0.5:29500/job/3/0"'
        )
    return Endpoint(host, int(port)), prefix


def create_store_client(store_addr: str, timeout: timedelta) -> Store:
    """Connect to the store at "host:port/prefix" and return a client of it under that prefix.

    `timeout` bounds the connecting and is the client's timeout afterwards. Raises ConfigError for a malformed address
    and PeerError if there is no store within the timeout. Forked children close the client's socket.
    """
    address, prefix = parse_store_addr(store_addr)
    client = connect(address, timeout.total_seconds())
    return PrefixStore(prefix, client.store)


def open_store(host: str, timeout: timedelta = STORE_TIMEOUT, *, port: int = 0) -> TCPStore:
    """Open a store of this process's own on `port` of `host` (0: a free one); `timeout` is that of its operations."""
    host_names.stop_asking()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)


def warm_store(store_addr: str, timeout: timedelta, connections: int = 1) -> None:
    """Have `connections` idle clients of the store ready, so that a later configure opens none; raises like above.

    One is used per group that configures at the same time (two for a Manager with two groups).
    """
    address, _ = parse_store_addr(store_addr)
    deadline = time.monotonic() + timeout.total_seconds()
    for _ in range(min(connections, MAX_IDLE) - pool.idle(address)):
        pool.give_back(connect(address, deadline - time.monotonic()))


def connect(address: Endpoint, timeout_s: float) -> StoreClient:
    """Open a connection to the store at `address`; PeerError if that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    host_names.stop_asking()
    with _one_at_a_time(address, deadline):
        hosts = _probe(address, deadline)
        for attempt in range(1, IDENTIFY_ATTEMPTS + 1):
            before = _connected_to(hosts, address.port)
            store = _make_client(address, hosts, before, deadline)
            _set_timeout(store, timeout_s)  # it was made with what was left
            now = _connected_to(hosts, address.port)
            new = now.keys() - before.keys()
            if len(new) == 1:
                fd = now[new.pop()]
                _remember(fd)
                return StoreClient(address, store, fd)
            if attempt == IDENTIFY_ATTEMPTS:
                return StoreClient(address, store, None)
            del store
    raise AssertionError("unreachable: the last attempt returns")


def _probe(address: Endpoint, deadline: float) -> set[str]:
    """Connect plainly, within the deadline, so that a dead host costs no more; return the host's addresses."""
    problem: Exception | None = None
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerError(f"the store's host name {address.host!r} (in {address}) cannot be resolved: {error}") from error
    hosts = {str(entry[4][0]) for entry in found}
    for family, kind, protocol, _, target in found:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        try:
            with socket.socket(family, kind, protocol) as plain:
                plain.settimeout(remaining_s)
                plain.connect(target)
            return hosts
        except OSError as error:
            problem = error
    raise PeerError(f"no store answers at {address}: {problem or 'timed out'}; is its process alive and reachable?")


@contextlib.contextmanager
def _one_at_a_time(address: Endpoint, deadline: float) -> Iterator[None]:
    with _address_locks_lock:
        lock = _address_locks.setdefault(address, threading.Lock())
        _address_locks.move_to_end(address)
        if len(_address_locks) > MAX_ADDRESS_LOCKS:
            _address_locks.popitem(last=False)
    if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise PeerError(f"the store at {address} does not answer: another connection attempt is still waiting for it")
    try:
        yield
    finally:
        lock.release()


def _make_client(
    address: Endpoint, hosts: set[str], before: Collection[Connection], deadline: float
) -> TCPStore:  # fmt: skip
    """Construct the client on a thread of its own, and cut that thread's connection if it does not come back."""
    made: list[TCPStore] = []
    problem: list[Exception] = []
    remaining_s = max(MIN_TIMEOUT_S, deadline - time.monotonic())

    def make() -> None:
        try:
            timeout = timedelta(seconds=remaining_s)
            made.append(TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout))
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread, which decides
            problem.append(error)

    thread = threading.Thread(target=make, name=f"ft-store-connect-{address}", daemon=True)
    thread.start()
    thread.join(remaining_s)
    if made:
        return made[0]
    if thread.is_alive():
        # Whatever else connected to this store in these seconds is waiting for the same dead process.
        strays = _connected_to(hosts, address.port).keys() - before
        socket_table.shut_down(lambda connection: connection in strays)
    reason = problem[0] if problem else f"no answer within {remaining_s:.1f} s (is something else listening there?)"
    raise PeerError(f"cannot open a client of the store at {address}: {reason}")


def _set_timeout(store: TCPStore, timeout_s: float) -> None:
    store.set_timeout(timedelta(seconds=max(MIN_TIMEOUT_S, timeout_s)))


def _remember(fd: int) -> None:
    for other, connection in list(_opened.items()):
        if socket_table.connection_of(other) != connection:
            _opened.pop(other, None)
    connection_now = socket_table.connection_of(fd)
    if connection_now is not None:
        _opened[fd] = connection_now
        socket_table.close_on_exec([fd])


def _opened_fds() -> list[int]:
    return [fd for fd, connection in list(_opened.items()) if socket_table.connection_of(fd) == connection]


close_in_child(_opened_fds)


def _connected_to(hosts: set[str], port: int) -> dict[Connection, int]:
    """This process's connections to there, by their ends: a number may be another one's a moment later."""

    def leads_there(connection: Connection) -> bool:
        return connection.peer.port == port and connection.peer.host in hosts

    found = {socket_table.connection_of(fd): fd for fd in socket_table.connections(leads_there)}
    return {connection: fd for connection, fd in found.items() if connection is not None and leads_there(connection)}


def _after_fork_in_child() -> None:
    global _address_locks, _address_locks_lock
    _address_locks, _address_locks_lock = OrderedDict(), threading.Lock()
    pool.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
