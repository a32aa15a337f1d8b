"""The machine of a rank above 0 of a replica group: what it concludes when its leader is away (R12). Pure.

Theory of operation. A rank has one stream to the leader of its group, group rank 0. It is told that the stream is open
or has ended, and what the rank asks and votes and is told; `due` returns what follows from the time that has passed,
and `next_at` says when to call it. While the stream is away:

- after the grace nothing that the leader decides reaches this rank in time any more: it is broken in its quorum, as
  its leader says of it (`protocol.group.group`);
- a liveness timeout later, if it has not asked for the next quorum at a boundary, it waits for the leader in a
  collective of the group, which ends in half an hour or never: it has to end. So it has to if it has asked, and the
  stream ended in silence: a leader that waits for a quorum itself answers keepalives, and without it there is none;
- after `connect_s` it gives up, also if the leader has never come.

Invariants: each of the three is concluded once per absence; nothing is while the stream is open; an answer to another
ask than the open one is none; a vote is open at most in the newest quorum.

Ownership: one shell, which holds a lock around every call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ft_core.protocol.group.ranks import ends, leaderless
from ft_core.protocol.group.settings import GroupRules
from ft_core.protocol.lighthouse.replica_table import CLOSED_BEFORE
from ft_core.protocol.pushes import Answer, Lost, Order
from ft_core.protocol.types import Verdict

if TYPE_CHECKING:
    from ft_core.protocol.pushes import Push


@dataclass(frozen=True, slots=True)
class FollowerSettings:
    """Of one rank. Durations in seconds."""

    replica_id: str
    rank: int
    grace_s: float
    liveness_s: float
    connect_s: float
    rules: GroupRules = field(default_factory=GroupRules)


@dataclass(frozen=True, slots=True)
class Broken:
    """This rank is broken in `quorum_id`: its leader cannot be reached."""

    quorum_id: int
    reason: str

    def told(self, replica_id: str) -> Lost:
        """What the rank would have been told, had its leader been there to do so."""
        return Lost(self.quorum_id, (replica_id,))


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The leader has not been reached for `for_s`: refused for good."""

    for_s: float


class _Next(Enum):
    BREAK = "break"
    END = "end"
    GIVE_UP = "give up"


class Follower:
    """What is open between a rank and its leader. See the module's theory of operation."""

    def __init__(self, settings: FollowerSettings) -> None:
        self.settings = settings
        self.quorum_id = 0
        """Of the quorum that the group has entered last; 0: none."""
        self.asking: int | None = None
        """The seq of the ask that is not answered."""
        self._moves = False
        """That ask came out of an open step, whose script may wait for the leader inside the group (R19)."""
        self.vote: Verdict | None = None
        """The vote on which there is no verdict."""
        self._next: tuple[float, _Next] | None = None
        self._silent = False
        """The stream did not end by itself: the leader had not answered any more."""

    def __repr__(self) -> str:
        waits = f", {self._next[1].value} at {self._next[0]:.1f}" if self._next else ""
        return f"Follower(rank {self.settings.rank} of {self.settings.replica_id}, quorum={self.quorum_id:#x}{waits})"

    @property
    def next_at(self) -> float | None:
        """When `due` has something to say; None: not before the stream ends again."""
        return self._next[0] if self._next else None

    # ------------------------------------------------------------ the stream

    def started(self, now: float) -> None:
        """It begins to connect."""
        self._next = now + self.settings.connect_s, _Next.GIVE_UP

    def opened(self) -> None:
        """The leader has welcomed this rank."""
        self._next = None

    def ended(self, now: float, silence_s: float) -> None:
        """The stream was open and is not any more; the leader may only have blinked.

        Args:
            now: the time.
            silence_s: how long nothing had arrived on it. For most of a liveness timeout: the leader did not answer any
                more; less: the connection was closed.
        """
        self._next = now + self.settings.grace_s, _Next.BREAK
        self._silent = silence_s >= CLOSED_BEFORE * self.settings.liveness_s

    def due(self, now: float) -> Broken | Order | Unreachable | None:
        """What has to be concluded by now from the leader's absence. Call again until it is None."""
        settings = self.settings
        while self._next is not None and now >= self._next[0]:
            at, what = self._next
            match what:
                case _Next.BREAK:
                    self._next = at + settings.liveness_s, _Next.END
                    reason = f"group rank 0 of {settings.replica_id} is gone (the connection to it ended)"
                    return Broken(self.quorum_id, reason)
                case _Next.END:
                    self._next = at + max(0.0, settings.connect_s - settings.liveness_s), _Next.GIVE_UP
                    if self.asking is None or self._moves:
                        return Order(kill=True, reason=ends(settings.replica_id, (0,), (settings.rank,)))
                    if self._silent and settings.rules.r12_silent:
                        return Order(kill=True, reason=leaderless(settings.replica_id, (settings.rank,)))
                case _Next.GIVE_UP:
                    self._next = None
                    return Unreachable(settings.connect_s)
        return None

    # ------------------------------------------------------------ what is open

    def asks(self, seq: int, *, moves: bool) -> None:
        """This rank's part of the group's ask. `moves`: out of an open step, which is to go on in the next quorum."""
        self.asking, self._moves = seq, moves

    def votes(self, vote: Verdict) -> None:
        """This rank's vote, or the one it puts in its place."""
        self.vote = vote

    def took(self, push: Push) -> bool:
        """The leader says something; False: it is an answer to nothing that is open."""
        match push:
            case Answer():
                if self.asking != push.seq:
                    return False
                self.asking = None
                if self.quorum_id != push.quorum.quorum_id:  # else the same answer, once more
                    self.vote, self.quorum_id = None, push.quorum.quorum_id
            case Verdict():
                vote = self.vote
                if vote is not None and (vote.quorum_id, vote.attempt) == (push.quorum_id, push.attempt):
                    self.vote = None
            case _:
                pass
        return True
