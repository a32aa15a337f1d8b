"""Announced pauses, and what they do to a wait that has a limit. Pure: the time is an argument.

How it works. A replica that saves, validates or compiles announces for how long at most (`Manager.pause`). Whoever
waits for it meanwhile, in a collective, in the vote of its group or for the next quorum, waits for nobody that has
failed. So there is one rule for all three: the limit of a wait counts from the end of the last pause that it overlaps.
A pause that ends early gives the limit back: a wait looks again at least once per limit.

Invariants: of a pause only the newest announcement counts; at most MAX_PAUSES are known.
Ownership: whoever has one calls it under a lock of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_PAUSES = 2 * MAX_REPLICAS
"""Pauses known at a time: members of a quorum, and what this process itself does."""


PAUSE_SLACK_S = 1.0
"""A pause whose end is announced at another time by more than this is another pause; the rest is the messages' way."""


def differs(until: float, before: float) -> bool:
    """The end of a pause is news (0: there is none). A longer pause may be opened within another, or end before it."""
    return (until > 0) != (before > 0) or abs(until - before) > PAUSE_SLACK_S


class Pauses:
    """The pauses that a rank knows of. Times are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._ended_at = -math.inf

    def __repr__(self) -> str:
        return f"Pauses({', '.join(sorted(self._until)) or 'none'})"

    def announce(self, who: str, for_s: float, now: float) -> None:
        """`who` is busy for at most `for_s` from now; 0: it is back."""
        before = self._until.pop(who, None)
        if for_s > 0:
            while len(self._until) >= MAX_PAUSES:
                del self._until[min(self._until, key=self._until.__getitem__)]
            self._until[who] = now + for_s
        elif before is not None:
            self._ended_at = max(self._ended_at, min(before, now))

    def forget(self) -> None:
        """What was announced belongs to a quorum that is over."""
        self._until.clear()

    def open(self, now: float) -> dict[str, float]:
        """Who is busy, and for how long at most."""
        return {who: until - now for who, until in self._until.items() if until > now}

    def look_again(self, since: float, limit_s: float, now: float) -> float | None:
        """When to look again at a wait since `since` that may last `limit_s`; None: it has lasted too long."""
        for who in [who for who, until in self._until.items() if until <= now]:
            self._ended_at = max(self._ended_at, self._until.pop(who))
        if self._until:
            return min(max(self._until.values()), now + limit_s)
        at = max(since, self._ended_at) + limit_s
        return at if at > now else None


class Wait:
    """One wait with a limit; `at` is when to look again if nothing happens before."""

    def __init__(self, pauses: Pauses, limit_s: float, now: float) -> None:
        self.at = now + limit_s
        self._pauses, self._limit_s, self._since = pauses, limit_s, now

    def __repr__(self) -> str:
        return f"Wait(of {self._limit_s:g} s since {self._since:g}, {self._pauses!r})"

    def over(self, now: float) -> bool:
        """It has lasted for too long."""
        if now < self.at:
            return False
        later = self._pauses.look_again(self._since, self._limit_s, now)
        if later is not None:
            self.at = later
        return later is None


class GroupPauses:
    """The pauses of a group's own ranks, of which the latest end is the group's."""

    def __init__(self, world_size: int) -> None:
        self._until = [0.0] * world_size
        self._told = 0.0

    def __repr__(self) -> str:
        return f"GroupPauses({[rank for rank, until in enumerate(self._until) if until] or 'none'})"

    def set(self, rank: int, until: float) -> bool:
        """A rank is busy until then; 0: it is not. True if that is news."""
        before, self._until[rank] = self._until[rank], until
        return differs(until, before)

    def left_s(self, ranks: Iterable[int], now: float) -> float:
        """How long the last of these ranks may still be busy."""
        return max(0.0, max((self._until[rank] for rank in ranks), default=0.0) - now)

    def news(self, now: float) -> float | None:
        """For how long at most the group is busy, if its ranks have not been told so; None: they have been."""
        until = max(self._until)
        until = until if until > now else 0.0
        if not differs(until, self._told):
            return None
        self._told = until
        return max(0.0, until - now)

    def new_quorum(self) -> None:
        """What the ranks were told belongs to a quorum that is over."""
        self._told = 0.0
