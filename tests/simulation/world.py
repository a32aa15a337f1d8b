"""A whole cluster in one process: the machines that ship under a fake clock and a fake network, driven by a seed.

How it works. `World` owns the clock, one event queue and one random generator; a run is a pure function of its seed
and its config. A `Lighthouse` hosts a real Room and can be restarted; a `Group` is one replica group, whose ranks
(`rank`) perform the actions of a real machine each and agree through the real machine of their leader (`leader`); a
`Ring` is the data plane of one group rank in one quorum.

A run has a safety phase with faults (`faults`), then a liveness phase: faults stop, everything is brought back, and
everybody has to commit again within a bound. `history` checks what always holds at each event that could break it.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.config import Config
from tests.simulation.faults import Faults
from tests.simulation.group import Group
from tests.simulation.history import History, Violation
from tests.simulation.lighthouse import Lighthouse
from tests.simulation.ring import Ring
from tests.simulation.user_ops import UserRing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.lighthouse.pair import Report
    from ft_core.protocol.lighthouse.room import Room
    from ft_core.protocol.rank.actions import Actions
    from ft_core.protocol.rank.events import Event
    from ft_core.protocol.rank.phases import Phase
    from ft_core.protocol.types import Quorum
    from tests.simulation.rank import Rank

LATE_S = 1.5
"""When a group that is set up wrongly comes: the others train then."""


class World:
    """Clock, event queue, dice, transcript, and the list of everything."""

    def __init__(self, seed: int, config: Config) -> None:
        self.seed = seed
        self.config = config
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.calm = False
        self.boots = 0
        self.story: list[tuple[float, str, tuple[object, ...]]] = []
        self.history = History(self)
        self.faults = Faults(self)
        self.groups: dict[str, Group] = {}
        self.active: dict[str, Group] = {}
        self.rings: dict[tuple[int, int], Ring] = {}
        self.user_rings: dict[tuple[int, int], UserRing] = {}
        self.links: dict[frozenset[int], frozenset[int]] = {}
        """Pairs of groups (numbers) between which nothing passes, and which of the two cannot open a connection."""
        if config.cut_forever:
            cut = config.cut_forever
            self.links[frozenset(cut)] = frozenset(cut if config.seen_by_both else cut[:1])
        self.incarnations = [0] * config.groups
        self.lighthouses: list[Lighthouse | None] = [None, None] if config.pair else [None]
        self.pair_cut = False
        """The two lighthouses of a pair cannot reach each other."""
        self.forgotten = 0
        """How often a lighthouse was started while none was there from which it could have learned anything."""
        self.trouble_at = 0.0
        """When a fault that is not announced began or ended last."""
        self.strangers = 0
        self.given_up: set[int] = set()
        """Groups (numbers) that gave up waiting for a quorum, and will be started again."""
        self.from_scratch = False
        self.watch: Callable[[Rank, Event, Phase, Actions], None] | None = None
        """Is shown each event that reaches a rank's machine, the phase before it, and the actions that follow."""
        self._queue: list[
            tuple[float, int, Group | Rank | Lighthouse | None, Callable[..., None], tuple[Any, ...]]
        ] = []
        self._count = 0

    @property
    def lighthouse(self) -> Lighthouse | None:
        """The one that serves; of two the one with more leases."""
        serving = [one for one in self.lighthouses if one is not None and one.serves]
        return max(serving, key=lambda one: len(one.conns), default=None)

    @property
    def room(self) -> Room | None:
        """The room of the running lighthouse."""
        return self.lighthouse.room if self.lighthouse else None

    def say(self, text: str, *args: object) -> None:
        """Add a line to the transcript; formatted only if somebody reads it."""
        self.story.append((self.now, text, args))

    def transcript(self, last: int = 0) -> str:
        """The story so far, or its last lines."""
        return "\n".join(f"{t:8.3f}  {text % args if args else text}" for t, text, args in self.story[-last:])

    def at(self, delay: float, owner: Group | Rank | Lighthouse | None, fn: Callable[..., None], *args: Any) -> None:
        """Call `fn` after `delay`; if `owner` is frozen then, when it thaws; if it is dead, never."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, owner, fn, args))

    def between(self, low: float, high: float) -> float:
        """A random duration."""
        return low + (high - low) * self.rng.random()

    def run(self) -> None:
        """Run the safety phase, then the liveness phase. Raises Violation."""
        config = self.config
        for index in range(len(self.lighthouses)):
            self.start_lighthouse(index)
        late = {config.unbuilt_group if config.unbuilt_late else -1, config.odd_group}
        for number in range(config.groups):
            if number in late:
                self.at(LATE_S, None, self.restart, number)
            elif number != config.absent:
                self.spawn(number)
        if config.faults:
            self.faults.begin()
        self.until(config.safety_s)
        self.faults.end()
        goal = {rid: (0, g.commits) for rid, g in self.active.items()}
        bound = self.now + config.liveness_bound_s
        while self.now < bound and not self._all_well(goal):
            self.until(min(self.now + 0.5, bound))
        if not self._all_well(goal, at_last=True):
            stuck = [repr(g) for rid, g in self.active.items() if g.commits < goal.get(rid, (0, 0))[1] + 2]
            raise Violation(
                "I7",
                f"no commits within {config.liveness_bound_s:g} s after the faults ended: {', '.join(stuck)}; "
                f"the lighthouse says {self.room.waits.reason if self.room else 'nothing'!r}",
            )
        self.check_bounds()

    def _all_well(self, goal: dict[str, tuple[int, int]], at_last: bool = False) -> bool:
        """Every group that should train has made two commits since; in the end but those that are held back (R15).

        A group that has given up, and will be started again, should train too.
        """
        running = [g for g in self.active.values() if not g.done]
        alive = [g for g in running if not self.set_up_wrongly(g.number)]
        if self.config.finish_at or not self.config.allow_heal:
            alive = [g for g in alive if not g.behind_for_good()]
        away = not at_last and any(not self.set_up_wrongly(number) for number in self.given_up)
        if len(alive) < self.config.min_replicas:
            return not away
        stuck = [g for g in alive if g.commits < goal.get(g.rid, (0, 0))[1] + 2]
        if at_last:
            stuck = [g for g in stuck if not self._held_for_crashes(g.rid, self.now)]
        no_place = max(0, len(running) - self.config.places)
        return not away and len(stuck) <= no_place + bool(self.config.cut_forever)

    def set_up_wrongly(self, number: int) -> bool:
        """A group that need not commit: it never heals, cannot be reached or is configured differently."""
        config = self.config
        return number in (config.bad_group, config.unbuilt_group, config.odd_group)

    def check_bounds(self) -> None:
        """I9: everything has a bound."""
        room = self.room
        if room and len(room.records) > 4 * (len(self.groups) + self.strangers) + 4:
            raise Violation("I9", f"{len(room.records)} records for {len(self.groups)} replicas")
        if len(self.rings) > 100_000:
            raise Violation("I9", "rings")

    def until(self, end: float) -> None:
        """Let time pass."""
        while self.step(end):
            pass
        self.now = end

    def step(self, end: float) -> bool:
        """Let the next event happen. False: there is none up to `end`."""
        queue = self._queue
        if not queue or queue[0][0] > end:
            return False
        self.now, _, owner, fn, args = heapq.heappop(queue)
        self.events += 1
        if owner is None or (owner.alive and not owner.frozen):
            fn(*args)
        elif owner.alive:
            owner.defer(fn, args)
        return True

    # ------------------------------------------------------------ processes come and go

    def start_lighthouse(self, index: int = 0) -> None:
        """Start a lighthouse that remembers nothing; its clock may have gone back a little."""
        self.boots += 1
        other = self.lighthouses[1 - index] if len(self.lighthouses) > 1 else None
        knows = other is not None and (other.pair is None or other.pair.partner.informed)
        if self.boots > len(self.lighthouses) and not knows:
            self.forgotten += 1
        self.trouble_at = self.now
        boot = 1000 + int(self.now) + (self.rng.randint(-8, 2) if self.boots > 1 else 0)
        self.lighthouses[index] = Lighthouse(self, boot, self.boots, index)
        self.say("the lighthouse starts (boot %d, number %d)", boot, self.boots)

    def stop_lighthouse(self, index: int = 0) -> None:
        """Kill the lighthouse; clients notice soon."""
        lighthouse, self.lighthouses[index] = self.lighthouses[index], None
        assert lighthouse is not None
        lighthouse.die()
        lighthouse.flushes = self.rng.random() < 0.5
        self.say("the lighthouse is killed" if len(self.lighthouses) == 1 else f"lighthouse {index} is killed")
        for group in self.groups.values():
            if group.alive and group.conn is not None and group.conn.lighthouse is lighthouse:
                self.at(self.between(0.0, 0.03), group, group.conn_lost, group.conn)
        other = self.lighthouses[1 - index] if len(self.lighthouses) > 1 else None
        if other is not None and not self.pair_cut:
            soon = max(self.between(0.0, 0.02), lighthouse.sent_at - self.now if lighthouse.flushes else 0.0)
            self.at(soon, other, other.partner_ended)

    def report(self, sender: Lighthouse, report: Report) -> None:
        """A lighthouse of a pair sends the other one a report: in order, lost while they are cut off."""
        other = self.lighthouses[1 - sender.index]
        if other is not None and not self.pair_cut:
            sender.sent_at = max(sender.sent_at, self.now + self.between(0.001, 0.01))
            self.at(sender.sent_at - self.now, other, self._reported, other, sender, report)

    def _reported(self, other: Lighthouse, sender: Lighthouse, report: Report) -> None:
        if not self.pair_cut and (sender.alive or sender.flushes):
            other.hears(report)

    def spawn(self, number: int) -> Group:
        """Start a new incarnation of a group."""
        self.incarnations[number] += 1
        self.trouble_at = self.now
        group = Group(self, number, self.incarnations[number])
        self.groups[group.rid] = self.active[group.rid] = group
        self.say("%s starts", group.rid)
        self.at(self.between(0.01, 0.2), group, group.start)
        return group

    def restart(self, number: int) -> None:
        """Its scheduler starts a group again, unless a process of that name lives."""
        self.given_up.discard(number)
        if not self.living(number):
            self.spawn(number)

    def begin_again(self, number: int) -> None:
        """A group that was refused because all state is lost (R21) is started with FT_FROM_SCRATCH."""
        self.from_scratch = True
        if not self.living(number):
            self.spawn(number)

    def living(self, number: int) -> list[Group]:
        """The living processes of a name."""
        return [g for g in self.active.values() if g.number == number]

    # ------------------------------------------------------------ giving up

    def ring(self, quorum: Quorum, index: int) -> Ring:
        """The process group of one group rank in a quorum."""
        key = (quorum.quorum_id, index)
        if key not in self.rings:
            self.rings[key] = Ring(self, quorum, index)
        return self.rings[key]

    def user_ring(self, quorum: Quorum, index: int) -> UserRing:
        """The process group of one group rank in a quorum for what scripts reduce themselves."""
        key = (quorum.quorum_id, index)
        if key not in self.user_rings:
            self.user_rings = {old: ring for old, ring in self.user_rings.items() if not ring.dead}
            self.user_rings[key] = UserRing(self, quorum)
        return self.user_rings[key]

    def trouble(self) -> None:
        """A fault that nobody announces has ended."""
        self.trouble_at = self.now

    def troubled(self) -> bool:
        """A fault that nobody announces is going on."""
        groups = [g for g in self.active.values() if not g.done]
        cut = any(g.cut_lighthouse or g.cut_peers or g.proxy_down or g.deaf for g in groups)
        stuck = cut or any(
            g.frozen or g.late_until > self.now or any(r.stopped or r.link.cut for r in g.ranks) for g in groups
        )
        return (
            stuck
            or bool(self.links)
            or self.pair_cut
            or not all(self.lighthouses)
            or len({g.number for g in groups}) < self.config.groups
        )

    def paused_peer(self, rank: Rank, since: float, why: str) -> None:
        """A rank breaks its quorum: not because of a peer that is paused, if nothing else was wrong meanwhile (I7)."""
        plan, config = rank.machine.plan, self.config
        if plan is None or self.trouble_at >= since or self.troubled():
            return
        busy = [g.rid for g in self.active.values() if g.rid in plan.quorum.ids and g.busy_until > self.now]
        if busy and not any(map(self.set_up_wrongly, range(config.groups))):
            raise Violation("I7", f"{rank.name} breaks its quorum: {why}, though {', '.join(busy)} announced a pause")

    def _held_for_crashes(self, replica_id: str, since: float) -> bool:
        """Its name crashed repeatedly before (R15): up to 30 s, for which a real quorum_timeout has the time."""
        record = self.room.records.get(replica_id) if self.room else None
        return record is not None and record.admitted_at > since

    def gives_up(self, rank: Rank, since: float, why: str) -> None:
        """A rank has waited for too long. Nobody may while the others are fine, or just paused (I7)."""
        config = self.config
        excused = config.finish_at or not config.allow_heal or any(map(self.set_up_wrongly, range(config.groups)))
        excused = excused or self.trouble_at >= since or self._held_for_crashes(rank.machine.settings.replica_id, since)
        if not excused and not self.troubled():
            busy = [g.rid for g in self.active.values() if g.busy_until > since]
            raise Violation("I7", f"{rank.name} gives up: {why}, though only {busy or 'nobody'} was paused")

    # ------------------------------------------------------------ reachability

    def connected(self, one: Group, other: Group) -> bool:
        """Can packets pass between two replicas?"""
        if frozenset((one.number, other.number)) in self.links and one is not other:
            return False
        return one is other or not (one.cut_peers or other.cut_peers)

    def can_open(self, one: Group, other: Group) -> bool:
        """Can `one` open a connection to `other`? A frozen process's kernel answers."""
        if one.cut_peers or other.cut_peers or not other.alive:
            return False
        return one.number not in self.links.get(frozenset((one.number, other.number)), ())

    def recheck(self) -> None:
        """A partition or freeze ended: operations that were stuck may go on."""
        for ring in list(self.rings.values()):
            if not ring.dead:
                ring.recheck()
        for users in list(self.user_rings.values()):
            users.recheck()


# ---------------------------------------------------------------- running


@dataclass(slots=True)
class Result:
    """What became of one seed."""

    seed: int
    violation: Violation | None
    world: World = field(repr=False)


def simulate(seed: int, config: Config | None = None) -> Result:
    """Run one seed to its end or to its first violation."""
    world = World(seed, config or Config.draw(seed))
    try:
        world.run()
    except Violation as violation:
        world.say("VIOLATION %s", violation)
        return Result(seed, violation, world)
    return Result(seed, None, world)
