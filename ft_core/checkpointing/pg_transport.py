"""`PGTransport`: live state over process groups, straight into the receiver's own tensors.

How it works. In a quorum in which somebody heals, each donor and receiver that `pg.pairing` puts together form a group
of two through the quorum's store, beside the groups that training uses; the donor serves it on a thread (`pg.donor`),
the receiver takes ranges from its donors at once, several in flight each (`pg.link`, `range_fetch`). Checksums, offers
and what closes them are those of HTTP, so what holds there holds here: nothing torn is ever taken for received. Who
dies ends its own pairs only; the receiver goes on with its other donor, else it fails, and heals in the next quorum.

The groups are siblings of `pg` (same kind, same interface), or Gloo's where `pg` is for devices alone: state travels in
CPU memory. Nothing is sent over `pg` itself but by `send_checkpoint` and `recv_checkpoint`, the reference
implementation's calls: those use it as its user has configured it.

Over HTTP remains what no group exists for: reaching a replica, questions, receivers for which there is no pair (a
donor is in eight at most). Live state is not copied before joining, so the members wait for all of a newcomer's state.

Threads: constructing it starts the heal server's (`HTTPTransport`); per pair of a donor `ft-heal-pg-<rank>` until the
offer is closed. `_lock` guards the list of pairs and is held for bookkeeping only.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from ft_core.certificates import Tls
from ft_core.checkpointing.donor_link import Links
from ft_core.checkpointing.http.client import own_of
from ft_core.checkpointing.http.wire import Cut
from ft_core.checkpointing.http_transport import HTTPTransport, step_tag
from ft_core.checkpointing.pg.donor import PgDonor
from ft_core.checkpointing.pg.link import PgLink
from ft_core.checkpointing.pg.pair import Pair, Place
from ft_core.checkpointing.pg.pairing import pairs
from ft_core.checkpointing.range_fetch import Fetch
from ft_core.checkpointing.receive_plan import Gauge, Given
from ft_core.errors import ConfigError, HealError, UsageError
from ft_core.process_group import ProcessGroup, host_process_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Event

    from ft_core.checkpointing.own_state import OwnState
    from ft_core.checkpointing.range_fetch import FetchResult
    from ft_core.checkpointing.receive_plan import Prefetched
    from ft_core.checkpointing.transport import Exchange, Receiver

T = TypeVar("T")
logger = logging.getLogger(__name__)
SHUTDOWN_S: Final = 2.0
"""How long `shutdown` waits for the threads of its pairs, which it has cut."""


class PGTransport(HTTPTransport[T]):
    """Moves state over process groups.

    Args:
        pg: the groups that state travels over are siblings of this one. `send_checkpoint` uses it itself.
        timeout: default deadline of a transfer.
        device: checked, and otherwise unused: state goes to where the receiver's own is, else into the CPU's memory.
        state_dict: the receiver's own state, which `recv_checkpoint` receives into; the Manager knows its own.
        hostname, token, bind, port, idle_s: of the heal server, as for `HTTPTransport`.

    Raises:
        ConfigError: an argument cannot work, or certificates are set (FT_TLS_*): a process group encrypts nothing.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta,
        device: torch.device | str = "cpu",
        state_dict: Callable[[], T] | None = None,
        *,
        hostname: str | None = None,
        token: str | None = None,
        bind: str | None = None,
        port: int = 0,
        idle_s: float | None = None,
        tls: Tls | None = None,
    ) -> None:
        if not isinstance(pg, ProcessGroup):
            raise ConfigError(f"pg must be an ft_core.process_group.ProcessGroup, got {type(pg).__name__}")
        if state_dict is not None and not callable(state_dict):
            raise ConfigError(f"state_dict must be a function that returns the receiver's state, got {state_dict!r}")
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device={device!r} is no device of torch's: {error}") from error
        if tls is not None or Tls.from_env(os.environ) is not None:
            raise ConfigError(
                "PGTransport sends state over a process group, which encrypts nothing, and certificates are set "
                '(FT_TLS_*): use HTTPTransport (transport="http"), or unset them'
            )
        super().__init__(timeout, hostname=hostname, token=token, bind=bind, port=port, idle_s=idle_s)
        self._pg, self._own_state = pg, state_dict
        self._lock = threading.Lock()
        self._pairs: dict[Pair, threading.Thread] = {}
        """Of the donor's side: at most RECEIVERS_MAX, and those that are just ending."""

    def __repr__(self) -> str:
        return f"PGTransport({self._pg.getBackendName()}, {len(self._pairs)} pairs, {self.server!r})"

    # -- in a quorum

    def offer(self, exchange: Exchange, state: object) -> None:
        """Serve it to those it forms pairs with, and over HTTP."""
        super().offer(exchange, state)
        self._serve_pairs(exchange)

    def refuse(self, exchange: Exchange, why: str) -> None:
        """Tell those it would form pairs with, too."""
        super().refuse(exchange, why)
        self._serve_pairs(exchange)

    def close(self) -> None:
        """Close what is offered, then end the pairs: what they were sending is not sealed any more."""
        super().close()
        with self._lock:
            open_pairs = list(self._pairs)
        for pair in open_pairs:
            pair.cut()

    def _serve_pairs(self, exchange: Exchange) -> None:
        for receiver, donors in pairs(exchange.holders, exchange.healing).items():
            if exchange.rank in donors:
                pair = self._pair(exchange, exchange.rank, receiver, 0)
                thread = threading.Thread(
                    target=self._serve, args=(pair, exchange.tag), name=f"ft-heal-pg-{receiver}", daemon=True
                )
                with self._lock:
                    self._pairs[pair] = thread
                thread.start()

    def _serve(self, pair: Pair, tag: str) -> None:
        until = time.monotonic() + self._timeout_s
        try:
            pair.form(self._timeout_s)
            PgDonor(pair, self.server.book, self.server.sums, tag).serve(until, self._idle_s)
        except (OSError, Cut) as error:  # the receiver notices by itself
            logger.debug("a receiver of state %r is not served any more: %s", tag, error)
        except Exception:
            logger.exception("serving state %r over a process group failed", tag)
        finally:
            pair.close()
            with self._lock:
                del self._pairs[pair]

    def receive(self, exchange: Exchange, receiver: Receiver) -> FetchResult:
        """Receive from the donors that it forms pairs with; from all of them over HTTP if it forms none."""
        donors = {f"replica rank {d}": d for d in pairs(exchange.holders, exchange.healing)[exchange.rank]}
        if not donors:
            return super().receive(exchange, receiver)
        links = Links(lambda name: PgLink(self._pair(exchange, donors[name], exchange.rank, 1), exchange.tag))
        given = Given(
            receiver.into,
            receiver.have,
            None,
            own_of(receiver.own, receiver.into),
            receiver.gauge or Gauge(),
            self.staging,
        )
        fetch = self._fetch(list(donors), exchange.tag, links, receiver.deadline_s, receiver.cancel, given)
        return fetch.result(lambda plan: self.server.relay(exchange.tag, plan))

    def _fetch(
        self, donors: list[str], tag: str, links: Links, deadline_s: float | None, cancel: Event | None, given: Given
    ) -> Fetch:
        limit_s = deadline_s if deadline_s is not None else self._timeout_s
        return Fetch(donors, f"state {tag!r}", links, limit_s, self._idle_s, cancel, given)

    def _pair(self, exchange: Exchange, donor: int, receiver: int, rank: int) -> Pair:
        group = self._pg.sibling() if self._pg.carries_cpu_memory else host_process_group()
        place = Place(f"{exchange.store}/state/{donor}-{receiver}", exchange.replica_id, rank)
        return Pair(group, 1 - rank, place)

    def prefetch(
        self, donors: Sequence[str], *, into: object = None, deadline_s: float | None = None,
        given_s: float | None = None, cancel: Event | None = None, own: OwnState | None = None,
        gauge: Gauge | None = None,
    ) -> Prefetched | None:  # fmt: skip
        """Nothing: who is in no quorum has no process group."""
        del donors, into, deadline_s, given_s, cancel, own, gauge
        return None

    # -- the reference implementation's calls: over `pg` itself

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Send it to `dst_ranks` of `pg`, one after the other; blocks until each has received it.

        Raises HealError naming those that did not within `timeout`.
        """
        if self._pg.size() < 2:
            raise UsageError("send_checkpoint before pg.configure(): the state is sent over that group")
        super().send_checkpoint(dst_ranks, step, state_dict, timeout)
        until, failed = time.monotonic() + timeout.total_seconds(), []
        for rank in dst_ranks:
            pair = Pair(self._pg, rank)
            left_s = max(0.0, until - time.monotonic())
            try:
                PgDonor(pair, self.server.book, self.server.sums, step_tag(step)).serve(until, left_s)
            except (OSError, Cut) as error:
                failed.append(f"rank {rank}: {error}")
            finally:
                pair.close()
        if failed:
            raise HealError(f"step {step} was not sent to {'; '.join(failed)}")

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive the state of `step` from `src_rank` of `pg`, which sends it meanwhile. Raises HealError."""
        del metadata
        if self._pg.size() < 2:
            raise UsageError("recv_checkpoint before pg.configure(): the state is received over that group")
        tag, limit_s = step_tag(step), timeout.total_seconds()
        into = self._own_state() if self._own_state is not None else None
        given = Given(into, own=own_of(None, into), staging=self.staging)
        links = Links(lambda _: PgLink(Pair(self._pg, src_rank), tag))
        state: Any = self._fetch([f"rank {src_rank}"], tag, links, limit_s, None, given).result().state
        return state  # type: ignore[no-any-return]

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving state to other replicas, end all pairs."""
        super().shutdown(wait)
        self.close()
        end = time.monotonic() + SHUTDOWN_S
        with self._lock:
            threads = list(self._pairs.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
