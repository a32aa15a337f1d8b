"""Reports that a room leaves for its next decision: every replica sends several of them per second. Pure.

A newer stable version can only lengthen a wait (R2), never end one, so it decides nothing by itself; while somebody
asks, the room looks again soon, because its explanation may have changed. A commit made in the current quorum
matters once: for all members together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ft_core.protocol.lighthouse.record import Record

NEWS_S = 0.5
"""An explanation that names stable versions is at most this old."""


class News:
    """News since the last decision: what it saw, and what was reported after it."""

    def __init__(self) -> None:
        self.asked_for = False
        """Somebody asked for a quorum; every change of that is decided about anew."""
        self.committed_in = 0
        """The quorum of which a commit was last reported."""

    def __repr__(self) -> str:
        return f"News(asked_for={self.asked_for})"

    def seen(self, records: Iterable[Record]) -> list[float]:
        """A decision was made. Returns when those who ask are admitted."""
        asking = [record.admitted_at for record in records if record.ask is not None]
        self.asked_for = bool(asking)
        return asking

    def look_at(self, now: float, next_at: float | None) -> float | None:
        """When to look again, after a newer stable version was reported."""
        if not self.asked_for:
            return next_at
        return now + NEWS_S if next_at is None else min(next_at, now + NEWS_S)

    def known(self, quorum_id: int, reporter: Record) -> bool:
        """Whether the commit that is reported is news; afterwards it is none any more."""
        old = reporter.committed and quorum_id == self.committed_in
        self.committed_in = quorum_id
        return old
