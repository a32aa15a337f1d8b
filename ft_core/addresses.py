"""Where a server is: at one address, or at either of two, of which one stands by for the other. Pure.

How it works. `Addresses` is what FT_LIGHTHOUSE, `lighthouse_addr=` or `--lighthouse` say. `Turn` is the rule by which a
client goes through them: it stays with the one that took it until that one ends, then tries the next one, the whole
list once without a pause, and after each round in which nobody took it pauses for longer. "Cannot be reached" and "I
stand by" are alike to it. A connection that broke while the other side answered is opened there once more first: if
that one is active yet, the next one may be a machine that is gone, and each attempt there takes a second. With one
address that is: at once, and then with pauses.

Invariants: at most MAX_ADDRESSES, all different. A pause is at most what the caller says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ft_core.errors import ConfigError
from ft_core.settings import parse_address

MAX_ADDRESSES: Final = 2
"""Lighthouses of one job: one is active, the other stands by."""
STANDBY: Final = "standby: "
"""How the refusal of a server begins that stands by for another one (gRPC: UNAVAILABLE)."""


@dataclass(frozen=True)
class Addresses:
    """The addresses of one server, in the order in which they are tried."""

    all: tuple[str, ...]
    """Each host:port, or with a scheme, as it was given."""
    setting: str
    """What named them, for messages."""

    @staticmethod
    def parse(text: str, setting: str) -> Addresses:
        """Read 'host:port' or 'host:port,host:port', each as `settings.parse_address` takes it.

        Raises:
            ConfigError: names `setting`, its value and what to do.
        """
        where = f"{setting}={text!r}"
        given: object = text
        if not isinstance(given, str):
            raise ConfigError(
                f"{where} must be a string such as 'trainer0:29510', or 'host0:29510,host1:29510' for two"
            )
        parts = tuple(part.strip() for part in text.split(",")) if "," in text else (text,)
        if len(parts) > 1 and "" in parts:
            raise ConfigError(f"{where}: an address is missing before or after a comma; write host:port,host:port")
        if len(parts) > MAX_ADDRESSES:
            raise ConfigError(
                f"{where} names {len(parts)} lighthouses, and a job has at most {MAX_ADDRESSES}: one, and one that "
                "stands by; write host:port,host:port"
            )
        if len(parts) == 1:
            return Addresses.one(text, setting)
        places = {(host.lower(), port) for host, port in (parse_address(part, setting) for part in parts)}
        if len(places) < len(parts):
            raise ConfigError(f"{where} names one lighthouse twice: name each once, or write one host:port")
        return Addresses(parts, setting)

    @staticmethod
    def one(text: str, setting: str) -> Addresses:
        """Read the address of a server that no other one stands by for. Raises ConfigError."""
        parse_address(text, setting)
        return Addresses((text,), setting)

    def __str__(self) -> str:
        return ",".join(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each."""
        return tuple(parse_address(one, self.setting)[0] for one in self.all)

    @property
    def ports(self) -> frozenset[int]:
        """The TCP ports of all."""
        return frozenset(parse_address(one, self.setting)[1] for one in self.all)

    def named(self, address: str = "") -> str:
        """The setting and its value, for messages; where there are several, also which of them is meant."""
        which = f" ({address})" if address and len(self) > 1 else ""
        return f"{self.setting}={str(self)!r}{which}"

    def each(self, reasons: dict[str, str]) -> str:
        """What is known of each address, in one line: of the only one, or of those that something is known of."""
        if len(self) == 1:
            return reasons.get(self.all[0], "")
        return "; ".join(f"{one}: {reasons[one]}" for one in self.all if one in reasons)


def hosts_of(text: str, setting: str) -> tuple[str, ...]:
    """The hosts that `text` names; none if it is empty. Raises ConfigError."""
    return Addresses.parse(text, setting).hosts if text else ()


@dataclass(frozen=True)
class Turn:
    """Which address is tried now, and after what pause."""

    count: int
    """How many there are."""
    index: int = 0
    pause_s: float = 0.0
    """More than 0: a round has come to nothing, and this long nothing is tried."""
    failed: int = 0
    """Attempts of this round that came to nothing."""
    backoff_s: float = 0.0
    """The last pause."""

    def ended(self, *, steady: bool, first_s: float, most_s: float, stay: bool = False) -> Turn:
        """The turn after this one.

        Args:
            steady: it took us, and for a while: whatever failed before is forgotten.
            first_s: the pause after the first round that came to nothing; each further one is twice as long.
            most_s: the longest one.
            stay: begin with the same one: it ended what was asked of it and is there for more, or it answered until the
                connection broke.
        """
        index = self.index if stay else (self.index + 1) % self.count
        if steady:
            return Turn(self.count, index)
        failed = self.failed + 1
        if failed < self.count:
            return Turn(self.count, index, failed=failed, backoff_s=self.backoff_s)
        pause_s = min(max(first_s, 2 * self.backoff_s), most_s)
        return Turn(self.count, index, pause_s, backoff_s=pause_s)
