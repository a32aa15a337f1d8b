"""`Explanation`: why a room has no quorum yet, as it was last told to those who ask. Pure.

Invariant: nobody is held back, and nobody paused is waited for, without a reason. Ownership: `room.Room` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import Explain
from ft_core.protocol.pauses import differs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.view import NotReady


class Explanation:
    """What those who ask wait for."""

    def __init__(self) -> None:
        self.reason: str = ""
        """Why there was no quorum, when that was last explained to those who ask."""
        self.held: Mapping[str, str] = {}
        """Those who ask and are held back, each with a reason of its own. Empty without a `reason`."""
        self.paused_until = 0.0
        """Until when those that are waited for may be busy; 0: nobody is, which holds without a `reason`."""

    def __repr__(self) -> str:
        return f"Explanation({self.reason or 'nobody waits'})"

    def validate(self) -> None:
        """Raise AssertionError unless what the fields promise holds."""
        assert self.reason or not (self.held or self.paused_until)

    def over(self) -> None:
        """There is a quorum, or nobody asks for one."""
        self.reason, self.paused_until, self.held = "", 0.0, {}

    def tell(self, outcome: NotReady, records: Mapping[str, Record], now: float) -> list[Explain]:
        """Explain it to those who ask, if it is news."""
        asking = tuple(sorted(i for i, record in records.items() if record.ask is not None))
        same = outcome.reason == self.reason and not differs(outcome.paused_until, self.paused_until)
        if not asking or (same and outcome.held == self.held):
            return []
        self.reason, self.paused_until, self.held = outcome.reason, outcome.paused_until, outcome.held
        return [Explain(asking, outcome.reason, max(0.0, outcome.paused_until - now))]
