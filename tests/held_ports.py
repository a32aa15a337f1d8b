"""`HeldPorts`: ports for servers that have to be known before they start, and ports at which nobody answers.

A port that was merely looked up is free again, and on a busy machine another process has it by the time the server
listens. One that a socket holds, with SO_REUSEADDR and without listening, is given to nobody else, but a server that
names it may listen there, as often as it is started again; while none does, connections to it are refused. The fixture
`hold` (tests/conftest.py) holds for as long as a test runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

Hold = Callable[..., list[int]]
"""The fixture `hold`: `hold(count=1, *, in_row=False)` returns ports that are held to the end of the test."""

ROWS = range(21000 + os.getpid() % 4000, 31000, 37)
"""Where rows of ports are looked for: below those that the kernel gives to connections."""


class HeldPorts:
    """Held from its construction to `close`, or to the end of a `with`. `in_row`: their numbers follow each other."""

    def __init__(self, count: int, *, in_row: bool = False) -> None:
        self._sockets = _row(count) if in_row else [_held(0) for _ in range(count)]
        self.numbers: list[int] = [one.getsockname()[1] for one in self._sockets]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let them go. Idempotent."""
        for one in self._sockets:
            one.close()


def _held(port: int) -> socket.socket:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(socket.socket())
        one.bind(("127.0.0.1", port))
        # Not before: two processes may bind one port if both say so, and each would take it for its own.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stack.pop_all()
        return one


def _row(count: int) -> list[socket.socket]:
    for first in ROWS:
        with contextlib.ExitStack() as stack:
            try:
                row = [stack.enter_context(_held(port)) for port in range(first, first + count)]
            except OSError:
                continue
            stack.pop_all()
            return row
    raise AssertionError("no free ports")
