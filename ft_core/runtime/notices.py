"""The few lines that a user sees without configuring any logging: who was lost, is back, was healed, what was vetoed.

How it works. `say` hands a line to the logger "ft_core" at level INFO if anybody has configured logging (a handler of
that logger, or of the root logger): then it is the user's to decide what is seen. Otherwise the line goes to stderr,
unless FT_LOG names a higher level (`FT_LOG=warning` for quiet). FT_LOG is the level of the logger "ft_core", too.

Each line appears once in a job, not once per rank or group: only rank 0 of a group speaks, what concerns one group is
said by that group, and changes of membership and vetoes are said by `speaker`, which all members know without asking:
the first of those that come from the newest quorum.

Threads: any; a line is one write. `Membership` is the quorum worker's, `Vetoes` the training thread's.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.types import Quorum

VARIABLE = "FT_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
VETOES_S = 10.0
"""Vetoes are said at most so often."""

log = logging.getLogger("ft_core")


def level(environ: Mapping[str, str]) -> int:
    """The level that FT_LOG names. Raises ConfigError for others than LEVELS."""
    name = environ.get(VARIABLE, "") or "info"
    if name.lower() not in LEVELS:
        raise ConfigError(f"{VARIABLE}={name!r} must be one of {', '.join(LEVELS)}")
    return LEVELS[name.lower()]


def configure(environ: Mapping[str, str]) -> None:
    """Give the logger "ft_core" the level that FT_LOG names, if it is set. Raises ConfigError as `level`."""
    wanted = level(environ)
    if environ.get(VARIABLE):
        log.setLevel(wanted)


def say(text: str, *, quiet: bool = False) -> None:
    """One line for the user. `quiet`: only for those who have configured logging."""
    if log.hasHandlers():
        log.info("%s", text)
    elif not quiet and level(os.environ) <= logging.INFO:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def name_of(replica_id: str) -> str:
    """The stable part."""
    return replica_id.rpartition(":")[0] or replica_id


def speaker(quorum: Quorum) -> str:
    """Who of the members speaks for all; '' in a first quorum, which is no news."""
    last = max(member.previous_quorum_id for member in quorum.members)
    return next(m.replica_id for m in quorum.members if m.previous_quorum_id == last) if last else ""


class Membership:
    """Who was in the quorums of one replica, for what there is to say of a new one. Pure."""

    def __init__(self) -> None:
        self._members: tuple[str, ...] = ()
        self._seen: dict[str, str] = {}
        """replica_id by name, of everybody who was ever a member here; bounded by the names of a job."""

    def __repr__(self) -> str:
        return f"Membership({', '.join(self._members) or 'none'})"

    def entered(self, quorum: Quorum, me: str) -> list[str]:
        """Lines about the quorum that `me` enters; [] if somebody else says them."""
        before, seen = self._members, dict(self._seen)
        self._members = quorum.ids
        self._seen.update((name_of(member), member) for member in quorum.ids)
        if not before or speaker(quorum) != me:
            return []
        step = max(0, *(member.version.step for member in quorum.members))
        groups = f"{len(quorum.members)} group{'s train' if len(quorum.members) > 1 else ' trains'}"
        lost = [name_of(member) for member in before if member not in quorum.ids]
        lines = [f"lost: {', '.join(lost)} (step {step}: {groups} on)"] if lost else []
        for member in quorum.ids:
            if member in before:
                continue
            name = name_of(member)
            how = "joined" if name not in seen else "back"
            same = " after it was frozen or cut off" if seen.get(name) == member else ""
            lines.append(f"{how}: {name}{same} (step {step}: {groups})")
        return lines


class Vetoes:
    """Steps that were agreed to be skipped. Pure: the time is an argument, in seconds."""

    def __init__(self) -> None:
        self._said_at = float("-inf")
        self._unsaid = 0

    def __repr__(self) -> str:
        return f"Vetoes({self._unsaid} not said)"

    def vetoed(self, step: int, reason: str, now: float) -> str:
        """The line to say, or '' so soon after the last one."""
        if now < self._said_at + VETOES_S:
            self._unsaid += 1
            return ""
        self._said_at, unsaid, self._unsaid = now, self._unsaid, 0
        more = f"; so were {unsaid} more since the last such line" if unsaid else ""
        return f"vetoed: the step after {step} was skipped by all ({reason}){more}"
