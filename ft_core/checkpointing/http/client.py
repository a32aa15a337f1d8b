"""The receiver's side of healing: what a healing replica calls.

`fetch` gets the consistent state offered under a tag, from several donors at once, verified, straight into place. A
donor that dies, closes its offer or sends something that does not verify is replaced by the others (`fetch`).

`prefetch` copies a *live* state, whose tensors change while they are read, ahead of joining. Its result may be torn;
what counts is that most of it will not change: `fetch(have=...)` compares checksums and transfers what differs.

Threads: both block the caller; see `fetch` for the workers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from ft_core.checkpointing.donor_link import Links, Refused, explain
from ft_core.checkpointing.http.connection import ClientTls, DonorConnection
from ft_core.checkpointing.own_state import OwnState
from ft_core.checkpointing.range_fetch import Fetch, FetchResult
from ft_core.checkpointing.receive_plan import Gauge, Given
from ft_core.errors import EncodingError, HealError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from ft_core.certificates import Tls
    from ft_core.checkpointing.receive_plan import Prefetched, ReceivePlan
    from ft_core.checkpointing.staging import Staging

logger = logging.getLogger(__name__)
DEADLINE_S: Final = 60.0
IDLE_S: Final = 5.0
"""Default for how long a donor may send nothing before its work goes to the others."""
CONNECTIONS_WITH_ONE_DONOR: Final = 2
"""One stream does not fill the wire: sender and receiver would take turns."""
BLOB_BYTES_MAX: Final = 64 << 20


def http_links(token: str | None, tls: Tls | None, manifest: str) -> Links:
    """Links to donors' heal servers; `manifest` is the path that their offer is described at. Raises ConfigError."""
    files = ClientTls.of(tls)
    return Links(lambda address: DonorConnection(address, token, files, manifest), CONNECTIONS_WITH_ONE_DONOR)


def fetch(
    donors: Sequence[str],
    tag: str,
    *,
    into: object = None,
    token: str | None = None,
    tls: Tls | None = None,
    deadline_s: float = DEADLINE_S,
    idle_s: float = IDLE_S,
    cancel: threading.Event | None = None,
    have: Prefetched | None = None,
    only: Callable[[str], bool] | None = None,
    own: OwnState | None = None,
    relays: Sequence[str] = (),
    arrived: Callable[[ReceivePlan], None] | None = None,
    gauge: Gauge | None = None,
    staging: Staging | None = None,
) -> FetchResult:
    """Receive the state that `donors` (addresses, best first) offer under `tag`; blocks.

    `into`: the receiver's own state; tensors that match are written in place (and are in the result), also when the
    fetch fails half way. None: everything is staged in fresh memory of the CPU.
    `staging`: what is received passes through it where `into` lies on a device; None: it goes to the CPU's memory.
    `only`: key paths to transfer; the tensors at all other paths are taken from `into` as they are.
    `have`: what an earlier prefetch (or a fetch that failed) left in memory; its memory is preferred to `into`'s, and
    it is updated, so that it can be passed again if this fetch fails.
    `own`: measures of the receiver's state (default: those of `into`, if that can be sent): which classes of the user's
    may be rebuilt besides the registered ones, and how large a state is believed.
    `relays`: replicas that receive the same state and may pass it on when they have it; nobody counts on them.
    `gauge` shows how far it is, from any thread.
    `arrived` is called with what lies in memory, all of it verified, before this returns: to become a relay.
    Waits for donors that have not offered `tag` yet, and for a place at donors that have many receivers.
    `idle_s` bounds every wait for bytes, `deadline_s` the whole call.
    `tls`: the job's certificates; nothing is received in clear with them, and nothing from who has none.
    Raises `HealError` naming what failed at each donor; `StateRefusedError` where trying again cannot help.
    """
    given = Given(into, have, only, own_of(own, into), gauge or Gauge(), staging)
    links = http_links(token, tls, f"/state/{quote(tag, safe='')}/manifest")
    running = Fetch(donors, f"state {tag!r}", links, deadline_s, idle_s, cancel, given, relays=relays)
    return running.result(arrived)


def prefetch(
    donors: Sequence[str],
    *,
    into: object = None,
    token: str | None = None,
    tls: Tls | None = None,
    deadline_s: float = DEADLINE_S,
    given_s: float | None = None,
    idle_s: float = IDLE_S,
    cancel: threading.Event | None = None,
    own: OwnState | None = None,
    gauge: Gauge | None = None,
    staging: Staging | None = None,
) -> Prefetched:
    """Copy what `donors` hold right now, while they train; for `fetch(have=...)`. Blocks.

    Returns what arrived, also if donors failed or time ran out meanwhile; `HealError` only if no donor answered at all,
    within `given_s` (default: `deadline_s`).
    `own`, `gauge`: as for `fetch`.
    """
    given = Given(into, own=own_of(own, into), gauge=gauge or Gauge(), staging=staging)
    running = Fetch(
        donors, "live state", http_links(token, tls, "/prefetch"), deadline_s, idle_s, cancel, given, live=True,
        given_s=given_s,
    )  # fmt: skip
    try:
        plan = running.run()
    except HealError:
        if running.plan is None:
            raise
        plan = running.plan
    kept = plan.kept
    try:
        plan.settle()
    except HealError as error:  # a device: what lies there is not known, so all of it is fetched after joining
        logger.warning("copied live state is of no use: %s", error)
        kept.sums.clear()
    kept.bytes, kept.seconds, kept.donors_used = running.bytes, running.elapsed_s(), running.donors_used()
    return kept


def own_of(own: OwnState | None, into: object) -> OwnState | None:
    """What is given, else measures of `into`; None: there is neither."""
    if own is not None or into is None:
        return own
    try:
        return OwnState.of(into)
    except EncodingError:
        return None  # it is only memory to write to, and nobody asked to send it


def get_blob(
    address: str, name: str, *, token: str | None = None, tls: Tls | None = None, timeout_s: float = IDLE_S,
    bytes_max: int = BLOB_BYTES_MAX,
) -> bytes | None:  # fmt: skip
    """What the replica at `address` registered with `add_blob(name)`; None if it has nothing there."""
    connection = DonorConnection(address, token, ClientTls.of(tls))
    try:
        connection.open(timeout_s, timeout_s)
        connection.request(f"/blob/{quote(name, safe='')}")
        return bytes(connection.small_body(bytes_max)[0])
    except Refused as e:
        if e.status == 404:
            return None
        raise HealError(f"{address}: {e}") from e
    except (OSError, HealError) as e:
        raise HealError(f"{address}: {explain(e)}") from e
    finally:
        connection.close()
