"""Which offers are open, and the lock that decides whether bytes that were sent count.

How a donor never serves torn state: tensors are held by reference, and their owner calls `close(tag)` right before
optimizer.step changes them. close() marks the offer closed under the lock and cuts the connections that are sending
it. A sender asks under the same lock, *after* its last byte went to the kernel (`sending`), whether the offer is still
open, and only then sends the trailer. So a trailer proves that every byte was read before close() returned. close()
never waits for a socket: the lock is only ever held for bookkeeping and for shutdown(2), which does not block.

A *live* offer is the same without the guarantee: nobody closes it when its tensors change. There is at most one; it is
made when a newcomer waits for it (`snapshot_wanted`) and dropped when nobody asked for it for a while.

Threads: any. Everything is guarded by `_lock`. `snapshot_wanted` is read without it, by the training thread
at every step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final

from ft_core.checkpointing.http.sockets import cut
from ft_core.checkpointing.http.wire import UNSENDABLE, Cut, NotYet, Refusal
from ft_core.checkpointing.offer import Offer
from ft_core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Container, Iterator

OFFERS_MAX: Final = 4
"""Offers open at once; one more closes the oldest."""
CLOSED_TAGS_MAX: Final = 64
WAIT_S_MAX: Final = 60.0
"""Longest a request may wait for an offer to appear."""
LIVE_IDLE_S: Final = 10.0
"""A live offer nobody asked for this long is dropped, so that replaced tensors do not stay alive."""
LIVE_PREFIX: Final = "live-"


class OfferBook:
    """The offers of one server."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when somebody may wait for what just happened."""
        self.snapshot_wanted = False
        self._lock = threading.Lock()
        self._wake = wake
        self._offers: dict[str, Offer] = {}  # open ones, oldest first, at most OFFERS_MAX
        self._closed_tags: dict[str, None] = {}  # newest CLOSED_TAGS_MAX, so that a late request learns why
        self._refused: dict[str, str] = {}  # tags that will not be offered and why, newest CLOSED_TAGS_MAX
        self._live: Offer | None = None
        self._live_count = 0
        self._live_refusal = (0, "")  # how many there were, and the last one: sends away who waits, nobody after it
        self._stopped = False

    def tags(self) -> list[str]:
        """Tags of the open offers, oldest first, without the live one."""
        with self._lock:
            return list(self._offers)

    def live_tag(self) -> str | None:
        """Tag of the live offer, if there is one."""
        with self._lock:
            return self._live.tag if self._live is not None else None

    # -- the training thread

    def offer(self, tag: str, state: object, copy_storages: Container[int]) -> None:
        """Capture `state` and open it under `tag`."""
        _check_tag(tag)
        self.open(Offer.capture(tag, state, copy_storages))

    def open(self, offer: Offer) -> None:
        """Serve a captured or received state from now on."""
        tag = offer.tag
        with self._lock:
            if self._stopped:
                raise UsageError("StateServer.offer() after shutdown()")
            self._drop(tag)
            while len(self._offers) >= OFFERS_MAX:
                self._drop(next(iter(self._offers)))
            self._offers[tag] = offer
            self._closed_tags.pop(tag, None)
            self._refused.pop(tag, None)
        self._wake()

    def offer_live(self, state: object) -> None:
        """Capture `state` as it is and as it changes."""
        with self._lock:
            self.snapshot_wanted = False  # first, so that a state that cannot be encoded is reported once
            self._live_count += 1
            tag = f"{LIVE_PREFIX}{self._live_count}"
        offer = Offer.capture(tag, state, live=True)
        with self._lock:
            if self._stopped:
                return
            self.snapshot_wanted = False
            offer.last_used_s = time.monotonic()
            self._live = offer
        self._wake()

    def refuse(self, tag: str, why: str) -> None:
        """Tell whoever asks for `tag` that it will not be offered."""
        with self._lock:
            self._drop(tag)
            self._refused[tag] = why
            while len(self._refused) > CLOSED_TAGS_MAX:
                del self._refused[next(iter(self._refused))]
        self._wake()

    def refuse_live(self, why: str) -> None:
        """Tell whoever waits for a live offer that there will be none; the next one may ask again."""
        with self._lock:
            self._live_refusal = (self._live_refusal[0] + 1, why)
            self.snapshot_wanted = False
        self._wake()

    def close(self, tags: Container[str] | None = None) -> None:
        """Close the offers in `tags` (None: all but the live one)."""
        with self._lock:
            dropped = [tag for tag in self._offers if tags is None or tag in tags]
            for tag in dropped:
                self._drop(tag)
        if dropped:
            self._wake()

    def drop_live(self) -> None:
        """Close the live offer."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                _close(live)

    def stop(self) -> None:
        """Close everything, for good, and send all waiters away."""
        with self._lock:
            self._stopped = True
            self.snapshot_wanted = False
        self.close()
        self.drop_live()

    def _drop(self, tag: str) -> None:
        """Under the lock: close the offer, if there is one."""
        offer = self._offers.pop(tag, None)
        if offer is None:
            return
        _close(offer)
        self._closed_tags[tag] = None
        while len(self._closed_tags) > CLOSED_TAGS_MAX:
            del self._closed_tags[next(iter(self._closed_tags))]

    # -- connection threads

    def find(self, tag: str, wait_s: float = 0.0) -> Offer:
        """The open offer `tag`; `Refusal` if it is closed, or not there and not waited for, else `NotYet`."""
        with self._lock:
            live = self._live
            if live is not None and live.tag == tag:
                live.last_used_s = time.monotonic()
                return live
            offer = self._offers.get(tag)
            if offer is not None:
                return offer
            if tag in self._refused:
                raise Refusal(UNSENDABLE, self._refused[tag])
            if tag in self._closed_tags or tag.startswith(LIVE_PREFIX) or self._stopped:
                raise Refusal(410, f"the offer {tag!r} was closed: the donor went on to its next step")
            if wait_s > 0:
                raise NotYet(tag, min(wait_s, WAIT_S_MAX))
            raise Refusal(404, f"there is no offer {tag!r} here (open: {', '.join(self._offers) or 'none'})")

    def live(self, wait_s: float, waited: NotYet | None = None) -> Offer:
        """The live offer; `Refusal` if there is none and it is not waited for, else `NotYet`.

        `waited`: the answer that the asker got the first time.
        """
        with self._lock:
            if self._live is None:
                if waited is not None and waited.refusals != self._live_refusal[0]:
                    raise Refusal(UNSENDABLE, self._live_refusal[1])
                if wait_s > 0 and not self._stopped:
                    raise NotYet(None, min(wait_s, WAIT_S_MAX), self._live_refusal[0])
                raise Refusal(404, "no live state within the wait: the donor reached no step boundary")
            self._live.last_used_s = time.monotonic()
            return self._live

    def answers(self, wanted: NotYet) -> bool:
        """Whether there is an answer now for an asker that got `NotYet`."""
        with self._lock:
            if self._stopped:
                return True
            if wanted.tag is not None:
                return wanted.tag in self._offers or wanted.tag in self._refused or wanted.tag in self._closed_tags
            return self._live is not None or self._live_refusal[0] != wanted.refusals

    def want_live(self, wanted: bool) -> None:
        """Whether somebody waits for a live offer."""
        with self._lock:
            self.snapshot_wanted = wanted and self._live is None and not self._stopped

    @contextlib.contextmanager
    def sending(self, offer: Offer, sock: socket.socket) -> Iterator[Callable[[], None]]:
        """Registers `sock` to be cut by close(); the yielded function raises `Cut` unless the offer is still open."""

        def seal() -> None:
            with self._lock:
                offer.sending.discard(sock)
                offer.last_used_s = time.monotonic()
                if offer.closed:
                    raise Cut

        with self._lock:
            if offer.closed:
                raise Cut
            offer.sending.add(sock)
        try:
            yield seal
        finally:
            with self._lock:
                offer.sending.discard(sock)

    def confirm(self, offer: Offer) -> None:
        """What was read of an offer until now counts; `Cut`: it was closed."""
        with self._lock:
            offer.last_used_s = time.monotonic()
            if offer.closed:
                raise Cut

    def expire_live(self) -> float | None:
        """Drop the live offer if it is idle; else the seconds until it may be. None if there is none."""
        with self._lock:
            if self._live is None:
                return None
            left_s = self._live.last_used_s + LIVE_IDLE_S - time.monotonic()
            if left_s > 0 or self._live.sending:
                return max(left_s, 0.1)
            _close(self._live)
            self._live = None
            return None


def _check_tag(tag: str) -> None:
    if not tag or tag.startswith(LIVE_PREFIX):
        raise ConfigError(f"offer tag must not be empty or start with {LIVE_PREFIX!r}, got {tag!r}")


def _close(offer: Offer) -> None:
    """Under the lock, which a sender needs before it can close its socket: so no cut hits a reused descriptor."""
    offer.closed = True
    for sock in offer.sending:
        cut(sock)
