"""A server's end of lasting streams: the lighthouse's leases, and a group's ranks at their leader.

How it works. `StreamHost.serve` handles one stream from its first message to its end: it checks the token, waits for
the first message for a limited time, lets a newer stream of the same process take over, and hands in the messages one
by one. Who is let in, what a message means, and what the end of a stream means, subclasses say, without waiting.

Invariants: a caller's handler is the only one to end its stream; `_ended` is called once for each caller that was let
in, and not for one that was taken over. Everything runs on the server's one loop.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ft_core.errors import ProtocolError, RefusedError
from ft_core.protocol.pushes import Acked, Refusal
from ft_core.rpc import codec
from ft_core.rpc.channel import grpc
from ft_core.rpc.loop_server import Doorkeeper, Stream, StreamDropped

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.access import Tokens

Context = grpc.aio.ServicerContext[bytes, bytes]


@dataclass(eq=False)
class Caller:
    """One caller that was let in."""

    name: str
    """For logs."""
    stream: Stream
    left: bool = False
    """It has said goodbye: nothing more is read."""


C = TypeVar("C", bound=Caller)
K = TypeVar("K")


class StreamHost(ABC, Generic[C]):
    """Serves lasting streams; see the module's text.

    Args:
        tokens: what callers have to show.
        first_s: how long an opened stream may take to send its first message.
        clock: seconds that never go back, for how long a stream has been silent.
    """

    _name: str
    """Of this server, for messages."""
    _first: str
    """What the first message is called."""
    _log: logging.Logger

    def __init__(self, tokens: Tokens, first_s: float, clock: Callable[[], float]) -> None:
        self._door = Doorkeeper(tokens, self._name)
        self._first_s = first_s
        self._clock = clock
        self._streams: set[Stream] = set()
        self._callers: dict[C, Callable[[], bool]] = {}
        """Who was let in -> what ends its entry; False: a newer stream has it."""

    @abstractmethod
    def _let_in(self, first: bytes, stream: Stream) -> C | Exception:
        """The first message: who it is (`_enter` was called for it), or why it is refused.

        Raises:
            ProtocolError, RefusedError: it is refused, and that is logged.
        """

    @abstractmethod
    def _received(self, caller: C, data: bytes) -> None:
        """A later message. Sets `caller.left` at a goodbye. Raises ProtocolError: the stream ends with that."""

    @abstractmethod
    def _ended(self, caller: C) -> None:
        """Its stream has ended, after a goodbye (`caller.left`) or without one, and no newer one took over."""

    @property
    def callers(self) -> int:
        """How many were let in and are there yet."""
        return len(self._callers)

    async def refuse_token(self, context: Context) -> None:
        """End a call that does not carry the token."""
        await self._door.check(context)

    async def refuse_order(self, context: Context) -> None:
        """End a call that orders replicas about without the token for it."""
        await self._door.check_order(context)

    async def serve(self, _requests: object, context: Context) -> None:
        """Handler of a lasting stream."""
        await self.refuse_token(context)
        stream = Stream(context, self._clock)
        self._streams.add(stream)
        try:
            error = await self._serve(stream)
            if error is not None:
                stream.send(codec.encode_push(Refusal(error)))
                await stream.finish()
        except StreamDropped as dropped:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(dropped))
        finally:
            stream.stop()
            self._streams.discard(stream)

    async def flush(self) -> None:
        """End all streams once what is queued on them has left, or after a short while."""
        await asyncio.gather(*(stream.finish() for stream in self._streams), return_exceptions=True)

    def _enter(self, caller: C, book: dict[K, C], key: K) -> None:
        """Enter a caller into a book; an older stream of the same process ends."""
        old, book[key] = book.get(key), caller

        def strike() -> bool:
            if book.get(key) is not caller:
                return False
            del book[key]
            return True

        self._callers[caller] = strike
        if old is not None:
            old.stream.drop("a newer stream of the same process took over")

    async def _serve(self, stream: Stream) -> Exception | None:
        """One stream from its first message to its end. Returns why it is refused, if it is."""
        caller: C | None = None
        try:
            first = await asyncio.wait_for(stream.read(), self._first_s)
            if first is None:
                return None
            found = self._let_in(first, stream)
            if isinstance(found, Exception):
                return found
            caller = found
            while not caller.left:
                data = await stream.read()
                if data is None:
                    return None
                self._received(caller, data)
            stream.send(codec.encode_push(Acked(0.0)))
            await stream.finish()
        except asyncio.TimeoutError:
            return ProtocolError(f"no {self._first} arrived within {self._first_s:g} s")
        except (ProtocolError, RefusedError) as error:
            self._log.info("refused %s: %s", caller.name if caller else "a client", error)
            return error
        finally:
            if caller is not None and self._callers.pop(caller)():
                self._ended(caller)
        return None
