"""Who takes part in the open attempt, as the script is told it.

Whoever asks may divide data by the answer, so each question that waits pins the attempt to its quorum (R19).

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.rank.rank import Rank


class Participation:
    """Questions about members and participants.

    Args:
        rank: the machine.
        wait: blocks until the attempt's process groups are usable, at once in a warm-up; raises what kept them from it.
        pinned: the machine, its attempt pinned to the quorum it is in.
    """

    def __init__(self, rank: Rank, wait: Callable[[], None], pinned: Callable[[], Rank]) -> None:
        self._rank, self._wait, self._pinned = rank, wait, pinned

    def __repr__(self) -> str:
        return f"Participation({self._rank!r})"

    @property
    def step(self) -> int:
        """As `Manager.current_step`."""
        rank = self._rank
        return max(0, rank.held.version.step if rank.plan is None else rank.attempt.base.step)

    def count(self) -> int:
        """As `Manager.num_participants`."""
        self._wait()
        return len(self._rank.attempt.participants) if self._rank.plan is not None else 1

    def place(self) -> int | None:
        """As `Manager.participating_rank`."""
        self._wait()
        plan, participants = self._rank.plan, self._rank.attempt.participants
        return participants.index(plan.replica_rank) if plan and plan.replica_rank in participants else None

    def here(self) -> bool:
        """As `Manager.is_participating`."""
        self._wait()
        return self._rank.attempt.participating

    @property
    def quorum_id(self) -> int:
        """As `Manager.quorum_id`."""
        return self._pinned().quorum_id

    @property
    def members(self) -> tuple[str, ...]:
        """As `Manager.members`."""
        quorum = self._pinned().quorum
        return () if quorum is None else quorum.ids

    @property
    def healing(self) -> tuple[str, ...]:
        """As `Manager.healing_members`."""
        plan = self._pinned().plan
        return () if plan is None else tuple(plan.quorum.ids[rank] for rank in plan.healing)
