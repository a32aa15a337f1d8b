"""`GroupConnections`: which sockets of this process belong to one Gloo group, and what becomes of strangers'.

How it works. Every group listens on a port that nothing else uses, and learns its peers' through the rendezvous. So
its sockets are the connections whose local end is its port or whose remote end is a peer's; once formed, only those it
was formed with: the port of a peer that is gone may be anybody's. `end` shuts them down.

Strangers. Gloo keeps every connection that it accepts until the group is destroyed, also one that never says which
pair it belongs to, and also after the other side has closed it: nothing from outside makes it let go of the
descriptor. So they are kept from being accepted. From its first moment a group's port accepts only connections that
have sent something (`wait_for_data`; the kernel drops the others by itself), and as soon as all peers are connected
nothing at all arrives there any more (`refuse_new`). What is left is a stranger who sends data to the port while the
group forms: it costs a descriptor until the group's end, but is not counted as a peer whose loss would break the group.

Invariants: nothing is remembered by descriptor number alone. `known` is assigned once, when the group has formed.
Threads: any; no lock is taken (a forked child asks, too).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ft_core.process_group import socket_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ft_core.process_group.rendezvous import RendezvousStore
    from ft_core.process_group.socket_table import Connection, Endpoint

logger = logging.getLogger(__name__)

_warned_cannot_end = False
Known = tuple[tuple[int, ...], "Connection"]
"""A connection, and its descriptors when the group had formed: mostly one. Another thread may have had a duplicate for
a moment (to send it to the witness, to shut another one down), whose end is not the connection's."""
_formed: set[GroupConnections] = set()
"""The connections of all formed groups that are not destroyed yet."""


class GroupConnections:
    """The sockets of the group of `world_size` ranks that meets at `store_addr`."""

    def __init__(self, store_addr: str, world_size: int) -> None:
        self.rendezvous: RendezvousStore | None = None
        self.known: tuple[Known, ...] | None = None
        """What the group was formed with; None: not formed yet."""
        self._store_addr = store_addr
        self._world_size = world_size
        self._strangers = 0

    def __repr__(self) -> str:
        return f"GroupConnections({'forming' if self.known is None else len(self.known)}, at {self.listening})"

    @property
    def listening(self) -> Endpoint | None:
        """Where the group's device listens, once known."""
        return None if self.rendezvous is None else self.rendezvous.listening

    def settle(self) -> None:
        """The group has formed: remember its connections, keep them out of children, and let nobody else connect."""
        global _warned_cannot_end
        if self.listening is None:
            if not _warned_cannot_end:
                _warned_cannot_end = True
                logger.warning(
                    "Gloo's sockets cannot be found on this system (needs Linux and /proc/self/fd): after a failure, "
                    "pending collectives end only at their timeout, and forked workers keep a killed trainer's "
                    "connections open"
                )
            return
        found: dict[Connection, tuple[int, ...]] = {}
        for fd in socket_table.connections(self.is_mine):
            connection = socket_table.connection_of(fd)
            if connection is not None:
                found[connection] = (*found.get(connection, ()), fd)
        known = [(fds, connection) for connection, fds in found.items()]
        listening = self._listening_fds()
        socket_table.close_on_exec([*listening, *(fd for fds, _ in known for fd in fds)])
        if len(known) >= self._world_size - 1:  # with TORCH_GLOO_LAZY_INIT the peers come later
            for fd in listening:
                socket_table.refuse_new(fd)
        self.known = tuple(self._without_strangers(known))
        _formed.add(self)

    def waiting_for(self) -> str:
        """What a group that is still forming lacks."""
        if self.rendezvous is None:
            return "no connection to the store"
        return self.rendezvous.missing or "all ranks are there, but connecting to them did not finish"

    def any_lost(self) -> bool:
        """Whether a connection to a peer is gone (asks only about the descriptors that they had when formed)."""
        lost = sum(not _still_at(fds, connection) for fds, connection in self.known or ())
        return lost > self._strangers

    def end(self) -> None:
        """Shut them down; none is left open whose two ends both still run."""
        if self.listening is not None:
            socket_table.shut_down(self.is_mine)

    def forget(self) -> None:
        """The group is destroyed."""
        self.rendezvous = None
        _formed.discard(self)

    def fds(self) -> Iterable[int]:
        """Return the descriptors of the port and of the connections."""
        if self.listening is None:
            return []
        return [*self._listening_fds(), *socket_table.connections(self.is_mine)]

    def open_fds(self) -> list[int]:
        """Return the descriptors of the connections that it was formed with and that are still the same."""
        return [at[0] for fds, connection in self.known or () if (at := _still_at(fds, connection))]

    def is_mine(self, connection: Connection) -> bool:
        """Whether it belongs to this group; while it forms also a stranger's, which nothing tells apart yet."""
        if self.known is not None:
            return any(connection == known for _, known in self.known)
        rendezvous = self.rendezvous
        if rendezvous is None or not (connection.local == rendezvous.listening or connection.peer in rendezvous.peers):
            return False
        others = [other for other in list(_formed) if other._store_addr != self._store_addr]
        return not any(connection == known for other in others for _, known in other.known or ())

    def _listening_fds(self) -> list[int]:
        mine = self.listening
        return [] if mine is None else [fd for fd, local in socket_table.listeners() if local == mine]

    def _without_strangers(self, found: list[Known]) -> list[Known]:
        """Leave out who connected from a host on which no peer is; count those that could still be either.

        Each pair of ranks has one connection, made by one of the two: whom this rank did not connect to has connected
        to it. (A peer on a host with several addresses may come from one that it does not listen on.)
        """
        assert self.rendezvous is not None
        peers = self.rendezvous.peers
        to_peers = [(fds, connection) for fds, connection in found if connection.peer in peers]
        accepted = [(fds, connection) for fds, connection in found if connection.peer not in peers]
        expected = max(0, self._world_size - 1 - len({connection.peer for _, connection in to_peers}))
        hosts = {peer.host for peer in peers}
        if len(accepted) > expected:
            near = [(fds, connection) for fds, connection in accepted if connection.peer.host in hosts]
            if len(near) >= expected:
                accepted = near
        self._strangers = max(0, len(accepted) - expected)
        return to_peers + accepted


def _still_at(fds: Iterable[int], connection: Connection) -> list[int]:
    """Which of these descriptors are that connection."""
    return [fd for fd in fds if socket_table.connection_of(fd) == connection]


def clear_in_child() -> None:
    """In a forked child: nothing of the parent's counts here."""
    _formed.clear()
