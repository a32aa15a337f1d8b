"""How often attempts of this rank were not committed, and when it must stop trying (max_retries, R11). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.protocol.rank.settings import gives_up


@dataclass(slots=True)
class Retries:
    """Attempts in a row."""

    own_failures: int = 0
    """Of those that this rank itself made fail."""
    vetoes: int = 0
    """Of all that were not committed in this quorum."""

    def failed(self) -> None:
        """An attempt failed because of this rank, or with its quorum."""
        self.own_failures += 1

    def reset(self) -> None:
        """A step was made."""
        self.own_failures = self.vetoes = 0

    def skipped(self, *, own: bool, current: bool) -> None:
        """Nothing was committed. A member's own failures count first; one that is behind keeps its failed heals."""
        self.vetoes += 1
        if own:
            self.own_failures += 1
        elif current:
            self.own_failures = 0

    def gave_up(self, max_retries: int | None) -> str:
        """Why this member must stop, or ''."""
        return gives_up(self.own_failures, self.vetoes, max_retries)
