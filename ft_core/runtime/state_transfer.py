"""Moving live state between replicas, as one Manager needs it: offer what I hold, receive what I lack.

How it works. Over a `LiveTransport` state is offered under a tag that names quorum and version, and received from
several donors at once; a newcomer copies most of it before it joins (prefetch, if the transport can) and only fetches
what differs once it is in. Any other `CheckpointTransport` is driven through its four calls, one donor at a time.

A donor never dies of a join: if its state cannot be sent it tells the receivers so, logs it once and trains on.
Whether it can be sent is looked at before training, when the first quorum is asked for (`check`).

Invariants (R7): what is received is used only in the quorum that planned it; an offer is closed before its tensors may
change; state is written in place only while this replica's own is worthless (it never trained), and is VOID from
then on.
Threads: `offer_*` and `close` on the training thread or quorum worker, `receive` and `prefetch` on the quorum worker.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any

from ft_core.checkpointing import CheckpointTransport, OwnState
from ft_core.checkpointing.receive_plan import Gauge
from ft_core.checkpointing.transport import Exchange, LiveTransport, Receiver
from ft_core.errors import EncodingError, HealError, StateRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ft_core.checkpointing.receive_plan import Prefetched
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.types import Version

log = logging.getLogger("ft_core")
WHY_MAX = 4096
"""Longest refusal that is sent, in characters."""


@dataclass(frozen=True)
class Received:
    """A verified state, not applied yet. Bytes are those that travelled."""

    quorum_id: int
    state: Mapping[str, Any]
    bytes: int
    seconds: float
    donors: tuple[str, ...]


def state_tag(quorum_id: int, version: Version) -> str:
    """Name of an offered state."""
    return f"q{quorum_id:x}-s{version.step}-e{version.quorum_id:x}"


class Healing:
    """Offers and receives state for one rank."""

    def __init__(self, transport: CheckpointTransport[Any], group_rank: int, heal_s: float, replica_id: str) -> None:
        self._transport = transport
        self._live = transport if isinstance(transport, LiveTransport) else None
        self._replica_id = replica_id
        self._own: OwnState | None = None
        self._told = ""
        """Why this replica cannot be a donor, as it was logged last."""
        self._group_rank = group_rank
        self._heal_s = heal_s
        self._prefetched: Prefetched | None = None
        self._into: Mapping[str, Any] | None = None
        self._cancel = Event()
        self._gauge = Gauge()
        """Of the fetch or prefetch that is under way, or was last."""

    def __repr__(self) -> str:
        return f"Healing({self._transport!r}, prefetched={self._prefetched is not None})"

    @property
    def address(self) -> str:
        """What donors are reached at; travels in the ask."""
        return self._transport.metadata()

    @property
    def snapshot_wanted(self) -> bool:
        """A newcomer waits for a live view of this replica's state (read on every step)."""
        return self._live is not None and self._live.server.snapshot_wanted

    def serve_parts(self, prefix: str, answer: Callable[[str], bytes | None]) -> bool:
        """Let peers ask for names that begin with `prefix`; False: this transport carries no questions."""
        if self._live is not None:
            self._live.server.add_blobs(prefix, answer)
        return self._live is not None

    def get_part(self, address: str, name: str, timeout_s: float, bytes_max: int) -> bytes | None:
        """A peer's answer; None: it does not know what is meant. Raises HealError: there is none."""
        assert self._live is not None
        return self._live.get_blob(address, name, timeout_s=timeout_s, bytes_max=bytes_max)

    def check(self, state: Mapping[str, Any]) -> None:
        """See that `state` can be sent, without copying any of it. Raises EncodingError naming the key path.

        A transport of the user's own carries what it carries, and is not asked.
        """
        if self._live is not None:
            self._own = OwnState.of(state)

    def mark(self, state: Mapping[str, Any]) -> None:
        """Training thread, where state is collected: its devices have to come so far before it is read or written."""
        if self._live is not None:
            self._live.mark(state)

    def offer_live(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Let newcomers copy a state as it is and as it changes. Never raises, also if `state` does."""
        assert self._live is not None
        server = self._live.server
        self._try(lambda: server.offer_live(state()), server.refuse_live)

    def offer(self, plan: Plan, store: str, state: Callable[[], Mapping[str, Any]], timeout_s: float) -> None:
        """Serve a state, which is `plan.target`, to the members that heal in this quorum. Never raises.

        `store`: host:port/prefix in the quorum's c10d store, for this quorum and group rank.
        """
        if self._live is not None:
            live, exchange = self._live, self._exchange(plan, store)
            self._try(lambda: live.offer(exchange, state()), lambda why: live.refuse(exchange, why))
            return
        ranks, limit = list(plan.healing), timedelta(seconds=timeout_s)
        self._try(
            lambda: self._transport.send_checkpoint(ranks, plan.target.step, dict(state()), limit), lambda _: None
        )

    def _try(self, offer: Callable[[], None], refuse: Callable[[str], None]) -> None:
        """Make an offer; whatever keeps it from being made is told to the receivers, and once to the user."""
        try:
            offer()
        except Exception as error:  # the user's functions and classes may raise anything
            known = isinstance(error, (EncodingError, HealError))
            why = str(error) if known else f"its state could not be collected: {type(error).__name__}: {error}"
            refuse(f"{self._replica_id}: {why}"[:WHY_MAX])
            if why != self._told:
                self._told = why
                told = "%s: no replica can heal from this one, which trains on: %s"
                log.error(told, self._replica_id, why, exc_info=None if known else error)

    def close(self) -> None:
        """Nothing offered is served any more: the state is about to change. Does not wait for receivers."""
        if self._live is not None:
            self._live.close()
        else:
            self._transport.disallow_checkpoint()

    def prefetch(self, donors: Sequence[str], into: Mapping[str, Any] | None, within_s: float) -> bool:
        """Copy what running members hold right now; what differs at join time is fetched then.

        Args:
            donors: heal addresses.
            into: this rank's own (worthless) state to write into; None stages.
            within_s: so long the first donor may take to give anything.

        Returns:
            Whether `into` may have been written to.

        Raises:
            StateRefusedError: no donor can send its state, or it holds a class unknown here. Nothing was written. Every
            other failure is logged: the whole state is fetched after joining.
        """
        if self._live is None or not donors:
            return False
        started, self._gauge = time.monotonic(), Gauge()
        try:
            found = self._live.prefetch(
                donors,
                into=into,
                deadline_s=self._heal_s,
                given_s=within_s,
                cancel=self._cancel,
                own=self._own,
                gauge=self._gauge,
            )
        except StateRefusedError:
            self._gauge = Gauge()
            raise
        except HealError as error:
            self._gauge = Gauge()  # nothing is being received any more
            # No donor answered at all, so nothing was written: perhaps they are those of a job that has ended.
            log.info("prefetch of live state failed (%s); the whole state is fetched after joining", error)
            return False
        if found is None:
            return False
        self._prefetched, self._into = found, into
        log.info(
            "prefetched %.1f MB of live state from %d donors in %.2f s",
            found.bytes / 1e6, len(found.donors_used), time.monotonic() - started,
        )  # fmt: skip
        return into is not None

    @property
    def prefetched_bytes(self) -> int:
        """What the last `prefetch` has copied."""
        return self._prefetched.bytes if self._prefetched is not None else 0

    @property
    def healed(self) -> tuple[int, int]:
        """Bytes that are here of the state that is being received, or was last, and of all of it; (0, 0): of none."""
        return self._gauge.done, self._gauge.total

    def forget(self) -> None:
        """What was copied beforehand is not needed any more."""
        self._prefetched = self._into = None
        if self._gauge.done < self._gauge.total:
            self._gauge = Gauge()  # it was given up

    @property
    def cancelled(self) -> Event:
        """Set by the next `cancel`."""
        return self._cancel

    def know(self, state: Mapping[str, Any]) -> None:
        """Look at a newer state of this rank's own than `check` was given: what a donor's may hold, and how much."""
        with contextlib.suppress(EncodingError):  # what is known from before remains
            if self._live is not None:
                self._own = OwnState.of(state)

    def receive(self, plan: Plan, store: str, into: Mapping[str, Any] | None, cancel: Event) -> Received:
        """Receive `plan.target` from its donors, verified. Blocks, until `cancel` is set; raises HealError.

        `store`: as for `offer`.
        """
        self._gauge = Gauge()
        try:
            return self._receive(plan, store, into, cancel)
        except BaseException:
            self._gauge = Gauge()  # nothing is being received any more
            raise

    def _receive(self, plan: Plan, store: str, into: Mapping[str, Any] | None, cancel: Event) -> Received:
        started = time.monotonic()
        if self._live is not None:
            have, self._prefetched = self._prefetched, None
            own_memory = into if into is not None else self._into
            receiver = Receiver(own_memory, have, self._own, self._gauge, cancel, deadline_s=self._heal_s)
            found = self._live.receive(self._exchange(plan, store), receiver)
            self._into = None
            return Received(plan.quorum_id, found.state, found.bytes, time.monotonic() - started, found.donors_used)
        failures = []
        for rank in plan.donors:
            member = plan.quorum.members[rank]
            metadata = member.heal_addresses[self._group_rank]
            try:
                state = self._transport.recv_checkpoint(
                    rank, metadata, plan.target.step, timedelta(seconds=self._heal_s)
                )
            except Exception as error:  # noqa: BLE001 - a transport of the user's own may raise anything
                failures.append(f"{member.replica_id}: {error}")
                continue
            return Received(plan.quorum_id, state, 0, time.monotonic() - started, (member.replica_id,))
        raise HealError(f"no donor could be received from: {'; '.join(failures) or 'none was planned'}")

    def cancel(self) -> None:
        """End a receive or prefetch that runs on another thread."""
        old, self._cancel = self._cancel, Event()
        old.set()

    def shutdown(self) -> None:
        """Stop serving and receiving."""
        self._cancel.set()
        self._transport.shutdown()

    def _exchange(self, plan: Plan, store: str) -> Exchange:
        addresses = {
            rank: member.heal_addresses[self._group_rank]
            for rank, member in enumerate(plan.quorum.members)
            if len(member.heal_addresses) > self._group_rank
        }
        return Exchange(
            state_tag(plan.quorum_id, plan.target), self._replica_id, plan.replica_rank, store, plan.holders,
            plan.healing, addresses, plan.donors, plan.relays,
        )  # fmt: skip
