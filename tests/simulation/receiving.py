"""State that travels in the simulation: what a rank receives, copies beforehand, and hands out.

How it works. `receive` fetches the planned state from the plan's donors, one after the other. A donor may be gone, cut
off or frozen; full, so that it is asked again; slow; or unable to encode its state, which it says: if all do, the
replica that healed ends (R11). `prefetch` is what a newcomer does before its first ask: it copies live state, which a
rank hands out between two steps, and while it waits for a quorum (`OfferLive`). What a newcomer has then is torn.

Everything that a donor decides here is its machine's state: in which quorum it is, and which version it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import HealError, StateRefusedError
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import Heal, Phase
from ft_core.protocol.types import VOID

if TYPE_CHECKING:
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.types import Version
    from tests.simulation.rank import Rank
    from tests.simulation.samples import Samples

BUSY_S = 0.05
"""Until a donor that had no free place is asked again."""
LOOK_S = 0.1
"""How often a rank that waits for a quorum looks whether a newcomer wants its live state."""
NOTICED_S = 0.02
"""Until a receiver knows that a donor does not answer."""


class Receiving:
    """One rank's part in the transfer of state."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._world = rank, rank.world
        self._received: tuple[int, Samples, Version | None] | None = None
        """Verified, and not applied yet."""
        self._refusals = 0
        """Donors of this receive that cannot encode their state."""
        self._wanted_by: list[Receiving] = []
        """Newcomers that wait for live state of this rank."""
        self._copying = 0
        """Which prefetch is under way; 0: none."""
        self._given = False
        """A donor has given live state for it."""
        self._copies = 0

    # ------------------------------------------------------------ healing

    def forget(self) -> None:
        """What was received belonged to the last quorum."""
        self._received = None

    def receive(self, plan: Plan) -> None:
        """Receive the planned state, or be told after a while that it failed."""
        machine, world = self._rank.machine, self._world
        sync = plan.heals_first or world.config.heals_before_forward
        worthless = machine.held.version.step <= 0
        in_place = (worthless or len(plan.donors) >= 2) and (sync or worthless)
        if in_place and (sync or machine.held.version == VOID):
            self._rank.dispatch(on.StateTorn())
            self._write_over(plan.quorum_id)
        self._refusals = 0
        world.at(world.config.heal_s, self._rank, self._failed, plan, HealError("too slow"))
        self._try_donor(plan, 0, 0)

    def _write_over(self, salt: int) -> None:
        """What this rank holds is half of this and half of that."""
        rank = self._rank
        rank.was_torn = True
        rank.state = hash((2, rank.group.key, salt))
        self._world.history.torn.add(rank.state)

    def _receives(self, plan: Plan) -> bool:
        return self._rank.machine.plan is plan and self._rank.machine.receiving

    def _failed(self, plan: Plan, error: Exception) -> None:
        if self._receives(plan):
            final = isinstance(error, StateRefusedError)
            self._rank.dispatch(on.ReceiveFailed(plan.quorum_id, error, final=final))

    def _try_donor(self, plan: Plan, position: int, busy: int) -> None:
        world = self._world
        if not self._receives(plan):
            return
        if position >= len(plan.donors):
            if busy:
                world.at(BUSY_S, self._rank, self._try_donor, plan, 0, 0)
            elif self._refusals >= len(plan.donors):
                self._failed(plan, StateRefusedError("no donor can encode its state"))
            else:
                self._failed(plan, HealError("no donor left"))
            return
        delay = world.between(0.005, 0.05) if world.rng.random() < 0.8 else world.between(0.05, 0.6)
        world.at(delay, self._rank, self._from_donor, plan, position, busy)

    def _from_donor(self, plan: Plan, position: int, busy: int) -> None:
        world, group = self._world, self._rank.group
        if not self._receives(plan):
            return
        donor = world.groups[plan.quorum.members[plan.donors[position]].replica_id]
        source = donor.ranks[self._rank.index] if donor.ranks else None
        usable = (
            donor.alive and source is not None and not source.frozen and world.connected(group, donor)
            and source.quorum_id == plan.quorum_id and source.machine.held.version == plan.target
            and "heal" not in group.injected and not self._rank.never_heals
        )  # fmt: skip
        if "heal" in group.injected and world.rng.random() < 0.5:
            group.injected.discard("heal")
        if not usable or source is None:
            world.at(NOTICED_S, self._rank, self._try_donor, plan, position + 1, busy)
        elif donor.unsendable or donor.full_until > world.now:
            self._refusals += donor.unsendable
            world.at(0.002, self._rank, self._try_donor, plan, position + 1, busy + (not donor.unsendable))
        else:
            self._received = source.state, source.samples, source.machine.data.ended_at
            # Its state was rolled back after orphan_s.
            group.excused_at = max(group.excused_at, donor.excused_at)
            self._rank.dispatch(on.StateReceived(plan.quorum_id))

    def apply(self) -> None:
        """The script's thread loads what was received, if anything was."""
        rank = self._rank
        if rank.machine.attempt.heal is Heal.READY:
            assert self._received is not None
            rank.state, rank.samples, data_ended_at = self._received
            self._received = None
            rank.dispatch(on.StateApplied(data_ended_at, 0, 0))
            self._world.history.heals += 1
            self._world.history.holds(rank, rank.machine.held.version, rank.state)
            self._world.say("%s is healed at %s", rank.name, rank.machine.held.version)

    # ------------------------------------------------------------ live state

    def prefetch(self, action: do.Prefetch) -> None:
        """Copy what running members hold, as it changes: what differs is fetched in the quorum."""
        world, rank = self._world, self._rank
        peers = [world.groups[name] for name in rank.group.peers if name in world.active]
        donors = [peer.ranks[rank.index] for peer in peers if peer.ranks and world.connected(rank.group, peer)]
        if not donors or not world.config.prefetches:
            rank.dispatch(on.PrefetchEnded())
            return
        self._copies += 1
        self._copying, self._given = self._copies, False
        before = rank.machine.held.version
        if before.step <= 0:
            rank.dispatch(on.StateTorn())  # before the first byte (R7)
        for donor in donors:
            donor.receiving.wanted(self)
        if action.within_s < world.config.prefetch_s:
            world.at(action.within_s, rank, self._too_long, self._copying, before, True)
        world.at(world.config.prefetch_s, rank, self._too_long, self._copying, before, False)

    def _too_long(self, copying: int, before: Version, unless_given: bool) -> None:
        if self._copying == copying and not (unless_given and self._given):
            self._copying = 0
            if not self._given:
                self._rank.dispatch(on.StateUntouched(before))
            self._rank.dispatch(on.PrefetchEnded())

    @property
    def awaited(self) -> bool:
        """A newcomer waits for live state of this rank."""
        return bool(self._wanted_by)

    def wanted(self, by: Receiving) -> None:
        """A newcomer waits for live state of this rank."""
        self._wanted_by.append(by)
        if len(self._wanted_by) == 1:
            self._world.at(0.0, self._rank, self._look)

    def _look(self) -> None:
        """While this rank waits for a quorum, what it holds may be copied."""
        if self._wanted_by and not self._rank.group.done:
            if self._rank.machine.phase is Phase.ASKING:
                self._rank.dispatch(on.StateWanted())
            self._world.at(LOOK_S, self._rank, self._look)

    def hand_out(self) -> None:
        """This rank is between two steps: newcomers may copy what it holds."""
        wanted, self._wanted_by = self._wanted_by, []
        for newcomer in wanted:
            rank = newcomer._rank
            if rank.group.alive and self._world.connected(rank.group, self._rank.group):
                newcomer._given = True
                self._world.at(
                    self._world.between(0.5, 1.0) * self._world.config.copy_s, rank, newcomer._copied, newcomer._copying
                )

    def _copied(self, copying: int) -> None:
        if copying and self._copying == copying:
            self._copying = 0
            rank = self._rank
            if rank.machine.held.version == VOID:
                self._write_over(-copying)
            self._world.say("%s has copied live state", rank.name)
            rank.dispatch(on.PrefetchEnded())
