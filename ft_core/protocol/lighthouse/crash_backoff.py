"""The back-off of a name that keeps crashing before its first commit: it joins later and later (R15).

Only deaths before a first commit count; a commit (also one that a peer reports later, because the dead report nothing)
forgives them. Pure; bounded by MAX_NAMES names with MAX_CRASHES deaths each.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ft_core.protocol.lighthouse.record import Record

CRASH_WINDOW_S = 120.0
"""Incarnations of one name that died without a commit are counted within this window."""
CRASH_FREE = 2
"""So many crashes cost a newcomer nothing; from then on its candidacy is delayed, doubling."""
CRASH_DELAY_S = 1.0
CRASH_DELAY_MAX_S = 30.0
MAX_NAMES = 4096
MAX_CRASHES = 16


class CrashLog:
    """Deaths before a first commit, per replica name."""

    def __init__(self) -> None:
        self._crashes: dict[str, deque[float]] = {}

    def __repr__(self) -> str:
        return f"CrashLog({', '.join(f'{name}: {len(times)}' for name, times in self._crashes.items())})"

    def not_before(self, name: str, now: float) -> float:
        """The instant from which on a newcomer of this name is a candidate; 0: at once."""
        crashes = [t for t in self._crashes.get(name, ()) if now - t < CRASH_WINDOW_S]
        if len(crashes) <= CRASH_FREE:
            return 0.0
        return now + min(CRASH_DELAY_MAX_S, CRASH_DELAY_S * 2.0 ** (len(crashes) - CRASH_FREE - 1))

    def crashed(self, name: str, now: float) -> None:
        """An incarnation of `name` died before its first commit."""
        if not name:
            return
        if name not in self._crashes and len(self._crashes) >= MAX_NAMES:
            self._crashes.pop(next(iter(self._crashes)))
        self._crashes.setdefault(name, deque(maxlen=MAX_CRASHES)).append(now)

    def died(self, record: Record, now: float) -> None:
        """A replica has ended, or is taken for ended: counted once."""
        if record.committed:
            self.forgive(record.hello.name)
        elif not record.crash_counted:
            record.crash_counted = True
            self.crashed(record.hello.name, now)

    def returned(self, record: Record) -> None:
        """It had only lost its connection."""
        if record.crash_counted:
            record.crash_counted = False
            self.forgive(record.hello.name)

    def committed(self, members: Iterable[Record]) -> None:
        """These have got past their first commit."""
        for record in members:
            if not record.committed:
                record.committed = True
                self.forgive(record.hello.name)

    def forgive(self, name: str) -> None:
        """An incarnation of `name` has committed."""
        self._crashes.pop(name, None)
