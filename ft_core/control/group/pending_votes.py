"""Where the threads of a rank wait for their group's verdicts.

What is known of them is `protocol.group.votes.Verdicts`; here is the lock around it, and the waiting. Thread safe.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ft_core.protocol.group.votes import Verdicts
from ft_core.protocol.pauses import Wait
from ft_core.protocol.types import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.pushes import Push


class Waiting:
    """Votes that threads of this process wait for: keyed like Votes.

    Args:
        replica_id: of the group.
        grace_s: how long the leader may take to answer a vote that is taken back.
    """

    def __init__(self, replica_id: str, grace_s: float) -> None:
        self._replica_id, self._grace_s = replica_id, grace_s
        self._changed = threading.Condition()
        self._verdicts = Verdicts()

    def __repr__(self) -> str:
        return f"Waiting({self._replica_id}, {self._verdicts!r})"

    def take(self, push: Push) -> None:
        """Something arrived from the leader."""
        with self._changed:
            self._verdicts.take(push, self._replica_id, time.monotonic())
            self._changed.notify_all()

    def broke(self, quorum_id: int, reason: str) -> bool:
        """This rank is broken in a quorum, so the group is. True if that is new."""
        with self._changed:
            new = self._verdicts.broke(quorum_id, reason)
            self._changed.notify_all()
            return new

    def wait(self, vote: Verdict, timeout_s: float, withdraw: Callable[[Verdict], None]) -> Verdict:
        """Wait for the verdict on the attempt that was voted on; pauses do not count.

        A vote that has waited too long is taken back: `withdraw` sends BROKEN in its place. Only the leader can say
        whether that came in time, or the last of the other votes did: all ranks get the same verdict then (R12).
        """
        found = self._within(vote, timeout_s)
        if found is not None:
            return found
        reason = f"the ranks of {self._replica_id} did not agree on the step within {timeout_s:g} s"
        broken = Verdict(vote.quorum_id, vote.attempt, Outcome.BROKEN, reason)
        withdraw(broken)
        return self._within(vote, self._grace_s) or broken

    def _within(self, vote: Verdict, limit_s: float) -> Verdict | None:
        with self._changed:
            wait = Wait(self._verdicts.pauses, limit_s, time.monotonic())
            while (found := self._verdicts.result(vote.quorum_id, vote.attempt)) is None:
                now = time.monotonic()
                if wait.over(now):
                    return None
                self._changed.wait(wait.at - now)
            return found
