"""`Division`: by how many replica groups the training data is divided, equal on all members.

How it works. Groups that join with a higher number than there were are counted from the next epoch on, when all members
know them and do the same about it.

Threads: the training thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ft_core.loop.sampling import groups_needed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.manager import Manager

log = logging.getLogger("ft_core")


class Division:
    """The division of one job's data.

    Args:
        groups: replica groups of the complete job.
        divide: called with the number of groups by which the data is to be divided; False: it cannot be.
    """

    def __init__(self, groups: int, divide: Callable[[int], bool]) -> None:
        self.groups = groups
        """By how many the data is divided now."""
        self._divide = divide
        self.due = False
        """A quorum was opened, and no epoch has begun in it."""

    def __repr__(self) -> str:
        return f"Division(by {self.groups})"

    def divide(self, groups: int) -> None:
        """From the next epoch on, or for a newcomer from now on: everybody does, or lengths differ."""
        if groups != self.groups and self._divide(groups):
            log.info("the training data is divided among %d replica groups, not %d any more", groups, self.groups)
            self.groups = groups

    def epoch_begins(self, manager: Manager | None) -> None:
        """Count the groups of the quorum that was opened; without one (None) nothing is known."""
        if manager is not None and self.due:
            self.due = False
            self.divide(groups_needed(self.groups, manager.members))
