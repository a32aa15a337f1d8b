"""What is known of a host: plain values that travel as JSON from each host to the others. Pure.

Invariants: no secret is among them (a token is told apart by a digest that is salted for one meeting); every text is
bounded; what cannot be found out is empty, and its `error` says why.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
TEXT_MAX = 500
"""Characters of a text; longer ones are cut."""
INDEX_DIGITS = 6


def number_of(found: Any) -> float:
    """A finite number that another host sent; 0.0: it is none."""
    good = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if good else 0.0


def index_of(found: Any) -> int:
    """A host's index, that JSON may have made a text; -1: it is none."""
    text = str(found)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < INDEX_DIGITS else -1


@dataclass
class TlsFacts:
    """The job's certificates on this host."""

    configured: bool = False
    error: str = ""
    """Why they cannot be used, and what to do."""
    covers: str = ""
    """Why the certificate does not hold for the address that is advertised; '': it does."""
    days_left: float = 0.0
    soon: bool = False
    """That is little of its time."""
    trusts: str = ""
    """Digest of what signs the others' certificates."""
    mutual: bool = False
    """Servers ask their clients for a certificate, too."""


@dataclass
class LighthouseFacts:
    """What answers where the lighthouse should be."""

    address: str = ""
    """'': none is named."""
    error: str = ""
    """Why the address is none."""
    resolves: list[str] = field(default_factory=list)
    connect: str = ""
    """Why no connection comes about; '': one does."""
    greeting: str = ""
    """The first bytes that are sent there, as Latin-1."""
    tls: bool = False
    """It answers a TLS handshake."""
    call: str = ""
    """Why a question to it fails; '': it was answered."""
    stands_by: bool = False
    """It answers that it stands by for another one."""
    release: str = ""
    round_trip_s: float = 0.0
    closed: str = ""
    """Why its room takes nobody any more."""
    members: int = 0
    """Of the job that runs there."""


@dataclass
class Gpu:
    """One accelerator."""

    name: str = ""
    memory_mb: int = 0
    used_mb: int = 0


@dataclass
class GpuFacts:
    """Accelerators, and what drives them."""

    devices: list[Gpu] = field(default_factory=list)
    driver: str = ""
    torch_devices: int = 0
    """As many as torch can use."""
    cuda: str = ""
    """Of torch's build; '': it has none."""
    nccl: str = ""
    error: str = ""


@dataclass
class Interface:
    """One network interface with an IPv4 address."""

    name: str = ""
    address: str = ""
    mtu: int = 0
    speed_mbit: int = 0
    """What it says of itself; 0: nothing (virtual ones often do not)."""
    hardware: bool = False
    """It is a card, or several that are bonded; virtual ones state speeds that mean nothing."""


@dataclass
class StorageFacts:
    """One shared path."""

    path: str = ""
    error: str = ""
    """Why nothing can be written there, or why that goes wrong."""
    free_mb: int = 0


@dataclass
class HostFacts:
    """One host, or one group of several on a host."""

    name: str = ""
    """How it is called in findings."""
    machine: str = ""
    """Equal for what runs on the same machine."""
    settings: dict[str, str] = field(default_factory=dict)
    """FT_ variables (no secrets), and others that change what the job does."""
    unknown: dict[str, str] = field(default_factory=dict)
    """FT_ variables that nobody knows, and what may have been meant."""
    errors: list[str] = field(default_factory=list)
    """Settings that cannot work."""
    token: str = ""
    """"set", or towards the others a digest (`host.token_digest`); "": there is none."""
    open_door: str = ""
    """Why the job would not listen for others here: nobody would be asked who they are."""
    address: str = ""
    """What others connect to; '': there is none."""
    address_from: str = ""
    """Why that one."""
    address_here: bool = True
    """This machine has it."""
    interfaces: list[Interface] = field(default_factory=list)
    """All but the loopback one."""
    host_name: str = ""
    host_resolves: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    cores: int = 0
    files_soft: int = 0
    shm_total_mb: int = -1
    """-1: there is none."""
    shm_free_mb: int = -1
    events_error: str = ""
    metrics_error: str = ""
    """Why FT_METRICS cannot be listened on."""
    tls: TlsFacts = field(default_factory=TlsFacts)
    lighthouse: LighthouseFacts = field(default_factory=LighthouseFacts)
    other_lighthouse: LighthouseFacts = field(default_factory=LighthouseFacts)
    """Of two, the second that is named."""
    gpus: GpuFacts = field(default_factory=GpuFacts)
    storage: StorageFacts = field(default_factory=StorageFacts)
    ports: list[int] = field(default_factory=list)
    """Where this ft-doctor listens for the others."""

    def interface(self, address: str = "") -> Interface:
        """The one that has an address (that which is advertised); without a name: it is not known."""
        return next((one for one in self.interfaces if one.address == (address or self.address)), Interface())

    @property
    def lighthouses(self) -> list[LighthouseFacts]:
        """Those that are named: none, one or two."""
        return [one for one in (self.lighthouse, self.other_lighthouse) if one.address]

    @property
    def lighthouse_addresses(self) -> str:
        """As they are named; '': none is."""
        return ",".join(one.address for one in self.lighthouses)

    def number(self, variable: str) -> int | None:
        """A whole number out of the settings; None: it is not set, or none."""
        text = self.settings.get(variable, "")
        return int(text) if text.lstrip("-").isdecimal() else None


@dataclass
class Probe:
    """What became of one connection."""

    error: str = ""
    """'': it reached the host that it was to reach."""
    seconds: float = 0.0
    local: str = ""
    """The address of this side."""

    @staticmethod
    def from_json(found: Any) -> Probe:
        """What another host sent."""
        if not isinstance(found, dict):
            return Probe("nothing was reported")
        error, local = (str(found.get(name, ""))[:TEXT_MAX] for name in ("error", "local"))
        return Probe(error, number_of(found.get("seconds")), local)


@dataclass
class Seen:
    """What one host saw of the others' files."""

    missing: list[int] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    """Files that were found half written, or not for a moment."""
    late_s: float = 0.0
    error: str = ""

    @staticmethod
    def from_json(found: Any) -> Seen:
        """What another host sent."""
        if not isinstance(found, dict):
            return Seen(error="nothing was reported")
        missing, torn = (found.get(name) for name in ("missing", "torn"))
        return Seen(
            [one for one in missing if isinstance(one, int)] if isinstance(missing, list) else [],
            [one for one in torn if isinstance(one, int)] if isinstance(torn, list) else [],
            number_of(found.get("late_s")),
            str(found.get("error", ""))[:TEXT_MAX],
        )


PARTS_MAX = 256
"""GPUs, or interfaces, of a host."""
PARTS: dict[str, type] = {
    "tls": TlsFacts, "lighthouse": LighthouseFacts, "other_lighthouse": LighthouseFacts, "gpus": GpuFacts,
    "storage": StorageFacts,
}  # fmt: skip


def as_json(facts: HostFacts) -> dict[str, Any]:
    """For the others."""
    return dataclasses.asdict(facts)


def from_json(found: Any) -> HostFacts:
    """What another host sent. Fields that are not known, or of another type, are left out."""
    facts = _fill(HostFacts(), found)
    for name, part in PARTS.items():
        setattr(facts, name, _fill(part(), found.get(name) if isinstance(found, dict) else None))
    gpus = found.get("gpus") if isinstance(found, dict) else None
    facts.gpus.devices = _each(Gpu, gpus, "devices")
    facts.interfaces = _each(Interface, found, "interfaces")
    return facts


def _each(kind: type[T], found: Any, name: str) -> list[T]:
    listed = found.get(name) if isinstance(found, dict) else None
    return [_fill(kind(), one) for one in listed[:PARTS_MAX]] if isinstance(listed, list) else []


def _fill(into: T, found: Any) -> T:
    if not isinstance(found, dict):
        return into
    for one in dataclasses.fields(into):  # type: ignore[arg-type]
        value, known = found.get(one.name), getattr(into, one.name)
        if isinstance(known, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not type(known) or dataclasses.is_dataclass(known):
            continue
        if isinstance(value, str):
            value = value[:TEXT_MAX]
        elif isinstance(value, dict):
            value = {str(key)[:TEXT_MAX]: str(text)[:TEXT_MAX] for key, text in value.items()}
        elif isinstance(value, list):
            kind = int if one.name == "ports" else str
            value = [entry for entry in value if type(entry) is kind]
        setattr(into, one.name, value)
    return into
