"""Reports that a group's processes have ended, until a lighthouse has taken them. Pure.

How it works. A report is sent at once. If no lighthouse takes it, because the active one ended together with the group
and the other one has not noticed yet, it is sent again, with pauses that grow, for REPORT_S. From then on it counts
only when the lighthouse knows somebody of that name: one that has just become active learns of the members when they
open their leases there. A report that comes after the group's next start does no harm: the lighthouse does not believe
it of a process that holds a lease.

Bounds: one report per group; REPORT_S; pauses from PAUSE_S to MOST_S.
"""

from __future__ import annotations

from dataclasses import dataclass

REPORT_S = 10.0
"""How long a report that no lighthouse took is sent again: longer than one that froze keeps its clients."""
PAUSE_S = 0.02
MOST_S = 0.5


@dataclass(frozen=True)
class _Open:
    until: float
    due_at: float
    pause_s: float


class EndReports:
    """The reports that have to be sent again. All times in monotonic seconds."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def __repr__(self) -> str:
        return f"EndReports({', '.join(self._open) or 'none'})"

    def sent(self, name: str, now: float, *, known: bool | None) -> None:
        """A report was sent. `known`: whether the lighthouse knew a process of that name; None: nobody took it."""
        before = self._open.pop(name, None)
        if known or (before is None and known is not None):
            return
        until = now + REPORT_S if before is None else before.until
        if now < until:
            pause_s = PAUSE_S if before is None else min(2 * before.pause_s, MOST_S)
            self._open[name] = _Open(until, now + pause_s, pause_s)

    def due(self, now: float) -> str:
        """Whose end is to be reported again now; '': nobody's."""
        return next((name for name, one in self._open.items() if now >= one.due_at), "")

    def wait_s(self, now: float) -> float | None:
        """How long until that has to be looked at again; None: no report is open."""
        return max(0.0, min(one.due_at for one in self._open.values()) - now) if self._open else None
