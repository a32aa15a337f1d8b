"""Which file descriptors of this process are which TCP connection, and how to end one.

Gloo and c10d's TCPStore open sockets in C++ and give no handle to them. Both data-plane needs of this project come
down to finding them again: `abort()` has to end a group's connections now, and a forked child has to drop its copies
of them.

How it works: every descriptor in /proc/self/fd that is a socket is asked for its own and its peer's address, and is
picked by these addresses. Nothing is remembered by descriptor number, because C++ may close a descriptor at any
instant and another thread may get the same number back. `shut_down` therefore first duplicates the descriptor (which
pins the socket behind it), checks the addresses on the duplicate, and shuts that down: it can never hit a socket that
is not the one meant.

Invariants: a listening socket is never shut down (that makes Gloo end the whole process); a descriptor that is not
ours is never closed. Raw system calls through ctypes are used instead of `socket.socket(fileno=...)`: the latter
would take over the descriptor, and would switch it to non-blocking mode if the user had called
`socket.setdefaulttimeout`.

Threads: no state; any thread, and a forked child (no lock is taken).
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FD_DIRECTORY = "/proc/self/fd"
SUPPORTED = sys.platform == "linux" and os.path.isdir(FD_DIRECTORY)
"""Whether sockets can be found here at all; everything in this file finds nothing where it is False."""

_ADDRESS_BYTES = 128  # sizeof(struct sockaddr_storage)
_SO_ACCEPTCONN = 30
_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06
PATIENCE_S = 60
"""How long a connection that has sent nothing may wait in the kernel where `wait_for_data` was asked for."""
EVERYWHERE = frozenset({"0.0.0.0", "::"})
"""Hosts of a listening socket that accepts at every address of this machine."""
_V4_MAPPED = b"\0" * 10 + b"\xff\xff"

# PyDLL keeps the GIL: each call is well under a microsecond of system call, less than handing the GIL over would cost.
_libc = ctypes.PyDLL(None) if SUPPORTED else None


class Endpoint(NamedTuple):
    """An address and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host.startswith("127.") or self.host == "::1"

    def packed(self) -> bytes:
        """The leading bytes of the kernel's `struct sockaddr` for it (family, port, address)."""
        if ":" in self.host:
            head = struct.pack("=H", socket.AF_INET6) + struct.pack("!H", self.port) + b"\0\0\0\0"
            return head + socket.inet_pton(socket.AF_INET6, self.host)
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H", self.port) + socket.inet_aton(self.host)


class Connection(NamedTuple):
    """A connected TCP socket of this process."""

    local: Endpoint
    peer: Endpoint


class _FilterStep(ctypes.Structure):
    """The kernel's `struct sock_filter`."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(_FilterStep)))


def connection_of(fd: int) -> Connection | None:
    """Return the two ends of the connected TCP socket `fd`, or None if it is anything else."""
    peer = _address(fd, "getpeername")
    if peer is None or _is_listening(fd):
        return None
    local = _address(fd, "getsockname")
    return None if local is None else Connection(local, peer)


def connections(matches: Callable[[Connection], bool]) -> Iterator[int]:
    """Yield every descriptor of this process that is a connected TCP socket for which `matches` is true."""
    for fd in _socket_fds():
        connection = connection_of(fd)
        if connection is not None and matches(connection):
            yield fd


def listeners() -> Iterator[tuple[int, Endpoint]]:
    """Yield every listening TCP socket of this process with its address."""
    for fd in _socket_fds():
        if _is_listening(fd):
            local = _address(fd, "getsockname")
            if local is not None:
                yield fd, local


def fds_on_port(port: int) -> list[int]:
    """Return the listening socket on `port` and the connections it accepted: what a server in this process holds.

    A connection that this process has opened may have the same port at another of its addresses.
    """
    servers = [(fd, local.host) for fd, local in listeners() if local.port == port]
    hosts = {host for _, host in servers}
    everywhere = not hosts.isdisjoint(EVERYWHERE)
    accepted = connections(lambda found: found.local.port == port and (everywhere or found.local.host in hosts))
    return [fd for fd, _ in servers] + list(accepted)


def shut_down(matches: Callable[[Connection], bool]) -> int:
    """End every connection of this process for which `matches` is true; both ends see it at once. Returns how many."""
    return sum(_shut_down_one(fd, matches) for fd in list(connections(matches)))


def wait_for_data(fd: int) -> None:
    """Have the listening socket `fd` accept a connection only once its other side has sent something.

    The kernel drops who sends nothing for PATIENCE_S. Where this is not possible nothing changes.
    """
    assert _libc is not None
    seconds = ctypes.c_int(PATIENCE_S)
    _libc.setsockopt(fd, socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, ctypes.byref(seconds), ctypes.sizeof(seconds))


def refuse_new(fd: int) -> None:
    """Let nothing arrive at the listening socket `fd` any more; connections that it accepted are not touched.

    By a packet filter on that socket that drops everything, because shutting it down would make its owner fail. Needs
    no privilege; where it is not possible nothing changes.
    """
    assert _libc is not None
    drop_all = (_FilterStep * 1)(_FilterStep(_BPF_RETURN, 0, 0, 0))
    program = _Filter(1, drop_all)
    _libc.setsockopt(fd, socket.SOL_SOCKET, _SO_ATTACH_FILTER, ctypes.byref(program), ctypes.sizeof(program))


def close_on_exec(fds: Iterable[int]) -> None:
    """Keep programs started by this process from inheriting `fds`; one that is gone is skipped."""
    for fd in fds:
        try:
            os.set_inheritable(fd, False)
        except OSError:
            continue


def _shut_down_one(fd: int, matches: Callable[[Connection], bool]) -> bool:
    assert _libc is not None
    try:
        pinned = os.dup(fd)
    except OSError:
        return False  # its owner closed it meanwhile: ended already
    try:
        connection = connection_of(pinned)
        if connection is None or not matches(connection):
            return False
        return bool(_libc.shutdown(pinned, socket.SHUT_RDWR) == 0)
    finally:
        os.close(pinned)


def _socket_fds() -> Iterator[int]:
    if not SUPPORTED:
        return
    for name in os.listdir(FD_DIRECTORY):
        fd = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd
        except OSError:
            continue  # the descriptor of the listing itself, or one closed meanwhile


def _address(fd: int, call: str) -> Endpoint | None:
    assert _libc is not None
    buffer = ctypes.create_string_buffer(_ADDRESS_BYTES)
    length = ctypes.c_uint32(_ADDRESS_BYTES)
    if getattr(_libc, call)(fd, buffer, ctypes.byref(length)) != 0:
        return None
    raw = buffer.raw
    (family,) = struct.unpack_from("=H", raw)
    (port,) = struct.unpack_from("!H", raw, 2)
    if family == socket.AF_INET:
        return Endpoint(socket.inet_ntoa(raw[4:8]), port)
    if family == socket.AF_INET6:
        host = raw[8:24]
        if host.startswith(_V4_MAPPED):
            return Endpoint(socket.inet_ntoa(host[12:]), port)
        return Endpoint(socket.inet_ntop(socket.AF_INET6, host), port)
    return None


def _is_listening(fd: int) -> bool:
    assert _libc is not None
    value = ctypes.c_int(0)
    length = ctypes.c_uint32(ctypes.sizeof(value))
    failed = _libc.getsockopt(fd, socket.SOL_SOCKET, _SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(length))
    return failed == 0 and value.value != 0
