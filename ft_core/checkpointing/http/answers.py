"""What a heal server answers to one request. The paths are listed in `http.server`.

Threads: connection threads, several at once.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from ft_core.checkpointing.http import auth
from ft_core.checkpointing.http.wire import FORBIDDEN, TRAILER, TRAILER_OK, Cut, NotYet, Refusal, Request, head
from ft_core.checkpointing.tensor_bytes import checksum
from ft_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.checkpointing.http.byte_stream import ByteStream
    from ft_core.checkpointing.offer import Offer
    from ft_core.checkpointing.offers import OfferBook
    from ft_core.checkpointing.range_sums import RangeSums

BLOBS_MAX: Final = 64


class Answers:
    """Answers requests from an `OfferBook`."""

    def __init__(self, book: OfferBook, sums: RangeSums, token: str | None) -> None:
        self._book, self._range_sums = book, sums
        self._token = token
        self._lock = threading.Lock()
        self._blobs: dict[str, Callable[[], bytes | None]] = {}
        self._families: dict[str, Callable[[str], bytes | None]] = {}

    def add_blob(self, name: str, provider: Callable[[], bytes | None]) -> None:
        """Answer `/blob/<name>` with what `provider` returns."""
        with self._lock:
            if name not in self._blobs and len(self._blobs) >= BLOBS_MAX:
                raise UsageError(f"more than {BLOBS_MAX} blobs")
            self._blobs[name] = provider

    def add_blobs(self, prefix: str, provider: Callable[[str], bytes | None]) -> None:
        """Answer `/blob/<prefix...>` with what `provider` returns for the rest of the name."""
        with self._lock:
            self._families[prefix] = provider

    def check(self, request: Request) -> None:
        """Raises `Refusal` unless the request may be answered at all."""
        if request.method != "GET":
            raise Refusal(405, "only GET is served here")
        if self._token is not None and not auth.verify(
            self._token, request.method, request.target, request.authorization
        ):
            raise Refusal(FORBIDDEN, "token missing or wrong: FT_TOKEN must be the same for all replicas of a job")

    def answer(self, stream: ByteStream, request: Request, waited: NotYet | None = None) -> None:
        """Answer a request that passed `check`. Raises `Refusal`, and `NotYet`, which it is passed the second time."""
        try:
            url = urlsplit(request.target)
            parts = [unquote(part) for part in url.path.split("/")[1:]]
            query = {name: int(values[0]) for name, values in parse_qs(url.query).items()}
            wait_s = 0.0 if waited is not None else query.get("wait_ms", 0) / 1000
            if parts == ["prefetch"]:
                return self._manifest(stream, self._book.live(wait_s, waited))
            if len(parts) == 2 and parts[0] == "blob":
                return self._blob(stream, parts[1])
            if len(parts) >= 3 and parts[0] == "state":
                if parts[2] == "manifest":
                    return self._manifest(stream, self._book.find(parts[1], wait_s))
                if parts[2] == "range" and len(parts) == 4:
                    return self._range(stream, self._book.find(parts[1]), int(parts[3]))
                if parts[2] == "sums":
                    return self._sums(stream, self._book.find(parts[1]), query["first"], query["count"])
        except (ValueError, KeyError, OverflowError) as e:
            raise Refusal(400, f"bad request: {e!r}") from e
        raise Refusal(404, "this is the healing port of an ft-training replica; there is nothing at this path")

    def _blob(self, stream: ByteStream, name: str) -> None:
        with self._lock:
            provider = self._blobs.get(name)
            family = next((f for f in self._families if name.startswith(f)), None)
            answers = None if family is None else self._families[family]
        if provider is not None:
            body = provider()
        else:
            body = None if family is None or answers is None else answers(name.removeprefix(family))
        if body is None:
            raise Refusal(404, f"there is no blob {name!r} here")
        stream.send([head(200, len(body) + TRAILER.size), body, TRAILER.pack(TRAILER_OK, checksum(body))])

    def _manifest(self, stream: ByteStream, offer: Offer) -> None:
        body = offer.manifest()
        extra = f"X-FT-Tag: {quote(offer.tag, safe='')}\r\nX-FT-Layout: {offer.digest}\r\n"
        with self._book.sending(offer, stream.sock) as seal:
            stream.send([head(200, len(body) + TRAILER.size, extra), body])
            seal()
        stream.send([TRAILER.pack(TRAILER_OK, checksum(body))])

    def _range(self, stream: ByteStream, offer: Offer, index: int) -> None:
        if not 0 <= index < len(offer.ranges):
            raise Refusal(400, f"range {index} of {len(offer.ranges)}")
        with self._book.sending(offer, stream.sock) as seal:
            if not offer.intact(index):
                raise Cut
            reading = self._range_sums.of(offer, index)
            try:
                view = reading.view()
                value = self._range_sums.sum(offer, index, view)
                stream.send([head(200, len(view) + TRAILER.size), view])
            finally:
                reading.release()
            seal()
        stream.send([TRAILER.pack(TRAILER_OK, value)])

    def _sums(self, stream: ByteStream, offer: Offer, first: int, count: int) -> None:
        if not 0 <= first < first + count <= len(offer.ranges):
            raise Refusal(400, f"ranges {first}+{count} of {len(offer.ranges)}")
        with self._book.sending(offer, stream.sock) as seal:
            if not all(offer.intact(index) for index in range(first, first + count)):
                raise Cut
            values = [self._range_sums.value(offer, index) for index in range(first, first + count)]
            seal()
        body = struct.pack(f"<{count}Q", *values)
        stream.send([head(200, len(body) + TRAILER.size), body, TRAILER.pack(TRAILER_OK, checksum(body))])
