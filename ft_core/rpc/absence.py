"""What is known while a stream is not open, and what of it is worth a line in the log. Pure.

How it works. Each attempt that came to nothing leaves the reason of its address. A line is due when that reason is
news, and, since trainers and their lighthouse start together, a warning at first only if the absence lasts. That an
address stands by for another one is no trouble by itself: it is worth a warning only if nobody takes us for SILENT_S.

Threads: the stream's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ft_core.addresses import STANDBY

if TYPE_CHECKING:
    from ft_core.addresses import Addresses

SILENT_S = 1.0
"""Addresses that have not answered for so long since the first attempt are worth a warning."""


class Absence:
    """From the start, or the end of a stream, to the next one.

    Args:
        who: is at the other end.
        addresses: of it.
    """

    def __init__(self, who: str, addresses: Addresses) -> None:
        self._who, self._addresses = who, addresses
        self._since: float | None = None
        """When it began (monotonic s): the first attempt to connect, later the end of the last stream."""
        self._reasons: dict[str, str] = {}
        """Why the last attempt at each address came to nothing, since then."""
        self._logged: dict[str, str] = {}
        """The last reason at each address that was logged."""
        self._warned = False
        self._was_open = False

    def __repr__(self) -> str:
        return f"Absence({self.reason or 'none'})"

    @property
    def reason(self) -> str:
        """Why there is no stream, in one line; '' if nothing was tried yet."""
        if not self._reasons:
            return ""
        where = f"{self._who} at {self._addresses}"
        return f"{where} cannot be reached: {self._addresses.each(self._reasons)}"

    def began(self, now: float) -> None:
        """The first attempt to connect is made."""
        self._since = now

    def failed(self, address: str, why: str, now: float, *, was_open: bool, steady: bool) -> tuple[int, str] | None:
        """An attempt came to nothing, or the stream ended (`was_open`; `steady`: it was open for a while).

        Returns the level and the text of a line that is due.
        """
        if was_open or self._since is None:
            self._since = now
            self._reasons.clear()
        self._reasons[address] = why
        stands_by, lasts = why.startswith(STANDBY), now - self._since >= SILENT_S
        # INFO is seldom shown.
        warn = lasts or (self._was_open and not stands_by)
        late = warn and not self._warned and (stands_by or not self._was_open)
        if why == self._logged.get(address) and not steady and not late:
            return None
        self._logged[address] = why
        self._warned |= warn
        where = "" if self._was_open else f" ({self._addresses.setting})"
        return (
            logging.WARNING if warn else logging.INFO,
            f"{self._who} at {address} cannot be reached: {why}{where}; trying {self._next(address)}",
        )

    def opened(self, address: str, now: float) -> str:
        """A stream is open. Returns a line for the log that ends a warning; '': there was none."""
        first, self._was_open = not self._was_open, True
        since, self._since = self._since, None
        warned, self._warned = self._warned, False
        self._reasons.clear()
        if since is None or not warned:
            return ""
        where = f" at {address}" if len(self._addresses) > 1 else ""
        return f"{self._who}{where} {'answers' if first or where else 'is back'} after {now - since:.1f} s"

    def _next(self, address: str) -> str:
        return "again" if len(self._addresses) == 1 else next(one for one in self._addresses.all if one != address)
