"""What really happened, against which the protocol's claims are checked (DESIGN 4). Nothing here is known to a replica.

A state is an integer: a hash of the whole history that led to it. The protocol sees only versions; `History` sees both.
Every check runs at the event that could break it, so a violation is found at once, not at the end of the run.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_core.protocol.rank.ballot import EXHAUSTED
from ft_core.protocol.rank.phases import Heal
from ft_core.protocol.types import VOID, Outcome, Quorum, Verdict, Version
from tests.simulation.samples import accounted

if TYPE_CHECKING:
    from ft_core.data.cursor import Cursor
    from ft_core.protocol.lighthouse.room import Room
    from tests.simulation.group import Group
    from tests.simulation.rank import Rank
    from tests.simulation.ring import Op
    from tests.simulation.samples import Samples
    from tests.simulation.world import World


LOSSY = frozenset(
    {
        "freeze",
        "duplicate",
        "cut_lighthouse",
        "cut_peers",
        "cut_all",
        "blip",
        "turbulence",
        "proxy",
        "oneway",
        "cut_one",
        "cut_pair",
        "freeze_lighthouse",
    }
)
"""Faults that, together with a restart of the lighthouse, leave the documented remainder (R9)."""


class Violation(AssertionError):
    """An invariant does not hold; `rule` is its number in DESIGN 4."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass(slots=True)
class Published:
    """A step that some replica saw held by a whole quorum."""

    at: float
    quorum_id: int
    boot: int


@dataclass(slots=True)
class History:
    """The truth about one run."""

    world: World
    parent: dict[int, tuple[int, int]] = field(default_factory=dict)
    """state -> (the state it was made from, its step)."""
    held: dict[tuple[int, Version], int] = field(default_factory=dict)
    """(group rank, version) -> the state that goes by that name."""
    members: dict[int, tuple[str, ...]] = field(default_factory=dict)
    torn: set[int] = field(default_factory=set)
    """States that an interrupted heal left behind."""
    formed_at: dict[int, float] = field(default_factory=dict)
    boot_of: dict[int, int] = field(default_factory=dict)
    presumed_over: set[int] = field(default_factory=set)
    """Quorums that a lighthouse took for ended without a certain loss, before it had heard of a commit in them."""
    last_id: dict[int, int] = field(default_factory=dict)
    published: dict[int, dict[int, Published]] = field(default_factory=dict)
    remainder: Counter[str] = field(default_factory=Counter)
    """What DESIGN documents as not prevented: counted, never a failure."""
    rounds: dict[tuple[int, int, int], tuple[Version | None, str]] = field(default_factory=dict)
    """(quorum, attempt, group rank) -> where the last data pass ended, as the first to settle sees it."""
    reads: dict[Version, dict[int, tuple[Cursor, Cursor, int]]] = field(default_factory=dict)
    """version -> group rank -> the cursor before and after that commit, and the epoch's samples through its ring."""
    left_behind: dict[int, tuple[int, str]] = field(default_factory=dict)
    """step -> (the state it led to, who committed it and shut down at once)."""
    lapses: dict[str, float] = field(default_factory=dict)
    """rank -> attempts that were lost because no member had a lease, since one last had."""
    verdicts: dict[tuple[str, int, int], tuple[Verdict, bool]] = field(default_factory=dict)
    script_steps: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """Which step of its script the first rank of a group made of an attempt."""
    apart: set[str] = field(default_factory=set)
    """Groups of which a rank has missed a verdict, without its leader: from then on it is behind in its script."""
    """(group, quorum, attempt) -> what the first of its ranks to know made of it, and whether it did so alone."""
    returned: int = 0
    """Commits without the share of a participant."""
    commits: int = 0
    moved: int = 0
    """Attempts that went on in the next quorum (R19)."""
    ended: int = 0
    """Rounds of data, counted per rank."""
    heals: int = 0

    def formed(self, quorum: Quorum, boot: int, room: Room) -> None:
        """The lighthouse formed a quorum (I2)."""
        known = self.members.setdefault(quorum.quorum_id, quorum.ids)
        if known != quorum.ids:
            raise Violation("I2", f"id {quorum.quorum_id:#x} names {known} and {quorum.ids}")
        if quorum.quorum_id <= self.last_id.get(boot, 0):
            raise Violation("I2", f"id {quorum.quorum_id:#x} is not above the last one of this lighthouse")
        self.last_id[boot] = quorum.quorum_id
        self.formed_at[quorum.quorum_id] = self.world.now
        self.boot_of[quorum.quorum_id] = boot
        world = self.world
        if room.presumed_over:
            self.presumed_over.add(room.presumed_over)
        for group in world.groups.values():
            if not group.alive or group.rid in quorum.ids:
                continue
            record = room.records.get(group.rid)
            if group.unleased_since is not None and world.now - group.unleased_since >= world.config.orphan_s - 1e-9:
                group.excused_at = world.now
            elif record is not None:
                group.reported = (world.now, record.stable.step)

    def formed_or_repeated(self, quorum: Quorum, boot: int, room: Room) -> None:
        """An announcement: of a quorum just formed, or once more of an old one (R14)."""
        if quorum.quorum_id in self.members and room.last_quorum is not quorum:
            if self.members[quorum.quorum_id] != quorum.ids:
                raise Violation("I2", f"id {quorum.quorum_id:#x} names two member lists")
        elif self.last_id.get(boot) != quorum.quorum_id or self.members[quorum.quorum_id] != quorum.ids:
            self.formed(quorum, boot, room)

    def check_roles(self, rank: Rank, op: Op, verdict: Verdict) -> None:
        """I4: at a commit, whoever was planned to take part did, unless it was out of data."""
        payloads = op.payloads()
        if verdict.contributors != sum(p[2] is not None for p in payloads):
            raise Violation("I5", f"{rank.name} counts {verdict.contributors} contributors")
        plan = rank.machine.plan
        assert plan is not None
        for planned in rank.machine.attempt.participants:
            failed_first_heal = (
                planned in plan.healing and not rank.machine.attempt.roles_switched
            )  # R11: zeros, never a veto
            if payloads[planned][2] is None and not payloads[planned][0][EXHAUSTED] and not failed_first_heal:
                raise Violation("I4", f"{rank.name} commits without the gradient of participant {planned}")

    def entered(self, group: Group, quorum: Quorum, highest: int) -> None:
        """A replica entered a quorum (I2)."""
        if quorum.quorum_id <= highest:
            raise Violation("I2", f"{group.rid} went from quorum {highest:#x} back to {quorum.quorum_id:#x}")
        if group.rid not in quorum.ids:
            raise Violation("I2", f"{group.rid} entered a quorum it is not in")

    def holds(self, rank: Rank, version: Version, state: int) -> None:
        """A replica claims to hold `version` (I1)."""
        if version.step <= 0:
            return
        known = self.held.setdefault((rank.index, version), state)
        if known != state:
            raise Violation(
                "I1", f"{rank.name} holds another state under {version} of {version.quorum_id:#x} than others"
            )

    def committed(self, rank: Rank, before: int, gradients: tuple[tuple[int, int], ...], divisor: int) -> None:
        """A replica applied a committed step (I1, I4, I5, I6)."""
        machine = rank.machine
        self.commits += 1
        if before in self.torn:
            raise Violation("I1", f"{rank.name} trains on a half-received state")
        self._check_in_force(rank)
        self.parent[rank.state] = (before, machine.held.version.step)
        self.holds(rank, machine.held.version, rank.state)
        self._check_left_behind(rank)
        if divisor != len(gradients):
            raise Violation("I5", f"{rank.name} divides a sum of {len(gradients)} gradients by {divisor}")
        for member, source in gradients:
            if source != before:
                raise Violation("I4", f"{rank.name} applied a gradient of member {member} taken at another state")
        if machine.held.version.step <= rank.last_step:
            if rank.was_torn:
                self.remainder["I6: the donors of an interrupted in-place heal all died"] += 1
            elif self._forgetful and LOSSY.intersection(self.world.config.faults):
                self.remainder["I6: out of reach while a restarted lighthouse formed a quorum without it (R18)"] += 1
            else:
                raise Violation("I6", f"{rank.name} committed step {rank.last_step}, now {machine.held.version.step}")
        rank.last_step = machine.held.version.step
        rank.was_torn = False

    def lapsed(self, rank: Rank, verdict: Verdict) -> None:
        """Without a lighthouse the members wait: each loses one attempt, with its samples, not one after another."""
        before, self.lapses[rank.name] = self.lapses.get(rank.name), rank.machine.attempt.lease_acked_at
        if not verdict.lapsed:
            del self.lapses[rank.name]
        elif before == rank.machine.attempt.lease_acked_at:  # a later one: it had a lease meanwhile, and froze again
            raise Violation("I7", f"{rank.name} loses one attempt after another while no member has a lease")

    def parted(self, rank: Rank) -> None:
        """A replica shut down right after its commit: the other members of that attempt have it, too (I3)."""
        self.left_behind[rank.machine.held.version.step] = rank.state, rank.name

    def _check_left_behind(self, rank: Rank) -> None:
        known, name = self.left_behind.get(rank.machine.held.version.step, (rank.state, ""))
        if known != rank.state and set(self.world.config.faults) == {"shutdown"}:
            raise Violation(
                "I3", f"{rank.name} makes step {rank.machine.held.version.step} again: {name} has left with it"
            )

    def read(self, rank: Rank, before: Samples, got: int) -> None:
        """A replica applied a committed step with the samples `got`: none comes twice, none is lost (I8)."""
        config, version = self.world.config, rank.machine.held.version
        if not config.data or config.rounds or config.finish_at:
            return
        if before.taken & got:
            raise Violation("I8", f"{rank.name} trains on samples {positions(before.taken & got)} again")
        mine = before.cursor, rank.samples.cursor, before.taken | got
        known = self.reads.setdefault(version, {})
        first = rank.index not in known
        if known.setdefault(rank.index, mine) != mine:
            raise Violation("I8", f"{rank.name} has read other samples at {version} than others")
        if not first or len(known) < len(rank.group.ranks):
            return
        if len({(old, new) for old, new, _ in known.values()}) > 1:
            raise Violation("I8", f"the ranks of {rank.group.rid} go on at different places in the data")
        rings = [taken for *_, taken in known.values()]
        taken = functools.reduce(operator.or_, rings)
        if taken.bit_count() < sum(ring.bit_count() for ring in rings):
            raise Violation("I8", f"the ranks of {rank.group.rid} train on the same samples")
        claimed = accounted(before.cursor, rank.samples.cursor)
        self.returned += bool(rank.samples.cursor.returned)
        if claimed != taken:
            lost, twice = positions(claimed & ~taken), positions(taken & ~claimed)
            raise Violation("I8", f"at {version}, {rank.name} will lose samples {lost}, and get {twice} again")

    def verdict_in_group(self, rank: Rank, verdict: Verdict, *, alone: bool) -> None:
        """A rank learns what became of an attempt: the same as the group's other ranks (R12).

        `alone`: it has left the quorum before its leader said so, because it failed or there was no way to its leader.
        """
        key = rank.group.rid, verdict.quorum_id, verdict.attempt
        known, was_alone = self.verdicts.setdefault(key, (verdict, alone))
        if known.outcome is not verdict.outcome and (alone or was_alone):
            self.remainder["R12: a rank without its leader does not apply what the others do"] += 1
            self.apart.add(rank.group.rid)
        elif known.outcome is not verdict.outcome:
            raise Violation("R12", f"{rank.name} is told {verdict.outcome}, another rank of its group {known.outcome}")
        steps = self.script_steps.setdefault(key, rank.steps)
        if verdict.outcome is Outcome.COMMIT and rank.steps != steps and rank.group.rid not in self.apart:
            raise Violation("R12", f"{rank.name} commits its step {rank.steps} with step {steps} of another rank")

    def settled(self, rank: Rank, verdict: Verdict) -> None:
        """A replica settled an attempt: those that hold its base agree on the rounds of data, and end them together."""
        machine = rank.machine
        failed = any(other.machine.attempt.heal is Heal.ABANDONED for other in rank.group.ranks)
        cannot_heal = failed or (machine.plan is not None and machine.plan.excluded)
        if machine.attempt.behind or verdict.behind:
            if verdict.exhausted and not cannot_heal and machine.held.version != machine.data.ended_at:
                raise Violation(
                    "I10", f"{rank.name} is at {machine.held.version} when the round ends at {machine.data.ended_at}"
                )
            return
        key = (verdict.quorum_id, verdict.attempt, rank.index)
        known, name = self.rounds.setdefault(key, (machine.data.ended_at, rank.name))
        if known != machine.data.ended_at:
            raise Violation(
                "I10", f"a data pass ended at {known} for {name}, at {machine.data.ended_at} for {rank.name}"
            )
        self.ended += verdict.exhausted

    @property
    def _forgetful(self) -> bool:
        """What a restart of the lighthouse loses may show; of two, only where the other could not tell it (R22)."""
        return bool(self.world.forgotten) if self.world.config.pair else self.world.boots > 1

    def _check_in_force(self, rank: Rank) -> None:
        """R1 and R3 together: what is launched in a quorum after its successor has formed never commits."""
        boot = self.boot_of.get(rank.quorum_id, 0)
        latest = self.last_id.get(boot, 0)
        if latest == rank.quorum_id or boot != self.world.boots or self.world.config.pair:
            return  # of a pair either may form what never stands; what commits twice is found when it is published
        follower = min(q for q, b in self.boot_of.items() if b == boot and q > rank.quorum_id)
        if self.formed_at[follower] < rank.machine.attempt.launched_at:
            if rank.quorum_id in self.presumed_over:
                self.remainder["I3: a quorum closed before it reported a commit, and trained on"] += 1
            else:
                raise Violation(
                    "I3", f"{rank.name} commits in {rank.quorum_id:#x} beside {follower:#x}, formed earlier"
                )

    def publish(self, rank: Rank) -> None:
        """A fence completed at the state this rank holds: every member of the quorum holds it (I3)."""
        if rank.index or rank.machine.held.version == VOID:
            return
        world, number, state = self.world, rank.machine.held.version.step, rank.state
        at_step = self.published.setdefault(number, {})
        if state in at_step:
            return
        at_step[state] = Published(world.now, rank.quorum_id, self.boot_of.get(rank.quorum_id, world.boots))
        if number == 0:
            return
        for other, published in at_step.items():
            if other != state:
                self._published_twice(rank, number, other, published)

    def _published_twice(self, rank: Rank, number: int, other: int, published: Published) -> None:
        world = self.world
        for group in world.groups.values():
            holder = group.alive and not group.done and bool(group.ranks) and group is not rank.group
            if not holder or not self._descends(group.ranks[0], other):
                continue
            if any(rank.was_torn for rank in group.ranks):
                continue  # one of its ranks holds another state, or none: the group's is worth nothing
            if group.excused_at >= published.at:
                self.remainder["I3: rolled back after orphan_s"] += 1
            elif self._forgetful and not (published.boot == world.boots == self.boot_of.get(rank.quorum_id)):
                if not LOSSY.intersection(world.config.faults):
                    raise Violation("I3", f"{rank.name} publishes step {number} again after a restart without any loss")
                self.remainder["I3: a restart of the lighthouse combined with a freeze or loss"] += 1
            elif group.reported[0] >= published.at and group.reported[1] < number:
                self.remainder["I3: its holder had not yet reported the step as stable"] += 1
            elif self.presumed_over & {published.quorum_id, rank.quorum_id}:
                self.remainder["I3: a quorum closed before it reported a commit, and trained on"] += 1
            else:
                raise Violation(
                    "I3", f"{rank.name} publishes step {number} again, though {group.rid} still holds the first one"
                )

    def _descends(self, rank: Rank, state: int) -> bool:
        at: int | None = rank.state
        while at is not None:
            if at == state:
                return True
            link = self.parent.get(at)
            at = link[0] if link else None
        return False


def positions(bitmap: int) -> list[int]:
    """The bits that are set."""
    return [n for n in range(bitmap.bit_length()) if bitmap >> n & 1]
