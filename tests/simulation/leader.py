"""A replica group's inner control plane in the simulation: the real machine of its leader, and a stream per other rank.

`Leader` is the shell around a `protocol.group.Group`: it performs its effects on the simulated network. A `RankLink` is
what one rank keeps of it, the shell around a `protocol.group.follower.Follower`, as `control.link.RankControl` is: what
is open is presented anew on every new `RankStream`. Rank 0 shares a process with the leader and needs no stream. A
stream is in order, and what is under way is lost when it breaks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ft_core.protocol.group import events as ev
from ft_core.protocol.group.follower import Broken, Follower, FollowerSettings, Unreachable
from ft_core.protocol.group.group import Group as Machine
from ft_core.protocol.group.settings import GroupSettings
from ft_core.protocol.group.votes import Verdicts
from ft_core.protocol.pushes import Acked, Answer, Order, Push, Welcome
from ft_core.protocol.types import Ask, Verdict
from tests.simulation import encoding
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.simulation.group import Group
    from tests.simulation.rank import Rank


class Leader:
    """The shell around one group's machine."""

    def __init__(self, group: Group) -> None:
        config = group.world.config
        self.world, self.group = group.world, group
        self.machine = Machine(
            GroupSettings(
                group.rid, config.ranks, config.liveness_s, config.grace_s, config.quorum_s, rules=config.group_rules
            )
        )
        self.links: list[RankLink] = []
        self._events: deque[ev.Event] = deque()
        self._handling = False
        self._wake_at = -1.0

    def start(self) -> None:
        """The leader's process is up."""
        self.links = [RankLink(self, rank) for rank in self.group.ranks]
        self.handle(ev.RankJoined(0, 1))
        self.handle(ev.Started(0))

    def handle(self, event: ev.Event) -> None:
        """One event in, all effects out. What these bring about in this process comes after them."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            effects = self.machine.handle(self._events.popleft(), self.world.now)
            try:
                self.machine.validate()
            except AssertionError as broken:
                raise Violation("R12", f"{self.machine!r}: {broken}") from broken
            for effect in effects:
                self._perform(effect)
        self._handling = False
        wake = self.machine.next_at
        if wake is not None and (wake < self._wake_at or self._wake_at <= self.world.now):
            self._wake_at = wake
            self.world.at(max(0.0, wake - self.world.now), self.group, self._tick, wake)

    def _tick(self, wake: float) -> None:
        if wake == self._wake_at and not self.group.done:
            self._wake_at = -1.0
            self.handle(ev.Tick())

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Tell():
                self.links[effect.rank].push(effect.push)
            case ev.TellAll():
                for link in self.links:
                    link.push(effect.push)
            case ev.Decide():
                for rank in effect.to:
                    self.links[rank].push(effect.verdict)
            case ev.Announce():
                for rank, seq in effect.to:
                    self.links[rank].push(Answer(seq, effect.quorum))
            case ev.Refuse():
                self.group.refused(effect.error)
            case ev.Note():
                self.world.say("%s", effect.text)
            case _:
                self._tell_lighthouse(effect)

    def _tell_lighthouse(self, effect: ev.AskLighthouse | ev.ReportIncomplete | ev.RenewLease) -> None:
        match effect:
            case ev.AskLighthouse():
                self.group.ask(effect.ask)
            case ev.ReportIncomplete():
                self.group.report_incomplete(effect.quorum_id, effect.reason)
            case ev.RenewLease():
                self.group.paused_until = self.world.now + effect.paused_s
                self.group.report()


class RankLink:
    """One rank's way to its leader."""

    def __init__(self, leader: Leader, rank: Rank) -> None:
        self.world, self.leader, self.rank, self.index = leader.world, leader, rank, rank.index
        self.verdicts = Verdicts()
        self.stream: RankStream | None = None
        """As the rank sees it."""
        self.served: RankStream | None = None
        """As the leader sees it."""
        self.cut = False
        """The rank cannot open a stream to its leader."""
        config = self.world.config
        self.machine = Follower(
            FollowerSettings(
                rank.group.rid, self.index, config.grace_s, config.liveness_s, config.quorum_s, config.group_rules
            )
        )
        self._open_ask: Ask | None = None
        self._waits_for: Verdict | None = None
        """The vote whose verdict the rank's script waits for."""
        self._own_breaks: set[int] = set()
        """Quorums that this rank has left before its leader said so."""

    # ------------------------------------------------------------ the rank's end

    def open(self) -> None:
        """Open a stream; tried again until it works. The leader's own rank has none."""
        if self.index == 0 or self.rank.group.done or (self.stream is not None and self.stream.client_open):
            return
        if self.cut:
            self.world.at(self.world.between(0.3, 1.0) * self.world.config.reconnect_s, self.rank, self.open)
            return
        self.stream = RankStream(self)
        self.stream.send(ev.RankJoined(self.index, 1))

    def leader_silent(self, stream: RankStream) -> None:
        """The leader has not answered the rank's keepalives for a liveness timeout."""
        if self.rank.group.frozen and stream.client_open:
            self.down(stream, self.world.config.liveness_s)

    def down(self, stream: RankStream, silence_s: float = 0.0) -> None:
        """The rank sees its stream end."""
        if stream is self.stream:
            stream.client_open = stream.ready = False
            self.machine.ended(self.world.now, silence_s)
            self._wake()
            self.world.at(self.world.between(0.0, 0.03), self.rank, self.open)

    def _wake(self) -> None:
        if self.machine.next_at is not None:
            self.world.at(max(0.0, self.machine.next_at - self.world.now), self.rank, self._absent)

    def _absent(self) -> None:
        """What follows from the leader's absence."""
        while not self.rank.group.done and (said := self.machine.due(self.world.now)) is not None:
            match said:
                case Broken():
                    if self.verdicts.broke(said.quorum_id, said.reason):
                        self._own_breaks.add(said.quorum_id)
                        self._look()
                        self.rank.on_push(said.told(self.rank.group.rid))
                case Order():
                    self.rank.on_push(said)
                case Unreachable():
                    self.rank.on_push(Order(kill=True, reason="group rank 0 was not reached"))
            self._wake()

    def renew(self) -> None:
        """Renew the stream: what this rank does, and the age of the group's lease in return."""
        if self.index and not self.rank.group.done:
            self.progress()
            self.world.at(self.world.config.progress_s * self.world.between(0.8, 1.0), self.rank, self.renew)

    def progress(self) -> None:
        """What this rank does: it is busy for at most so long."""
        self._send(ev.RankProgress(self.index, "busy", max(0.0, self.rank.busy_until - self.world.now)))

    def ask(self, ask: Ask) -> None:
        """This rank's part of the group's ask."""
        self._open_ask = ask
        self.machine.asks(ask.seq, moves=ask.moves)
        self._send(ev.RankAsked(self.index, ask))

    def vote(self, vote: Verdict) -> None:
        """This rank's vote; the group's verdict settles the attempt."""
        self._waits_for = vote
        self.machine.votes(vote)
        self._send(ev.RankVoted(self.index, vote))
        self._look()

    def expire(self, broken: Verdict) -> None:
        """The other ranks have not voted in time: the vote is taken back, and the leader answers that, if it can."""
        if self.leader.machine.settings.rules.r12_withdraws:
            self.vote(broken)
            self.world.at(self.world.config.grace_s, self.rank, self._expired, broken, True)
        else:
            self._expired(broken, alone=False)

    def _expired(self, broken: Verdict, alone: bool) -> None:
        vote = self._waits_for
        if vote is not None and (vote.quorum_id, vote.attempt) == (broken.quorum_id, broken.attempt):
            self.world.history.verdict_in_group(self.rank, broken, alone=alone)
            self.rank.settle(broken)

    def broke(self, quorum_id: int, reason: str) -> None:
        """This rank is broken in a quorum."""
        self._own_breaks.add(quorum_id)
        if self.verdicts.broke(quorum_id, reason):
            self._send(ev.RankBroke(self.index, quorum_id, reason))

    def _send(self, event: ev.Event) -> None:
        if self.index == 0:
            self.leader.handle(event)
        elif self.stream is not None and self.stream.ready:
            self.stream.send(event)

    def take(self, push: Push) -> None:
        """Something arrived from the leader."""
        now = self.world.now
        match push:
            case Welcome():
                self._welcomed()
                return
            case Acked():
                self.rank.machine.acknowledged(push.clock_s - push.lease_age_s)
                return
            case _:
                if not self.machine.took(push):
                    return
        if isinstance(push, Answer):
            self._open_ask = None
            if self._waits_for is not None and self._waits_for.quorum_id != push.quorum.quorum_id:
                self._waits_for = None
        self.verdicts.take(push, self.rank.group.rid, now)
        self._look()
        if not isinstance(push, Verdict):
            self.rank.on_push(push)

    def _welcomed(self) -> None:
        if self.stream is None:
            return
        self.stream.ready = True
        self.machine.opened()
        if self._open_ask is not None:
            self.stream.send(ev.RankAsked(self.index, self._open_ask))
        if self.machine.vote is not None:
            self.stream.send(ev.RankVoted(self.index, self.machine.vote))

    def _look(self) -> None:
        """should_commit waits for the verdict on the open vote."""
        vote = self._waits_for
        found = self.verdicts.result(vote.quorum_id, vote.attempt) if vote is not None else None
        if found is not None:
            self._waits_for = None
            self.world.history.verdict_in_group(self.rank, found, alone=found.quorum_id in self._own_breaks)
            self.world.at(self.world.between(0.0, 0.002), self.rank, self.rank.settle, found)

    # ------------------------------------------------------------ the leader's end

    def push(self, push: Push) -> None:
        """Send something to the rank."""
        if self.index == 0:
            self.rank.told(self.take, push)
        elif self.served is not None:
            self.served.push(push)

    def silent(self) -> None:
        """Its keepalives have gone unanswered for a liveness timeout."""
        if self.rank.stopped and self.served is not None:
            self.served.end()


class RankStream:
    """One stream between a rank and its leader: in order, and lossy at its end."""

    def __init__(self, link: RankLink) -> None:
        self.world, self.link = link.world, link
        self.client_open, self.server_open = True, False
        self.ready = False
        """The leader has welcomed the rank on it."""
        self._heard_at = link.world.now
        self._up_at = self._down_at = 0.0

    def send(self, event: ev.Event) -> None:
        """Rank to leader."""
        if self.client_open:
            self._up_at = max(self._up_at, self.world.now + self.world.between(0.0005, 0.005))
            self.world.at(
                self._up_at - self.world.now,
                self.link.rank.group,
                self._arrive,
                encoding.to_leader(event),
                self.world.now,
            )

    def _arrive(self, event: ev.Event, sent_at: float) -> None:
        link = self.link
        if isinstance(event, ev.RankJoined):
            if link.served is not None:
                link.served.server_open = False  # taken over
            link.served, self.server_open = self, True
        if not self.server_open or link.rank.group.done:
            return
        self._heard_at = self.world.now
        if isinstance(event, ev.RankProgress):
            self.push(Acked(sent_at, self.world.now - link.rank.group.last_ack))
        link.leader.handle(event)

    def push(self, push: Push) -> None:
        """Leader to rank."""
        if self.server_open:
            self._down_at = max(self._down_at, self.world.now + self.world.between(0.0005, 0.005))
            self.world.at(self._down_at - self.world.now, self.link.rank, self._deliver, encoding.push(push))

    def _deliver(self, push: Push) -> None:
        if self.client_open and self.link.stream is self and not self.link.rank.group.done:
            self.link.take(push)

    def break_(self) -> None:
        """The connection breaks; both ends notice, each in its own time."""
        self.client_open = self.ready = False
        self.world.at(self.world.between(0.001, 0.03), self.link.rank.group, self.end)
        self.world.at(self.world.between(0.001, 0.02), self.link.rank, self.link.down, self)

    def end(self) -> None:
        """The leader's end of the stream ends."""
        if not self.server_open:
            return
        self.server_open, self.link.served = False, None
        if not self.link.rank.group.done:
            self.link.leader.handle(ev.RankGone(self.link.index, self.world.now - self._heard_at))
