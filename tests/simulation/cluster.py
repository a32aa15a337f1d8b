"""A whole cluster in one process: the real pure modules under a fake clock and a fake network, driven by a seed.

How it works. `World` owns the clock, one event queue and one random generator; a run is a pure function of its seed
and its config. `Lighthouse` hosts a real `room.Room` and can be restarted; a `Group` is one replica group, its
`Rank`s run a real `rank.Step` each through ask, configure, heal, forward, launch, fence and settle, and agree through
the real machine of their leader (`leader`); a `Conn` is one lease stream (in order, but lossy at its end); a `Ring` is
the data plane of one group rank in one quorum. An operation completes for a member when all members have launched it;
if somebody aborts before all have received it, the dice decide who does (two generals). A frozen process does nothing;
what arrives meanwhile is handled when it thaws.

A run has a safety phase with faults, then a liveness phase: faults stop, everything is brought back, and everybody has
to commit again within a bound. `history` checks DESIGN 4's invariants at each event that could break them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ft_core.errors import JobFinishedError, RefusedError, StateLostError
from ft_core.protocol.group import events as group_events
from ft_core.protocol.group.group import GroupRules
from ft_core.protocol.lighthouse import events as room_events
from ft_core.protocol.lighthouse.model_signature import setting_lines
from ft_core.protocol.lighthouse.quorum_rule import decide
from ft_core.protocol.lighthouse.reachability import Holds
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.lighthouse.view import Life, NotReady, View
from ft_core.protocol.pushes import Acked, Answer, Busy, Change, Lost, Over, Push, Reason, Refusal
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.rank import events as rank_events
from ft_core.protocol.rank.ballot import FENCE_SLOTS
from ft_core.protocol.rank.heal_plan import WorldSizeMode
from ft_core.protocol.rank.rank import Rank as Machine
from ft_core.protocol.rank.settings import RankRules, RankSettings
from ft_core.protocol.types import VOID, Ask, Quorum, Version
from ft_core.settings import MAX_REPLICAS, LighthouseSettings
from tests.simulation.encoding import check_travels
from tests.simulation.history import History, Violation
from tests.simulation.leader import Leader, RankLink
from tests.simulation.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable

LAYOUT = 7
"""Hash over what has to be equal."""
FAULTS = (
    "kill", "freeze", "cut_lighthouse", "cut_peers", "cut_all", "blip", "lighthouse", "slow", "late", "soft", "leave",
    "pause", "duplicate", "configure", "heal", "skip", "turbulence", "hidden", "proxy", "oneway", "freeze_rank",
    "link",
)  # fmt: skip

LATE_S = 1.5
"""When a group that is set up wrongly comes: the others train then."""
PASSING = frozenset({"pause", "configure", "late", "skip", "soft", "heal", "rank_stream"})
"""Faults that are announced, or cost an attempt: they are no reason to give up waiting."""


@dataclass(frozen=True)
class Config:
    """One run's parameters. Durations in simulated seconds, scaled down from the real ones."""

    groups: int = 3
    ranks: int = 1
    min_replicas: int = 1
    choosy: tuple[int, int] = (-1, 0)
    """A group that is configured with another min_replicas than the rest, and with which."""
    expected: int = 0
    places: int = MAX_REPLICAS
    """How many groups a quorum holds."""
    faults: tuple[str, ...] = ()
    fault_every_s: float = 1.0
    safety_s: float = 12.0
    liveness_bound_s: float = 45.0
    forward_s: float = 0.2
    liveness_s: float = 1.0
    grace_s: float = 0.1
    join_s: float = 1.0
    connect_s: float = 1.0
    timeout_s: float = 2.5
    heal_s: float = 0.8
    quorum_s: float = 9.0
    """A rank whose ask is not answered within it gives up, and its group dies."""
    autonomy_s: float = 3.0
    orphan_s: float = 5.0
    boot_window_s: float = 0.5
    progress_s: float = 0.25
    reconnect_s: float = 0.15
    heals_before_forward: bool = False
    fixed_with_spares: bool = False
    allow_heal: bool = True
    finish_at: int = 0
    """Ranks run out of data at this step; 0: never."""
    rounds: bool = False
    """Data come in rounds of different lengths; out of data, some groups apply the commits and some trail."""
    ends_rounds: bool = False
    """The group that runs out first ends the round for all."""
    supervised: bool = True
    bad_group: int = -1
    """A group whose heals never succeed."""
    bad_rank: int = -1
    """Only those of this rank of it; -1: of all."""
    cut_forever: tuple[int, int] = ()  # type: ignore[assignment]
    """Two groups that never reach each other."""
    seen_by_both: bool = True
    """Both of them find that out; False: only the first."""
    look_s: float = 1.0
    """How often who is left out because of a link looks whether it is whole again."""
    unbuilt_group: int = -1
    """A group that can never build a process group; it comes later than the others."""
    odd_group: int = -1
    """A group that is configured differently; it comes later than the others."""
    odd: str = ""
    """In what: "min" (a larger min_replica_size), "mode" (world_size_mode)."""
    compared: bool = True
    """Settings that have to be equal are part of the layout."""
    data: bool = True
    """Check that no sample is lost or comes twice; not where data run out by another rule."""
    late_rank: bool = False
    """The last rank of a group starts later than the others."""
    member_rules: RankRules = field(default_factory=RankRules)
    group_rules: GroupRules = field(default_factory=GroupRules)
    room_rules: Rules = field(default_factory=Rules)
    unique_ids: bool = True

    @staticmethod
    def draw(seed: int, **fixed: Any) -> Config:
        """A configuration for a seed: which faults may come together is itself random. `fixed` overrides fields."""
        rng = random.Random(seed * 7919 + 1)
        groups = rng.choice((2, 3, 3, 4))
        count = rng.choice((1, 2, 3, 4, len(FAULTS)))
        values: dict[str, Any] = {
            "groups": groups,
            "ranks": 2 if rng.random() < 0.2 else 1,
            "min_replicas": rng.randint(1, groups - 1) if rng.random() < 0.5 else 1,
            "expected": groups if rng.random() < 0.5 else 0,
            "faults": tuple(sorted(rng.sample(FAULTS, count))),
            "fault_every_s": rng.choice((0.5, 1.0, 2.0)),
            "heals_before_forward": rng.random() < 0.2,
            "fixed_with_spares": rng.random() < 0.15,
            "forward_s": rng.choice((0.1, 0.2, 0.4)),
            "finish_at": rng.choice((15, 30)) if rng.random() < 0.1 else 0,
            "supervised": rng.random() < 0.6,
            "rounds": rng.random() < 0.3,
            "ends_rounds": rng.random() < 0.3,
        }
        if rng.random() < 0.15:
            values["faults"] += ("stranger",)
        values.update(fixed)
        if values["ranks"] > 1 and "faults" not in fixed and rng.random() < 0.6:
            values["faults"] += ("rank_stream", "late_vote")
            values.setdefault("late_rank", rng.random() < 0.3)
        return Config(**values)


# ---------------------------------------------------------------- the world


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
        self.groups: dict[str, Group] = {}
        self.active: dict[str, Group] = {}
        self.rings: dict[tuple[int, int], Ring] = {}
        self.links: dict[frozenset[int], frozenset[int]] = {}
        """Pairs of groups (numbers) between which nothing passes, and which of the two cannot open a connection."""
        if config.cut_forever:
            cut = config.cut_forever
            self.links[frozenset(cut)] = frozenset(cut if config.seen_by_both else cut[:1])
        self.incarnations = [0] * config.groups
        self.lighthouse: Lighthouse | None = None
        self.trouble_at = 0.0
        """When a fault that is not announced began or ended last."""
        self.strangers = 0
        self.given_up: set[int] = set()
        """Groups (numbers) that gave up waiting for a quorum, and will be started again."""
        self.from_scratch = False
        self._queue: list[tuple[float, int, Group | Rank | None, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

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

    def at(self, delay: float, owner: Group | Rank | None, fn: Callable[..., None], *args: Any) -> None:
        """Call `fn` after `delay`; if `owner` is frozen then, when it thaws; if it is dead, never."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, owner, fn, args))

    def between(self, low: float, high: float) -> float:
        """A random duration."""
        return low + (high - low) * self.rng.random()

    def run(self) -> None:
        """Run the safety phase, then the liveness phase. Raises Violation."""
        config = self.config
        self.start_lighthouse()
        late = {config.unbuilt_group, config.odd_group}
        for number in range(config.groups):
            if number in late:
                self.at(LATE_S, None, self._restart, number)
            else:
                self.spawn(number)
        if config.faults:
            self.at(self.between(0.3, 2 * config.fault_every_s), None, self._fault)
        self._until(config.safety_s)
        self._calm_down()
        goal = {rid: (0, g.commits) for rid, g in self.active.items()}
        bound = self.now + config.liveness_bound_s
        while self.now < bound and not self._all_well(goal):
            self._until(min(self.now + 0.5, bound))
        if not self._all_well(goal, at_last=True):
            stuck = [repr(g) for rid, g in self.active.items() if g.commits < goal.get(rid, (0, 0))[1] + 2]
            raise Violation(
                "I7",
                f"no commits within {config.liveness_bound_s:g} s after the faults ended: {', '.join(stuck)}; "
                f"the lighthouse says {self.room.reason if self.room else 'nothing'!r}",
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

    def _until(self, end: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= end:
            self.now, _, owner, fn, args = heapq.heappop(queue)
            self.events += 1
            if owner is not None:
                if not owner.alive:
                    continue
                if owner.frozen:
                    owner.defer(fn, args)
                    continue
            fn(*args)
        self.now = end

    # ------------------------------------------------------------ processes come and go

    def start_lighthouse(self) -> None:
        """Start a lighthouse that remembers nothing; its clock may have gone back a little."""
        self.boots += 1
        self.trouble_at = self.now
        boot = 1000 + int(self.now) + (self.rng.randint(-8, 2) if self.boots > 1 else 0)
        self.lighthouse = Lighthouse(self, boot)
        self.say("the lighthouse starts (boot %d, number %d)", boot, self.boots)

    def stop_lighthouse(self) -> None:
        """Kill the lighthouse; clients notice soon."""
        lighthouse, self.lighthouse = self.lighthouse, None
        assert lighthouse is not None
        self.say("the lighthouse is killed")
        for group in self.groups.values():
            if group.alive and group.conn is not None:
                self.at(self.between(0.0, 0.03), group, group.conn_lost, group.conn)

    def spawn(self, number: int) -> Group:
        """Start a new incarnation of a group."""
        self.incarnations[number] += 1
        self.trouble_at = self.now
        group = Group(self, number, self.incarnations[number])
        self.groups[group.rid] = self.active[group.rid] = group
        self.say("%s starts", group.rid)
        self.at(self.between(0.01, 0.2), group, group.start)
        return group

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
            stuck or bool(self.links) or self.lighthouse is None or len({g.number for g in groups}) < self.config.groups
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

    # ------------------------------------------------------------ faults

    def _fault(self) -> None:
        if self.calm:
            return
        kind = self.rng.choice(self.config.faults)
        if kind not in PASSING:
            self.trouble_at = self.now
        groups = [g for g in self.active.values() if not g.done]
        if kind in ("lighthouse", "turbulence", "stranger") or groups:
            inject: Callable[..., None] = getattr(self, f"_fault_{kind}", self._fault_inject)
            inject(kind, self.rng.choice(groups) if groups else None)
        self.at(self.rng.expovariate(1 / self.config.fault_every_s), None, self._fault)

    def _how_long(self) -> float:
        return self.between(0.05, 1.5) if self.rng.random() < 0.6 else self.between(1.5, 8.0)

    def _fault_inject(self, kind: str, group: Group) -> None:
        group.injected.add(kind)

    def _fault_kill(self, _: str, group: Group) -> None:
        group.die("is killed", hidden="hidden" in self.config.faults and self.rng.random() < 0.5)
        self.at(self.between(0.02, 3.0), None, self._restart, group.number)

    def _restart(self, number: int) -> None:
        self.given_up.discard(number)
        if not self.living(number):
            self.spawn(number)

    def _fault_freeze(self, _: str, group: Group) -> None:
        if not group.frozen:
            group.freeze()
            self.at(self._how_long(), None, group.thaw)

    def _fault_freeze_rank(self, _: str, group: Group) -> None:
        """SIGSTOP to one rank of a group, not to its leader."""
        others = [rank for rank in group.ranks[1:] if not rank.stopped]
        if others:
            rank = self.rng.choice(others)
            rank.stop()
            self.at(self._how_long(), None, rank.resume)

    def _fault_rank_stream(self, _: str, group: Group) -> None:
        """The stream of a rank to its leader breaks: with its vote, its ask, or what it was told under way."""
        links = [link for link in group.leader.links[1:] if link.stream is not None and link.stream.client_open]
        if not links:
            return
        link = self.rng.choice(links)
        assert link.stream is not None
        self.say("the stream of %s to its leader breaks", link.rank.name)
        link.stream.break_()
        if self.rng.random() < 0.3:
            link.cut, self.trouble_at = True, self.now
            self.at(self._how_long(), None, self._rank_stream_back, link)

    def _rank_stream_back(self, link: RankLink) -> None:
        self.trouble_at = self.now
        link.cut = False

    def _fault_duplicate(self, _: str, group: Group) -> None:
        """A scheduler believes a frozen or cut-off process lost and starts another."""
        if self.calm:
            return
        if (group.frozen or group.cut_lighthouse) and len(self.living(group.number)) == 1:
            self.say("the scheduler gives up on %s", group.rid)
            self.spawn(group.number)
        elif not group.frozen:
            self._fault_freeze("", group)
            self.at(self.between(0.1, 2.0), None, self._fault_duplicate, "", group)

    def _fault_cut_lighthouse(self, _: str, group: Group) -> None:
        self._cut(group, lighthouse=True, peers=False)

    def _fault_cut_peers(self, _: str, group: Group) -> None:
        self._cut(group, lighthouse=False, peers=True)

    def _fault_cut_all(self, _: str, group: Group) -> None:
        self._cut(group, lighthouse=True, peers=True)

    def _cut(self, group: Group, *, lighthouse: bool, peers: bool) -> None:
        if group.cut_lighthouse or group.cut_peers:
            return
        what = "everything" if lighthouse and peers else "the lighthouse" if lighthouse else "its peers"
        self.say("%s is cut off from %s", group.rid, what)
        group.cut_peers = peers
        if lighthouse:
            group.set_cut(True)
        self.at(self._how_long(), None, self._mend, group)

    def _mend(self, group: Group) -> None:
        self.trouble_at = self.now
        if group.alive and (group.cut_lighthouse or group.cut_peers):
            self.say("%s is connected again", group.rid)
            group.cut_peers = False
            group.set_cut(False)
            self.recheck()

    def _fault_blip(self, _: str, group: Group) -> None:
        if group.conn is not None and not group.cut_lighthouse and not group.frozen:
            self.say("the lease stream of %s breaks", group.rid)
            group.conn.break_()

    def _fault_proxy(self, _: str, __: Group) -> None:
        """What stands between some of the groups and the lighthouse restarts: it closes their connections."""
        groups = [g for g in self.active.values() if not (g.proxy_down or g.cut_lighthouse)]
        if not groups:
            return
        behind = self.rng.sample(groups, self.rng.randint(1, len(groups)))
        self.say("the proxy of %s goes down", ", ".join(g.rid for g in behind))
        for group in behind:
            group.proxy_down = True
            if group.conn is not None:
                group.conn.break_()
        self.at(self._how_long(), None, self._proxy_back, behind)

    def _proxy_back(self, behind: list[Group]) -> None:
        self.trouble_at = self.now
        self.say("the proxy of %s is back", ", ".join(g.rid for g in behind))
        for group in behind:
            group.proxy_down = False

    def _fault_oneway(self, _: str, group: Group) -> None:
        """What the lighthouse sends is dropped, so the client gives up its connection: the lighthouse sees it close."""
        if group.proxy_down or group.cut_lighthouse or group.deaf:
            return
        self.say("%s does not receive what the lighthouse sends", group.rid)
        group.deaf = True
        if group.conn is not None:
            self.at(self.config.liveness_s, group, self._gives_up, group.conn)
        self.at(self._how_long(), None, self._hears_again, group)

    def _gives_up(self, conn: Conn) -> None:
        if conn.group.deaf and conn.client_open:
            conn.break_()

    def _hears_again(self, group: Group) -> None:
        self.trouble_at = self.now
        if group.deaf:
            self.say("%s receives again what the lighthouse sends", group.rid)
            group.deaf = False
            if group.conn is not None:
                group.conn.release()

    def _fault_link(self, _: str, group: Group) -> None:
        """Two groups do not reach each other; sometimes only one of them can find that out."""
        others = [g for g in self.active.values() if g.number != group.number]
        other = self.rng.choice(others) if others else group
        key = frozenset((group.number, other.number))
        if other is group or key in self.links:
            return
        both = self.rng.random() < 0.7
        self.say(
            "%s and %s are cut off from each other%s", group.rid, other.rid, "" if both else ", as one of them sees"
        )
        self.links[key] = key if both else frozenset((group.number,))
        self.at(self._how_long(), None, self._link_back, key)

    def _link_back(self, key: frozenset[int]) -> None:
        if self.links.pop(key, None) is not None:
            self.say("the link of groups %s is whole again", sorted(key))
            self.trouble_at = self.now
            self.recheck()

    def _fault_turbulence(self, _: str, __: Group | None) -> None:
        if self.lighthouse is None:
            return
        self.say("all lease streams break")
        for group in list(self.active.values()):
            if group.conn is not None and not group.cut_lighthouse and not group.frozen:
                group.conn.break_()
        self.at(0.02, None, self._turbulence, self.lighthouse)

    def _turbulence(self, lighthouse: Lighthouse) -> None:
        if lighthouse is self.lighthouse:
            lighthouse.handle(room_events.Turbulence())

    def _fault_stranger(self, _: str, __: Group | None) -> None:
        """Somebody who was in no quorum of the room connects, and claims what would overrule the job."""
        lighthouse = self.lighthouse
        current = lighthouse.room.current if lighthouse else None
        if lighthouse is None or current is None or not lighthouse.room.last_quorum:
            return
        self.strangers += 1
        name, huge = f"s:{self.strangers}", Version(10**12, 3)
        fake = current.quorum_id + 3
        self.say("a stranger %s claims step %d and quorum %x", name, huge.step, fake)
        lighthouse.handle(
            room_events.Hello(
                name, "s", self.strangers, 1, stable=huge, quorum_id=fake, members=(name,), join_s=1e6, orphan_s=1e6,
                expected=99,
            )
        )  # fmt: skip
        self.at(self._how_long(), None, self._stranger_ends, lighthouse, name, self.strangers)

    def _stranger_ends(self, lighthouse: Lighthouse, name: str, generation: int) -> None:
        if lighthouse is self.lighthouse and lighthouse.room.current is not None:
            records, members = lighthouse.room.records, lighthouse.room.current.members
            here = any((r := records.get(i)) is not None and r.life is Life.UP for i in members)
            if here and self.rng.random() < 0.5:  # while nobody of the job is there, anybody may end it
                lighthouse.handle(room_events.Left(name, generation, "bye", True, Version(10**12, 3), False))
            elif self.rng.random() < 0.7:
                lighthouse.handle(room_events.LeaseEnded(name, generation, 0.0))

    def _fault_lighthouse(self, _: str, __: Group | None) -> None:
        if self.lighthouse is not None:
            self.stop_lighthouse()
            self.at(self._how_long(), None, self._lighthouse_back)

    def _lighthouse_back(self) -> None:
        if self.lighthouse is None:
            self.start_lighthouse()

    def _fault_slow(self, _: str, group: Group) -> None:
        group.slow_until = self.now + self._how_long()

    def _fault_leave(self, _: str, group: Group) -> None:
        if len(self.active) > self.config.min_replicas and not group.leaving:
            self.say("%s is asked to drain", group.rid)
            group.leaving = True
            for rank in group.ranks:
                rank.dispatch(rank_events.LeaveWanted())
            self.at(self.between(0.5, 4.0), None, self._restart, group.number)

    def _fault_shutdown(self, kind: str, group: Group) -> None:
        """It shuts down right after its next commit; one at a time, so that somebody is left to hold that commit."""
        groups = list(self.active.values())
        whole = len(groups) == self.config.groups and all(g.commits and not g.done for g in groups)
        if whole and not any(kind in g.injected for g in groups):
            group.injected.add(kind)

    def _calm_down(self) -> None:
        self.say("-------- the faults end; everything is brought back --------")
        self.calm = True
        for group in list(self.active.values()):
            group.injected.clear()
            group.slow_until = 0.0
            group.proxy_down = False
            self._hears_again(group)
            for key in [key for key in self.links if key != frozenset(self.config.cut_forever)]:
                self._link_back(key)
            if group.cut_lighthouse or group.cut_peers:
                self._mend(group)
            if group.frozen:
                group.thaw()
            for rank in group.ranks:
                rank.link.cut = False
                rank.resume()
        self.trouble_at = self.now
        if self.lighthouse is None:
            self.start_lighthouse()
        for number in range(self.config.groups):
            if not self.living(number):
                self.spawn(number)

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


# ---------------------------------------------------------------- the lighthouse


class Lighthouse:
    """The shell around a Room: performs its effects on the lease streams."""

    def __init__(self, world: World, boot: int) -> None:
        self.world = world
        config = world.config
        ids = QuorumIds(
            boot, world.rng.randrange(1 << 16), deque(world.rng.randrange(1 << 16) for _ in range(8)),
            unique=config.unique_ids,
        )  # fmt: skip
        settings = LighthouseSettings(
            min_replicas=1, join_timeout_s=0.1, boot_window_s=config.boot_window_s, grace_s=config.grace_s
        )
        holds = Holds(hold_s=1.0, retry_s=5.0, max_s=10.0)
        self.room = Room("job", settings, ids, boot_at=world.now, rules=config.room_rules, holds=holds)
        self.conns: dict[str, Conn] = {}
        self._wake_at = -1.0

    def handle(self, event: room_events.Event) -> None:
        """One event in, all effects out."""
        world = self.world
        effects = self.room.handle(event, world.now)
        self.room.validate()
        for effect in effects:
            self._perform(effect)
        wake = self.room.next_at
        if wake is not None and (wake < self._wake_at or self._wake_at <= world.now):
            self._wake_at = wake
            world.at(max(0.0, wake - world.now), None, self._tick, wake)

    def _tick(self, wake: float) -> None:
        if self.world.lighthouse is self and wake == self._wake_at:
            self._wake_at = -1.0
            self.handle(room_events.Tick())

    def _perform(self, effect: room_events.Effect) -> None:
        world = self.world
        check_travels(effect, self.room, world.now)
        match effect:
            case room_events.Announce(quorum, to):
                world.history.formed_or_repeated(quorum, world.boots, self.room)
                for replica_id, seq in to:
                    self._push(replica_id, Answer(seq, quorum))
            case room_events.Note(text):
                world.say("lighthouse: %s", text)
            case room_events.Explain(to, reason, paused_s):
                world.say("lighthouse to %s: %s", ", ".join(to), reason)
                self._push_all(to, Reason(reason, paused_s))
            case room_events.Superseded(replica_id, quorum_id):
                self._push(replica_id, Over(quorum_id))
            case room_events.Refuse(replica_id, reason, finished, lost):
                if lost:
                    self._check_lost(replica_id)
                error = JobFinishedError if finished else StateLostError if lost else RefusedError
                self._push(replica_id, Refusal(error(reason)))
            case room_events.MemberLost(to, quorum_id, lost, held):
                self._push_all(to, Lost(quorum_id, lost, held))
            case room_events.ChangePending(to, quorum_id, reason):
                self._push_all(to, Change(quorum_id, reason))
            case room_events.Paused(to, quorum_id, who, for_s):
                self._push_all(to, Busy(quorum_id, who, for_s))

    def _check_lost(self, replica_id: str) -> None:
        """R21: nobody whose lease stands holds what the job has committed."""
        members = self.room.current.members if self.room.current else ()
        for group in self.world.active.values():
            conn = group.conn
            leased = group.alive and not group.done and conn is not None and conn.client_open and conn.server_open
            held = {rank.machine.held.version for rank in group.ranks}  # several: the group's state is none
            if leased and len(held) == 1 and min(held).step > 0 and group.rid in members:
                raise Violation("I7", f"{replica_id} is told that all state is lost, but {group.rid} holds it")

    def _push_all(self, to: tuple[str, ...], push: Push) -> None:
        for replica_id in to:
            self._push(replica_id, push)

    def _push(self, replica_id: str, push: Push) -> None:
        conn = self.conns.get(replica_id)
        if conn is not None:
            conn.push(push)


class Conn:
    """One lease stream: ordered both ways; messages under way are lost when it breaks."""

    def __init__(self, group: Group, lighthouse: Lighthouse, generation: int) -> None:
        self.world = group.world
        self.group = group
        self.lighthouse = lighthouse
        self.generation = generation
        self.client_open = self.server_open = True
        self.heard_at = self.world.now
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._up_at = self._down_at = 0.0

    def send(self, event: room_events.Event, sent_at: float) -> None:
        """Client to lighthouse."""
        if self.client_open:
            self._up_at = max(self._up_at, self.world.now + self.world.between(0.001, 0.02))
            self.world.at(self._up_at - self.world.now, None, self._arrive, event, sent_at)

    def _arrive(self, event: room_events.Event, sent_at: float) -> None:
        if not self.server_open or self.world.lighthouse is not self.lighthouse:
            return
        if self.group.cut_lighthouse:
            self.held.append((self._arrive, (event, sent_at)))
            return
        self.heard_at = self.world.now
        if isinstance(event, room_events.Hello):
            self.lighthouse.conns[self.group.rid] = self
            self.group.unleased_since = None
        self.lighthouse.handle(event)
        room = self.lighthouse.room
        if isinstance(event, room_events.Asked) and room.reason:  # its shell tells who asks what it has told the others
            self.push(Reason(room.reason, max(0.0, room.paused_until - self.world.now)))
        if isinstance(event, room_events.Hello | room_events.Progress):
            self.push(Acked(sent_at))
        elif isinstance(event, room_events.Left):
            self.server_open = False

    def push(self, push: Push) -> None:
        """Lighthouse to client."""
        if self.server_open:
            self._down_at = max(self._down_at, self.world.now + self.world.between(0.001, 0.02))
            self.world.at(self._down_at - self.world.now, self.group, self._deliver, push)

    def _deliver(self, push: Push) -> None:
        if not self.client_open or self.group.conn is not self:
            return
        if self.group.cut_lighthouse or self.group.deaf:
            self.held.append((self._deliver, (push,)))
            return
        self.group.on_push(push)

    def release(self) -> None:
        """A partition ended: TCP sends again what was held up, if the connection still stands."""
        held, self.held = self.held, []
        for fn, args in held:
            fn(*args)

    def break_(self) -> None:
        """The connection breaks; both ends notice, each in its own time."""
        world = self.world
        self.client_open = False
        world.at(world.between(0.001, 0.03), None, self.end)
        world.at(world.between(0.001, 0.02), self.group, self.group.conn_lost, self)

    def end(self) -> None:
        """The lighthouse's end of the stream ends."""
        if not self.server_open:
            return
        self.server_open = False
        if self.lighthouse.conns.get(self.group.rid) is self and self.group.unleased_since is None:
            self.group.unleased_since = self.world.now
        if self.world.lighthouse is self.lighthouse:
            silence = self.world.now - self.heard_at
            self.lighthouse.handle(room_events.LeaseEnded(self.group.rid, self.generation, silence))


# ---------------------------------------------------------------- a replica group


class Group:
    """One incarnation of a replica group: its lease, its leader, its ranks."""

    def __init__(self, world: World, number: int, incarnation: int) -> None:
        self.world = world
        self.number = number
        self.name = "abcdefgh"[number]
        self.rid = f"{self.name}:{incarnation}"
        self.key = number * 1000 + incarnation
        self.incarnation = incarnation
        self.alive = True
        self.done = False
        self.frozen = False
        self.cut_lighthouse = self.cut_peers = False
        self.proxy_down = False
        """It cannot open a connection to the lighthouse; those it had were closed, although it lives."""
        self.deaf = False
        """What the lighthouse sends does not reach it."""
        self.leaving = False
        self.deferred: list[tuple[Group | Rank, Callable[..., None], tuple[Any, ...]]] = []
        self.injected: set[str] = set()
        self.slow_until = 0.0
        self.late_until = 0.0
        """Until when one of its ranks does not vote, and says nothing."""
        self.paused_until = 0.0
        """Until when one of its ranks is busy, as its leader says."""
        self._incomplete: tuple[int, str] | None = None
        """What was reported since the last ask: a rank is missing."""
        self.last_ack = 0.0
        self.commits = 0
        self.unleased_since: float | None = world.now
        self.excused_at = -1.0
        self.reported = (-1.0, 0)
        self.conn: Conn | None = None
        self._generation = 0
        self._open_ask: Ask | None = None
        self.known_cut: tuple[str, ...] = ()
        """Whom it could not reach when it looked last."""
        self.ranks: list[Rank] = []
        self.leader = Leader(self)

    def __repr__(self) -> str:
        state = "frozen" if self.frozen else "alive" if self.alive else "dead"
        asks = f", asking seq {self._open_ask.seq}" if self._open_ask else ""
        return f"{self.rid} ({state}{asks}, {', '.join(repr(r.machine) for r in self.ranks)})"

    @property
    def busy_until(self) -> float:
        """Until when one of its ranks has announced to be busy; 0: none has."""
        return max((rank.busy_until for rank in self.ranks), default=0.0)

    # ------------------------------------------------------------ life

    def _odd_in(self, what: str) -> bool:
        return self.number == self.world.config.odd_group and self.world.config.odd == what

    @property
    def min_replicas(self) -> int:
        """min_replica_size; a larger one than there are groups if it is odd in that."""
        config = self.world.config
        usual = config.choosy[1] if config.choosy[0] == self.number else config.min_replicas
        return config.groups + 5 if self._odd_in("min") else usual

    @property
    def fixed_with_spares(self) -> bool:
        """world_size_mode."""
        return self.world.config.fixed_with_spares != self._odd_in("mode")

    def layout_lines(self) -> tuple[str, ...]:
        """What is compared with other groups."""
        return setting_lines({"world_size_mode": "FIXED_WITH_SPARES" if self.fixed_with_spares else "DYNAMIC"})

    def start(self) -> None:
        """The process is up."""
        config = self.world.config
        for index in range(config.ranks):
            settings = RankSettings(
                replica_id=self.rid, group_rank=index, group_world_size=config.ranks, min_replicas=self.min_replicas,
                mode=WorldSizeMode.FIXED_WITH_SPARES if self.fixed_with_spares else WorldSizeMode.DYNAMIC,
                timeout_s=config.timeout_s, autonomy_s=config.autonomy_s, orphan_s=config.orphan_s,
                look_s=config.look_s, rules=config.member_rules,
            )  # fmt: skip
            machine = Machine(settings, lineage=self.world.rng.getrandbits(62), now=self.world.now)
            machine.describe(LAYOUT + (config.compared and self.fixed_with_spares))
            if self.leaving:
                machine.handle(rank_events.LeaveWanted(), self.world.now)
            self.ranks.append(Rank(self, index, machine))
        self.leader.start()
        self.connect()
        self.world.at(self.world.between(0.0, 0.1), self, self._progress)
        for rank in self.ranks:
            late = self.world.between(0.3, 3.0) if config.late_rank and rank.index == config.ranks - 1 else 0.0
            self.world.at(late + self.world.between(0.01, 0.15), self, rank.start)

    def die(self, how: str, *, hidden: bool = False) -> None:
        """The process ends without a word."""
        world = self.world
        if not self.alive:
            return
        self.alive = False
        world.active.pop(self.rid, None)
        world.trouble_at = world.now
        world.say("%s %s%s", self.rid, how, " (its sockets stay open in a forked child)" if hidden else "")
        if self.conn is not None:
            soon = world.config.liveness_s if self.cut_lighthouse else world.between(0.001, 0.02)
            world.at(soon, None, self.conn.end)
        for rank in self.ranks:
            rank.leave_ring(hidden=hidden)
        if world.config.supervised and how == "is killed":
            alone = not world.living(self.number)  # a name's word is given only when no process of that name is left
            word = self.name if alone and world.rng.random() < 0.5 else self.rid
            world.at(world.between(0.01, 0.6), None, self._supervisor, word)

    def _supervisor(self, word: str) -> None:
        lighthouse = self.world.lighthouse
        if lighthouse is not None:
            self.world.say("the supervisor reports the end of %s", word)
            lighthouse.handle(room_events.Ended(word))

    def defer(self, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Do it when this process is thawed."""
        self.deferred.append((self, fn, args))

    def freeze(self) -> None:
        """SIGSTOP."""
        self.world.say("%s is frozen", self.rid)
        self.frozen = True
        if self.conn is not None:
            self.world.at(self.world.config.liveness_s, None, self._missed, self.conn, True)

    def thaw(self) -> None:
        """SIGCONT: what arrived meanwhile is handled now."""
        if not self.alive or not self.frozen:
            return
        self.world.say("%s is thawed", self.rid)
        self.frozen = False
        self.world.trouble_at = self.world.now
        deferred, self.deferred = self.deferred, []
        for position, (owner, fn, args) in enumerate(deferred):
            self.world.at(position * 1e-6, owner, fn, *args)
        if self.conn is not None and not self.conn.server_open:
            self.world.at(self.world.between(0.0, 0.01), self, self.conn_lost, self.conn)
        self.world.recheck()

    def set_cut(self, cut: bool) -> None:
        """Packets to and from the lighthouse are dropped, or pass again."""
        self.cut_lighthouse = cut
        if self.conn is None:
            return
        if cut:
            self.world.at(self.world.config.liveness_s, None, self._missed, self.conn, False)
        else:
            self.conn.release()
            if not self.conn.server_open:
                self.world.at(0.001, self, self.conn_lost, self.conn)

    def _missed(self, conn: Conn, by_freeze: bool) -> None:
        """Keepalives went unanswered for a liveness timeout."""
        still = self.frozen if by_freeze else self.cut_lighthouse
        if still and self.alive and self.world.now - conn.heard_at >= self.world.config.liveness_s - 1e-9:
            conn.end()
            if not by_freeze:
                self.world.at(0.001, self, self.conn_lost, conn)
        elif still and self.alive and conn.server_open:
            left = self.world.config.liveness_s - (self.world.now - conn.heard_at)
            self.world.at(max(left, 0.001), None, self._missed, conn, by_freeze)

    # ------------------------------------------------------------ the lease

    def connect(self) -> None:
        """Open a lease stream; tried again until it works."""
        world = self.world
        if self.conn is not None and self.conn.client_open:
            return
        lighthouse = world.lighthouse
        if lighthouse is None or self.cut_lighthouse or self.proxy_down or self.deaf:
            world.at(world.between(0.3, 1.0) * world.config.reconnect_s, self, self.connect)
            return
        self._generation += 1
        self.conn = Conn(self, lighthouse, self._generation)
        self.conn.send(self.hello(), world.now)
        if self._open_ask is not None:
            self.conn.send(room_events.Asked(self._open_ask, self._generation), world.now)
        if self._incomplete is not None:
            self.report_incomplete(*self._incomplete)

    def conn_lost(self, conn: Conn) -> None:
        """The client sees its stream end."""
        if conn is self.conn:
            conn.client_open = False
            self.world.at(self.world.between(0.0, 0.03), self, self.connect)

    def hello(self) -> room_events.Hello:
        """What this group presents when it (re-)opens its lease: rank 0 does it for all."""
        config, rank = self.world.config, self.ranks[0].machine
        quorum = rank.quorum
        return room_events.Hello(
            self.rid, self.name, self._generation, self.incarnation, version=rank.held.version,
            stable=rank.held.stable, highest_id=rank.highest_id, quorum_id=quorum.quorum_id if quorum else 0,
            members=quorum.ids if quorum else (), expected=config.expected, min_replicas=self.min_replicas,
            group_world_size=config.ranks, join_s=config.join_s, liveness_s=config.liveness_s,
            orphan_s=config.orphan_s, paused_s=max(0.0, self.paused_until - self.world.now),
            layout=rank.attempt.signature, layout_lines=self.layout_lines(),
        )  # fmt: skip

    def stable(self) -> Version:
        """The newest version every rank knows to be held by its whole quorum."""
        return min(rank.machine.held.stable for rank in self.ranks)

    def _progress(self) -> None:
        world = self.world
        if not self.done:
            self.report()
            world.at(world.config.progress_s * world.between(0.8, 1.0), self, self._progress)

    def report(self) -> None:
        """Renew the lease."""
        if self.done or self.conn is None or not self.conn.client_open:
            return
        rank, now = self.ranks[0].machine, self.world.now
        paused = max(0.0, self.paused_until - now)
        event = room_events.Progress(
            self.rid,
            self._generation,
            max(rank.held.version.step, 0),
            rank.phase.value,
            rank.held.stable,
            paused,
        )
        self.conn.send(event, now)

    def on_push(self, push: Push) -> None:
        """Something arrived from the lighthouse."""
        match push:
            case Acked():
                self.leader.handle(group_events.Welcomed())
                rank, self.last_ack = self.ranks[0].machine, max(self.last_ack, push.clock_s)
                rank.acknowledged(max(rank.attempt.lease_acked_at, push.clock_s))
            case Answer():
                if self._open_ask is not None and self._open_ask.seq == push.seq:
                    self._open_ask = None
                    self.leader.handle(group_events.Answered(push.seq, push.quorum))
            case Refusal():
                self.leader.handle(group_events.RefusedByLighthouse(push.error))
            case _:
                self.leader.handle(group_events.Pushed(push))

    def refused(self, error: Exception) -> None:
        """It is over."""
        world, finished = self.world, isinstance(error, JobFinishedError)
        world.say("%s is refused: %s", self.rid, error)
        fine = self.ranks[0].machine.plan is not None and not world.set_up_wrongly(self.number)
        if world.config.odd and fine and not finished:  # where nobody was in a quorum, the first one counts
            raise Violation("I7", f"{self.rid} is refused because of one that is set up wrongly: {error}")
        if finished and not self.world.config.finish_at:
            raise Violation("I7", f"{self.rid} is refused: {error}: but nobody has finished")
        void = self.ranks[0].machine.held.version < Version(0, 0)
        self.stop()
        if isinstance(error, StateLostError) or void:  # R21: whoever runs the job decides that it may begin again
            world.at(world.between(0.4, 1.0), None, world.begin_again, self.number)

    def ask(self, ask: Ask) -> None:
        """All ranks have asked: so does the group."""
        self._open_ask, self._incomplete = ask, None
        if ask.version == VOID:  # some of its ranks were healed, some not: as good as torn
            for rank in self.ranks:
                rank.was_torn = True
        self.world.say(
            "%s asks (seq %d) at %s, leaving %#x%s: %s", self.rid, ask.seq, ask.version, ask.quorum_id,
            ", failed" if ask.failed else "", ask.reason,
        )  # fmt: skip
        if self.conn is not None and self.conn.client_open:
            self.conn.send(room_events.Asked(ask, self._generation), self.world.now)

    def report_incomplete(self, quorum_id: int, reason: str) -> None:
        """A rank is missing: the lighthouse is told, again on each new lease until all have asked."""
        self._incomplete = quorum_id, reason
        if self.conn is not None and self.conn.client_open:
            event = room_events.Incomplete(self.rid, self._generation, quorum_id, reason)
            self.conn.send(event, self.world.now)

    def look(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """To whom of the last quorum no connection can be opened, and to whom one can."""
        quorum, world = self.ranks[0].machine.quorum, self.world
        others = {*(quorum.ids if quorum else ()), *self.known_cut} - {self.rid}
        reached = {i for i in others if world.can_open(self, world.groups[i])}
        self.known_cut = tuple(sorted(others - reached))
        return self.known_cut, tuple(sorted(reached))

    def goodbye(self, why: str, *, agreed: bool, finished: bool) -> None:
        """Leave on purpose."""
        if self.done:
            return
        self.world.say("%s leaves: %s", self.rid, why)
        if self.conn is not None:
            held = self.ranks[0].machine.held.version
            event = room_events.Left(self.rid, self._generation, why, finished, held, agreed)
            self.conn.send(event, self.world.now)
        self.stop()

    def stop(self) -> None:
        """End the process; its sockets stay open a little longer (R16)."""
        self.done = True
        for rank in self.ranks:
            rank.token += 1
        self.world.at(0.3, None, self.die, "has ended")

    def behind_for_good(self) -> bool:
        """Excluded with allow_heal=False."""
        return any(rank.machine.plan is not None and rank.machine.plan.excluded for rank in self.ranks)


# ---------------------------------------------------------------- the data plane


Payload = tuple[list[float], int, "int | None", tuple[int, Version, int], int]


class Op:
    """One collective of a ring: the last bucket with the fence in its tail."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.launched: dict[int, tuple[Rank, Payload]] = {}
        self.started = False
        self.reached: set[int] = set()
        self._sums: list[float] | None = None

    def payloads(self) -> list[Payload]:
        """In rank order."""
        return [self.launched[position][1] for position in range(len(self.ring.ids))]

    def sums(self) -> list[float]:
        """What an allreduce of the fence gives."""
        if self._sums is None:
            columns = zip(*(p[0] for p in self.payloads()), strict=True)
            self._sums = [sum(column) for column in columns]
            assert len(self._sums) == FENCE_SLOTS
        return self._sums

    def check_aligned(self) -> None:
        """Gloo mixes misaligned buckets silently, or kills the process if their sizes differ."""
        if len({p[3][0] for p in self.payloads()}) > 1:
            raise Violation("I4", "collectives of different attempts were paired with each other")

    def check_scaled(self) -> None:
        """Gradients are divided by the planned number of participants before they are summed."""
        planned = {p[3][2] for p in self.payloads()}
        if len(planned) > 1:
            raise Violation("I5", f"gradients that were divided by {sorted(planned)} are summed")


class Ring:
    """The process group of one group rank in one quorum."""

    def __init__(self, world: World, quorum: Quorum, index: int) -> None:
        self.world = world
        self.quorum = quorum
        self.index = index
        self.ids = quorum.ids
        self.arrived: dict[int, Rank] = {}
        self.left: set[int] = set()
        self.up = False
        self.ops: list[Op] = []
        self.position: dict[int, int] = {}

    @property
    def dead(self) -> bool:
        """Nobody will use it again."""
        return len(self.left) == len(self.ids)

    def _where(self, rank: Rank) -> int:
        return self.ids.index(rank.group.rid)

    def _passable(self, ranks: list[Rank]) -> bool:
        groups = [rank.group for rank in ranks]
        cut = any(not self.world.connected(one, other) for one, other in itertools.combinations(groups, 2))
        return not cut and not any(rank.frozen for rank in ranks)

    def arrive(self, rank: Rank) -> None:
        """A member configures."""
        self.arrived[self._where(rank)] = rank
        self.position[self._where(rank)] = 0
        self.recheck()

    def recheck(self) -> None:
        """See what can go on."""
        world = self.world
        if not self.up:
            if len(self.arrived) == len(self.ids) and not self.left and self._passable(list(self.arrived.values())):
                self.up = True
                for rank in self.arrived.values():
                    world.at(world.between(0.001, 0.02), rank, rank.configured, self)
            return
        if self.ops and not self.ops[-1].started:
            self._try(self.ops[-1])

    def launch(self, rank: Rank, payload: Payload) -> Op:
        """A member launches its next operation."""
        where = self._where(rank)
        number = self.position[where]
        self.position[where] += 1
        while len(self.ops) <= number:
            self.ops.append(Op(self))
        op = self.ops[number]
        op.launched[where] = (rank, payload)
        self._try(op)
        return op

    def _try(self, op: Op) -> None:
        world = self.world
        if op.started:
            return
        if self.left:
            for rank, _ in op.launched.values():
                self._fail_soon(op, rank)
            return
        if len(op.launched) < len(self.ids) or not self._passable([rank for rank, _ in op.launched.values()]):
            return
        op.started = True
        parting = any("shutdown" in rank.group.injected for rank, _ in op.launched.values())
        for where, (rank, _) in op.launched.items():
            # A large last bucket is still on its way to some members when another one has it already.
            longest = 0.15 if parting and "shutdown" not in rank.group.injected else 0.015
            world.at(world.between(0.001, longest), rank, self._deliver, op, where)

    def _deliver(self, op: Op, where: int) -> None:
        rank = op.launched[where][0]
        if self.left and self.world.rng.random() < 0.5:
            rank.op_failed(op, "a peer left while the last collective was under way")
            return
        op.reached.add(where)
        polls = [payload[3][0] < 0 for _, payload in op.launched.values()]
        if all(polls):
            rank.polled(op)
        elif any(polls):
            raise Violation("I4", "a fence was paired with a sum of who has a lease")
        else:
            rank.fence_done(op)

    def _fail_soon(self, op: Op, rank: Rank) -> None:
        self.world.at(self.world.between(0.001, 0.02), rank, rank.op_failed, op, "a peer closed its connection")

    def leave(self, rank: Rank, *, hidden: bool) -> None:
        """A member aborts, or dies. `hidden`: a forked child keeps its sockets open, so nobody notices."""
        where = self._where(rank)
        if where in self.left:
            return
        self.left.add(where)
        if self.dead:
            self.world.rings.pop((self.quorum.quorum_id, self.index), None)
        if hidden:
            return
        for other in self.arrived.values() if self.up else ():
            if other is not rank and self.world.connected(rank.group, other.group):
                self.world.at(self.world.between(0.0005, 0.01), other, other.peer_ended, self)
        for op in self.ops[-2:]:
            if not op.started:
                for other, _ in op.launched.values():
                    if other is not rank:
                        self._fail_soon(op, other)


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


__all__ = ["FAULTS", "Config", "NotReady", "Result", "View", "World", "decide", "simulate"]
