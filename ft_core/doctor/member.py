"""One host's place in the meeting of several (`meeting`): it joins, compares clocks, and takes part in rounds.

Blocking, used by one thread. Every wait has a limit.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from ft_core.doctor.meeting import LINE_MAX, ROUND_S, VERSION
from ft_core.errors import ConfigError, LighthouseError

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECT_S, RETRY_S = 3.0, 0.2
PINGS = 9
"""Round trips that clocks are compared over; the fastest one counts."""


class Member:
    """One connection to the meeting.

    Args:
        host, port: where it is.
        wait_s: how long it may take to be there.
        clock: the time here, in seconds since 1970.
    """

    def __init__(self, host: str, port: int, wait_s: float, clock: Callable[[], float] = time.time) -> None:
        self._where = host, port
        self._wait_s, self._clock = wait_s, clock
        self._socket: socket.socket | None = None
        self._buffer = b""
        self.index = -1
        self.hosts = 0
        self.nonce = ""

    def __repr__(self) -> str:
        return f"Member({self._where}, index={self.index})"

    def join(self) -> None:
        """Go there. Raises ConfigError if nobody is there in time, LighthouseError if one is refused."""
        until, why = time.monotonic() + self._wait_s, ""
        while True:
            try:
                self._socket = socket.create_connection(self._where, CONNECT_S)
                break
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > until:
                host, port = self._where
                raise ConfigError(
                    f"nobody holds the meeting at {host}:{port} ({why}): run ft-doctor on that host, too, and open the "
                    "port between the hosts, or name another host with --meet HOST:PORT"
                ) from None
            threading.Event().wait(RETRY_S)
        found = self._ask({"ft-doctor": VERSION}, CONNECT_S)
        if "refused" in found:
            self.close()
            raise LighthouseError(f"the meeting refuses this host: {found['refused']}")
        index, hosts, nonce = (found.get(name) for name in ("index", "hosts", "nonce"))
        if not (isinstance(index, int) and isinstance(hosts, int) and isinstance(nonce, str)):
            raise self._something_else()
        self.index, self.hosts, self.nonce = index, hosts, nonce

    def offset(self) -> tuple[float, float]:
        """By how many seconds the clock here is ahead of the meeting's, and how wrong that may be."""
        found = []
        for _ in range(PINGS):
            before = self._clock()
            there = self._ask({"ping": 1}, ROUND_S).get("t")
            after = self._clock()
            if not isinstance(there, float | int):
                raise self._something_else()
            found.append((after - before, (before + after) / 2 - there))
        trip, offset = min(found)
        return offset, trip / 2

    def round(self, name: str, value: Any) -> dict[int, Any]:
        """Everybody's values, by index. Raises LighthouseError if the meeting has ended."""
        found = self._ask({"round": name, "value": value}, self._wait_s + 2 * ROUND_S)
        values = found.get("values")
        if not isinstance(values, dict) or not all(key.isdecimal() for key in values):
            raise self._something_else()
        return {int(key): one for key, one in values.items()}

    def close(self) -> None:
        """Leave. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._socket is not None
        host, port = self._where
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            found = json.loads(self._line())
        except OSError as error:
            why = error.strerror or str(error) or "no answer"
            raise LighthouseError(f"the meeting at {host}:{port} does not go on: {why}") from None
        except ValueError:
            raise self._something_else() from None
        if not isinstance(found, dict):
            raise self._something_else()
        return found

    def _something_else(self) -> LighthouseError:
        host, port = self._where
        return LighthouseError(
            f"what answers at {host}:{port} is no meeting of ft-doctor: name another port with --meet"
        )

    def _line(self) -> bytes:
        assert self._socket is not None
        while b"\n" not in self._buffer:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("it has ended")
            self._buffer += data
            if len(self._buffer) > LINE_MAX:
                raise ValueError("too long")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
