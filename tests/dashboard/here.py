"""A lighthouse with its dashboard, replicas that hold leases there, and a plain client."""

from __future__ import annotations

import contextlib
import http.client
import json
from socket import SO_RCVBUF, SOL_SOCKET, socket
from typing import TYPE_CHECKING, Any

from ft_core.control.lighthouse.server import LighthouseServer
from tests.control.recorder import Replica, wait_until

if TYPE_CHECKING:
    from ft_core.dashboard.feed import Feed


class Here:
    """A lighthouse, and a client of its dashboard."""

    def __init__(self, **more: Any) -> None:
        settings: dict[str, Any] = {"token": "job", "admin_token": "admin", "http": "127.0.0.1:0", "boot_window_ms": 20}
        self.server = LighthouseServer("127.0.0.1:0", **(settings | more))
        self.host, _, port = self.server.http_address().partition("//")[2].rpartition(":")
        self.port = int(port)
        self.replicas: list[Replica] = []

    @property
    def feed(self) -> Feed:
        found = self.server._dashboard._dashboard
        assert found is not None
        return found.feed

    def replica(self, replica_id: str, **more: Any) -> Replica:
        self.replicas.append(Replica(self.server.address(), replica_id, token="job", **more))
        self.replicas[-1].lease.wait_connected(5)
        return self.replicas[-1]

    def quorum(self, *names: str) -> list[Replica]:
        found = [self.replica(name, expected=len(names)) for name in names]
        for one in found:
            one.ask()
        assert len({one.answer().quorum_id for one in found}) == 1
        return found

    def ask(
        self, path: str, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Status, text and headers of an answer."""
        with contextlib.closing(http.client.HTTPConnection(self.host, self.port, timeout=10)) as client:
            given = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            client.request(method, path, given, headers or {})
            answer = client.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    def status(self) -> Any:
        return json.loads(self.ask("/status.json")[1])

    def room(self) -> Any:
        """The room, once the dashboard knows it."""
        wait_until(lambda: self.status()["rooms"])
        return self.status()["rooms"][0]

    def connect(self, buffer: int = 0) -> socket:
        client = socket()
        if buffer:
            client.setsockopt(SOL_SOCKET, SO_RCVBUF, buffer)
        client.settimeout(10)
        client.connect((self.host, self.port))
        return client

    def watch(self, buffer: int = 0) -> socket:
        """A browser that has asked for events."""
        client = self.connect(buffer)
        client.sendall(b"GET /events HTTP/1.1\r\nHost: %s\r\n\r\n" % self.host.encode())
        return client

    def close(self) -> None:
        for one in self.replicas:
            one.close()
        self.server.shutdown()
