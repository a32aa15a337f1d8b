"""What a room knows of one replica. Values only; `room.Room` is the only one to change them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.pauses import differs
from ft_core.protocol.types import VOID, Version

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.types import Ask, Quorum


@dataclass(slots=True)
class Record:
    """What is known of one replica."""

    hello: Hello
    life: Life
    since: float
    stable: Version
    generation: int
    ask: Ask | None = None
    asked_at: float = 0.0
    answered: tuple[int, Quorum] | None = None
    """R14: (seq, quorum) of the last answer, repeated if the same ask is presented again."""
    paused_until: float = 0.0
    back_at: float = 0.0
    """When its last pause ended."""
    pause_told: bool = False
    """Members of the current quorum believe it paused, or did: they are told how that goes on."""
    step: int = 0
    phase: str = ""
    admitted_at: float = 0.0
    held_back: str = ""
    """Why it may not join before that, if it could not build its process group (`build_backoff`)."""
    accused: bool = False
    """A member of its quorum reported a failed collective: it is not waited for any more (DESIGN 3.2)."""
    presumed_dead: bool = False
    """It is lost with its whole quorum, which had reported no commit: another process may take its id."""
    crash_counted: bool = False
    """Its end was counted as a crash (R15)."""
    told_lost: bool = False
    agreed: bool = False
    """It said goodbye after a fence that announced it: nobody has to abort because of it (R16)."""
    left_with: Version = VOID
    """The state it held when it said goodbye."""
    committed: bool = False
    """A fence completed at a state it held: it is not crash-looping."""
    twin_until: float = 0.0
    """Another living process has the same name; if it still lives then, this newcomer is refused. 0: no such thing."""
    incomplete: str = ""
    """Why it can neither go on nor ask: which of its ranks is missing. Stands until it asks with all of them."""
    proven: bool = False
    """It was in a quorum of the room: what it claims about the room's state counts (R18)."""
    stalled: str = ""
    """It is alive and did not come to the next quorum in time; the sentence that says so. Stays until it asks."""
    word_until: float = 0.0
    """A supervisor saw the end of a process of this name while this lease still stood: should the lease end by then,
    it was this process, and there is nothing to wait for."""

    @staticmethod
    def unseen(replica_id: str, presenter: Hello, now: float) -> Record:
        """A member of a presented quorum that has not been seen under this boot (R9)."""
        name = replica_id.rpartition(":")[0] or replica_id
        hello = replace(presenter, replica_id=replica_id, name=name, incarnation=0, generation=-1, members=())
        return Record(hello, Life.UNKNOWN, now, VOID, -1)

    def pauses(self, for_s: float, now: float) -> bool:
        """It is busy for at most `for_s` from now; 0: it is not. True if that is news."""
        before, self.paused_until = self.paused_until, now + for_s if for_s > 0 else 0.0
        if before and not self.paused_until:
            self.back_at = min(before, now)
        return differs(self.paused_until, before)

    def succeeded(self) -> None:
        """Another process has its id: nothing of what it asked or held is that one's."""
        self.ask = self.answered = None
        self.stable, self.committed, self.stalled, self.crash_counted = VOID, False, "", False
        self.proven = False

    def turns(self, life: Life, now: float) -> None:
        """Time has told. `since` stays unless it is gone: orphan_s counts from the end of the lease."""
        if life is Life.GONE:
            self.goes(now)
        self.life = life

    def goes(self, now: float) -> None:
        """It is certainly gone."""
        self.life, self.since, self.ask, self.stalled, self.incomplete = Life.GONE, now, None, "", ""
