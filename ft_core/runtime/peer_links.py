"""Which members of the last quorum this rank can connect to: what a failed attempt over the network is told by.

How it works. A collective that waits does not say for whom, and a process group that cannot be built seldom does. So
when an attempt has waited for long, or its process group could not be built, this rank opens a TCP connection to each
member's state server and closes it again. A handshake proves both directions; a process that is merely frozen still
answers it, so "unreachable" is about the network. A member that refuses counts as unreachable as well: the lighthouse
knows whether it lives, and believes the word only of one that does (`reachability`).

Invariants: a probe takes at most its timeout, looks at the members of one quorum, and leaves no socket open. What was
found is about members of the quorum entered last, at the addresses they have there. Any thread; one probe at a time.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.types import Quorum

log = logging.getLogger("ft_core")
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a process that can open no sockets at all."""
PROBE_S = 3.0
"""How long a handshake may take: two lost packets (Linux repeats them after 1 and 3 s) are no cut."""
MAX_KEPT = 64
"""Peers outside the last quorum that it did not reach before, and keeps looking at."""
Statement = tuple[tuple[str, ...], tuple[str, ...]]
"""(unreachable, reached) replica_ids, each sorted."""


class Links:
    """What this rank knows of the way to its peers."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[str, int]] = {}
        self._said: Statement = ((), ())
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Links({len(self._peers)} peers, unreachable: {', '.join(self._said[0]) or 'none'})"

    @property
    def statement(self) -> Statement:
        """What was found last."""
        return self._said

    def entered(self, quorum: Quorum, replica_id: str, group_rank: int) -> None:
        """A quorum was entered: its members are not known yet. Whom this rank did not reach, it keeps looking at."""
        before = {i: self._peers[i] for i in self._said[0][:MAX_KEPT] if i in self._peers}
        self._peers = before | {
            m.replica_id: where
            for m in quorum.members
            if m.replica_id != replica_id and (where := _where(m.heal_addresses, group_rank)) is not None
        }
        self._said = ((), ())

    def probe(self, timeout_s: float = PROBE_S) -> tuple[str, ...]:
        """Try all peers at once. Returns those of which nothing is heard (not who refuses: its host is there)."""
        with self._lock:
            peers = self._peers
            found = _connect_all(peers, timeout_s)
            if found is None:
                return ()
            # Who was reached at once has broken off the quorum meanwhile, and all may be in the next one.
            same = {i for i, where in self._peers.items() if peers.get(i) == where}
            reached, refused = found
            self._said = (tuple(sorted(same - reached)), tuple(sorted(same & reached)))
            return tuple(sorted(same - reached - refused))

    def look_again(self, seen: Callable[[], None]) -> None:
        """Probe on a thread of its own, unless one is under way, and call `seen` there: the caller must not wait."""

        def look() -> None:
            self.probe()
            seen()

        if self._peers and (self._looking is None or not self._looking.is_alive()):
            self._looking = threading.Thread(target=look, name="ft-links", daemon=True)
            self._looking.start()


def _where(addresses: tuple[str, ...], group_rank: int) -> tuple[str, int] | None:
    if len(addresses) <= group_rank:
        return None
    try:
        parts = urlsplit(addresses[group_rank])
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    except ValueError:  # a transport of the user's own may advertise anything
        return None


def _connect_all(peers: dict[str, tuple[str, int]], timeout_s: float) -> tuple[set[str], set[str]] | None:
    """Who answers a TCP handshake, and who refuses it; None if this process cannot look."""
    try:
        with selectors.DefaultSelector() as selector:
            return _shake_hands(selector, peers, time.monotonic() + timeout_s)
    except OSError as error:
        log.debug("the peers cannot be looked at: %s", error)
        return None


def _shake_hands(
    selector: selectors.BaseSelector, peers: dict[str, tuple[str, int]], deadline: float
) -> tuple[set[str], set[str]]:
    reached: set[str] = set()
    refused: set[str] = set()
    try:
        for replica_id, (host, port) in peers.items():
            try:
                family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                sock = socket.socket(family, kind, proto)
            except OSError as error:
                if error.errno in SCARCE:
                    raise
                continue  # its name means nothing here, or no address of that family does
            sock.setblocking(False)
            code = sock.connect_ex(address)
            if code in (0, errno.EINPROGRESS):
                selector.register(sock, selectors.EVENT_WRITE, replica_id)
            else:
                refused |= {replica_id} if code == errno.ECONNREFUSED else set()
                sock.close()
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                sock = key.fileobj
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code in (0, errno.ECONNREFUSED):
                    (refused if code else reached).add(key.data)
                selector.unregister(sock)
                sock.close()
    finally:
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
    return reached, refused
