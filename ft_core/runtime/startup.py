"""Everything a Manager decides and opens before its first step: arguments + environment -> configuration -> parts.

`resolve` is pure: it merges explicit arguments (they win), FT_* and TORCHFT_* variables and defaults, and refuses what
cannot work. `start` opens what the configuration names: the c10d store of the group, the heal server, the control link.
The small functions at the end fill in the messages that describe this replica to others.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any

from ft_core.certificates import Tls
from ft_core.checkpointing import CheckpointTransport, HTTPTransport
from ft_core.control.lighthouse.lease_client import LeaseSettings
from ft_core.control.link import Control, LeaderControl, LocalControl, RankControl
from ft_core.errors import ConfigError, LighthouseError
from ft_core.network import advertised_host, is_here, is_loopback
from ft_core.process_group import ProcessGroup, create_store_client, open_store
from ft_core.protocol.lighthouse.events import Hello
from ft_core.protocol.lighthouse.model_signature import setting_lines
from ft_core.protocol.lineage import fold_lineage
from ft_core.protocol.rank.heal_plan import WorldSizeMode
from ft_core.protocol.rank.settings import StepSettings
from ft_core.protocol.types import Ask
from ft_core.runtime import notices
from ft_core.runtime.communicators import Lanes
from ft_core.runtime.session import Session
from ft_core.runtime.state_transfer import Healing
from ft_core.settings import MAX_REPLICAS, Environment, TimeBudget, parse_address, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._C._distributed_c10d import Store

    from ft_core.data.interface import DataListener
    from ft_core.protocol.rank.rank import Step
    from ft_core.reduction.interface import Carrier

ON_EXHAUSTED = ("shadow", "leave", "stop_all")
DEFAULT_TIMEOUT_S = 60.0
WATCHED = timedelta(hours=1)
"""Gloo's own timeout: not the one that fires, because a peer may legitimately be busy (the watchdog knows,
Gloo does not). Not longer either: work that an abort could not end (Gloo can lose a send) holds memory until then."""


@dataclass(frozen=True)
class Arguments:
    """What the caller of Manager passed; None: not said."""

    min_replica_size: int | None
    timeout: timedelta | None
    quorum_timeout: timedelta | None
    connect_timeout: timedelta | None
    rank: int | None
    world_size: int | None
    world_size_mode: WorldSizeMode
    store_addr: str | None
    store_port: int | None
    lighthouse_addr: str | None
    replica_id: str | None
    port: int | None
    hostname: str | None
    init_sync: bool
    max_retries: int | None
    quorum_retries: int | None
    parity_check_every: int
    parity_sample_steps: int
    time_overrides: Mapping[str, float] | None
    expected_replicas: int | None
    token: str | None
    exit_on_drain: bool
    on_exhausted: str | None
    room_id: str
    from_scratch: bool | None = None


@dataclass(frozen=True)
class Config:
    """What a Manager runs with, resolved and checked."""

    step: StepSettings
    budget: TimeBudget
    name: str
    replica_id: str
    rank: int
    world_size: int
    store: tuple[str, int] | None
    lighthouse: str
    host: str
    bind: str
    port: int
    token: str
    tls: Tls | None
    expected: int
    init_sync: bool
    parity_check_every: int
    parity_sample_steps: int
    quorum_retries: int
    incarnation_key: str
    """Of this start of the group, in its c10d store: its ranks must not find their predecessors."""
    exit_on_drain: bool
    on_exhausted: str
    room: str
    from_scratch: bool


@dataclass(frozen=True)
class Parts:
    """What `start` opened."""

    session: Session
    healing: Healing
    store: Store
    store_address: str
    incarnation: int


def resolve(arguments: Arguments, variables: Mapping[str, str]) -> Config:
    """Merge arguments, environment and defaults. Raises ConfigError naming the setting, the value and what to do."""
    env = Environment.read(variables)
    notices.configure(variables)
    a = arguments
    rank = a.rank if a.rank is not None else whole_number(variables, "RANK", 0)
    world_size = a.world_size if a.world_size is not None else whole_number(variables, "WORLD_SIZE", 1)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} and world_size={world_size}: need 0 <= rank < world_size (inside the group)")
    min_replicas = a.min_replica_size if a.min_replica_size is not None else env.min_replicas
    min_replicas = 1 if min_replicas is None else min_replicas
    if not 1 <= min_replicas <= MAX_REPLICAS:
        raise ConfigError(f"min_replica_size={min_replicas} must be between 1 and {MAX_REPLICAS}")
    for setting, value in (("max_retries", a.max_retries), ("quorum_retries", a.quorum_retries)):
        if value is not None and value < 0:
            raise ConfigError(f"{setting}={value} must be 0 or more")
    for setting, value in (
        ("parity_check_every", a.parity_check_every), ("parity_sample_steps", a.parity_sample_steps),
    ):  # fmt: skip
        if value < 0:
            raise ConfigError(f"{setting}={value} must be 0 (never) or a number of commits")
    on_exhausted = ON_EXHAUSTED[0] if a.on_exhausted is None else a.on_exhausted
    if on_exhausted not in ON_EXHAUSTED:
        raise ConfigError(f"on_exhausted={a.on_exhausted!r} must be one of {', '.join(map(repr, ON_EXHAUSTED))}")
    budget = _budget(a, env)
    lighthouse = a.lighthouse_addr or env.lighthouse
    if not lighthouse and rank == 0:
        raise ConfigError(
            "no lighthouse: pass lighthouse_addr='host:port' or set FT_LIGHTHOUSE; start one with `ft-lighthouse`"
        )
    if lighthouse:
        parse_address(lighthouse, "lighthouse_addr" if a.lighthouse_addr else "FT_LIGHTHOUSE")
    expected = a.expected_replicas if a.expected_replicas is not None else env.num_replica_groups or 0
    if expected and expected < min_replicas:
        raise ConfigError(
            f"min_replica_size={min_replicas} is more than the {expected} groups of the job (FT_NUM_REPLICA_GROUPS)"
        )
    name = a.replica_id or env.replica_id
    if not name:
        name = f"replica-{env.replica_group}" if env.replica_group is not None else f"replica-{secrets.token_hex(4)}"
    start_of_group = variables.get("FT_GROUP_ATTEMPT") or variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = _store_place(a, variables, world_size)
    towards = parse_address(lighthouse, "")[0] if lighthouse else store[0] if store else ""
    host = advertised_host(a.hostname or env.hostname, env.interface, towards)
    replica_id = f"{name}:{secrets.token_hex(4)}"
    return Config(
        step=StepSettings(
            replica_id=replica_id, group_rank=rank, group_world_size=world_size, min_replicas=min_replicas,
            mode=a.world_size_mode, autonomy_s=budget.autonomy_s, orphan_s=budget.orphan_s, max_retries=a.max_retries,
        ),
        budget=budget,
        name=name,
        replica_id=replica_id,
        rank=rank,
        world_size=world_size,
        store=store,
        lighthouse=lighthouse or "",
        host=host,
        bind="" if not is_loopback(host) else "::1" if ":" in host else "127.0.0.1",
        port=a.port if a.port is not None else env.manager_port or 0,
        token=a.token if a.token is not None else env.token,
        tls=_certificates(variables),
        expected=expected,
        init_sync=a.init_sync,
        parity_check_every=a.parity_check_every, parity_sample_steps=a.parity_sample_steps,
        quorum_retries=a.quorum_retries if a.quorum_retries is not None else env.quorum_retries or 0,
        incarnation_key=f"ft_core/{name if a.replica_id or env.replica_id else 'group'}/{start_of_group}",
        exit_on_drain=a.exit_on_drain,
        on_exhausted=on_exhausted,
        room=a.room_id,
        from_scratch=env.from_scratch if a.from_scratch is None else a.from_scratch,
    )  # fmt: skip


def _certificates(variables: Mapping[str, str]) -> Tls | None:
    """A replica serves: its group's ranks, and its state to newcomers."""
    tls = Tls.from_env(variables)
    return None if tls is None else tls.check_serves("its ranks and its state would travel")


def start(
    config: Config,
    pg: ProcessGroup,
    transport: CheckpointTransport[Any] | None,
    step: Step,
    hello: Callable[[], Hello],
) -> Parts:
    """Open the group's store, the heal server and the control link (the link's `start` is the caller's)."""
    store, store_address = _open_store(config)
    if config.world_size > 1:
        config = replace(config, incarnation_key=f"{config.incarnation_key}/{_nth(config)}")
        step.join_group(_shared_id(config, step.settings, store))
    lanes = Lanes(pg)
    lanes.set_timeout(WATCHED)
    session = Session(step, lanes, config.budget, hello)
    session.exits_on_drain = config.exit_on_drain
    mine = transport is None
    if transport is None:
        transport = HTTPTransport(
            timedelta(seconds=config.budget.heal_s), hostname=config.host, token=config.token or None,
            bind=config.bind, idle_s=config.budget.transfer_idle_s, tls=config.tls,
        )  # fmt: skip
    healing = Healing(transport, config.rank, config.budget.heal_s, step.settings.replica_id)
    try:
        session.control = _control(config, step.settings.replica_id, session, store)
    except BaseException:
        if mine:
            transport.shutdown()
        raise
    session.control_ports = _ports(config, session.control)
    return Parts(session, healing, store, store_address, secrets.randbits(62) | 1)


def hello(config: Config, step: Step, incarnation: int, heal_address: str, layout: tuple[str, ...]) -> Hello:
    """What this replica presents when its lease is opened."""
    quorum = step.quorum
    return Hello(
        replica_id=step.settings.replica_id, name=config.name, generation=0, incarnation=incarnation,
        version=step.version, stable=step.stable, highest_id=step.highest_id,
        quorum_id=quorum.quorum_id if quorum else 0, members=quorum.ids if quorum else (), layout=step.layout,
        layout_lines=layout if step.layout else (), expected=config.expected, min_replicas=config.step.min_replicas,
        group_world_size=config.world_size, join_s=config.budget.join_s, liveness_s=config.budget.liveness_s,
        orphan_s=config.budget.orphan_s, heal_addresses=(heal_address,),
    )  # fmt: skip


def ask_template(
    config: Config,
    heal_address: str,
    store_address: str,
    *,
    allow_heal: bool,
    shrink_only: bool,
    heals_first: bool,
    layout: tuple[str, ...],
) -> Ask:
    """The part of an ask that the step machine does not know."""
    return Ask(
        replica_id=config.replica_id, seq=0, heal_addresses=(heal_address,), store_address=store_address,
        init_sync=config.init_sync, allow_heal=allow_heal, shrink_only=shrink_only, heals_before_forward=heals_first,
        layout_lines=layout, from_scratch=config.from_scratch,
    )  # fmt: skip


def describe(
    config: Config, step: Step, backend: str, carriers: Sequence[Carrier], data: DataListener | None
) -> tuple[int, tuple[str, ...]]:
    """What has to be equal on all replicas, as one number and in lines: compared before a quorum is formed (R4).

    The settings among it decide who participates, what a sum is divided by, or which collectives run. All that else
    differs is either told to the others with each ask or fence (init_sync, use_async_quorum, on_exhausted, batch
    weights), or concerns this replica alone (timeouts, retries).
    """
    settings: dict[str, object] = {"world_size_mode": config.step.mode.name}
    if config.step.mode is WorldSizeMode.FIXED_WITH_SPARES:
        settings["min_replica_size"] = config.step.min_replicas  # so many participate; else it only bounds the quorum
    settings["parity_check_every"] = config.parity_check_every
    settings["parity_sample_steps"] = config.parity_sample_steps
    settings["pg"] = backend
    settings["require_all_contributions"] = step.whole_steps
    settings["number of models in DistributedDataParallel"] = len(carriers)
    told, divided = setting_lines(settings), () if data is None else (data.describe(),)
    parts = [*told, *(str(carrier.layout.digest) for carrier in carriers), *divided]
    models = (line for carrier in carriers for line in carrier.layout.describe())
    return fold_lineage(len(carriers), 0, 0, parts), (*told, *models, *divided)


def _budget(a: Arguments, env: Environment) -> TimeBudget:
    def seconds(value: timedelta | None, fallback: float | None, setting: str) -> float | None:
        if value is None:
            return fallback
        if not isinstance(value, timedelta):
            raise ConfigError(f"{setting}={value!r} must be a datetime.timedelta")
        return value.total_seconds()

    timeout_s = seconds(a.timeout, env.timeout_s, "timeout")
    overrides = dict(env.overrides)
    overrides.update(a.time_overrides or {})
    return TimeBudget.derive(
        DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s,
        quorum_s=seconds(a.quorum_timeout, env.quorum_s, "quorum_timeout"),
        connect_s=seconds(a.connect_timeout, env.connect_s, "connect_timeout"),
        overrides=overrides,
    )


def _store_place(a: Arguments, variables: Mapping[str, str], world_size: int) -> tuple[str, int] | None:
    address = a.store_addr or variables.get("MASTER_ADDR")
    port = a.store_port if a.store_port is not None else whole_number(variables, "MASTER_PORT", 0)
    if address and port:
        return address, port
    if world_size > 1:
        raise ConfigError(
            f"a group of world_size={world_size} needs its c10d store: pass store_addr and store_port, or set "
            "MASTER_ADDR and MASTER_PORT (torchrun does)"
        )
    return None


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


def _shared_id(config: Config, settings: StepSettings, store: Store) -> StepSettings:
    """All ranks of a group carry the replica_id that rank 0 drew."""
    key = f"{config.incarnation_key}/replica_id"
    if config.rank == 0:
        store.set(key, settings.replica_id)
        return settings
    _wait_for_rank_0(config, store, key)
    return replace(settings, replica_id=store.get(key).decode())


def _control(config: Config, replica_id: str, session: Session, store: Store) -> Control:
    settings = LeaseSettings(
        address=config.lighthouse,
        replica_id=replica_id,
        budget=config.budget,
        token=config.token,
        tls=config.tls,
        room=config.room,
    )
    if config.world_size == 1:
        return LocalControl(settings, session)
    key = f"{config.incarnation_key}/control"
    if config.rank == 0:
        leader = LeaderControl(
            settings, session, world_size=config.world_size, hostname=config.host, port=config.port,
            drains=config.exit_on_drain,
        )  # fmt: skip
        store.set(key, leader.address)
        return leader
    _wait_for_rank_0(config, store, key)
    address = LeaseSettings(
        address=store.get(key).decode(), replica_id=replica_id, budget=config.budget, token=config.token,
        tls=config.tls, setting="group rank 0's control address",
    )  # fmt: skip
    return RankControl(address, session, rank=config.rank, world_size=config.world_size)


def _ports(config: Config, control: Control) -> frozenset[int]:
    """Of the lighthouse, and of the leader of the group: the lease, and the streams between the group's ranks."""
    addresses = [config.lighthouse] if config.rank == 0 else []
    if isinstance(control, LeaderControl):
        addresses.append(control.address)
    elif isinstance(control, RankControl):
        addresses.append(control.settings.address)
    return frozenset(parse_address(address, "address")[1] for address in addresses)


def _wait_for_rank_0(config: Config, store: Store, key: str) -> None:
    try:
        store.wait([key], timedelta(seconds=config.budget.connect_s))
    except Exception as error:
        raise LighthouseError(
            f"group rank 0 of {config.name} did not announce itself in the c10d store at {config.store} within "
            f"connect_timeout={config.budget.connect_s:g} s: is rank 0 running, with the same MASTER_ADDR, MASTER_PORT "
            "and FT_REPLICA_ID?"
        ) from error
