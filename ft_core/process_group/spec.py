"""`Spec`: what one incarnation of a group is formed from, whatever its kind. Pure; str() names it in messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ft_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What one incarnation is formed from."""

    what: str
    """The library, for messages."""
    store_addr: str
    replica_id: str
    rank: int
    world_size: int
    timeout: timedelta
    """Of forming, and of each collective."""

    def __str__(self) -> str:
        return f"the {self.what} group of {self.replica_id!r} ({self.place}, {self.store_addr})"

    @property
    def place(self) -> str:
        """Its rank, in words."""
        return f"rank {self.rank} of {self.world_size}"

    @property
    def timeout_s(self) -> float:
        """The timeout in seconds."""
        return self.timeout.total_seconds()

    def check(self) -> None:
        """Raise ConfigError for a rank that its group does not have."""
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank}, world_size={self.world_size}: expected 0 <= rank < world_size")
