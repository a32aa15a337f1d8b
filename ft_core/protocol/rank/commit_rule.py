"""What a completed fence decides: commit, veto, or that this rank cannot follow. The only place that does. Pure.

How it works. The verdict is a function of the sum over all members, so all of them reach the same one, but for what a
member knows of itself alone: that the sum is of another attempt (R0), or that it has had no lease for too long (R3).
These make it leave the quorum, and change nothing for the others.

Invariants: a commit has a weight above 0; with whole steps nobody's share is missing in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ft_core.protocol.rank.ballot import places_missing
from ft_core.protocol.types import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection

    from ft_core.protocol.rank.ballot import FenceSum
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.settings import RankSettings

NO_LEASE = "no member has had a lease for autonomy_s"
FAILED = "members failed in this step"
OUT_OF_DATA = "every member is out of data"
NO_GRADIENT = "no member contributed a gradient"
STOPS = "training stops at the state that members without data are healed to"
NOT_WHOLE = "every step has to be whole"
"""What the reasons of vetoes say, whole or in part."""


class Facts(NamedTuple):
    """What one member knows of the attempt whose fence has completed."""

    plan: Plan
    attempt: int
    tag: int
    """Over everything that has to be equal on all members of this attempt."""
    participants: tuple[int, ...]
    """replica_ranks whose shares are planned to be in the sum."""
    soft_error: str
    lacks_lease: bool
    took_s: float
    """Since its first collective was launched."""
    behind: bool
    """It does not hold the state that the attempt builds on; `received`: it has it, not loaded yet."""
    received: bool
    trails: bool
    knows_end: bool
    """It knows that the pass over the data ended with that state."""
    whole_steps: bool


class Judgement(NamedTuple):
    """The verdict, and what else the sum says."""

    verdict: Verdict
    everyone_out: bool = False
    source_lost: bool = False
    ends_now: bool = False
    """The pass over the data ends with this attempt."""
    passed: bool = False
    """It had ended with the state that the attempt builds on."""
    states_differ: bool = False


def judge(told: FenceSum, facts: Facts, settings: RankSettings) -> Judgement:
    """The decision on one attempt."""
    rules, plan, n = settings.rules, facts.plan, facts.plan.size

    def verdict(outcome: Outcome, reason: str = "", **more: object) -> Verdict:
        return Verdict(plan.quorum_id, facts.attempt, outcome, reason, **more)  # type: ignore[arg-type]

    if rules.r0_tag and not told.is_of(n, facts.tag):
        reason = "the fence shows that a member is in another attempt or holds another state"
        return Judgement(verdict(Outcome.BROKEN, reason))
    if rules.r3_autonomy:
        margin = settings.orphan_s - settings.autonomy_s
        if facts.lacks_lease and facts.took_s > margin:
            reason = f"no lighthouse for too long, and the fence took over {margin:g} s"
            return Judgement(verdict(Outcome.BROKEN, reason))
        if told.no_lease == n:
            reason = f"{NO_LEASE}={settings.autonomy_s:g} s: waiting for one"
            return Judgement(verdict(Outcome.VETO, reason, change=told.change > 0, lapsed=True))
    everyone_out, passed = told.out == n, told.passed > 0
    ends_now = (everyone_out or told.ends > 0) and not told.lagging
    lag_ends = told.lagging > 0 and (everyone_out or told.ends + told.stop > 0)
    missed = passed and not facts.behind and not facts.knows_end
    missing = places_missing(facts.participants, told.shares) if rules.r17_shares else ()
    more: dict[str, Any] = {
        "weight": told.weight, "contributors": told.contributed, "missing": missing,
        "stop": told.stop > 0 and not told.lagging, "change": told.change > 0 or lag_ends,
        "exhausted": ends_now or missed,
        "healed": told.ready == plan.ready_expected or not rules.r10_ready,
        "behind": facts.behind and not facts.received, "trails": facts.trails,
    }  # fmt: skip
    if told.failed:
        reached = verdict(Outcome.VETO, facts.soft_error or f"{told.failed} of {n} {FAILED}", **more)
    elif told.weight == 0:
        reason = OUT_OF_DATA if everyone_out else NO_GRADIENT
        reached = verdict(Outcome.VETO, reason, **more)
    elif told.trailing and (told.ends or told.stop):
        reached = verdict(Outcome.VETO, STOPS, **more)
    elif missing and facts.whole_steps:
        names = ", ".join(plan.quorum.ids[facts.participants[place]] for place in missing)
        reached = verdict(Outcome.VETO, f"{NOT_WHOLE}, and {names} contributed nothing", **more)
    else:
        reached = verdict(Outcome.COMMIT, **more)
    return Judgement(reached, everyone_out, told.sources_lost > 0, ends_now, passed, told.states_differ)


def contributed(places: int, missing: Collection[int]) -> Collection[int] | None:
    """Places among the participants whose share is in the sum, as `DataListener.committed` takes them: None: all."""
    return frozenset(range(places)).difference(missing) if missing else None
