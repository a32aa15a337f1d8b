"""`Channel`: messages with file descriptors between this process and one on the same machine that it started.

How it works. A pair of Unix sockets that keep the boundaries of what is sent (SOCK_SEQPACKET). A message is pickled and
sent in fragments of at most FRAGMENT_BYTES, each with the message's number, so that threads may send at the same time
without a lock: their fragments mix, and the receiver puts each message together. Descriptors travel with the fragments
(SCM_RIGHTS). Only metadata passes here; tensors lie in shared memory.

Pickle is safe between these two: whoever can write to the socket can as well write to the process's memory.

Invariants: `receive` returns whole messages only. `shut_down` wakes everybody who sends or receives, on both sides,
and what the other side sent before can still be received. At most MAX_UNFINISHED messages are being put together.
Threads: `send` and `shut_down` from any; `receive` from one; `close` when nobody is left inside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from ft_core.errors import CollectiveError, ThisMachineError

FRAGMENT_BYTES = 32 * 1024
"""Far below the smallest usual send buffer (208 KiB), which a fragment has to fit into."""
FDS_PER_FRAGMENT = 200
"""The kernel takes at most 253 at once."""
MAX_UNFINISHED = 64
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of descriptions of tensors: some hundred thousand tensors in one collective."""
_FD = struct.Struct("i")
_FDS_SPACE = socket.CMSG_SPACE(FDS_PER_FRAGMENT * _FD.size)
_HEADER = struct.Struct("<QI?")  # number of the message, of the fragment, whether it is the last


class Channel:
    """One end; see the file's header."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._numbers = itertools.count()
        self._unfinished: dict[int, tuple[list[bytes], list[int]]] = {}

    def __repr__(self) -> str:
        return f"Channel(fd {self._socket.fileno()})"

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return two connected ends; neither is inherited by what this process executes."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        """Return the descriptor, for polling; -1 when closed."""
        return self._socket.fileno()

    def send(self, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        """Send a message and copies of `fds`. Blocks while the other side does not read; OSError once it has ended."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > MAX_MESSAGE_BYTES:
            raise CollectiveError(f"a collective with a description of {len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
        number = next(self._numbers)
        pieces = max(1, -(-len(data) // FRAGMENT_BYTES), -(-len(fds) // FDS_PER_FRAGMENT))
        for piece in range(pieces):
            body = data[piece * FRAGMENT_BYTES : (piece + 1) * FRAGMENT_BYTES]
            along = list(fds[piece * FDS_PER_FRAGMENT : (piece + 1) * FDS_PER_FRAGMENT])
            socket.send_fds(self._socket, [_HEADER.pack(number, piece, piece == pieces - 1), body], along)

    def receive(self) -> tuple[tuple[Any, ...], list[int]] | None:
        """Return the next message and its descriptors, which are the caller's then; None once the other side has ended.

        Raises ThisMachineError if this process may not open more descriptors.
        """
        while True:
            try:
                data, along, flags, _ = self._socket.recvmsg(  # socket.recv_fds takes flags and does not pass them on
                    _HEADER.size + FRAGMENT_BYTES, _FDS_SPACE, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionError:
                return None
            if not data:
                return None
            number, _, last = _HEADER.unpack_from(data)
            parts, all_fds = self._unfinished.setdefault(number, ([], []))
            parts.append(data[_HEADER.size :])
            for _level, _kind, fds in along:
                all_fds.extend(item[0] for item in _FD.iter_unpack(fds[: len(fds) - len(fds) % _FD.size]))
            if flags & socket.MSG_CTRUNC:
                raise ThisMachineError("this process may not open more file descriptors (ulimit -n)")
            if last:
                del self._unfinished[number]
                return pickle.loads(b"".join(parts)), all_fds
            if len(self._unfinished) > MAX_UNFINISHED:
                raise CollectiveError(f"more than {MAX_UNFINISHED} threads send to one process at the same time")

    def has_ended(self) -> bool:
        """Whether the other side is gone."""
        poll = select.poll()
        try:
            poll.register(self._socket, 0)
        except (OSError, ValueError):
            return True
        return bool(poll.poll(0))

    def shut_down(self) -> None:
        """End it for both sides; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back, and those of messages that did not come to their end; idempotent."""
        self._socket.close()
        for _, fds in self._unfinished.values():
            for fd in fds:
                os.close(fd)
        self._unfinished.clear()
