"""The view of a room that a decision looks at, taken from its records. Pure.

How it works. `view_of` copies what is known of each replica into the small values that `quorum_rule.decide` reads, and
takes the durations that the replicas brought: the room's are the largest of those who train, because nobody may be
taken as gone, or be waited for in vain, sooner than it was configured to be.

Invariant: a replica that was in no quorum changes no duration while others train.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.admission import earlier_process
from ft_core.protocol.lighthouse.view import Current, Life, Seen, View
from ft_core.protocol.types import UNTRAINED
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.lighthouse.claims import Claims
    from ft_core.protocol.lighthouse.expected_groups import ExpectedGroups
    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.rules import Rules
    from ft_core.protocol.lighthouse.succession import Succession
    from ft_core.protocol.types import Quorum
    from ft_core.settings import LighthouseSettings

ORPHAN_S = 900.0
"""orphan_s of a room in which nobody named one."""


def view_of(
    records: Mapping[str, Record],
    current: Current | None,
    expected: ExpectedGroups,
    settings: LighthouseSettings,
    claims: Claims,
    rules: Rules,
    now: float,
) -> View:
    """The room at this instant, without what its shell's start decides (boot and restart windows).

    Claims that do not count (R18) are left out, so that no rule of the decision has to know of them.
    """
    settled = claims.settled(records, current, rules)
    living = {i: r for i, r in records.items() if r.life is not Life.GONE}
    judged = rules.r18_claims and (settled or claims.formed)
    hellos = [r.hello for r in living.values() if r.proven or not judged] or [r.hello for r in living.values()]
    stable = {i: claims.stable(r, settled=settled) if rules.r18_claims else r.stable for i, r in records.items()}
    asks = {i: claims.ask(r, settled=settled) for i, r in records.items()}
    usable = any(ask is not None and ask.version >= UNTRAINED for ask in asks.values())
    if not usable and not any(stable[i] >= UNTRAINED for i, r in living.items() if r.ask is None):
        asks = {i: r.ask for i, r in records.items()}  # nobody of the room holds a state any more
    leased = [h for h in hellos if not h.unary]
    leased = [h for h in leased if h.quorum_id] or leased
    return View(
        now=now,
        seen={
            i: Seen(
                i, r.life, r.since, stable[i], asks[i], r.asked_at, r.paused_until, r.phase, r.admitted_at,
                earlier_process(r.hello, records) if r.same_name_until else "", r.incomplete, r.back_at,
                r.hello.min_replicas, r.held_back,
            )
            for i, r in records.items()
        },
        current=current,
        min_replicas=settings.min_replicas,
        expected=expected.number(hellos),
        trained=expected.trained,
        join_timeout_s=settings.join_timeout_s,
        join_s=max([settings.join_timeout_s, *(h.join_s for h in leased)]),
        orphan_s=max((h.orphan_s for h in leased), default=ORPHAN_S),
        rules=rules,
    )  # fmt: skip


def of_pair(view: View, succession: Succession) -> View:
    """What the other lighthouse of a pair adds: until both met it may have had leases of those who are away (R22)."""
    partner = succession.partner
    if not partner.address or not view.rules.r22_met:
        return view
    entered = next((b.members for b in succession.bases if b.quorum_id == succession.entered), ())
    return replace(view, met_at=partner.met_at, holders=(*entered, *succession.theirs.members))


def peers_of(
    current: Current | None,
    announced: Quorum | None,
    records: Mapping[str, Record],
    me: str,
    most: int = MAX_REPLICAS,
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(replica_id, heal addresses) of living members of the quorum in force, without `me`: whom to copy from.

    At most `most`, and each newcomer gets others of them: so the donors share the work.
    """
    if current is None:
        return ()
    first = _place(me, len(current.members)) if most < len(current.members) else 0
    asked: dict[str, tuple[str, ...]] | None = None
    found: list[tuple[str, tuple[str, ...]]] = []
    for replica_id in (*current.members[first:], *current.members[:first]):
        if len(found) == most:
            break
        record = records.get(replica_id)
        if replica_id == me or record is None or record.life is not Life.UP:
            continue
        addresses = record.hello.heal_addresses
        if not addresses:
            if asked is None:
                asked = {m.replica_id: m.heal_addresses for m in announced.members} if announced else {}
            addresses = asked.get(replica_id, ())
        found.append((replica_id, addresses))
    return tuple(found)


def _place(replica_id: str, places: int) -> int:
    return int.from_bytes(hashlib.blake2s(replica_id.encode(), digest_size=4).digest(), "big") % places
