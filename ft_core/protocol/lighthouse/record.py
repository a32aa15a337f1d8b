"""`Record`: a room's knowledge of one replica. Pure; each field names what always holds, and `validate` checks it.

Instants are seconds of the clock that the room is given. Only `room.Room`, and the parts it hands them to, change
records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.pauses import differs
from ft_core.protocol.types import VOID, Version

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.events import Hello, Left, Progress
    from ft_core.protocol.types import Ask, Quorum


@dataclass(slots=True)
class Record:
    """The record of one replica."""

    hello: Hello
    """Its presentation when the lease was opened, brought up to date by what it asked and reported since."""
    life: Life
    since: float
    """When `life` began; of a lost replica, when its lease ended, because orphan_s counts from then."""
    stable: Version
    """The newest version that it reported as held by every member of its quorum (R2)."""
    generation: int
    """Its newest stream, which alone may change its life (R15); -1: it has none. With a lease there is one."""
    heard_at: float = 0.0
    """When it last sent something."""
    ask: Ask | None = None
    """Its open ask. Only a replica with a lease has one."""
    asked_at: float = 0.0
    """When it began to ask: an ask that replaces another one does not begin again."""
    answered: tuple[int, Quorum] | None = None
    """(seq, quorum) of the last answer, which is repeated if the same ask is presented again (R14). It is a member."""
    paused_until: float = 0.0
    """It announced to be busy until then at most; 0: it is not."""
    back_at: float = 0.0
    """When its last pause ended."""
    pause_told: bool = False
    """Members of the current quorum believe it paused, or did: they are notified how that goes on."""
    step: int = 0
    """The step it last reported."""
    phase: str = ""
    """The phase that it last reported to be in."""
    healed: tuple[int, int] = (0, 0)
    """Bytes that it has of the state that it receives, and of all of it, as it last reported; for users only."""
    admitted_at: float = 0.0
    """It is no candidate before this instant. Never before `same_name_until`."""
    held_back: str = ""
    """Why it may not join before that, if it could not build its process group (`build_backoff`)."""
    peer_reported_failure: bool = False
    """A member of its quorum reported a failed collective: it is not waited for any more. Only without a lease."""
    presumed_dead: bool = False
    """It is lost with its whole quorum, which had reported no commit: another process may take its id. Only of the lost
    and the gone."""
    crash_counted: bool = False
    """Its end was counted as a crash (R15)."""
    loss_announced: bool = False
    """The members of the current quorum know that it is lost, or that it leaves."""
    agreed: bool = False
    """It said goodbye after a ballot that announced it: nobody has to abort because of it (R16)."""
    left_with: Version = VOID
    """The state it held when it said goodbye."""
    committed: bool = False
    """A step was committed in a quorum with it: it is not crash-looping (R15)."""
    same_name_until: float = 0.0
    """Another living process has its name; if that still lives then, this newcomer is refused. 0: no such thing."""
    incomplete: str = ""
    """Why it can neither go on nor ask: which of its ranks is missing (R12). Stands until it asks with all of them,
    opens a lease anew, or is gone."""
    proven: bool = False
    """It was in a quorum of the room: what it claims about the room's state counts (R18)."""
    stalled: str = ""
    """The sentence about a replica that lives and did not come to the next quorum in time. Stands until it asks."""
    ended_hint_until: float = 0.0
    """A supervisor saw the end of a process of this name while this lease still stood: should the lease end by then,
    it was this process, and there is nothing to wait for."""

    @staticmethod
    def unseen(replica_id: str, presenter: Hello, now: float) -> Record:
        """The record of a member of a presented quorum that has not been seen under this boot (R9)."""
        name = replica_id.rpartition(":")[0] or replica_id
        hello = replace(presenter, replica_id=replica_id, name=name, incarnation=0, generation=-1, members=())
        return Record(hello, Life.UNKNOWN, now, VOID, -1)

    def validate(self, replica_id: str) -> None:
        """Raise AssertionError unless what the fields promise holds."""
        assert self.hello.replica_id == replica_id
        assert self.generation >= 0 or self.life not in (Life.UP, Life.CLOSED), "a lease without a stream"
        assert self.ask is None or self.life is Life.UP, "an ask without a lease"
        assert self.ask is None or self.ask.replica_id == replica_id
        assert self.ask is None or not self.stalled, "who asks has come"
        assert self.answered is None or replica_id in self.answered[1].ids, "answered with a quorum of others"
        assert self.admitted_at >= self.same_name_until
        assert self.life is not Life.UP or not self.peer_reported_failure
        assert not self.presumed_dead or self.life in (Life.LOST, Life.GONE)
        assert self.life is not Life.GONE or not (self.stalled or self.incomplete), "nothing is expected of the gone"

    def is_other_process(self, hello: Hello) -> bool:
        """Whether the lease that was seen last belonged to another process than the one that says hello."""
        return self.generation >= 0 and self.hello.incarnation != hello.incarnation

    def members_of(self, quorum_id: int) -> tuple[str, ...]:
        """Of the quorum that it presented, or entered here; (): it is another one."""
        return self.hello.members if self.hello.quorum_id == quorum_id else ()

    def reports(self, progress: Progress, now: float) -> bool:
        """It reports what it does. True: it knows of a newer stable version than before."""
        self.heard_at = now
        self.step, self.phase, self.healed = progress.step, progress.phase, progress.healed
        newer, self.stable = progress.stable > self.stable, max(self.stable, progress.stable)
        if progress.heal_addresses and progress.heal_addresses != self.hello.heal_addresses:
            self.hello = replace(self.hello, heal_addresses=progress.heal_addresses)
        if progress.paused_s > 0:
            self.stalled = ""
        return newer

    def brings(self, ask: Ask) -> None:
        """An ask shows what its group is like now."""
        hello = self.hello
        if (hello.group_world_size, hello.min_replicas) != (ask.group_world_size, ask.min_replicas):
            self.hello = replace(hello, group_world_size=ask.group_world_size, min_replicas=ask.min_replicas)
        if ask.signature_lines:
            self.hello = replace(self.hello, signature=ask.signature, signature_lines=ask.signature_lines)

    def asks(self, ask: Ask, now: float) -> None:
        """It asks for the next quorum."""
        self.heard_at = now
        if self.ask is None:
            self.asked_at = now
        self.ask, self.stalled, self.incomplete = ask, "", ""
        self.step, self.stable = max(ask.version.step, 0), max(self.stable, ask.stable)

    def enters(self, seq: int, quorum: Quorum) -> None:
        """Its ask `seq` is answered: it is a member of a new quorum."""
        self.ask, self.answered = None, (seq, quorum)
        self.hello = replace(self.hello, quorum_id=quorum.quorum_id, members=quorum.ids)
        self.loss_announced = self.peer_reported_failure = self.pause_told = False
        self.left_with = VOID

    def pauses(self, for_s: float, now: float) -> bool:
        """It is busy for at most `for_s` from now; 0: it is not. True if that is news."""
        before, self.paused_until = self.paused_until, now + for_s if for_s > 0 else 0.0
        if before and not self.paused_until:
            self.back_at = min(before, now)
        return differs(self.paused_until, before)

    def opens(self, hello: Hello, now: float) -> None:
        """Its lease is open (anew): what was believed because there was none is over."""
        self.heard_at = now
        self.pauses(hello.paused_s, now)
        self.peer_reported_failure = self.loss_announced = self.agreed = False
        self.ended_hint_until = 0.0
        self.incomplete = ""  # if a rank is still missing, it is reported once more

    def outlives(self, until: float) -> None:
        """Another living process has its name: it is no candidate before that one had the time to end."""
        self.same_name_until = until
        self.admitted_at = max(self.admitted_at, until)

    def succeeded(self) -> None:
        """Another process has its id: nothing of what it asked or held is that one's."""
        self.ask = self.answered = None
        self.stable, self.committed, self.stalled, self.crash_counted = VOID, False, "", False
        self.proven = False

    def turns(self, life: Life, now: float) -> None:
        """Time has shown what became of it. `since` stays unless it is gone."""
        if life is Life.GONE:
            self.goes(now)
        self.life = life

    def goes(self, now: float) -> None:
        """It is certainly gone."""
        self.life, self.since, self.ask, self.stalled, self.incomplete = Life.GONE, now, None, "", ""

    def leaves(self, goodbye: Left, now: float) -> None:
        """It said goodbye."""
        # With an open ask it leaves a quorum that has ended without it: nobody waits there for its collectives.
        self.loss_announced = self.agreed = goodbye.agreed or (self.ask is not None and not self.ask.failed)
        self.goes(now)
        # Nothing that is still under way on its stream brings it back.
        self.stable, self.left_with, self.generation = VOID, goodbye.version, -1
