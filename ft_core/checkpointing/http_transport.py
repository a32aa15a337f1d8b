"""`HTTPTransport`: live state over HTTP, zero-copy on the donor, in parallel from several donors.

The reference interface (`send_checkpoint`, `recv_checkpoint`) knows one donor and one step number. The Manager uses it
as a `LiveTransport`. `fetch` and `prefetch` fill in this transport's token and timeouts.

Threads: constructing it starts the server's accept thread (users of the name expect that); the rest: `http.server`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from ft_core.certificates import Tls
from ft_core.checkpointing.http import client
from ft_core.checkpointing.http.server import StateServer
from ft_core.checkpointing.staging import Staging
from ft_core.checkpointing.transport import Exchange, LiveTransport, Receiver
from ft_core.errors import ConfigError
from ft_core.settings import staging_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from threading import Event

    from ft_core.checkpointing.own_state import OwnState
    from ft_core.checkpointing.range_fetch import FetchResult
    from ft_core.checkpointing.receive_plan import Gauge, Prefetched

T = TypeVar("T")
_STEP_TAG = "step-"


class HTTPTransport(LiveTransport[T]):
    """Serves this replica's state and fetches from others.

    `timeout`: default deadline of a transfer. `num_chunks` is accepted for compatibility; state is always cut into
    ranges of 4 MiB. `hostname`: what peers connect to (default: this machine's name). `bind`, `port`: where to listen
    (default: as `StateServer`: without a token on this machine only).
    `token`: the job's secret, default `FT_TOKEN`. `idle_s`: how long a donor may be silent.
    `tls`: the job's certificates, default `FT_TLS_*`. FT_STAGING_MB bounds the pinned host memory that state
    on a device passes through.
    """

    def __init__(
        self,
        timeout: timedelta,
        num_chunks: int = 0,
        *,
        hostname: str | None = None,
        token: str | None = None,
        bind: str | None = None,
        port: int = 0,
        idle_s: float | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        if self._timeout_s <= 0:
            raise ConfigError(f"timeout must be positive, got {timeout}")
        if num_chunks < 0:
            raise ConfigError(f"num_chunks must not be negative, got {num_chunks}")
        self._idle_s = idle_s if idle_s is not None else min(client.IDLE_S, self._timeout_s)
        self._token = token if token is not None else (os.environ.get("FT_TOKEN") or None)
        self._tls = tls if tls is not None else Tls.from_env(os.environ)
        self.staging = Staging(staging_bytes(os.environ))
        self.server = StateServer(
            self._token, bind=bind, hostname=hostname, port=port, tls=self._tls, staging=self.staging
        ).start()

    def __repr__(self) -> str:
        return f"HTTPTransport({self.server!r})"

    def mark(self, state: object) -> None:
        """Copies from and to devices wait for that. The first time with state on a device pinned memory is made."""
        self.staging.mark(state)

    def offer(self, exchange: Exchange, state: object) -> None:
        """Offer it to whoever holds the token."""
        self.server.offer(exchange.tag, state)

    def refuse(self, exchange: Exchange, why: str) -> None:
        """Answer whoever asks for it so."""
        self.server.refuse(exchange.tag, why)

    def close(self) -> None:
        """Close what is offered, but for live state, which may be torn anyway."""
        self.server.close_all()

    def receive(self, exchange: Exchange, receiver: Receiver) -> FetchResult:
        """Receive from all donors at once, and pass on what was received to others that heal."""

        def addresses(ranks: tuple[int, ...]) -> list[str]:
            return [exchange.addresses[rank] for rank in ranks if rank in exchange.addresses]

        return self.fetch(
            addresses(exchange.donors),
            exchange.tag,
            into=receiver.into,
            deadline_s=receiver.deadline_s,
            cancel=receiver.cancel,
            have=receiver.have,
            own=receiver.own,
            relays=addresses(exchange.relays),
            gauge=receiver.gauge,
        )

    def fetch(
        self,
        donors: Sequence[str],
        tag: str,
        *,
        into: object = None,
        deadline_s: float | None = None,
        cancel: Event | None = None,
        have: Prefetched | None = None,
        only: Callable[[str], bool] | None = None,
        own: OwnState | None = None,
        relays: Sequence[str] | None = None,
        gauge: Gauge | None = None,
    ) -> FetchResult:
        """`http.client.fetch` with this transport's token and timeouts.

        `relays`: not None: this replica serves what it received under `tag`, too, until its server is told to close it.
        """
        server = self.server
        return client.fetch(
            donors,
            tag,
            into=into,
            token=self._token,
            tls=self._tls,
            deadline_s=deadline_s if deadline_s is not None else self._timeout_s,
            idle_s=self._idle_s,
            cancel=cancel,
            have=have,
            only=only,
            own=own,
            relays=relays or (),
            gauge=gauge,
            staging=self.staging,
            arrived=None if relays is None else lambda plan: server.relay(tag, plan),
        )

    def prefetch(
        self,
        donors: Sequence[str],
        *,
        into: object = None,
        deadline_s: float | None = None,
        given_s: float | None = None,
        cancel: Event | None = None,
        own: OwnState | None = None,
        gauge: Gauge | None = None,
    ) -> Prefetched | None:
        """`http.client.prefetch` with this transport's token and timeouts."""
        return client.prefetch(
            donors,
            into=into,
            token=self._token,
            tls=self._tls,
            deadline_s=deadline_s if deadline_s is not None else self._timeout_s,
            given_s=given_s,
            idle_s=self._idle_s,
            cancel=cancel,
            own=own,
            gauge=gauge,
            staging=self.staging,
        )

    def get_blob(
        self, address: str, name: str, *, timeout_s: float | None = None, bytes_max: int = client.BLOB_BYTES_MAX
    ) -> bytes | None:
        """`http.client.get_blob` with this transport's token."""
        wait_s = timeout_s if timeout_s is not None else self._idle_s
        return client.get_blob(address, name, token=self._token, tls=self._tls, timeout_s=wait_s, bytes_max=bytes_max)

    def metadata(self) -> str:
        """This replica's address."""
        return self.server.address

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Offer `state_dict` to whoever holds the token, until `disallow_checkpoint`; returns at once."""
        del dst_ranks, timeout  # receivers come by themselves, and at their own pace
        self.server.offer(step_tag(step), state_dict)

    def disallow_checkpoint(self) -> None:
        """Close what `send_checkpoint` offered."""
        for tag in self.server.open_tags():
            if tag.startswith(_STEP_TAG):
                self.server.close(tag)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive the state of `step` into fresh memory; waits for the donor to offer it."""
        del src_rank
        state: Any = self.fetch([metadata], step_tag(step), deadline_s=timeout.total_seconds()).state
        return state  # type: ignore[no-any-return]

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving state to other replicas."""
        del wait  # bounded either way
        self.server.shutdown()
        self.staging.drop()


def step_tag(step: int) -> str:
    """Name of what `send_checkpoint` offers."""
    return f"{_STEP_TAG}{step}"
