"""The data plane in the simulation: the process group of one group rank in one quorum, and its collectives.

An operation completes for a member when all members have launched it; if somebody aborts before all have received it,
the dice decide who does (two generals).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ft_core.protocol.rank.ballot import FENCE_SLOTS
from ft_core.protocol.types import Version
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from ft_core.protocol.types import Quorum
    from tests.simulation.rank import Rank
    from tests.simulation.world import World

Payload = tuple[list[float], int, "int | None", tuple[int, Version, int, int], int]


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

    def check_batches(self) -> None:
        """The data are divided by who trains on which part of a batch, so that all have to be at the same one."""
        batches = {p[3][3] for p in self.payloads() if p[2] is not None}
        if len(batches) > 1:
            raise Violation("I10", f"gradients of the batches {sorted(batches)} are summed")

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
