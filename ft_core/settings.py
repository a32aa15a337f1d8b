"""Every knob: its unit, default, rule and environment name; frozen dataclasses and nothing else.

`TimeBudget.derive(timeout_s)` turns the one number users set into all the others (DESIGN 3.8). Each can be
overridden by
name; an order that cannot work is a `ConfigError` naming the two values and the rule. `Environment` reads FT_* (and the
reference implementation's TORCHFT_* as fallbacks). An explicit argument beats the environment.

No clock, socket or thread; imported by everything, imports only `errors`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

PROTOCOL_VERSION = 2
MAX_REPLICAS = 1024
"""Members per quorum: a ballot's slots are below 2^14, so that the sum of 1024 of them is exact in float32 (2^24)."""
MAX_STEP = 1 << 48
"""No job makes so many steps (at one per microsecond it takes nine years): a larger number is a mistake."""
TRANSPORTS = ("auto", "http", "pg")
"""How state may move to replicas that heal (docs/state-transport.md)."""
STAGING_MB, STAGING_MB_MIN, STAGING_MB_MAX = 64, 8, 1 << 16
"""Pinned host memory that state passes through from and into device memory, per rank: default and bounds, in MiB."""
DEFAULT_ROOM = "default"
"""The quorum namespace of a job that names none."""
AUTO = "auto"
BACKENDS = (AUTO, "gloo", "nccl", "xccl", "baby-gloo", "baby-nccl")
"""What FT_BACKEND may be: which process group carries the gradients (`backends`)."""


@dataclass(frozen=True)
class TimeBudget:
    """All durations of one replica, in float seconds.

    `timeout_s` is the number users set: how long a collective may wait for a silent peer. The rest follows from it.
    """

    timeout_s: float
    liveness_s: float
    """Unanswered keepalives for this long end a lease: how soon a frozen or cut-off process is noticed."""
    grace_s: float
    """A closed lease that is not re-opened within this time is a death (a living client re-opens it in 50 ms)."""
    join_s: float
    """How long a living member that does not arrive at a new quorum is waited for."""
    connect_s: float
    quorum_s: float
    """How long start_quorum may wait for a quorum before it raises."""
    heal_s: float
    """How long receiving state may take in total before the receiver gives up and asks again."""
    transfer_idle_s: float
    """A donor that sends nothing for this long is dropped and its ranges go to another."""
    autonomy_s: float
    """How long members go on committing without any acknowledged lease (lighthouse down)."""
    orphan_s: float
    """After this long without a lease, a quorum that nobody ended is presumed dead (R1, R2)."""
    progress_s: float
    """How often the lease reports progress."""
    reconnect_s: float
    """Longest pause between two attempts to re-open a lease; at most a third of the lighthouse's boot window (R9)."""

    @staticmethod
    def derive(
        timeout_s: float,
        *,
        quorum_s: float | None = None,
        connect_s: float | None = None,
        overrides: Mapping[str, float] | None = None,
    ) -> TimeBudget:
        """Derive the whole budget from `timeout_s`; `overrides` replaces single fields by name.

        Raises:
            ConfigError: a value is not a positive number, a name is unknown, or an order cannot work.
        """
        if not _positive(timeout_s):
            raise ConfigError(f"timeout={timeout_s!r} s must be a positive number of seconds")
        liveness_s = min(3.0, timeout_s / 4)
        values: dict[str, float] = {
            "timeout_s": timeout_s,
            "liveness_s": liveness_s,
            "grace_s": min(0.1, timeout_s / 20),
            "join_s": min(10.0, timeout_s / 2),
            "connect_s": connect_s if connect_s is not None else timeout_s,
            "quorum_s": quorum_s if quorum_s is not None else timeout_s,
            "heal_s": timeout_s * 5,
            "transfer_idle_s": max(min(10.0, timeout_s / 2), 1.0),
            "autonomy_s": 600.0,
            "orphan_s": 900.0,
            "progress_s": 0.0,
            "reconnect_s": 0.15,
        }
        for name, value in (overrides or {}).items():
            if name not in values:
                near = difflib.get_close_matches(name, values, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown time setting {name!r}{hint} (known: {', '.join(sorted(values))})")
            values[name] = value
        if values["progress_s"] == 0.0:
            # A keepalive can only be what ended a lease if nothing was heard for a liveness timeout, so four reports
            # in that time let the lighthouse tell a closed connection from missed keepalives (membership.py).
            values["progress_s"] = min(1.0, max(0.05, values["liveness_s"] / 4))
        budget = TimeBudget(**values)
        budget.check()
        return budget

    def check(self) -> None:
        """Refuse values that cannot work together."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _positive(value) and not (field.name in ("autonomy_s", "orphan_s") and value == math.inf):
                raise ConfigError(f"{field.name}={value!r} must be a positive number of seconds")
        both_infinite = self.autonomy_s == math.inf and self.orphan_s == math.inf
        rules: list[tuple[bool, str, str, str]] = [
            (self.grace_s <= self.liveness_s, "grace_s", "liveness_s", "a closed lease must not outlive a frozen one"),
            (
                self.progress_s <= self.liveness_s / 2,
                "progress_s",
                "liveness_s",
                "progress must be reported twice within a liveness timeout, or a killed process looks frozen",
            ),
            (
                self.liveness_s <= self.timeout_s,
                "liveness_s",
                "timeout_s",
                "a frozen peer has to be noticed before the collective that waits for it times out",
            ),
            (
                both_infinite or self.autonomy_s < self.orphan_s,
                "autonomy_s",
                "orphan_s",
                "a cut-off quorum must stop committing before the lighthouse may start another beside it (R3); "
                "infinite only together",
            ),
        ]
        for holds, first, second, why in rules:
            if not holds:
                raise ConfigError(
                    f"{first}={getattr(self, first)} s and {second}={getattr(self, second)} s cannot work together: "
                    f"{why}"
                )


@dataclass(frozen=True)
class LighthouseSettings:
    """What a lighthouse is started with. Durations in seconds."""

    min_replicas: int = 1
    join_timeout_s: float = 0.1
    """How long to wait for replicas that hold a lease but are not in the current quorum and have not asked yet."""
    heartbeat_timeout_s: float = 5.0
    """How long after its last call a client of the unary calls (which has no lease) is taken to have left."""
    boot_window_s: float = 0.5
    """After a start, leases that were never seen are unknown rather than dropped for this long (R9)."""
    grace_s: float = 0.1
    token: str = dataclasses.field(default="", repr=False)
    admin_token: str = dataclasses.field(default="", repr=False)
    """For orders to drain and exit; '': `token` is enough."""
    one_job: bool = False
    """It serves a single job and ends with it: no goodbye makes place for another one (R21)."""

    def check(self) -> None:
        """Refuse values that cannot work, naming them."""
        if self.min_replicas < 1:
            raise ConfigError(f"min_replicas={self.min_replicas} must be at least 1")
        if self.min_replicas > MAX_REPLICAS:
            raise ConfigError(f"min_replicas={self.min_replicas}: a quorum holds at most {MAX_REPLICAS} groups")
        for name in ("join_timeout_s", "heartbeat_timeout_s", "boot_window_s", "grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value!r} must be a number of seconds, 0 or more")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


KNOWN_ENVIRONMENT = (
    "FT_LIGHTHOUSE", "FT_REPLICA_ID", "FT_REPLICA_GROUP", "FT_NUM_REPLICA_GROUPS", "FT_MIN_REPLICAS", "FT_TIMEOUT_S",
    "FT_MANAGER_PORT", "FT_HOSTNAME", "FT_INTERFACE", "FT_TOKEN", "FT_ADMIN_TOKEN", "FT_MADE_TOKEN", "FT_INSECURE",
    "FT_TLS_CERT", "FT_TLS_KEY", "FT_TLS_CA", "FT_WITNESS", "FT_LIVENESS_S", "FT_GRACE_S", "FT_JOIN_S", "FT_CONNECT_S",
    "FT_QUORUM_S", "FT_HEAL_S", "FT_TRANSFER_IDLE_S", "FT_AUTONOMY_S", "FT_ORPHAN_S", "FT_PROGRESS_S", "FT_RECONNECT_S",
    "FT_TRANSPORT", "FT_STAGING_MB", "FT_GROUP_ATTEMPT", "FT_PREDECESSORS", "FT_FROM_SCRATCH", "FT_LOG", "FT_EVENTS",
    "FT_METRICS", "FT_STARTED_AT", "FT_FENCE", "FT_BACKEND",
)  # fmt: skip
_OVERRIDES = {
    f"FT_{name.upper()}": name
    for name in (
        "liveness_s", "grace_s", "join_s", "heal_s", "transfer_idle_s", "autonomy_s", "orphan_s", "progress_s",
        "reconnect_s",
    )
}  # fmt: skip
_warned: set[str] = set()


@dataclass(frozen=True)
class Environment:
    """What the environment says; None or empty where it says nothing."""

    lighthouse: str | None
    replica_id: str | None
    replica_group: int | None
    num_replica_groups: int | None
    min_replicas: int | None
    timeout_s: float | None
    quorum_s: float | None
    connect_s: float | None
    quorum_retries: int | None
    manager_port: int | None
    hostname: str | None
    interface: str | None
    token: str = dataclasses.field(repr=False)
    made_token: bool
    """ftrun has made the token, for its own job."""
    from_scratch: bool
    """A job that has committed, and whose state is lost, may begin again at step 0 (R21)."""
    fence: str
    """Where ballots travel (`Manager(fence=...)`); '': not said."""
    transport: str | None
    """How state moves to replicas that heal: one of `TRANSPORTS`."""
    events: str
    """Folder of the job's event files; '': none are written."""
    metrics: str
    """HOST:PORT to serve metrics at; '': nowhere."""
    started_at: float | None
    """When ftrun started this process, or gave a standby process its work (seconds since 1970)."""
    backend: str
    """One of BACKENDS; '': nothing is said."""
    overrides: Mapping[str, float]

    @staticmethod
    def read(env: Mapping[str, str]) -> Environment:
        """Read FT_*, and where it is silent the reference implementation's (TORCHFT_*, REPLICA_GROUP_ID, ...).

        Warns once about an FT_ name nobody knows.

        Raises:
            ConfigError: a value is not of its type; the message names the variable and the value.
        """
        for name in env:
            if name.startswith("FT_") and name not in KNOWN_ENVIRONMENT and name not in _warned:
                _warned.add(name)
                near = difflib.get_close_matches(name, KNOWN_ENVIRONMENT, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                warnings.warn(f"environment variable {name} is not known to ft_core{hint}", stacklevel=3)

        def text(*names: str) -> tuple[str, str] | None:
            return next(((name, env[name]) for name in names if env.get(name)), None)

        def number(*names: str, whole: bool = False) -> float | None:
            found = text(*names)
            if found is None:
                return None
            try:
                return int(found[1]) if whole else float(found[1])
            except ValueError:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"{found[0]}={found[1]!r} is not {kind}") from None

        def whole(*names: str) -> int | None:
            value = number(*names, whole=True)
            return None if value is None else int(value)

        def string(*names: str) -> str | None:
            found = text(*names)
            return found[1] if found else None

        overrides = {field: value for name, field in _OVERRIDES.items() if (value := number(name)) is not None}
        return Environment(
            lighthouse=string("FT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"),
            replica_id=string("FT_REPLICA_ID"),
            replica_group=whole("FT_REPLICA_GROUP", "REPLICA_GROUP_ID"),
            num_replica_groups=whole("FT_NUM_REPLICA_GROUPS", "NUM_REPLICA_GROUPS"),
            min_replicas=whole("FT_MIN_REPLICAS"),
            timeout_s=number("FT_TIMEOUT_S", "TORCHFT_TIMEOUT_SEC"),
            quorum_s=number("FT_QUORUM_S", "TORCHFT_QUORUM_TIMEOUT_SEC"),
            connect_s=number("FT_CONNECT_S", "TORCHFT_CONNECT_TIMEOUT_SEC"),
            quorum_retries=whole("TORCHFT_QUORUM_RETRIES"),
            manager_port=whole("FT_MANAGER_PORT", "TORCHFT_MANAGER_PORT"),
            hostname=string("FT_HOSTNAME"),
            interface=string("FT_INTERFACE"),
            token=env.get("FT_TOKEN", ""),
            made_token=switch(env, "FT_MADE_TOKEN"),
            from_scratch=switch(env, "FT_FROM_SCRATCH"),
            fence=env.get("FT_FENCE", ""),
            transport=string("FT_TRANSPORT"),
            events=env.get("FT_EVENTS", ""),
            metrics=env.get("FT_METRICS", ""),
            started_at=number("FT_STARTED_AT"),
            backend=check_backend(env.get("FT_BACKEND", ""), "FT_BACKEND") if env.get("FT_BACKEND") else "",
            overrides=overrides,
        )


def check_backend(value: str, setting: str) -> str:
    """Itself. Raises ConfigError, which begins with `setting`, if no process group is called so."""
    if value not in BACKENDS:
        near = difflib.get_close_matches(value.lower(), BACKENDS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{setting}={value!r}: unknown; {hint}(known: {', '.join(BACKENDS)})")
    return value


def switch(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable says yes; not set: no. Raises ConfigError for anything but 1 and 0."""
    value = env.get(name, "").lower()
    if value not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"{name}={env[name]!r} must be 1 (yes) or 0 (no)")
    return value in ("1", "true")


def whole_number(variables: Mapping[str, str], name: str, default: int) -> int:
    """What a variable says, or the default. Raises ConfigError if it is none."""
    text = variables.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number") from None


def staging_bytes(variables: Mapping[str, str]) -> int:
    """How much pinned host memory a heal may use (FT_STAGING_MB). Raises ConfigError if that cannot work."""
    wanted = whole_number(variables, "FT_STAGING_MB", STAGING_MB)
    if not STAGING_MB_MIN <= wanted <= STAGING_MB_MAX:
        raise ConfigError(
            f"FT_STAGING_MB={wanted} must be between {STAGING_MB_MIN} and {STAGING_MB_MAX}: MiB of pinned host memory "
            "per rank, in buffers of 4"
        )
    return wanted << 20


def room_of_run(nth: int) -> str:
    """Of the nth training run (from 0) of one job: each has a room, as a finished one stays closed for latecomers."""
    return DEFAULT_ROOM if nth == 0 else f"{DEFAULT_ROOM}.{nth + 1}"


def run_of_room(room: str) -> int:
    """The `nth` of `room_of_run`; -1: another job's room."""
    name, _, number = room.partition(".")
    nth = int(number) - 1 if number.isdecimal() else 0
    return nth if name == DEFAULT_ROOM and room_of_run(nth) == room else -1


def parse_address(text: str, setting: str) -> tuple[str, int]:
    """Split 'host:port', 'http://host:port' or '[v6]:port'.

    Raises:
        ConfigError: the form is wrong; the message names `setting`, the value and the forms that work.
    """
    bare = text
    for scheme in ("http://", "https://", "grpc://", "grpcs://"):
        bare = bare.removeprefix(scheme)
    bare = bare.rstrip("/")
    host, separator, port = bare.rpartition(":")
    good = f"{setting}={text!r}: expected host:port or http://host:port, for example trainer0:29510"
    if not separator or not host or not port.isdecimal() or "/" in host:
        raise ConfigError(good)
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(good + " (IPv6 addresses in brackets: [::1]:29510)")
    if not 0 < int(port) < 65536:
        raise ConfigError(f"{setting}={text!r}: port {port} is not between 1 and 65535")
    return check_host(host.strip("[]"), f"{setting}={text!r}"), int(port)


def check_host(host: str, where: str) -> str:
    """Itself. Raises ConfigError, which begins with `where`, if nothing can have this name."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigError(
            f"{where}: {host[:80]!r} can be no host's name, whose parts between dots have 1 to 63 characters each"
        ) from None
    return host
