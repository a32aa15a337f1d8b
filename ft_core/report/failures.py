"""What went wrong in a job, each with its first cause in one sentence. Pure.

How it works. One failure shows in many places: ftrun sees a process end, the lighthouse loses a member, the others'
quorum breaks. `find` takes those first that say most (ftrun's, then the lighthouse's, then the replicas'), and leaves
out what one of them explains: of the same group, or of any group, within TOGETHER_S.

Invariants: failures are in the order of time; a goodbye is none. Instants are wall-clock seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_core.report.story import Story, name_of, plain

Event = dict[str, Any]
TOGETHER_S = 3.0
"""What comes so soon after a failure is a consequence of it."""
EARLY_S = 0.1
"""Peers may see a connection end before ftrun sees the process end."""
SAME_VETO_S = 2.0
"""Vetoes so near to each other are one entry."""
SILENT = "silent"
SOON_S = 1.0
TAKEN_OVER = "taken over"
"""A lighthouse has lost its place to the one that stood by: no job ends by that."""
LOSSES = ("member lost", "broken")
"""Gaps of these causes that begin so soon after a failure are what it cost."""


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong."""

    t: float
    who: str
    what: str
    cause: str
    """One sentence."""
    noticed_s: float | None = None
    """Until the first of the others noticed it, or was told by the lighthouse; None: nobody did."""
    gap_s: float | None = None
    """The longest gap that it cost another group, beyond a usual step."""
    back_s: float | None = None
    """Until the group trained again; None: it has not."""


def find(
    stories: Mapping[str, Story], replicas: Mapping[str, Sequence[Event]], lighthouse: Sequence[Event],
    ftrun: Sequence[Event], restarts: Sequence[float],
) -> list[Failure]:  # fmt: skip
    """All failures.

    Args:
        stories: by group.
        replicas: events of the groups' processes, by group.
        lighthouse: events of all lighthouses, in order.
        ftrun: events of all ftruns, in order.
        restarts: when a lighthouse was started again.
    """
    found = _deaths(lighthouse, ftrun, replicas)
    found += _losses(lighthouse, ftrun, replicas, found)
    found += [Failure(t, "the lighthouse", "started again", "it had ended; training went on") for t in restarts]
    found += _takeovers(lighthouse)
    found += [
        Failure(e["t"] - e["seconds_s"], "the lighthouse", "stood still", f"its process did nothing for "
                f"{e['seconds_s']:.1f} s: frozen, or its machine has too much to do")
        for e in lighthouse if e["kind"] == "stood_still"
    ]  # fmt: skip
    found += [
        Failure(e["t"], name_of(e["replica_id"]), "refused", plain(e["reason"]))
        for e in lighthouse if e["kind"] == "refused"
    ]  # fmt: skip
    found += _heals(replicas, found)
    found += _vetoes(replicas)
    found += _breaks(replicas, found)
    return [_cost(failure, stories) for failure in sorted(found, key=lambda failure: failure.t)]


def _near(t: float, who: str, found: Iterable[Failure], within_s: float = TOGETHER_S) -> Failure | None:
    """An earlier failure that explains one at `t`; of that group, or with '' of any."""
    return next((f for f in found if who in ("", f.who) and abs(t - f.t) <= within_s), None)


def _deaths(
    lighthouse: Sequence[Event], ftrun: Sequence[Event], replicas: Mapping[str, Sequence[Event]]
) -> list[Failure]:
    lost = [event for event in lighthouse if event["kind"] == "member_lost"]
    kills = [(e["t"], e["group"]) for e in ftrun if e["kind"] == "order" and e["what"] == "kill"]
    broken = [(event["t"], name) for name, events in replicas.items() for event in events if event["kind"] == "broken"]
    deaths = []
    for event in ftrun:
        if event["kind"] != "failed":
            continue
        at, group = min(event["t"], event["at_s"]), event["group"]
        ordered = [t for t, name in kills if name == group and 0 <= at - t <= TOGETHER_S]
        at = max(ordered, default=at)  # when it was killed, not when that was seen
        told = [e["t"] for e in lost if name_of(e["replica_id"]) == group and abs(e["t"] - at) < TOGETHER_S]
        told += [t for t, name in broken if name != group and -EARLY_S <= t - at < TOGETHER_S]
        excuse, sentence = event["excuse"], event["sentence"]
        cause = f"{excuse}: {sentence}" if excuse else sentence
        noticed_s = max(0.0, min(told) - at) if told else None
        deaths.append(Failure(at, group, "killed" if event["code"] < 0 else "failed", plain(cause), noticed_s))
    return deaths


def _losses(
    lighthouse: Sequence[Event], ftrun: Sequence[Event], replicas: Mapping[str, Sequence[Event]],
    found: Sequence[Failure],
) -> list[Failure]:  # fmt: skip
    """Members that the lighthouse lost, and no supervisor knows why."""
    orders = [event for event in ftrun if event["kind"] == "order" and event["what"] == "freeze"]
    losses: list[Failure] = []
    for event in lighthouse:
        if event["kind"] != "member_lost" or "goodbye" in event["how"]:
            continue
        t, who = event["t"], name_of(event["replica_id"])
        if _near(t, who, found) or _near(t, who, losses):
            continue
        how, what, at = event["how"], "lost", t
        froze = next((o for o in reversed(orders) if o["group"] == who and 0 <= t - o["t"] <= 60.0), None)
        if froze is not None:
            how, what, at = f"frozen by {froze['reason']}: {how}", "frozen", froze["t"]
        elif how.startswith(SILENT):
            what = "frozen or cut off"
        else:
            ended = _last_word(replicas.get(who, ()), t)
            how += f"; the last that it wrote was {ended}" if ended else ""
        losses.append(Failure(at, who, what, plain(how), max(0.0, t - at)))
    return losses


def _last_word(events: Sequence[Event], t: float) -> str:
    before = [event for event in events if event["t"] <= t]
    return f"{before[-1]['kind']}, {t - before[-1]['t']:.1f} s before" if before else ""


def _takeovers(lighthouse: Sequence[Event]) -> list[Failure]:
    """Of two lighthouses, the one that served was gone for the other one."""
    return [
        Failure(
            event["t"], "the lighthouse", TAKEN_OVER,
            f"the one that stood by took over from {event['other']}, gone or out of reach; its records were "
            + ("complete" if event["complete"] else "not complete"),
        )
        for event in lighthouse if event["kind"] == "pair" and event["took_over"]
    ]  # fmt: skip


def _heals(replicas: Mapping[str, Sequence[Event]], found: Sequence[Failure]) -> list[Failure]:
    return [
        Failure(event["t"], name, "heal given up", plain(event["reason"]))
        for name, events in replicas.items() for event in events
        if event["kind"] == "heal_ended" and not event["ok"] and not _near(event["t"], "", found)
    ]  # fmt: skip


def _vetoes(replicas: Mapping[str, Sequence[Event]]) -> list[Failure]:
    """Those that all made together are one; the member that caused it knows the reason."""
    vetoes = sorted(
        ((e["t"], name, e) for name, events in replicas.items() for e in events if e["kind"] == "vetoed"),
        key=lambda veto: veto[0],
    )
    out: list[Failure] = []
    last, counts, who, reason, since = 0.0, dict[str, int](), "", "", 0.0
    for t, name, event in [*vetoes, (float("inf"), "", {"attempts": 0, "reason": ""})]:
        if counts and t - last > SAME_VETO_S:
            times = max(counts.values())
            what = f"{times} steps vetoed" if times > 1 else "a step vetoed"
            out.append(Failure(since, who, what, plain(reason)))
            counts, who, reason = {}, "", ""
        if not counts:
            since = t
        counts[name] = counts.get(name, 0) + event["attempts"]
        own = "members failed in this step" not in event["reason"]
        if own and not reason:
            who, reason = name, event["reason"]
        elif not reason and not own:
            who, reason = "", ""
        last = t
    return [f if f.cause else Failure(f.t, "a member", f.what, "a member failed; it did not write why") for f in out]


def _breaks(replicas: Mapping[str, Sequence[Event]], found: Sequence[Failure]) -> list[Failure]:
    """Quorums that broke for no reason found so far: who was the first."""
    first: dict[int, tuple[float, str, str]] = {}
    for name, events in replicas.items():
        for event in events:
            known = first.get(event["quorum_id"]) if event["kind"] == "broken" else None
            if event["kind"] == "broken" and (known is None or event["t"] < known[0]):
                first[event["quorum_id"]] = event["t"], name, event["reason"]
    left = [e["t"] for events in replicas.values() for e in events if e["kind"] in ("left", "draining")]
    return [
        Failure(t, name, "quorum broken", plain(reason))
        for t, name, reason in first.values()
        if not _near(t, "", found) and not any(abs(t - other) <= TOGETHER_S for other in left)
    ]


def _cost(failure: Failure, stories: Mapping[str, Story]) -> Failure:
    """The same with what it cost."""
    gaps = [
        max(0.0, gap["seconds_s"] - gap["usual_s"])
        for name, story in stories.items() if name != failure.who
        for gap in story.gaps if _belongs(gap, failure.t)
    ]  # fmt: skip
    story = stories.get(failure.who)
    back = story.trains_again(failure.t) if story is not None and failure.what in BACK else None
    return Failure(
        failure.t, failure.who, failure.what, failure.cause, failure.noticed_s, max(gaps, default=None),
        None if back is None else back - failure.t,
    )  # fmt: skip


def _belongs(gap: Event, t: float) -> bool:
    """Whether a failure at `t` may have made this gap: who dies may have done its part of one more step."""
    begin = gap["t"] - gap["seconds_s"]
    late_s = SOON_S if gap["cause"] in LOSSES else 0.0
    return bool(t <= gap["t"] and begin <= t + late_s)


BACK = ("killed", "failed", "lost", "frozen", "frozen or cut off")
"""Failures after which a group is away for a while."""
