"""The choice of the next quorum's candidates, and what each of the others waits for. Pure.

How it works. `choose` looks at the replicas that ask, and at the living members of the quorum in force, who will ask at
their next step boundary. A replica that asks is held back, with a sentence for its user, while
- one of its ranks is missing (R12), it crashes in a loop, or an earlier process of its name is still alive,
- the quorum shall only shrink and it is not in it,
- it cannot reach the others over the network (`reachability`),
- it is one more than a quorum can hold, or
- its own min_replica_size asks for more groups than there are, and for more than the running job does.

The running job's min_replica_size is the one that most of its members give (of equally frequent ones the larger): one
group with a larger one, by mistake, is left out until enough groups are here; it never stops the others. While there is
no running job the largest one counts.

Invariants: nobody is held back for the sake of a replica that is in no quorum; what is held back never counts as
somebody to wait for, nor as a reason to form a new quorum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.reachability import hold_unreachable
from ft_core.protocol.lighthouse.reasons import held as delayed
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ft_core.protocol.lighthouse.view import Seen, View


@dataclass(frozen=True, slots=True)
class Choice:
    """Those who ask, divided into those that may be in the next quorum and the others."""

    candidates: Mapping[str, Seen]
    held: Mapping[str, str]
    """Those held back, each with the sentence why; the same words for as long as nothing changes."""
    need: int
    """The smallest quorum that the lighthouse and the job's min_replica_size allow."""
    at: float | None
    """When somebody who is held back may join although nothing happens before; None: never."""


def choose(view: View, asking: Mapping[str, Seen]) -> Choice:
    """Divide those who ask into candidates and those who are held back.

    Args:
        view: the room.
        asking: all living replicas with an open ask.
    """
    now = view.now
    held = {i: s.incomplete for i, s in asking.items() if s.incomplete}
    later = {i: s for i, s in asking.items() if s.admitted_at > now and i not in held}
    held |= {i: delayed(s) for i, s in later.items()}
    candidates = {i: s for i, s in asking.items() if i not in held}
    members = view.current.members if view.current else ()
    if members and any(s.ask.shrink_only for s in candidates.values() if s.ask):
        for replica_id in sorted(set(candidates) - set(members)):
            del candidates[replica_id]
            held[replica_id] = f"{replica_id} is not in the running quorum, which shall only shrink"
    apart = hold_unreachable(view, candidates, held)
    running = {i: s for i, s in _running(view, candidates, members).items() if i not in apart}
    if view.rules.places:
        _hold_surplus(candidates, running, held)
    need = _hold_larger_minimum(view, candidates, running, held)
    return Choice(candidates, held, need, min((s.admitted_at for s in later.values()), default=None))


def _running(view: View, candidates: Mapping[str, Seen], members: Collection[str]) -> dict[str, Seen]:
    """The running job: the members that ask, or, before the first of them does, those that can."""
    asking = {i: candidates[i] for i in members if i in candidates}
    return asking or {
        i: s for i in members if (s := view.seen.get(i)) is not None and s.up and s.admitted_at <= view.now
    }


def _hold_surplus(candidates: dict[str, Seen], running: Mapping[str, Seen], held: dict[str, str]) -> None:
    """A quorum holds at most MAX_REPLICAS groups: those of the running job, then who asked first."""
    surplus = len(set(candidates) | set(running)) - MAX_REPLICAS
    if surplus <= 0:
        return
    newcomers = sorted((s.asked_at, i) for i, s in candidates.items() if i not in running)
    for _, replica_id in newcomers[-surplus:]:
        del candidates[replica_id]
        held[replica_id] = f"{replica_id} waits for a place: a quorum holds at most {MAX_REPLICAS} groups"


def _hold_larger_minimum(
    view: View, candidates: dict[str, Seen], running: Mapping[str, Seen], held: dict[str, str]
) -> int:
    """Hold back whose min_replica_size is not met, while the running job's own is. Returns the smallest quorum."""
    if not view.rules.min_by_majority or not running:
        return max([view.min_replicas, *(s.minimum for s in candidates.values())])
    count = Counter(s.minimum for s in running.values())
    usual = max(count, key=lambda size: (count[size], size))
    here = {**candidates, **running}
    while True:
        over = [i for i, s in here.items() if s.minimum > max(usual, len(here))]
        if not over:
            return max(view.min_replicas, usual)
        for replica_id in over:
            own = here.pop(replica_id).minimum
            if candidates.pop(replica_id, None) is not None:
                held[replica_id] = (
                    f"{replica_id} asks for min_replica_size={own} (FT_MIN_REPLICAS), the running groups for {usual}: "
                    f"they go on without it until {own} groups are here; start it with {usual}"
                )
