"""A port that is held is nobody else's, and a server's that names it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from tests.held_ports import HeldPorts

if TYPE_CHECKING:
    from tests.held_ports import Hold


@pytest.mark.parametrize("in_row", [False, True])
def test_a_server_may_listen_there_again_and_again(hold: Hold, in_row: bool) -> None:
    first, second = hold(2, in_row=in_row)
    assert not in_row or second == first + 1
    for _ in range(2):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", first))
        with socket.create_server(("127.0.0.1", first)) as server, socket.create_connection(server.getsockname()):
            pass  # its end leaves the port in TIME_WAIT


def test_rows_of_two_processes_are_two(hold: Hold) -> None:
    """Both look in the same places."""
    assert not set(hold(3, in_row=True)) & set(hold(3, in_row=True))


def test_what_is_let_go_is_free() -> None:
    with HeldPorts(1) as held:
        (port,) = held.numbers
    with socket.create_server(("127.0.0.1", port)):
        pass
