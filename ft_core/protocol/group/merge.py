"""What the ranks of a replica group say, made into what the group says: one ask, one verdict. Pure functions.

Two questions are answered once for all ranks: "what does the group ask for?" (when every rank has asked) and "what
became of attempt k of quorum q?" (when every rank has voted, R12).

Invariants: a group commits only if every rank's ring said commit, and applies it on all ranks or on none; one broken
rank makes the group broken; flags are the OR over all ranks; if ranks hold different states the group's version is
VOID, so the whole group heals.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Any

from ft_core.protocol.lighthouse.model_signature import NOT_KNOWN, SETTING, first_differing, settings_in
from ft_core.protocol.types import VOID, Ask, Outcome, Verdict

WEIGHTS = "have set different batch weights"
UNEVEN = "a group contributed on some of its ranks only: a rank of it could not be healed"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The ranks of a group cannot ask together; `reason` is for the user."""

    reason: str


def merge_asks(asks: dict[int, Ask], world_size: int) -> Ask | Mismatch | None:
    """The group's ask, once every rank has asked; None before.

    `heal_addresses` of a rank's ask holds its own address only; the group's holds one per rank, in order. The ranks of
    a group go through their data together, so they are at one batch; one without data says nothing of it.
    """
    if len(asks) < world_size:
        return None
    ordered = [asks[rank] for rank in range(world_size)]
    first = ordered[0]
    for field in ("min_replicas", "group_world_size", "allow_heal", "init_sync", "shrink_only"):
        values = [getattr(ask, field) for ask in ordered]
        if any(value != values[0] for value in values):
            return Mismatch(f"the ranks of {first.replica_id} differ in {field}: {values}; pass the same on all ranks")
    told = [settings_in(ask.signature_lines) for ask in ordered if ask.signature_lines]
    found = next((found for other in told[1:] if (found := first_differing(told[0], other))), None)
    if found is not None:
        name = found[0]
        values = [settings.get(name, NOT_KNOWN) for settings in told]
        return Mismatch(f"the ranks of {first.replica_id} differ in {name}: {values}; pass the same on all ranks")
    same = all(ask.version == first.version and ask.lineage == first.lineage for ask in ordered)
    # Untrained ranks draw their lineage on their own: at step 0 they need not agree. The group's is then a mixture of
    # all, so that a group of which only some ranks have the common initial state does not pass for one that has it.
    fresh = all(ask.version == first.version and ask.version.step == 0 for ask in ordered)
    unreachable = {i for ask in ordered for i in ask.unreachable}
    return replace(
        first,
        version=first.version if same or fresh else VOID,
        lineage=first.lineage if same else _mixture([ask.lineage for ask in ordered]),
        failed=any(ask.failed for ask in ordered),
        unbuilt=max(ordered, key=lambda ask: (ask.unbuilt_here, bool(ask.unbuilt))).unbuilt,
        unbuilt_here=any(ask.unbuilt_here for ask in ordered),
        reason=next((ask.reason for ask in ordered if ask.failed), first.reason),
        heal_addresses=tuple(address for ask in ordered for address in ask.heal_addresses[:1]),
        heals_before_forward=all(ask.heals_before_forward for ask in ordered),
        heals_late=any(ask.heals_late for ask in ordered),
        moves=False,
        from_scratch=any(ask.from_scratch for ask in ordered),
        cast=all(ask.cast for ask in ordered),  # a commit takes a fence in the ring of each rank (R22)
        fenced=all(ask.fenced for ask in ordered),
        stable=min(ask.stable for ask in ordered),
        position=max(ask.position for ask in ordered),
        **_signature(ordered),
        unreachable=tuple(sorted(unreachable)),
        reached=tuple(sorted({i for ask in ordered for i in ask.reached} - unreachable)),
    )


def _signature(asks: list[Ask]) -> dict[str, Any]:
    """The group's signature: what its ranks have in common, or all of theirs, as a pipeline's stages have.

    The ranks of one number meet in a ring, so groups may meet only if they are alike on every rank.
    """
    first = asks[0]
    if all(ask.signature == first.signature for ask in asks):
        return {}
    lines = list(first.signature_lines)
    for rank, ask in enumerate(asks):
        if ask.signature != first.signature:
            lines += [f"on group rank {rank}: {line}" for line in ask.signature_lines if not line.startswith(SETTING)]
    return {"signature": _mixture([ask.signature for ask in asks]), "signature_lines": tuple(lines)}


def _mixture(lineages: list[int]) -> int:
    text = b"".join(struct.pack("<Q", lineage & (2**64 - 1)) for lineage in lineages)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _weighed_alike(lead: Verdict, votes: list[Verdict]) -> Verdict:
    """Where the ranks of a group make each gradient together (FSDP2), each has to count it as the others do.

    Differences in another group show in the sums of the rings: that step is lost, and no more of this group.
    """
    own = tuple(vote.own_weight for vote in votes if vote.own_weight is not None)
    if len(set(own)) > 1:
        reason = f"the ranks of this group {WEIGHTS}"
        return replace(lead, outcome=Outcome.VETO, reason=reason, own_weights=own)
    if own and any(vote.weight != lead.weight for vote in votes):
        reason = f"the ranks of another group {WEIGHTS}"
        return replace(lead, outcome=Outcome.VETO, reason=reason)
    return lead


def is_decided(votes: dict[int, Verdict], world_size: int) -> bool:
    """Whether `merge_votes` gives a verdict."""
    return len(votes) >= world_size or any(vote.outcome is Outcome.BROKEN for vote in votes.values())


def merge_votes(votes: dict[int, Verdict], world_size: int) -> Verdict | None:
    """The group's verdict, once every rank has voted; None before (a broken vote decides at once).

    If a group's share is in the rings of some ranks only (the heal of one of its ranks failed), nobody commits: its
    samples are neither trained on nor not, and what its other ranks gave was computed with that rank's foreign state.
    All groups decide that alike, because every group has a rank in each ring and each ring tells all its members the
    same. It cannot hold the others for ever (R11): whoever's heal failed in an agreed attempt asks from then on not to
    be counted on before it is healed (`Ask.heals_late`), and a group does if one of its ranks does. So it has no share
    in the next quorum, and costs the others this one attempt.
    """
    broken = next((vote for _, vote in sorted(votes.items()) if vote.outcome is Outcome.BROKEN), None)
    if broken is not None or not is_decided(votes, world_size):
        return broken
    ordered = [votes[rank] for rank in range(world_size)]
    vetoes = [vote for vote in ordered if vote.outcome is Outcome.VETO]
    lead = vetoes[0] if vetoes else ordered[0]
    if not vetoes and any(vote.missing != lead.missing for vote in ordered):
        lead = replace(lead, outcome=Outcome.VETO, reason=UNEVEN)
    elif not vetoes:
        lead = _weighed_alike(lead, ordered)
    return replace(
        lead,
        own_weight=None,
        change=any(vote.change for vote in ordered),
        healed=all(vote.healed for vote in ordered),
        exhausted=any(vote.exhausted for vote in ordered),
        stop=any(vote.stop for vote in ordered),
        behind=any(vote.behind for vote in ordered),
        drain=any(vote.drain for vote in ordered),
        lapsed=any(vote.lapsed for vote in ordered),
        trails=any(vote.trails for vote in ordered),
        weight=ordered[0].weight,
        contributors=ordered[0].contributors,
    )
