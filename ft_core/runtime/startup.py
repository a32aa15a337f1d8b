"""Everything a Manager opens before its first step: the c10d store of the group, the heal server, the control link.

Threads: the one that makes the Manager.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ft_core.addresses import Addresses
from ft_core.checkpointing import CheckpointTransport, HTTPTransport, PGTransport
from ft_core.control.lighthouse.lease_client import LeaseSettings
from ft_core.control.link import Control, LeaderControl, LocalControl, RankControl
from ft_core.errors import ConfigError, LighthouseError
from ft_core.network import is_here, is_loopback
from ft_core.process_group import ByDevice, ProcessGroup, create_store_client, host_process_group, open_store
from ft_core.protocol.rank.rank import Rank
from ft_core.runtime.communicators import Communicators
from ft_core.runtime.shell import RankShell
from ft_core.runtime.state_transfer import Healing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ft_core.protocol.rank.settings import RankSettings
    from ft_core.runtime.config import Config

WATCHED = timedelta(hours=1)
"""Gloo's own timeout: not the one that fires, because a peer may legitimately be busy (the watchdog knows,
Gloo does not). Not longer either: work that an abort could not end (Gloo can lose a send) holds memory until then."""


@dataclass(frozen=True)
class Parts:
    """What `start` opened."""

    shell: RankShell
    store: Store
    store_address: str
    incarnation: int
    """Of this process, to tell it from its predecessors of the same name."""


def start(config: Config, pg: ProcessGroup | ByDevice, transport: CheckpointTransport[Any] | None) -> Parts:
    """Open the group's store, the heal server and the control link (the link's `start` is the caller's)."""
    store, store_address = _open_store(config)
    settings = config.rank_settings
    if config.world_size > 1:
        config = replace(config, incarnation_key=f"{config.incarnation_key}/{_nth(config)}")
        settings = _shared_id(config, settings, store)
    lineage = secrets.randbits(62) if config.init_sync else 0
    rank = Rank(settings, lineage=lineage, now=time.monotonic())
    communicators = Communicators(pg)
    communicators.set_timeout(WATCHED)
    mine = transport is None
    if transport is None:
        transport = _transport(config, host_process_group() if isinstance(pg, ByDevice) else pg)
    else:
        _check_reachable(transport, config.host)
    shell = RankShell(
        rank, communicators, Healing(transport, config.rank, config.budget.heal_s, settings.replica_id), config.budget
    )
    try:
        shell.control = _control(config, settings.replica_id, shell, store)
    except BaseException:
        if mine:
            transport.shutdown()
        raise
    shell.control_ports = _ports(config, shell.control)
    return Parts(shell, store, store_address, secrets.randbits(62) | 1)


def _transport(config: Config, pg: ProcessGroup) -> CheckpointTransport[Any]:
    """What the caller chose by name."""
    within, idle_s, token = timedelta(seconds=config.budget.heal_s), config.budget.transfer_idle_s, config.token or None
    if config.transport == "pg":
        return PGTransport(pg, within, hostname=config.host, token=token, bind=config.bind, idle_s=idle_s)
    return HTTPTransport(within, hostname=config.host, token=token, bind=config.bind, idle_s=idle_s, tls=config.tls)


def kind_of(transport: CheckpointTransport[Any] | None) -> str:
    """What replicas compare of a transport that the caller has made; '': it has made none."""
    if transport is None:
        return ""
    kinds: dict[type, str] = {HTTPTransport: "http", PGTransport: "pg"}
    return kinds.get(type(transport), type(transport).__name__)


def _check_reachable(transport: CheckpointTransport[Any], host: str) -> None:
    """Raise ConfigError if others are to come to this machine, and the caller's transport listens for itself alone."""
    try:
        where = urlsplit(str(transport.metadata())).hostname or ""
    except ValueError:
        return  # no address: a transport of the caller's own
    if is_loopback(where) and not is_loopback(host):
        raise ConfigError(
            f"checkpoint_transport listens at {transport.metadata()}, where only this machine reaches it, and others "
            f"reach this replica at {host}: without a token it stays there. Set FT_TOKEN before it is made"
        )


def _open_store(config: Config) -> tuple[Store, str]:
    if config.store is None:
        server = open_store(config.host, timedelta(seconds=60))
        return server, f"{_bracketed(config.host)}:{server.port}"
    host, port = config.store
    advertised = config.host if is_here(host) else host
    address = f"{_bracketed(advertised)}:{port}"
    try:
        return create_store_client(
            f"{_bracketed(host)}:{port}/ft_core", timeout=timedelta(seconds=config.budget.connect_s)
        ), address
    except Exception as error:
        raise ConfigError(
            f"the c10d store at store_addr={host!r} store_port={port} (MASTER_ADDR, MASTER_PORT) cannot be reached: "
            f"{error}. Start it before the Manager (torchrun or init_process_group does), or, for a group of one "
            "rank, name none"
        ) from error


_started: Counter[tuple[object, ...]] = Counter()
_started_lock = Lock()


def _nth(config: Config) -> int:
    """How many Managers this process made before for the same rank of the same group: the ranks make them alike."""
    key = (config.store, config.incarnation_key, config.rank)
    with _started_lock:
        _started[key] += 1
        return _started[key] - 1


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _shared_id(config: Config, settings: RankSettings, store: Store) -> RankSettings:
    """All ranks of a group carry the replica_id that rank 0 drew."""
    key = f"{config.incarnation_key}/replica_id"
    if config.rank == 0:
        store.set(key, settings.replica_id)
        return settings
    _wait_for_rank_0(config, store, key)
    return replace(settings, replica_id=store.get(key).decode())


def _control(config: Config, replica_id: str, shell: RankShell, store: Store) -> Control:
    settings = LeaseSettings(
        address=config.lighthouse,
        replica_id=replica_id,
        budget=config.budget,
        token=config.token,
        tls=config.tls,
        room=config.room,
        healed=lambda: shell.transfer.healed,
    )
    if config.world_size == 1:
        return LocalControl(settings, shell)
    key = f"{config.incarnation_key}/control"
    if config.rank == 0:
        leader = LeaderControl(
            settings, shell, world_size=config.world_size, hostname=config.host, port=config.port,
            drains=config.rank_settings.exits_on_drain,
        )  # fmt: skip
        store.set(key, leader.address)
        return leader
    _wait_for_rank_0(config, store, key)
    address = LeaseSettings(
        address=store.get(key).decode(), replica_id=replica_id, budget=config.budget, token=config.token,
        tls=config.tls, setting="group rank 0's control address",
    )  # fmt: skip
    return RankControl(address, shell, rank=config.rank, world_size=config.world_size)


def _ports(config: Config, control: Control) -> frozenset[int]:
    """Of the lighthouse, also of one that stands by, and of the leader of the group: the lease, and the streams between
    the group's ranks."""
    addresses = [config.lighthouse] if config.rank == 0 else []
    if isinstance(control, LeaderControl):
        addresses.append(control.address)
    elif isinstance(control, RankControl):
        addresses.append(control.settings.address)
    return frozenset(port for address in addresses for port in Addresses.parse(address, "address").ports)


def _wait_for_rank_0(config: Config, store: Store, key: str) -> None:
    try:
        store.wait([key], timedelta(seconds=config.budget.connect_s))
    except Exception as error:
        raise LighthouseError(
            f"group rank 0 of {config.name} did not announce itself in the c10d store at {config.store} within "
            f"connect_timeout={config.budget.connect_s:g} s: is rank 0 running, with the same MASTER_ADDR, MASTER_PORT "
            "and FT_REPLICA_ID?"
        ) from error
