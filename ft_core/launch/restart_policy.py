"""Whether a failed replica group is started again, and when: budget, backoff, crash loop.

One `RestartPolicy` per group. Whoever supervises the group calls `failed()` once per ended run and does what the answer
says: start it again `after_s` later, or keep it down for good. Rules, in the order in which they are tried:

1. a quarantine is final; a group that somebody starts again by hand gets a new policy;
2. `max_restarts=0` means never, whatever ended the run;
3. an excused failure (our own chaos, an operator's restart) costs nothing and restarts at once;
4. `crash_loop` runs in a row that died before their first commit are a crash loop: what is wrong will not go away by
   trying again. A run that committed, excused or not, ends the row;
5. at most `max_restarts` restarts that are not excused fall into any `window_s` seconds;
6. a run that committed restarts at once, and so does the first of a row; the second waits `backoff_s`, and every
   further one twice as long as the one before, up to `backoff_max_s`.

Pure: no clock, no I/O; `now` is an argument, in seconds of a clock that does not go back (if it does, the latest time
seen counts). Not thread-safe: one policy belongs to the thread that supervises its group. State is bounded by
`max_restarts` instants.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ft_core.errors import ConfigError

MAX_RESTARTS = 1_000_000
"""The largest budget; a policy remembers one instant per restart in the window."""
MAX_DOUBLINGS = 1000
"""The backoff stops doubling here, so that a very long row stays a finite float."""


@dataclass(frozen=True)
class RestartSettings:
    """The knobs of `RestartPolicy`. `check()` refuses what cannot work."""

    max_restarts: int = 10
    """Restarts of one group within `window_s`; 0: a failed group is never started again (--max-restarts)."""
    window_s: float = 3600.0
    """The sliding window of the budget (--restart-window); infinite: the budget is for the whole job."""
    crash_loop: int = 3
    """So many runs in a row without a commit quarantine the group (--crash-loop)."""
    backoff_s: float = 1.0
    """The wait before the restart after the second death of a row; it doubles from there."""
    backoff_max_s: float = 60.0

    def check(self) -> None:
        """Refuse values that cannot work.

        Raises:
            ConfigError: names the option, its value and the rule.
        """
        if not 0 <= self.max_restarts <= MAX_RESTARTS:
            raise ConfigError(
                f"--max-restarts {self.max_restarts}: must be 0 (never restart) to {MAX_RESTARTS} restarts of a group"
            )
        if not self.window_s > 0:
            raise ConfigError(
                f"--restart-window {self.window_s}: must be a positive number of seconds; "
                "within it a group may restart --max-restarts times"
            )
        if self.crash_loop < 1:
            raise ConfigError(
                f"--crash-loop {self.crash_loop}: must be at least 1, the deaths in a row before a first commit that "
                "quarantine a group"
            )
        if not 0 <= self.backoff_s <= self.backoff_max_s < math.inf:
            raise ConfigError(
                f"backoff_s={self.backoff_s} and backoff_max_s={self.backoff_max_s} cannot work: "
                "0 <= backoff_s <= backoff_max_s < infinity, in seconds"
            )


@dataclass(frozen=True)
class Restart:
    """Start the group again, `after_s` seconds from the failure."""

    after_s: float
    reason: str


@dataclass(frozen=True)
class Quarantine:
    """Keep the group down for good; the rest of the job goes on without it."""

    reason: str


class RestartPolicy:
    """The restarts of one group; the header of this file has the rules.

    Raises:
        ConfigError: the settings cannot work.
    """

    def __init__(self, settings: RestartSettings) -> None:
        settings.check()
        self._settings = settings
        self._now = -math.inf
        self._row = 0
        """Runs in a row that died before their first commit; excused ones are not counted."""
        self._restarts: deque[float] = deque(maxlen=settings.max_restarts)
        """When the group was last started again (not excused); all less than `window_s` ago."""
        self._quarantine: Quarantine | None = None

    def __repr__(self) -> str:
        state = "quarantined" if self._quarantine else "may restart"
        used = f"{len(self._restarts)} of {self._settings.max_restarts} restarts"
        return f"RestartPolicy({state}, {used}, {self._row} of {self._settings.crash_loop} deaths in a row)"

    def failed(self, now: float, *, committed: bool, excused: bool = False) -> Restart | Quarantine:
        """A run of the group ended badly at `now`; what to do about it.

        Args:
            now: seconds, of a clock that does not go back.
            committed: did this run commit a step?
            excused: it was ended on purpose, and is to come back.
        """
        if self._quarantine is not None:
            return self._quarantine
        self._now = now = max(now, self._now)
        settings = self._settings
        if committed:
            self._row = 0
        if settings.max_restarts == 0:
            return self._give_up("never restarted: --max-restarts is 0")
        if excused:
            return Restart(0.0, "ended on purpose")
        if not committed:
            self._row += 1
            if self._row >= settings.crash_loop:
                times = "once" if self._row == 1 else f"{self._row} times in a row"
                return self._give_up(f"died {times} before its first commit")
        after_s = self._backoff_s()
        at = now + after_s
        while self._restarts and self._restarts[0] <= at - settings.window_s:
            self._restarts.popleft()
        if len(self._restarts) == settings.max_restarts:
            return self._give_up(
                f"restarted {settings.max_restarts} times {self._window()}, as often as --max-restarts allows"
            )
        self._restarts.append(at)
        why = "died after a commit" if committed else f"died before its first commit ({self._row} in a row)"
        return Restart(after_s, f"{why}; restart {len(self._restarts)} of {settings.max_restarts} {self._window()}")

    def _backoff_s(self) -> float:
        if self._row <= 1:
            return 0.0
        doublings = min(self._row - 2, MAX_DOUBLINGS)
        return min(self._settings.backoff_max_s, self._settings.backoff_s * 2.0**doublings)

    def _window(self) -> str:
        return "in all" if self._settings.window_s == math.inf else f"in {self._settings.window_s:g} s"

    def _give_up(self, reason: str) -> Quarantine:
        self._quarantine = Quarantine(reason)
        return self._quarantine
