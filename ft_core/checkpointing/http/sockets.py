"""What both ends do to their sockets: kernel timeouts, cutting from another thread, and letting go in forked children.

Sockets here are truly blocking and have SO_RCVTIMEO/SO_SNDTIMEO. Python's own timeouts make a socket non-blocking and
turn one long transfer into many short system calls, each of which then competes for the GIL with the training thread.

A DataLoader worker inherits every open fd. If it kept a donor's connection, a receiver would not see the donor die
until the worker ends too (measured: 5 s), and the listening port would outlive its trainer.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import weakref
from typing import Final

from ft_core.errors import ConfigError
from ft_core.process_group.fork_safety import close_in_child

BACKLOG: Final = 512
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def track(sock: socket.socket) -> None:
    """Have forked children drop `sock`. It is forgotten when it is collected; a closed one is skipped."""
    _open.add(sock)


def _fds() -> list[int]:
    """Runs in a forked child: takes no lock."""
    return [fd for fd in (sock.fileno() for sock in list(_open)) if fd >= 0]


close_in_child(_fds)


def listen(bind: str, port: int) -> socket.socket:
    """A socket that listens there ("": on all interfaces). `ConfigError` if it cannot."""
    try:
        if bind in ("", "::") and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        return socket.create_server((bind, port), family=family, backlog=BACKLOG)
    except OSError as e:
        where = f"bind={bind!r}, port={port}: {e}"
        raise ConfigError(f"cannot listen for healing peers on {where}; choose another address or port 0") from e


def set_timeouts(sock: socket.socket, *, receive_s: float, send_s: float) -> None:
    """Make `sock` blocking, with timeouts kept by the kernel; running into one is a BlockingIOError."""
    sock.setblocking(True)
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        whole = int(seconds)
        # All zeros would mean "for ever".
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6))))


def cut(sock: socket.socket) -> None:
    """End a connection from any thread: wakes whoever blocks on it; never blocks."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # a TLS socket's own would forget its keys under its user
