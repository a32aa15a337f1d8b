"""The replica groups that a room waits for before there is a quorum. Pure.

How it works. Replicas bring the number of groups that their job is configured with (FT_NUM_REPLICA_GROUPS). A group
that its supervisor gave up, or ended on purpose, comes no more: it is not waited for, until a process of its name
opens a lease all the same. How long the rest is waited for depends on `trained`: a lighthouse that has just started
may be one that forgot, and where somebody has shown trained state, the groups that are missing may hold more of it
(R9). In a job that nobody has trained yet there is nothing to lose.

Invariant: bounded by MAX_GIVEN_UP names, the oldest goes first.
Ownership: `room.Room` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import Note
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.types import Version

MAX_GIVEN_UP = MAX_REPLICAS


class ExpectedGroups:
    """Knowledge of one room about the groups that are not there."""

    def __init__(self) -> None:
        self.trained = False
        """Somebody has shown trained state, or that it was in a quorum, since this lighthouse started."""
        self._given_up: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"ExpectedGroups(trained={self.trained}, given up: {', '.join(self._given_up) or 'none'})"

    @property
    def given_up(self) -> Mapping[str, str]:
        """Names of the groups that come no more, and why."""
        return self._given_up

    def give_up(self, name: str, reason: str) -> list[Note]:
        """A supervisor reports that it does not start this group again. Returns the line for the log, if it is news."""
        known = name in self._given_up
        if not known and len(self._given_up) >= MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[name] = reason
        return [] if known else [Note(f"{name} is not started again, reports its supervisor: {reason}")]

    def hello(self, hello: Hello) -> None:
        """A lease was opened."""
        self._given_up.pop(hello.name, None)
        self.trained |= bool(hello.quorum_id or hello.highest_id)
        self.holds(hello.version)
        self.holds(hello.stable)

    def holds(self, version: Version) -> None:
        """A replica reported the state that it holds."""
        self.trained |= version.step > 0

    def number(self, hellos: Iterable[Hello]) -> int:
        """The number of groups that may come, as those who are not gone were configured; 0: unknown."""
        configured = max((hello.expected for hello in hellos), default=0)
        return max(0, configured - len(self._given_up))
