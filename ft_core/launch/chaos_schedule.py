"""What `ftrun --chaos "kill=30s,stop=60s,drain=5m,seed=7"` does to its own groups, and when.

    kill     SIGKILL to every worker of a group; it is started again
    stop     SIGSTOP, and SIGCONT after `hold_s`; long enough to be noticed, or short enough not to be
    drain    a graceful drain; afterwards the group is started again

Each kind has a period P: exactly one act of that kind falls into every [k*P, (k+1)*P), at a uniformly random instant.
`schedule()` is infinite, in time order, and the same for the same settings in every process and Python version: each
kind draws from a stream of its own (seeded with the text "seed:kind"), always three numbers per act, so that neither
another kind nor a longer warm-up moves its acts.

Pure: no clock, no signals; the caller waits until `at_s` and does the act.
"""

from __future__ import annotations

import difflib
import heapq
import math
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KINDS = ("kill", "stop", "drain")
"""Every kind of act; acts of the same instant come in this order."""
HOLD_MIN_S = 1.0
HOLD_MAX_S = 15.0
"""How long a stopped group stays stopped; never longer than half of stop's period, so that stops do not pile up."""
EXAMPLE = '--chaos "kill=30s,stop=60s,drain=5m,seed=7"'
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*([a-z]*)", re.ASCII)


@dataclass(frozen=True)
class ChaosSettings:
    """What `--chaos` asked for: the period of every kind in seconds; 0 for a kind that is not wanted."""

    kill_s: float = 0.0
    stop_s: float = 0.0
    drain_s: float = 0.0
    seed: int = 0

    @staticmethod
    def parse(text: str) -> ChaosSettings:
        """Read the value of `--chaos`: comma-separated kind=duration, and seed=integer.

        A duration is a number with ms, s, m or h; without a unit it is in seconds.

        Raises:
            ConfigError: names the part that cannot be read and what it should look like.
        """
        values: dict[str, float] = {}
        seed: int | None = None
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not part.strip():
                raise ConfigError(f"--chaos {text!r}: an empty part; write for example {EXAMPLE}")
            if name not in (*KINDS, "seed"):
                near = difflib.get_close_matches(name, (*KINDS, "seed"), 1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(f"--chaos {text!r}: unknown kind {name!r}; {hint}(known: {', '.join(KINDS)}, seed)")
            if not equals:
                shape = "seed=7" if name == "seed" else f"{name}=30s"
                raise ConfigError(f"--chaos {text!r}: {name!r} has no value; write for example {shape}")
            if name in values or (name == "seed" and seed is not None):
                raise ConfigError(f"--chaos {text!r}: {name} is given twice; leave one of them out")
            if name == "seed":
                seed = _integer(text, value)
            else:
                values[name] = _seconds(text, name, value)
        if not values:
            raise ConfigError(f"--chaos {text!r}: nothing to do; name at least one of {', '.join(KINDS)}, as {EXAMPLE}")
        return ChaosSettings(
            values.get("kill", 0.0), values.get("stop", 0.0), values.get("drain", 0.0), 0 if seed is None else seed
        )

    def periods(self) -> dict[str, float]:
        """Seconds between two acts of a kind on average, of the kinds that are wanted."""
        every = {"kill": self.kill_s, "stop": self.stop_s, "drain": self.drain_s}
        return {kind: period_s for kind, period_s in every.items() if period_s > 0}


@dataclass(frozen=True)
class Act:
    """One thing to do to one group."""

    at_s: float
    """Seconds since the schedule's start."""
    kind: str
    """One of KINDS."""
    pick: float
    """In [0, 1): which of the groups that are alive at that moment; see `victim`."""
    hold_s: float
    """How long a stopped group stays stopped; 0 for other kinds."""


def schedule(settings: ChaosSettings, *, warmup_s: float = 0.0) -> Iterator[Act]:
    """All acts from `warmup_s` on, without end, in time order; earlier ones are left out, later ones do not move."""
    streams = [_acts(kind, period_s, settings.seed) for kind, period_s in settings.periods().items()]
    merged = heapq.merge(*streams, key=lambda act: (act.at_s, KINDS.index(act.kind)))
    return (act for act in merged if act.at_s >= warmup_s)


def victim(act: Act, names: Sequence[str]) -> str:
    """The group that the act hits, of those alive; the order of `names` does not matter.

    Raises:
        UsageError: no name is given.
    """
    if not names:
        raise UsageError(f"no living group to {act.kind}; skip the act")
    return sorted(names)[min(int(act.pick * len(names)), len(names) - 1)]


def _acts(kind: str, period_s: float, seed: int) -> Iterator[Act]:
    # A text seed goes through SHA-512, not hash(), which differs between processes.
    draw = random.Random(f"{seed}:{kind}").random
    longest_s = min(HOLD_MAX_S, period_s / 2)
    shortest_s = min(HOLD_MIN_S, longest_s / 2)
    period = 0
    while True:
        moment, pick, hold = draw(), draw(), draw()
        end_s = (period + 1) * period_s
        at_s = min((period + moment) * period_s, math.nextafter(end_s, 0.0))  # rounding must not move it out of its own
        yield Act(at_s, kind, pick, shortest_s + hold * (longest_s - shortest_s) if kind == "stop" else 0.0)
        period += 1


def _seconds(text: str, name: str, value: str) -> float:
    found = _DURATION.fullmatch(value)
    if found is None or found[2] not in _UNITS_S:
        raise ConfigError(
            f"--chaos {text!r}: {name}={value!r} is no duration; write a number with ms, s, m or h, such as {name}=30s"
        )
    seconds = float(found[1]) * _UNITS_S[found[2]]
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--chaos {text!r}: {name}={value} must be more than 0; leave {name} out if it is not wanted")
    return seconds


def _integer(text: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--chaos {text!r}: seed={value!r} is no integer; write for example seed=7") from None
