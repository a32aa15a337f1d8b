"""`Rate`: steps per second out of looks at a step number. Pure.

How it works. It keeps the looks that showed a new step: those of the last WINDOW_S, and the one before, so that a job
of one step a minute has a rate, too. If the next step is overdue, the rate sinks as if it came now.

Invariant: at most LOOKS_MAX looks are kept; a step that went back begins anew.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 5.0
"""Steps of this time are averaged."""
LOOKS_MAX = 32
OVERDUE = 2.0
"""A step is overdue if it takes so many times longer than those before."""
OVERDUE_S = 1.0
"""And so much longer: replicas report a few times a second."""


class Rate:
    """The rate of one replica, or of a room."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque(maxlen=LOOKS_MAX)

    def __repr__(self) -> str:
        return f"Rate({list(self._looks)})"

    def look(self, now: float, step: int) -> None:
        """At `now` it was at this step."""
        looks = self._looks
        if looks and step < looks[-1][1]:
            looks.clear()
        if not looks or step > looks[-1][1]:
            looks.append((now, step))
        while len(looks) > 2 and looks[1][0] <= now - WINDOW_S:
            looks.popleft()

    def per_s(self, now: float) -> float:
        """Steps per second; 0.0 before two different steps were seen."""
        if len(self._looks) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._looks[0], self._looks[-1]
        steps, took_s = last - first, max(1e-9, last_at - first_at)
        waits_s, usual_s = now - last_at, took_s / steps
        if waits_s > usual_s * OVERDUE + OVERDUE_S:
            took_s += waits_s
        return steps / took_s
