"""Votes on attempts, and what became of them. Pure.

`Votes` is the leader's: what each rank has voted. `Verdicts` is what a process knows of the outcomes: the leader's
machine and every rank keep one. Both are keyed (quorum_id, attempt) and idempotent: a rank that votes again under the
same key changes nothing and gets the same answer, so callers retry freely.

Invariants: the first verdict on an attempt stands; so does the first vote of a rank, unless it is taken back before the
verdict is known; a verdict outlives a later break of its quorum (R0); what is remembered is bounded by MAX_OPEN_VOTES
and MAX_BROKEN.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ft_core.protocol.group.merge import is_decided, merge_votes
from ft_core.protocol.pauses import Pauses
from ft_core.protocol.pushes import Answer, Busy, Lost
from ft_core.protocol.types import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection

    from ft_core.protocol.pushes import Push

MAX_OPEN_VOTES = 8
"""Votes remembered: ranks are at most one attempt apart, so a handful covers every retry."""
MAX_BROKEN = 8
"""Quorums remembered as left by this group, and verdicts."""


class Votes:
    """The open votes of one group, keyed (quorum_id, attempt); bounded by MAX_OPEN_VOTES."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: OrderedDict[tuple[int, int], dict[int, Verdict]] = OrderedDict()

    def __repr__(self) -> str:
        keys = ", ".join(f"{quorum:#x}.{attempt}: {len(v)}" for (quorum, attempt), v in self._open.items())
        return f"Votes(of {self._world_size}: {keys or 'none open'})"

    def cast(self, rank: int, vote: Verdict) -> Verdict | None:
        """Record a rank's vote. Returns the group's verdict if it is decided.

        The first vote of a rank stands, but for one that waits no longer: until the verdict is known it may take its
        vote back, by voting BROKEN.
        """
        key = (vote.quorum_id, vote.attempt)
        votes = self._open.setdefault(key, {})
        if vote.outcome is Outcome.BROKEN and not is_decided(votes, self._world_size):
            votes[rank] = vote
        votes.setdefault(rank, vote)
        while len(self._open) > MAX_OPEN_VOTES:
            self._open.popitem(last=False)
        return merge_votes(votes, self._world_size)

    def result(self, quorum_id: int, attempt: int) -> Verdict | None:
        """The group's verdict on an attempt, if it is decided."""
        votes = self._open.get((quorum_id, attempt))
        return merge_votes(votes, self._world_size) if votes else None

    def undecided(self, quorum_id: int) -> dict[int, tuple[int, ...]]:
        """Attempts of a quorum on which some ranks have voted and the group has no verdict: attempt -> those ranks."""
        return {
            attempt: tuple(sorted(votes))
            for (quorum, attempt), votes in self._open.items()
            if quorum == quorum_id and not is_decided(votes, self._world_size)
        }

    def validate(self) -> None:
        """Every invariant."""
        assert len(self._open) <= MAX_OPEN_VOTES, self
        for (quorum_id, attempt), votes in self._open.items():
            assert set(votes) <= set(range(self._world_size)), self
            assert all((vote.quorum_id, vote.attempt) == (quorum_id, attempt) for vote in votes.values()), self


class Verdicts:
    """What is known of a group's attempts: verdicts, quorums that it has left, and whom a vote waits for meanwhile."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[tuple[int, int], Verdict] = OrderedDict()
        self._broken: OrderedDict[int, str] = OrderedDict()
        self.pauses = Pauses()
        """Of other groups, and of this group: whoever waits in one of its rings for a busy one votes late."""

    def __repr__(self) -> str:
        return (
            f"Verdicts({len(self._verdicts)}, left: {', '.join(f'{quorum:#x}' for quorum in self._broken) or 'none'})"
        )

    @property
    def broken(self) -> tuple[int, ...]:
        """Quorums that the group has left because one of its ranks could not go on."""
        return tuple(self._broken)

    def decided_in(self, quorum_ids: Collection[int]) -> list[Verdict]:
        """The verdicts that are remembered of these quorums, in the order in which they were reached."""
        return [verdict for verdict in self._verdicts.values() if verdict.quorum_id in quorum_ids]

    def decided(self, verdict: Verdict) -> None:
        """The group's verdict on an attempt is known; the first one stands."""
        self._verdicts.setdefault((verdict.quorum_id, verdict.attempt), verdict)
        while len(self._verdicts) > MAX_BROKEN:
            self._verdicts.popitem(last=False)

    def broke(self, quorum_id: int, reason: str) -> bool:
        """The group is broken in a quorum. True if that is new."""
        new = quorum_id not in self._broken
        self._broken.setdefault(quorum_id, reason)
        while len(self._broken) > MAX_BROKEN:
            self._broken.popitem(last=False)
        return new

    def take(self, push: Push, replica_id: str, now: float) -> None:
        """What a rank of group `replica_id` learns from a push of its leader."""
        match push:
            case Verdict():
                self.decided(push)
            case Lost() if replica_id in push.lost and not push.moves:
                self.broke(push.quorum_id, "another rank of this group is broken")
            case Busy():
                self.pauses.announce(push.replica_id, push.for_s, now)
            case Answer():
                self.pauses.forget()  # its members announce what they do anew
            case _:
                pass

    def result(self, quorum_id: int, attempt: int) -> Verdict | None:
        """The group's verdict, if it is known. A decided verdict outlives a later break (R0)."""
        verdict = self._verdicts.get((quorum_id, attempt))
        if verdict is None and quorum_id in self._broken:
            verdict = Verdict(quorum_id, attempt, Outcome.BROKEN, self._broken[quorum_id])
        return verdict

    def validate(self) -> None:
        """Every invariant."""
        assert len(self._verdicts) <= MAX_BROKEN, self
        assert len(self._broken) <= MAX_BROKEN, self
        assert all((v.quorum_id, v.attempt) == key for key, v in self._verdicts.items()), self
