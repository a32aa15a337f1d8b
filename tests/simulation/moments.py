"""Faults that strike one of two lighthouses exactly while a quorum is recorded or announced (R22).

How it works. `arm` draws a moment, a victim and what befalls it; the shell of a lighthouse calls `reached` at each
moment, and the first that fits is when it happens. So the windows that a fault drawn by the clock hits once in
thousands of seeds are hit in nearly every one: a record that is under way, one that is not answered yet, an answer that
was not acted on, a quorum that some of its members were told of.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.lighthouse import Lighthouse
    from tests.simulation.world import World

MOMENTS = ("proposed", "recorded", "answered", "announced")
"""The record is asked for; the other lighthouse has made it; its answer is there; some members (perhaps none, or all)
are told of a quorum."""
BLOWS = ("kill", "kill", "freeze", "cut_pair", "cut_groups", "cut_off")
"""`cut_groups`: from some of the groups; `cut_off`: from the other lighthouse and from some of the groups."""


@dataclass(frozen=True)
class _Strike:
    """What befalls whom at a moment."""

    blow: str
    told: float
    """Which part of the members are told of a quorum before."""
    itself: bool
    """It strikes the lighthouse at which the moment is reached, not the other one."""


class Moments:
    """What waits for its moment: at most one strike for each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._armed: dict[str, _Strike] = {}
        self.struck: Counter[str] = Counter()
        """How often each moment was used."""

    def arm(self) -> None:
        """Draw one more, for a moment for which none waits."""
        rng = self.world.rng
        strike = _Strike(rng.choice(BLOWS), rng.choice((0.0, 0.4, 0.7, 1.0)), rng.random() < 0.75)
        self._armed.setdefault(rng.choice(MOMENTS), strike)

    def reached(self, moment: str, lighthouse: Lighthouse, told: float = 0.0) -> None:
        """A lighthouse of a pair has come there. `told`: the part of the members that have been sent the quorum."""
        strike = self._armed.get(moment)
        if strike is None or (moment == "announced" and told < strike.told) or self.world.calm:
            return
        victim = lighthouse if strike.itself else self.world.lighthouses[1 - lighthouse.index]
        if victim is None or victim.frozen:
            return
        del self._armed[moment]
        self.struck[moment] += 1
        self.world.trouble_at = self.world.now
        self.world.say("at this moment (%s, %.1f told), lighthouse %d: %s", moment, told, victim.index, strike.blow)
        faults = self.world.faults
        if strike.blow == "kill":
            faults.kill_lighthouse(victim)
        if strike.blow == "freeze":
            faults.freeze_lighthouse(victim)
        if strike.blow in ("cut_pair", "cut_off"):
            faults.cut_pair()
        if strike.blow in ("cut_groups", "cut_off"):
            groups = list(self.world.active.values())
            for group in self.world.rng.sample(groups, self.world.rng.randint(0, len(groups))):
                faults.cut_from(group, victim.index)
