"""Where the ft-doctors of several hosts meet: a small server of ft-doctor's own, on the first of them.

How it works. Each host connects, and takes part in *rounds*: it sends a value under the round's name and gets those of
all. A round is over when every host that is still connected has sent its value; the first one also waits until all
expected hosts have come, or WAIT is over, and from then on nobody else is let in. Between rounds a host may ask for
the time here, as often as it needs to compare clocks. What travels is one JSON object per line.

Invariants: nothing that arrives is executed or stored; a line is at most LINE_MAX bytes, hosts are at most HOSTS_MAX,
a host that is silent for ROUND_S in a round is left out, and the whole ends with `close`. It knows nothing of jobs.

Threads: one, "ft-doctor-meeting", with an asyncio loop, on which everything here runs but `start` and `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 1
HOSTS_MAX = MAX_REPLICAS
LINE_MAX = 16 << 20
"""Bytes of a line: the facts of HOSTS_MAX hosts together."""
ROUND_S = 60.0
FIRST_S = 5.0
"""How long a new connection may take to say what it is."""
END_S = 5.0
"""How long the others may take to leave at the end."""
BACKLOG = 512
ROUNDS_MAX = 16


class _Round:
    """One value of each host."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.over = asyncio.Event()
        self.answer = b""
        """What everybody gets, encoded once; nothing is added after it."""

    def end(self) -> None:
        if not self.answer:
            self.answer = _encoded({"values": {str(index): value for index, value in self.values.items()}})
            self.over.set()


class Meeting:
    """The server.

    Args:
        port: to listen on; 0: any free one.
        hosts: how many are expected.
        wait_s: how long the first round waits for them.
        clock: the time here, in seconds since 1970.
    """

    def __init__(self, port: int, hosts: int, wait_s: float, clock: Callable[[], float] = time.time) -> None:
        if not 1 <= hosts <= HOSTS_MAX:
            raise ConfigError(f"--hosts {hosts} must be between 1 and {HOSTS_MAX}")
        self.port = port
        self._hosts, self._wait_s, self._clock = hosts, wait_s, clock
        self._nonce = secrets.token_hex(8)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._present: set[int] = set()
        self._next = 0
        """The index of who comes next. Who leaves before the first round is over makes room for another."""
        self._rounds: dict[str, _Round] = {}
        self._begun = False
        """The first round is over: nobody else is let in."""
        self._deadline: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Meeting(port={self.port}, {len(self._present)} of {self._hosts} hosts)"

    def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        self._listener = _listen(self.port)
        self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ft-doctor-meeting", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(ROUND_S)

    def close(self) -> None:
        """End all connections. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(ROUND_S)
            loop.call_soon_threadsafe(loop.stop)
            assert self._thread is not None
            self._thread.join(ROUND_S)
            loop.close()

    async def _serve(self) -> None:
        assert self._listener is not None
        self._server = await asyncio.start_server(self._host, sock=self._listener, limit=LINE_MAX)
        self._deadline = asyncio.get_running_loop().call_later(self._wait_s, self.begin)

    async def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._server is not None:
            self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)  # the others read their last answer, and go
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self) -> None:
        """No more hosts are waited for. On the loop's thread."""
        self._begun = True
        for name in list(self._rounds):
            self._look(name)

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first line to its end."""
        index: int | None = None
        following: asyncio.Future[bytes] | None = None
        try:
            line = await asyncio.wait_for(reader.readline(), FIRST_S)
            while line:
                message = json.loads(line)
                following = asyncio.ensure_future(reader.readline())
                if index is None:
                    index = await self._let_in(message, writer)
                    if index is None:
                        return
                elif "ping" in message:
                    await _send(writer, _encoded({"t": self._clock()}))
                else:
                    await _send(writer, await self._take(index, str(message["round"]), message["value"], following))
                line = await asyncio.wait_for(following, ROUND_S)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, asyncio.TimeoutError):
            return  # its end is all that the others see of it
        finally:
            if following is not None:
                following.cancel()
            if index is not None:
                self._leave(index)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _leave(self, index: int) -> None:
        self._present.discard(index)
        for name, found in list(self._rounds.items()):
            if not self._begun:
                found.values.pop(index, None)
            self._look(name)

    async def _let_in(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> int | None:
        why = ""
        if message.get("ft-doctor") != VERSION:
            why = (
                f"this meeting has version {VERSION}, and you version {message.get('ft-doctor')!r}: install one release"
            )
        elif self._begun:
            why = "the meeting began without you: run ft-doctor on all hosts within --wait seconds"
        elif len(self._present) >= self._hosts:
            why = f"all {self._hosts} hosts have come already: is --hosts {self._hosts} right?"
        if why:
            await _send(writer, _encoded({"refused": why}))
            return None
        index = self._next
        self._next += 1
        self._present.add(index)
        hello = {"ft-doctor": VERSION, "index": index, "hosts": self._hosts, "nonce": self._nonce}
        await _send(writer, _encoded(hello))
        return index

    async def _take(self, index: int, name: str, value: Any, following: asyncio.Future[bytes]) -> bytes:
        if name not in self._rounds and len(self._rounds) >= ROUNDS_MAX:
            raise ValueError(f"more than {ROUNDS_MAX} rounds")
        found = self._rounds.setdefault(name, _Round())
        if not found.answer:
            found.values[index] = value
            self._look(name)
        over: asyncio.Future[Any] = asyncio.ensure_future(found.over.wait())
        first: set[asyncio.Future[Any]] = {over, following}
        limit_s = ROUND_S if self._begun else self._wait_s + ROUND_S
        try:
            await asyncio.wait(first, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if not found.answer and following.done():
            raise ConnectionResetError("it has gone, or does not wait for the answer")
        if not found.answer:
            self._present &= set(found.values)  # who is silent is not waited for again
            found.end()
        return found.answer

    def _look(self, name: str) -> None:
        """End the round if nobody is missing any more."""
        found = self._rounds[name]
        if (self._begun or len(self._present) >= self._hosts) and self._present <= set(found.values):
            self._begun = True
            found.end()


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def _send(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line)
    await writer.drain()


def _listen(port: int) -> socket.socket:
    """On all addresses. (The name by which others know this host may lead to its loopback address here.)"""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)
