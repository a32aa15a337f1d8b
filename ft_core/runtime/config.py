"""What a Manager runs with: arguments + environment + defaults -> `Config`. Pure.

`resolve` merges explicit arguments (they win), FT_* and TORCHFT_* variables and defaults, and refuses what cannot work.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from ft_core.access import Tokens, check_listener, insecure
from ft_core.addresses import Addresses, hosts_of
from ft_core.certificates import Tls
from ft_core.errors import ConfigError
from ft_core.metrics.admission import Admission
from ft_core.metrics.server import checked_address
from ft_core.network import advertised_host, is_loopback
from ft_core.protocol.rank.settings import RankSettings
from ft_core.rpc.channel import check_schemes
from ft_core.runtime import notices
from ft_core.settings import MAX_REPLICAS, TRANSPORTS, Environment, TimeBudget, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.rank.heal_plan import WorldSizeMode

ON_EXHAUSTED = ("shadow", "leave", "stop_all")
FENCES = ("bucket", "cpu")
"""Where the ballots travel: on the last bucket of the one model, or in a sum of their own over the CPU's group."""
DEFAULT_TIMEOUT_S = 60.0


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
    token: str | None = field(repr=False)
    exit_on_drain: bool
    on_exhausted: str | None
    room_id: str
    from_scratch: bool | None = None
    use_async_quorum: bool = True
    warm_up: bool = True
    fence: str | None = None
    transport: str | None = None
    own_transport: str = ""
    """Kind of the transport that the caller passed; '': none."""


@dataclass(frozen=True)
class Config:
    """What a Manager runs with, resolved and checked."""

    rank_settings: RankSettings
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
    token: str = field(repr=False)
    tls: Tls | None
    expected: int
    init_sync: bool
    parity_check_every: int
    parity_sample_steps: int
    quorum_retries: int
    incarnation_key: str
    """Of this start of the group, in its c10d store: its ranks must not find their predecessors."""
    on_exhausted: str
    fence: str
    """One of FENCES."""
    room: str
    from_scratch: bool
    use_async_quorum: bool
    warm_up: bool
    transport: str
    """"http", "pg", or the kind of the caller's own."""
    events: str
    """Folder of the job's event files; '': none are written."""
    metrics: str
    """HOST:PORT to serve metrics at; '': nowhere."""
    admission: Admission
    """Who may read them there."""
    started_at: float | None
    """When ftrun started this process (seconds since 1970)."""


def resolve(arguments: Arguments, variables: Mapping[str, str]) -> Config:
    """Merge arguments, environment and defaults. Raises ConfigError naming the setting, the value and what to do."""
    env = Environment.read(variables)
    notices.configure(variables)
    a = arguments
    rank, world_size = _place_in_group(a, variables)
    min_replicas = a.min_replica_size if a.min_replica_size is not None else env.min_replicas
    min_replicas = 1 if min_replicas is None else min_replicas
    if not 1 <= min_replicas <= MAX_REPLICAS:
        raise ConfigError(f"min_replica_size={min_replicas} must be between 1 and {MAX_REPLICAS}")
    _check_counts(a)
    on_exhausted = ON_EXHAUSTED[0] if a.on_exhausted is None else a.on_exhausted
    if on_exhausted not in ON_EXHAUSTED:
        raise ConfigError(f"on_exhausted={a.on_exhausted!r} must be one of {', '.join(map(repr, ON_EXHAUSTED))}")
    budget = _budget(a, env)
    lighthouse = _lighthouse(a, env, rank, variables)
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
    towards = hosts_of(lighthouse, "lighthouse_addr") or ((store[0],) if store else ())
    host = advertised_host(a.hostname or env.hostname, env.interface, *towards)
    token, tls = a.token if a.token is not None else env.token, _certificates(variables)
    _check_doors(host, token, tls, variables)
    admission = _admission(env, "" if a.token is None and env.made_token else token, tls, variables)
    replica_id = f"{name}:{secrets.token_hex(4)}"
    return Config(
        rank_settings=RankSettings(
            replica_id=replica_id, group_rank=rank, group_world_size=world_size, min_replicas=min_replicas,
            mode=a.world_size_mode, timeout_s=budget.timeout_s, autonomy_s=budget.autonomy_s, orphan_s=budget.orphan_s,
            max_retries=a.max_retries, exits_on_drain=a.exit_on_drain,
        ),
        budget=budget,
        name=name,
        replica_id=replica_id,
        rank=rank,
        world_size=world_size,
        store=store,
        lighthouse=lighthouse,
        host=host,
        bind="" if not is_loopback(host) else "::1" if ":" in host else "127.0.0.1",
        port=a.port if a.port is not None else env.manager_port or 0,
        token=token,
        tls=tls,
        expected=expected,
        init_sync=a.init_sync,
        parity_check_every=a.parity_check_every, parity_sample_steps=a.parity_sample_steps,
        quorum_retries=a.quorum_retries if a.quorum_retries is not None else env.quorum_retries or 0,
        incarnation_key=f"ft_core/{name if a.replica_id or env.replica_id else 'group'}/{start_of_group}",
        on_exhausted=on_exhausted, fence=_fence(a, env),
        room=a.room_id, from_scratch=env.from_scratch if a.from_scratch is None else a.from_scratch,
        use_async_quorum=a.use_async_quorum, warm_up=a.warm_up, transport=_transport(a, env, tls),
        events=env.events,
        metrics=env.metrics, admission=admission, started_at=env.started_at,
    )  # fmt: skip


def _fence(a: Arguments, env: Environment) -> str:
    """Where the ballots travel."""
    fence, setting = (a.fence, "fence") if a.fence is not None else (env.fence or FENCES[0], "FT_FENCE")
    if fence not in FENCES:
        choices = ", ".join(map(repr, FENCES))
        raise ConfigError(f"{setting}={fence!r} must be one of {choices}, on all replicas the same")
    return fence


def _place_in_group(a: Arguments, variables: Mapping[str, str]) -> tuple[int, int]:
    """Group rank, and how many ranks the group has."""
    rank = a.rank if a.rank is not None else whole_number(variables, "RANK", 0)
    world_size = a.world_size if a.world_size is not None else whole_number(variables, "WORLD_SIZE", 1)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} and world_size={world_size}: need 0 <= rank < world_size (inside the group)")
    return rank, world_size


def _lighthouse(a: Arguments, env: Environment, rank: int, variables: Mapping[str, str]) -> str:
    """Its address, or both of two, which only rank 0 needs; empty: none was named."""
    lighthouse = a.lighthouse_addr or env.lighthouse or ""
    if not lighthouse and rank == 0:
        raise ConfigError(
            "no lighthouse: pass lighthouse_addr='host:port' or set FT_LIGHTHOUSE; start one with `ft-lighthouse`"
        )
    if lighthouse:
        setting = "lighthouse_addr" if a.lighthouse_addr else "FT_LIGHTHOUSE"
        check_schemes(Addresses.parse(lighthouse, setting), Tls.from_env(variables))
    return lighthouse


def _check_counts(a: Arguments) -> None:
    for setting, value in (("max_retries", a.max_retries), ("quorum_retries", a.quorum_retries)):
        if value is not None and value < 0:
            raise ConfigError(f"{setting}={value} must be 0 or more")
    for setting, value in (
        ("parity_check_every", a.parity_check_every), ("parity_sample_steps", a.parity_sample_steps),
    ):  # fmt: skip
        if value < 0:
            raise ConfigError(f"{setting}={value} must be 0 (never) or a number of commits")


def _transport(a: Arguments, env: Environment, tls: Tls | None) -> str:
    """How state moves. HTTP where nothing else is said: docs/state-transport.md has the figures."""
    if a.own_transport:
        if a.transport is not None:
            raise ConfigError(f"transport={a.transport!r} and checkpoint_transport: give one of them, not both")
        return a.own_transport
    setting, wanted = ("transport", a.transport) if a.transport is not None else ("FT_TRANSPORT", env.transport)
    if wanted is not None and wanted not in TRANSPORTS:
        raise ConfigError(f"{setting}={wanted!r} must be one of {', '.join(map(repr, TRANSPORTS))}")
    if wanted == "pg" and tls is not None:
        raise ConfigError(
            f"{setting}='pg' sends state over a process group, which encrypts nothing, and certificates are set "
            "(FT_TLS_*): use 'http', or unset them"
        )
    return "pg" if wanted == "pg" else "http"


def _certificates(variables: Mapping[str, str]) -> Tls | None:
    """A replica serves: its group's ranks, and its state to newcomers."""
    tls = Tls.from_env(variables)
    return None if tls is None else tls.check_serves("its ranks and its state would travel")


def _check_doors(host: str, token: str, tls: Tls | None, variables: Mapping[str, str]) -> None:
    """Refuse to serve ranks and state to anybody who comes."""
    check_listener(
        f"other machines reach this replica at {host!r} (FT_HOSTNAME), where it listens", host, token, tls,
        "whoever does may read the model, or take the place of a rank", insecure(variables),
    )  # fmt: skip


def _admission(env: Environment, token: str, tls: Tls | None, variables: Mapping[str, str]) -> Admission:
    """Who may read the metrics. Raises ConfigError: their address is none, or anybody could."""
    admission = Admission(Tokens(token), tls, insecure(variables))
    if env.metrics:
        checked_address(env.metrics, "FT_METRICS", admission)
    return admission


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
