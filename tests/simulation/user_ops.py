"""The script's own collectives in the simulation: `Manager.allreduce` in the middle of a step, or after its backward.

How it works. A script makes `Config.user_ops` collectives in each forward pass, and one more after the ballots have
come back if `Config.op_after` says so. It waits for each of them (`Config.waits_for_ops`), or for none: then
should_commit does, after the fence. They pair up in launch order on a ring of their own, as on the `control` group of
the product. `UserOps` is one rank's part of that, `UserRing` the process group of one group rank in one quorum.

Invariant that is checked (I4): nobody commits a step in which one of its collectives was paired with another one of
somebody else's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import CollectiveError
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import Phase
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from ft_core.protocol.types import Quorum
    from tests.simulation.rank import Rank
    from tests.simulation.world import World

Place = tuple[int, int]
"""Which collective it is: of which attempt of the quorum, and which one in it."""


class UserOp:
    """One rank's side of a collective."""

    def __init__(self, rank: Rank, place: Place) -> None:
        self.rank, self.place = rank, place
        self.ended = False
        self.spoilt = False
        """It was paired with another collective of somebody else's."""


class UserRing:
    """A process group: the nth collectives of all members are one."""

    def __init__(self, world: World, quorum: Quorum) -> None:
        self.world, self.ids = world, quorum.ids
        self._launched: dict[str, list[UserOp]] = {}
        self._left: dict[str, bool] = {}
        """Who aborted or died, and whether a forked child hides it from the others."""
        self._started = 0
        """How many collectives have begun, because all members had launched them."""

    @property
    def dead(self) -> bool:
        """Nobody will use it again."""
        return len(self._left) == len(self.ids)

    def launch(self, op: UserOp) -> None:
        """A member launches its next collective."""
        self._launched.setdefault(op.rank.group.rid, []).append(op)
        self.recheck()

    def recheck(self) -> None:
        """See which collectives can go on, or never will."""
        if self._left:
            if not all(self._left.values()):
                self._fail_waiting()
            return
        while all(len(self._launched.get(name, ())) > self._started for name in self.ids):
            ops = [self._launched[name][self._started] for name in self.ids]
            if not self._passable(ops):
                return
            self._started += 1
            mixed = len({op.place for op in ops}) > 1
            for op in ops:
                op.spoilt |= mixed
                self.world.at(self.world.between(0.001, 0.015), op.rank, self._deliver, op)

    def _passable(self, ops: list[UserOp]) -> bool:
        groups = [op.rank.group for op in ops]
        cut = any(not self.world.connected(groups[0], other) for other in groups[1:])
        return not cut and not any(op.rank.frozen for op in ops)

    def _deliver(self, op: UserOp) -> None:
        if op.ended:
            return
        if self._left and self.world.rng.random() < 0.5:
            op.rank.ops.failed(op, "a peer left while a collective of the script's was under way")
        else:
            op.ended = True
            op.rank.ops.looked()

    def _fail_waiting(self) -> None:
        for name, ops in self._launched.items():
            for op in ops[self._started :] if name not in self._left else ():
                self.world.at(self.world.between(0.001, 0.02), op.rank, self._fail, op)

    def _fail(self, op: UserOp) -> None:
        if not op.ended:
            op.rank.ops.failed(op, "a peer closed its connection")

    def leave(self, name: str, *, hidden: bool) -> None:
        """A member aborts, or dies. `hidden`: a forked child keeps its connections open."""
        if name not in self._left:
            self._left[name] = hidden
            self.recheck()


class UserOps:
    """The collectives of one rank's script."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._world = rank, rank.world
        self._ring: UserRing | None = None
        self._quorum_id = 0
        self._made: list[UserOp] = []
        """Those of the attempt that is open."""
        self._left_out = 0
        """How many more it should have made in this attempt."""

    @property
    def under_way(self) -> bool:
        """One of them has not ended."""
        return any(not op.ended for op in self._made)

    def launch(self, number: int) -> bool:
        """Make the collective of this number in the attempt. False: the quorum is broken, and nothing is launched."""
        rank, machine = self._rank, self._rank.machine
        quorum = machine.quorum
        if quorum is None or rank.ring is None or not machine.may_launch_user_op():
            return False
        if self._ring is None or self._quorum_id != quorum.quorum_id:
            self._ring, self._quorum_id = self._world.user_ring(quorum, rank.index), quorum.quorum_id
        op = UserOp(rank, (machine.attempt.number, number))
        self._made.append(op)
        self._world.at(self._world.config.timeout_s, rank, self._timed_out, op, self._world.now)
        self._ring.launch(op)
        return True

    def failed(self, op: UserOp, why: str) -> None:
        """The data plane reports an error of one of them."""
        op.ended = True
        if not self._rank.group.done:
            self._world.say("%s: %s", self._rank.name, why)
            self._rank.dispatch(on.CollectiveFailed(CollectiveError(why)))
        self.looked()

    def looked(self) -> None:
        """One has ended: perhaps that is what the script waits for."""
        if not self._rank.group.done:
            self._rank.look_again()

    def _timed_out(self, op: UserOp, since: float) -> None:
        world, rank = self._world, self._rank
        if op.ended or rank.group.done:
            return
        later = rank.machine.overdue(world.config.timeout_s, world.now)
        if later is not None:
            world.at(later - world.now, rank, self._timed_out, op, since)
            return
        world.paused_peer(rank, since, "a collective of the script's timed out")
        self.failed(op, "timeout of a collective of the script's")

    def abort(self, quorum: Quorum, *, hidden: bool = False) -> None:
        """End them, here and at the peers."""
        self._ring = None
        for op in self._made:
            op.ended = True
        if self._world.config.user_ops or self._world.config.op_after:
            self._world.user_ring(quorum, self._rank.index).leave(self._rank.group.rid, hidden=hidden)

    def end_for_vote(self) -> None:
        """should_commit: where this attempt is broken already they are ended, for they could wait for a peer."""
        quorum = self._rank.machine.quorum
        if quorum is not None and self.under_way and self._rank.machine.phase is not Phase.COUNTED:
            self.abort(quorum)

    def left_out(self) -> None:
        """By mistake the script does not make one."""
        self._left_out += 1

    def settled(self, *, committed: bool) -> None:
        """The attempt is over.

        Only how many were made is compared: where every member leaves out one, nobody can know that it was another.
        """
        made, self._made = self._made, []
        left_out, self._left_out = self._left_out, 0
        if committed and any(op.spoilt for op in made):
            if not left_out:
                raise Violation("I4", f"{self._rank.name} commits with a collective that was paired with another one")
            self._world.history.remainder["I4: as many collectives were left out by every member"] += 1
