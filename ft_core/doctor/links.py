"""Connections from each host to each other one: who reaches whom, and how fast. Collects; decides nothing.

How it works. Every host listens where its replicas would: on any free port, under the address that it advertises. A
probe connects there, says who asks, and learns who answers. A transfer sends for TRANSFER_S and learns from the
receiver how much arrived. All hosts send to the next one at the same time, as the ring of gradients does.

Invariants: what is received is counted and thrown away; a connection ends within CONNECTION_S.
Threads: "ft-doctor-listener" and one for each of at most CONNECTIONS_MAX connections; `close` ends them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from ft_core.doctor.facts import Probe
from ft_core.doctor.meeting import HOSTS_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ft_core.doctor.facts import HostFacts

PROBE_S = 3.0
TRANSFER_S, WARM_UP_S = 1.5, 0.3
"""How long is sent, of which the first part does not count."""
CONNECTION_S = 15.0
CONNECTIONS_MAX = 2 * HOSTS_MAX
CHUNK = 1 << 20
AT_ONCE = 32
PROBES_MAX = 128
"""Others that a host connects to: if none answers, that takes PROBES_MAX / AT_ONCE * PROBE_S, less than a round may."""
LINE_MAX = 1 << 12


class Listener:
    """Answers the others' probes, and takes what they send.

    Args:
        index, nonce: of this host in the meeting.
    """

    def __init__(self, index: int, nonce: str) -> None:
        self._answer = {"index": index, "nonce": nonce}
        self._socket: socket.socket | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(CONNECTIONS_MAX, "ft-doctor-link")
        self._thread = threading.Thread(target=self._accept, name="ft-doctor-listener", daemon=True)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Listener({self._answer['index']})"

    def start(self) -> int:
        """Listen; returns the port."""
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=HOSTS_MAX)
        else:
            self._socket = socket.create_server(("", 0), backlog=HOSTS_MAX)
        self._thread.start()
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(CONNECTION_S)
        with self._lock:
            left = list(self._open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown()
        self._socket.close()

    def _accept(self) -> None:
        assert self._socket is not None
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
            self._threads.submit(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(CONNECTION_S)
                asked = _line(connection)
                if asked.get("nonce") != self._answer["nonce"]:
                    return
                _say(connection, self._answer)
                if asked.get("load"):
                    _say(connection, _sink(connection))
        finally:
            with self._lock:
                self._open.discard(connection)


def _sink(connection: socket.socket) -> dict[str, Any]:
    """What arrives after WARM_UP_S, and in which time."""
    buffer, begin = bytearray(CHUNK), time.monotonic()
    counted, since, last = 0, 0.0, 0.0
    while found := connection.recv_into(buffer):
        last = time.monotonic()
        if last > begin + CONNECTION_S:
            break
        if since:
            counted += found
        elif last > begin + WARM_UP_S:
            since = last
    return {"bytes": counted, "seconds": max(last - since, 0.0) if since else 0.0}


def _say(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _line(connection: socket.socket) -> dict[str, Any]:
    """One line, byte by byte: what follows it is data. Raises ValueError, OSError."""
    found = b""
    while not found.endswith(b"\n"):
        one = connection.recv(1)
        if not one or len(found) > LINE_MAX:
            raise ValueError("no line")
        found += one
    message = json.loads(found)
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def chosen(hosts: Collection[int], me: int) -> list[int]:
    """Whom to probe: all others, or as many as PROBES_MAX, spread over them so that all are probed as often."""
    ring = sorted(hosts)
    place, step = ring.index(me), max(1, -(-(len(ring) - 1) // PROBES_MAX))
    return [ring[(place + ahead) % len(ring)] for ahead in range(1, len(ring), step)]


def probe_all(hosts: Mapping[int, HostFacts], me: int, nonce: str) -> dict[int, Probe]:
    """Connect to others at once."""
    others = chosen(hosts, me)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE, "ft-doctor-probe") as threads:
        return dict(zip(others, threads.map(lambda index: probe(hosts[index], index, nonce), others), strict=True))


def probe(host: HostFacts, index: int, nonce: str) -> Probe:
    """Connect to one of the others."""
    begin = time.monotonic()
    try:
        with _connect(host) as connection:
            local = str(connection.getsockname()[0]).removeprefix("::ffff:")
            _say(connection, {"nonce": nonce})
            answer = _line(connection)
    except (OSError, IndexError) as error:
        return Probe(_why(error))
    except ValueError:
        return Probe("something else answers there")
    if answer.get("index") != index:
        return Probe(f"another host answers there: number {answer.get('index')}")
    return Probe("", time.monotonic() - begin, local)


def _connect(host: HostFacts) -> socket.socket:
    if not host.address:
        raise OSError(0, "it has no address that could be advertised")
    return socket.create_connection((host.address, host.ports[0]), PROBE_S)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {PROBE_S:g} s"
    return str(getattr(error, "strerror", "") or error) or type(error).__name__


def transfer(host: HostFacts, nonce: str) -> tuple[float, str]:
    """Send for TRANSFER_S; bytes per second that arrived, and why there are none."""
    data = bytes(CHUNK)
    try:
        with _connect(host) as connection:
            connection.settimeout(CONNECTION_S)
            _say(connection, {"nonce": nonce, "load": True})
            _line(connection)
            until = time.monotonic() + TRANSFER_S
            while time.monotonic() < until:
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            arrived = _line(connection)
            seconds = float(arrived["seconds"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        return 0.0, _why(error)
    return (float(arrived["bytes"]) / seconds, "") if seconds > 0 else (0.0, "nothing arrived in time")
