"""The quorum rule once more: slow, obvious, written from the text of DESIGN 3. The real one must agree with it."""

from __future__ import annotations

from ft_core.protocol.lighthouse.view import Life, Seen, View
from ft_core.protocol.types import VOID


def gone(view: View, name: str) -> bool:
    """Nothing it does can reach anybody again."""
    return name not in view.seen or view.seen[name].life is Life.GONE


def out_of_reach(view: View, name: str) -> bool:
    """It has been without a lease for orphan_s."""
    seen = view.seen[name]
    return seen.life is not Life.UP and view.now >= seen.since + view.orphan_s


def may_form(view: View) -> tuple[str, ...] | None:  # noqa: C901 - one rule after the other, as in the text
    """The members of the quorum that may form now; None: it may not."""
    askers = {
        n: s for n, s in view.seen.items() if s.life is Life.UP and s.ask is not None and s.admitted_at <= view.now
    }
    everybody = sum(s.life is Life.UP and s.ask is not None for s in view.seen.values())
    if view.current and any(s.ask and s.ask.shrink_only for s in askers.values()):
        askers = {n: s for n, s in askers.items() if n in view.current.members}
    askers, need = agreed(view, askers)
    if not askers:
        return None
    newest = max(s.ask.version for s in askers.values() if s.ask)
    complete = 0 < view.expected <= len(askers)
    # R9: a lighthouse that has just started may have forgotten a quorum.
    if view.current is None:
        if view.now < view.boot_until and not complete:
            return None
        if view.trained and view.expected and not complete and newest.step <= 0 and view.now < view.restart_until:
            return None
    elif view.now < view.boot_until and any(
        n in view.seen and view.seen[n].life is Life.UNKNOWN for n in view.current.members
    ):
        return None
    # R1: not beside a quorum that may still be training.
    if view.current and not view.current.ended:
        for name in view.current.members:
            if not gone(view, name) and not out_of_reach(view, name):
                return None
    # R2: not from an older state than somebody within reach is known to hold.
    for name, seen in view.seen.items():
        if name not in askers and not gone(view, name) and seen.stable > newest and not out_of_reach(view, name):
            return None
    # 3.2: whoever is alive is waited for, within bounds.
    first = min(s.asked_at for s in askers.values())
    if view.current is None:
        if everybody < view.expected and view.now < first + view.join_s:
            return None
        idle = [s for s in view.seen.values() if s.life is Life.UP and s.ask is None]
        if idle and view.now < first + view.join_timeout_s:
            return None
    else:
        first = max(first, view.current.ended_at)
        for name in view.current.members:
            asks = name in view.seen and view.seen[name].life is Life.UP and view.seen[name].ask is not None
            if not asks and not gone(view, name) and _worth_waiting(view, view.seen[name], first):
                return None
    if len(askers) < need:
        return None
    if newest == VOID:
        return None
    return tuple(sorted(askers))


def agreed(view: View, askers: dict[str, Seen]) -> tuple[dict[str, Seen], int]:
    """Whose min_replica_size allows the next quorum, and the smallest one that is allowed.

    Where a job runs, the size that most of its members give counts: of all sets of groups in which nobody asks for more
    groups than there are in it (or than the job does), the largest.
    """
    members = view.current.members if view.current else ()
    running = {n: s for n, s in askers.items() if n in members} or {
        n: s for n, s in view.seen.items() if n in members and s.life is Life.UP and s.admitted_at <= view.now
    }
    asked_for = {n: s.ask.min_replicas if s.ask else s.min_replicas for n, s in {**askers, **running}.items()}
    if not running:
        return askers, max([view.min_replicas, *asked_for.values()])
    sizes = [asked_for[n] for n in running]
    usual = max(sizes, key=lambda size: (sizes.count(size), size))
    for size in range(len(asked_for), -1, -1):
        fits = {n for n, least in asked_for.items() if least <= max(usual, size)}
        if len(fits) >= size:
            return {n: s for n, s in askers.items() if n in fits}, max(view.min_replicas, usual)
    raise AssertionError("the empty set always fits")


def _worth_waiting(view: View, seen: Seen, first: float) -> bool:
    if seen.life in (Life.LOST, Life.MISSED):
        return False
    if seen.life is Life.CLOSED:
        return True  # until it is lost
    if seen.life is Life.UNKNOWN:
        return view.now < max(view.boot_until, seen.since + view.join_s)
    return view.now < max(first, seen.paused_until, seen.back_at) + view.join_s
