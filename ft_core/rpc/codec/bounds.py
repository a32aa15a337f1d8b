"""Bounds of what travels, and how a broken one is told. Shared by the other modules of `codec`.

A value of our own that breaks a bound is the caller's mistake (`ConfigError`); one that arrived is a `ProtocolError`.
Text that only people read is cut to its bound instead. Protocol versions are compared before anything else is looked
at.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError, Message

from ft_core._pb import coordination_pb2 as pb
from ft_core.errors import ConfigError, ProtocolError
from ft_core.protocol.types import Version
from ft_core.settings import MAX_STEP, PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_NAME = 256
"""Characters of a replica_id, name, room or phase."""
MAX_ADDRESS = 1024
MAX_TEXT = 2000
"""Characters of a reason; longer ones are cut."""
MAX_UNBUILT = 500
"""Characters of why a process group could not be built; longer ones are cut."""
MAX_DATA = 16 * 1024
MAX_ADDRESSES_BYTES = 160 << 10
"""All heal addresses of one group: so many groups' parts as a quorum holds fit into one push, whoever asks."""
MAX_RANKS = 4096
"""Ranks per group."""
MAX_SIGNATURE_LINES = 20_000
MAX_SIGNATURE_BYTES = 2 << 20
"""Signature lines past this are left out: they only serve to name the first difference, the hash decides."""
MAX_DURATION_MS = 10**12
NEVER_MS = 2**63 - 1
MAX_REQUEST_BYTES = 4 << 20
MAX_PUSH_BYTES = 256 << 20
"""gRPC's message limits: a Hello with its signature; a quorum of MAX_REPLICAS groups of many ranks."""

Msg = TypeVar("Msg", bound=Message)


def check_version(theirs: int, release: str, *, they_are: str, we_are: str) -> None:
    """Compare protocol versions.

    Raises:
        ProtocolError: they differ; the message names both and says which side to upgrade.
    """
    if theirs == PROTOCOL_VERSION:
        return
    older = they_are if theirs < PROTOCOL_VERSION else we_are
    made_by = f" (ft-training {release[:40]})" if release else ""
    raise ProtocolError(
        f"{they_are} speaks protocol version {theirs}{made_by}, {we_are} speaks version {PROTOCOL_VERSION}: "
        f"upgrade ft-training on {older}"
    )


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Cut text for people to `limit` characters, and make it encodable."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextlib.contextmanager
def sending(what: str) -> Iterator[None]:
    """Protobuf's own complaints about our values (a number out of range, a lone surrogate) become ConfigErrors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what} cannot be sent: {error}") from None


def parse(kind: type[Msg], data: bytes) -> Msg:
    """Parse protobuf. Raises ProtocolError if the bytes are something else."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise ProtocolError(
            f"{len(data)} bytes arrived that are not a {kind.DESCRIPTOR.name}: something else than ft-training "
            "of this protocol version talks to this port"
        ) from None
    return message


class Check:
    """Bounds on one message; `error` says whose fault a violation is."""

    def __init__(self, error: type[Exception], what: str) -> None:
        self._error, self._what = error, what

    def fail(self, field: str, why: str) -> None:
        """Raise the error, naming the field."""
        raise self._error(f"{self._what}.{field} {why}")

    def text(self, field: str, value: str, limit: int = MAX_NAME, *, needed: bool = False) -> None:
        """A text of at most `limit` characters."""
        if len(value) > limit:
            self.fail(field, f"has {len(value)} characters; at most {limit} are allowed")
        if needed and not value:
            self.fail(field, "is empty")

    def texts(self, field: str, values: Sequence[str], count: int, limit: int = MAX_NAME) -> None:
        """At most `count` such texts."""
        if len(values) > count:
            self.fail(field, f"has {len(values)} entries; at most {count} are allowed")
        for value in values:
            self.text(field, value, limit)

    def size(self, field: str, values: Sequence[str], limit: int) -> None:
        """At most `limit` bytes in all."""
        total = sum(len(value.encode()) for value in values)
        if total > limit:
            self.fail(field, f"has {total} bytes in all; at most {limit} are allowed")

    def number(self, field: str, value: int, low: int, high: int) -> None:
        """A number between `low` and `high`, both included."""
        if not low <= value <= high:
            self.fail(field, f"is {value}; it must be between {low} and {high}")


INT64 = 2**63 - 1


def read_version(message: pb.Version, check: Check, field: str) -> Version:
    """A version, checked."""
    check.number(f"{field}.step", message.step, -1, MAX_STEP)
    check.number(f"{field}.quorum_id", message.quorum_id, -1, INT64)
    return Version(message.step, message.quorum_id)


def pb_version(version: Version) -> pb.Version:
    """A version, as it travels."""
    return pb.Version(step=version.step, quorum_id=version.quorum_id)


def to_ms(seconds: float) -> int:
    """Seconds, as they travel; infinity is NEVER_MS."""
    return NEVER_MS if seconds == math.inf else max(0, round(seconds * 1000))


def from_ms(ms: int, check: Check, field: str) -> float:
    """Seconds, checked."""
    if ms == NEVER_MS:
        return math.inf
    check.number(field, ms, 0, MAX_DURATION_MS)
    return ms / 1000
