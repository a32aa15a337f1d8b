"""What may go wrong in a run, drawn by its dice: deaths, freezes, cuts, restarts, mistakes of scripts and schedulers.

How it works. `begin` draws one fault after another until `end`, which brings everything back. A fault acts at once (its
method `_fault_<name>`), or waits in `Group.injected` until the script of a rank comes to where it can happen. Faults
that nobody announces are noted as trouble: within it a rank may give up waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse import events as room_events
from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.rank import events as rank_events
from ft_core.protocol.types import Version
from tests.simulation.moments import Moments

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.group import Group
    from tests.simulation.leader import RankLink
    from tests.simulation.lighthouse import Conn, Lighthouse
    from tests.simulation.world import World

PASSING = frozenset(
    {"pause", "configure", "late", "skip", "soft", "heal", "rank_stream", "skip_op", "full", "unsendable"}
)
"""Faults that are announced, or cost an attempt: they are no reason to give up waiting."""
GROUPLESS = frozenset(
    {"lighthouse", "both_lighthouses", "turbulence", "stranger", "cut_pair", "freeze_lighthouse", "moment"}
)
"""Faults that need no group."""


class Faults:
    """The faults of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.moments = Moments(world)

    def begin(self) -> None:
        """Draw the first one."""
        every_s = self.world.config.fault_every_s
        self.world.at(self.world.between(0.3, 2 * every_s), None, self._draw)

    def _draw(self) -> None:
        if self.world.calm:
            return
        kind = self.world.rng.choice(self.world.config.faults)
        if kind not in PASSING:
            self.world.trouble_at = self.world.now
        groups = [g for g in self.world.active.values() if not g.done]
        if kind in GROUPLESS or groups:
            inject: Callable[..., None] = getattr(self, f"_fault_{kind}", self._fault_inject)
            inject(kind, self.world.rng.choice(groups) if groups else None)
        self.world.at(self.world.rng.expovariate(1 / self.world.config.fault_every_s), None, self._draw)

    def _how_long(self) -> float:
        return self.world.between(0.05, 1.5) if self.world.rng.random() < 0.6 else self.world.between(1.5, 8.0)

    def _fault_inject(self, kind: str, group: Group) -> None:
        group.injected.add(kind)

    def _fault_kill(self, _: str, group: Group) -> None:
        group.die("is killed", hidden="hidden" in self.world.config.faults and self.world.rng.random() < 0.5)
        self.world.at(self.world.between(0.02, 3.0), None, self.world.restart, group.number)

    def _fault_kill_many(self, _: str, __: Group) -> None:
        """Half of the groups, or more, die at once; not all of them."""
        groups = list(self.world.active.values())
        least = (len(groups) + 1) // 2
        for group in self.world.rng.sample(groups, self.world.rng.randint(least, max(least, len(groups) - 1))):
            self._fault_kill("", group)

    def _fault_freeze(self, _: str, group: Group) -> None:
        if not group.frozen:
            group.freeze()
            self.world.at(self._how_long(), None, group.thaw)

    def _fault_freeze_rank(self, _: str, group: Group) -> None:
        """SIGSTOP to one rank of a group, not to its leader."""
        others = [rank for rank in group.ranks[1:] if not rank.stopped]
        if others:
            rank = self.world.rng.choice(others)
            rank.stop()
            self.world.at(self._how_long(), None, rank.resume)

    def _fault_freeze_leader(self, _: str, group: Group) -> None:
        """SIGSTOP to the leader of a group, not to its other ranks."""
        if not group.frozen and len(group.ranks) > 1:
            group.freeze(leader_only=True)
            self.world.at(self._how_long(), None, group.thaw)

    def _fault_rank_stream(self, _: str, group: Group) -> None:
        """The stream of a rank to its leader breaks: with its vote, its ask, or what it was told under way."""
        links = [link for link in group.leader.links[1:] if link.stream is not None and link.stream.client_open]
        if not links:
            return
        link = self.world.rng.choice(links)
        assert link.stream is not None
        self.world.say("the stream of %s to its leader breaks", link.rank.name)
        link.stream.break_()
        if self.world.rng.random() < 0.3:
            link.cut, self.world.trouble_at = True, self.world.now
            self.world.at(self._how_long(), None, self._rank_stream_back, link)

    def _rank_stream_back(self, link: RankLink) -> None:
        self.world.trouble_at = self.world.now
        link.cut = False

    def _fault_duplicate(self, _: str, group: Group) -> None:
        """A scheduler believes a frozen or cut-off process lost and starts another."""
        if self.world.calm:
            return
        if (group.frozen or group.cut_lighthouse) and len(self.world.living(group.number)) == 1:
            self.world.say("the scheduler gives up on %s", group.rid)
            self.world.spawn(group.number)
        elif not group.frozen:
            self._fault_freeze("", group)
            self.world.at(self.world.between(0.1, 2.0), None, self._fault_duplicate, "", group)

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
        self.world.say("%s is cut off from %s", group.rid, what)
        group.cut_peers = peers
        if lighthouse:
            group.set_cut(True)
        self.world.at(self._how_long(), None, self._mend, group)

    def _mend(self, group: Group) -> None:
        self.world.trouble_at = self.world.now
        if group.alive and (group.cut_lighthouse or group.cut_peers):
            self.world.say("%s is connected again", group.rid)
            group.cut_peers = False
            group.set_cut(False)
            self.world.recheck()

    def _fault_blip(self, _: str, group: Group) -> None:
        if group.conn is not None and not group.cut_lighthouse and not group.frozen:
            self.world.say("the lease stream of %s breaks", group.rid)
            group.conn.break_()

    def _fault_proxy(self, _: str, __: Group) -> None:
        """What stands between some of the groups and the lighthouse restarts: it closes their connections."""
        groups = [g for g in self.world.active.values() if not (g.proxy_down or g.cut_lighthouse)]
        if not groups:
            return
        behind = self.world.rng.sample(groups, self.world.rng.randint(1, len(groups)))
        self.world.say("the proxy of %s goes down", ", ".join(g.rid for g in behind))
        for group in behind:
            group.proxy_down = True
            if group.conn is not None:
                group.conn.break_()
        self.world.at(self._how_long(), None, self._proxy_back, behind)

    def _proxy_back(self, behind: list[Group]) -> None:
        self.world.trouble_at = self.world.now
        self.world.say("the proxy of %s is back", ", ".join(g.rid for g in behind))
        for group in behind:
            group.proxy_down = False

    def _fault_oneway(self, _: str, group: Group) -> None:
        """What the lighthouse sends is dropped, so the client gives up its connection: the lighthouse sees it close."""
        if group.proxy_down or group.cut_lighthouse or group.deaf:
            return
        self.world.say("%s does not receive what the lighthouse sends", group.rid)
        group.deaf = True
        if group.conn is not None:
            self.world.at(self.world.config.liveness_s, group, self._gives_up, group.conn)
        self.world.at(self._how_long(), None, self._hears_again, group)

    def _gives_up(self, conn: Conn) -> None:
        if conn.group.deaf and conn.client_open:
            conn.break_()

    def _hears_again(self, group: Group) -> None:
        self.world.trouble_at = self.world.now
        if group.deaf:
            self.world.say("%s receives again what the lighthouse sends", group.rid)
            group.deaf = False
            if group.conn is not None:
                group.conn.release()

    def _fault_link(self, _: str, group: Group) -> None:
        """Two groups do not reach each other; sometimes only one of them can find that out."""
        others = [g for g in self.world.active.values() if g.number != group.number]
        other = self.world.rng.choice(others) if others else group
        key = frozenset((group.number, other.number))
        if other is group or key in self.world.links:
            return
        both = self.world.rng.random() < 0.7
        self.world.say(
            "%s and %s are cut off from each other%s", group.rid, other.rid, "" if both else ", as one of them sees"
        )
        self.world.links[key] = key if both else frozenset((group.number,))
        self.world.at(self._how_long(), None, self._link_back, key)

    def _link_back(self, key: frozenset[int]) -> None:
        if self.world.links.pop(key, None) is not None:
            self.world.say("the link of groups %s is whole again", sorted(key))
            self.world.trouble_at = self.world.now
            self.world.recheck()

    def _fault_turbulence(self, _: str, __: Group | None) -> None:
        if self.world.lighthouse is None:
            return
        self.world.say("all lease streams break")
        for group in list(self.world.active.values()):
            if group.conn is not None and not group.cut_lighthouse and not group.frozen:
                group.conn.break_()
        self.world.at(0.02, None, self._turbulence, self.world.lighthouse)

    def _turbulence(self, lighthouse: Lighthouse) -> None:
        if lighthouse is self.world.lighthouse:
            lighthouse.handle(room_events.Turbulence())

    def _fault_stranger(self, _: str, __: Group | None) -> None:
        """Somebody who was in no quorum of the room connects, and claims what would overrule the job."""
        lighthouse = self.world.lighthouse
        current = lighthouse.room.current if lighthouse else None
        if lighthouse is None or current is None or not lighthouse.room.last_quorum:
            return
        self.world.strangers += 1
        name, huge = f"s:{self.world.strangers}", Version(10**12, 3)
        fake = current.quorum_id + 3
        self.world.say("a stranger %s claims step %d and quorum %x", name, huge.step, fake)
        lighthouse.handle(
            room_events.Hello(
                name, "s", self.world.strangers, 1, stable=huge, quorum_id=fake, members=(name,), join_s=1e6,
                orphan_s=1e6, expected=99,
            )
        )  # fmt: skip
        self.world.at(self._how_long(), None, self._stranger_ends, lighthouse, name, self.world.strangers)

    def _stranger_ends(self, lighthouse: Lighthouse, name: str, generation: int) -> None:
        if lighthouse is self.world.lighthouse and lighthouse.room.current is not None:
            records, members = lighthouse.room.records, lighthouse.room.current.members
            here = any((r := records.get(i)) is not None and r.life is Life.UP for i in members)
            if here and self.world.rng.random() < 0.5:  # while nobody of the job is there, anybody may end it
                lighthouse.handle(room_events.Left(name, generation, "bye", True, Version(10**12, 3), False))
            elif self.world.rng.random() < 0.7:
                lighthouse.handle(room_events.LeaseEnded(name, generation, 0.0))

    def _fault_lighthouse(self, _: str, __: Group | None) -> None:
        living = [one for one in self.world.lighthouses if one is not None]
        if living:
            self.kill_lighthouse(self.world.rng.choice(living) if len(living) > 1 else living[0])

    def kill_lighthouse(self, lighthouse: Lighthouse) -> None:
        """Kill it for a while; the last one that lives only where a run allows that."""
        last = sum(one is not None for one in self.world.lighthouses) < len(self.world.lighthouses)
        if not last or self.world.rng.random() < self.world.config.both_down:
            self.world.stop_lighthouse(lighthouse.index)
            self.world.at(self._how_long(), None, self._lighthouse_back, lighthouse.index)

    def _fault_both_lighthouses(self, _: str, __: Group | None) -> None:
        """One after the other: the second perhaps before the first is back, or has learnt anything."""
        if all(self.world.lighthouses):
            first = self.world.rng.randrange(2)
            self.world.stop_lighthouse(first)
            self.world.at(self.world.between(0.05, 1.5), None, self._lighthouse_back, first)
            self.world.at(self.world.between(0.0, 3.0), None, self._second, 1 - first)

    def _second(self, index: int) -> None:
        if self.world.lighthouses[index] is not None and not self.world.calm:
            self.world.stop_lighthouse(index)
            self.world.at(self.world.between(0.05, 1.5), None, self._lighthouse_back, index)

    def _fault_moment(self, _: str, __: Group | None) -> None:
        """What befalls a lighthouse exactly when a quorum is recorded or announced."""
        self.moments.arm()

    def _lighthouse_back(self, index: int) -> None:
        if self.world.lighthouses[index] is None:
            self.world.start_lighthouse(index)

    def _fault_freeze_lighthouse(self, _: str, __: Group | None) -> None:
        living = [one for one in self.world.lighthouses if one is not None and not one.frozen]
        if living:
            self.freeze_lighthouse(self.world.rng.choice(living))

    def freeze_lighthouse(self, lighthouse: Lighthouse) -> None:
        """SIGSTOP, for a while."""
        self.world.say("lighthouse %d is frozen", lighthouse.index)
        lighthouse.freeze()
        self.world.at(self._how_long(), None, self._lighthouse_thaws, lighthouse)

    def _lighthouse_thaws(self, lighthouse: Lighthouse) -> None:
        if lighthouse.alive and lighthouse.frozen:
            self.world.trouble_at = self.world.now
            self.world.say("lighthouse %d is thawed", lighthouse.index)
            lighthouse.thaw()

    def _fault_cut_pair(self, _: str, __: Group | None) -> None:
        self.cut_pair()

    def cut_pair(self) -> None:
        """The two lighthouses do not reach each other, for a while."""
        if not self.world.pair_cut:
            self.world.say("the lighthouses are cut off from each other")
            self.world.pair_cut = True
            self.world.at(self._how_long(), None, self._pair_whole)

    def _pair_whole(self) -> None:
        if self.world.pair_cut:
            self.world.say("the lighthouses reach each other again")
            self.world.trouble_at, self.world.pair_cut = self.world.now, False

    def _fault_cut_one(self, _: str, group: Group) -> None:
        self.cut_from(group, self.world.rng.randrange(len(self.world.lighthouses)))

    def cut_from(self, group: Group, index: int) -> None:
        """A group is cut off from one of the lighthouses, for a while."""
        if index not in group.cut_from:
            self.world.say("%s is cut off from lighthouse %d", group.rid, index)
            group.cut_one(index, True)
            self.world.at(self._how_long(), None, self._one_back, group, index)

    def _one_back(self, group: Group, index: int) -> None:
        if group.alive and index in group.cut_from:
            self.world.trouble_at = self.world.now
            self.world.say("%s reaches lighthouse %d again", group.rid, index)
            group.cut_one(index, False)

    def _fault_slow(self, _: str, group: Group) -> None:
        group.slow_until = self.world.now + self._how_long()

    def _fault_full(self, _: str, group: Group) -> None:
        """So many receive state from it that there is no place for one more."""
        group.full_until = self.world.now + self._how_long()

    def _fault_unsendable(self, _: str, group: Group) -> None:
        """Its state holds for a while what cannot be encoded."""
        if not group.unsendable:
            self.world.say("the state of %s cannot be encoded", group.rid)
            group.unsendable = True
            self.world.at(self._how_long(), None, self._sendable, group)

    def _sendable(self, group: Group) -> None:
        group.unsendable = False

    def _fault_leave(self, _: str, group: Group) -> None:
        if len(self.world.active) > self.world.config.min_replicas and not group.leaving:
            self.world.say("%s is asked to drain", group.rid)
            group.leaving = True
            for rank in group.ranks:
                rank.dispatch(rank_events.LeaveWanted())
            self.world.at(self.world.between(0.5, 4.0), None, self.world.restart, group.number)

    def _fault_shutdown(self, kind: str, group: Group) -> None:
        """It shuts down right after its next commit; one at a time, so that somebody is left to hold that commit."""
        groups = list(self.world.active.values())
        whole = len(groups) == self.world.config.groups and all(g.commits and not g.done for g in groups)
        if whole and not any(kind in g.injected for g in groups):
            group.injected.add(kind)

    def end(self) -> None:
        """The faults end, and everything is brought back."""
        self.world.say("-------- the faults end; everything is brought back --------")
        self.world.calm = True
        for group in list(self.world.active.values()):
            group.injected.clear()
            group.slow_until = group.full_until = 0.0
            group.unsendable = False
            group.proxy_down = False
            self._hears_again(group)
            for key in [key for key in self.world.links if key != frozenset(self.world.config.cut_forever)]:
                self._link_back(key)
            if group.cut_lighthouse or group.cut_peers:
                self._mend(group)
            if group.frozen:
                group.thaw()
            for rank in group.ranks:
                rank.link.cut = False
                rank.resume()
            for index in sorted(group.cut_from):
                self._one_back(group, index)
        self.world.trouble_at = self.world.now
        self._pair_whole()
        for index, lighthouse in enumerate(self.world.lighthouses):
            if lighthouse is None:
                self.world.start_lighthouse(index)
            else:
                self._lighthouse_thaws(lighthouse)
        for number in range(self.world.config.groups):
            if not self.world.living(number):
                self.world.spawn(number)
