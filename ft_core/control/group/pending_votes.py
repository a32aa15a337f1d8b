"""Where the threads of a rank wait for their group's verdicts.

Invariants: the first verdict on an attempt stands, and outlives a later break (R0); at most MAX_BROKEN of each are
kept. Thread safe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from ft_core.protocol.pauses import Pauses, Wait
from ft_core.protocol.types import Outcome, Verdict

MAX_BROKEN = 8
"""Quorums remembered as broken for this group."""


class Waiting:
    """Votes that threads of this process wait for: keyed like Votes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._verdicts: OrderedDict[tuple[int, int], Verdict] = OrderedDict()
        self._broken: OrderedDict[int, str] = OrderedDict()
        self._pauses = Pauses()
        """Of other groups, and of this group: whoever waits in one of its rings for a busy one votes late."""

    def decided(self, verdict: Verdict) -> None:
        """The group's verdict on an attempt is known; the first one stands."""
        with self._changed:
            self._verdicts.setdefault((verdict.quorum_id, verdict.attempt), verdict)
            while len(self._verdicts) > MAX_BROKEN:
                self._verdicts.popitem(last=False)
            self._changed.notify_all()

    def broke(self, quorum_id: int, reason: str) -> bool:
        """The group is broken in a quorum. True if that is new."""
        with self._changed:
            new = quorum_id not in self._broken
            self._broken.setdefault(quorum_id, reason)
            while len(self._broken) > MAX_BROKEN:
                self._broken.popitem(last=False)
            self._changed.notify_all()
            return new

    def paused(self, who: str, for_s: float) -> None:
        """A group is busy for at most `for_s` from now (0: it is back): votes wait for it."""
        with self._changed:
            self._pauses.announce(who, for_s, time.monotonic())

    def pauses(self) -> dict[str, float]:
        """Who is busy, and for how long at most."""
        with self._changed:
            return self._pauses.open(time.monotonic())

    def new_quorum(self) -> None:
        """Its members announce what they do anew."""
        with self._changed:
            self._pauses.forget()

    def result(self, quorum_id: int, attempt: int) -> Verdict | None:
        """A decided verdict outlives a later break (R0)."""
        verdict = self._verdicts.get((quorum_id, attempt))
        if verdict is None and quorum_id in self._broken:
            verdict = Verdict(quorum_id, attempt, Outcome.BROKEN, self._broken[quorum_id])
        return verdict

    def wait(self, verdict: Verdict, timeout_s: float, whose: str) -> Verdict:
        """Wait for the verdict on the attempt that `verdict` is a vote on; pauses do not count."""
        with self._changed:
            wait = Wait(self._pauses, timeout_s, time.monotonic())
            while (found := self.result(verdict.quorum_id, verdict.attempt)) is None:
                now = time.monotonic()
                if wait.over(now):
                    reason = f"the ranks of {whose} did not agree on the step within {timeout_s:g} s"
                    return Verdict(verdict.quorum_id, verdict.attempt, Outcome.BROKEN, reason)
                self._changed.wait(wait.at - now)
            return found
