"""Servers that are no lighthouse: what somebody finds who has mistyped a port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.network import Network

SSH = b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n"
HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@contextlib.contextmanager
def server(unasked: bytes = b"", asked: bytes = b"") -> Iterator[str]:
    """Sends `unasked` at once and `asked` when something has come; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    connection.sendall(unasked)
                    if asked and connection.recv(1024):
                        connection.sendall(asked)
                    while connection.recv(1024):  # until the other side has enough
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = listener.getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


ON_ANOTHER = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as listener:
    print("listening", flush=True)
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian\\r\\n")
"""


@contextlib.contextmanager
def on(network: Network, machine: str, port: int) -> Iterator[None]:
    """Something like an SSH server, on a machine of a network."""
    command = network.on(machine, [sys.executable, "-c", ON_ANOTHER, str(port)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()
