"""`HeldPorts`: ports for servers that have to know each other's before they start.

A port that was merely looked up is free again, and on a busy machine another process has it by the time the server
listens. One that a socket holds, with SO_REUSEADDR and without listening, is given to nobody else, but a server that
names it may listen there, as often as it is started again.
"""

from __future__ import annotations

import socket


class HeldPorts:
    """Held from its construction to `close`."""

    def __init__(self, count: int) -> None:
        self._sockets = [socket.socket() for _ in range(count)]
        for one in self._sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        self.numbers: list[int] = [one.getsockname()[1] for one in self._sockets]

    def close(self) -> None:
        """Let them go. Idempotent."""
        for one in self._sockets:
            one.close()
