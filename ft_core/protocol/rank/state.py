"""What one rank knows, and what always holds of it. Pure.

`Rank` (rank.py) is the only one that writes here. The parts: `held` is the state this rank holds, `attempt` the open
try at a step, `formation` the wait for a quorum; `data`, `departure` and `retries` are what it knows of its data, its
end and its failures.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ft_core.protocol.pauses import Pauses
from ft_core.protocol.rank.attempt import Attempt
from ft_core.protocol.rank.data_pass import DataPass
from ft_core.protocol.rank.departure import Departure
from ft_core.protocol.rank.held import Held
from ft_core.protocol.rank.phases import TRANSITIONS, USABLE, WAITING, Heal, Phase
from ft_core.protocol.rank.retries import Retries

if TYPE_CHECKING:
    from ft_core.protocol.rank import events as on
    from ft_core.protocol.rank.formation import Formation, Wish
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.phases import Cause
    from ft_core.protocol.rank.settings import RankSettings
    from ft_core.protocol.types import Basis, Quorum

    Push = on.MemberLost | on.ChangePending | on.Superseded

MYSELF = ""
"""This rank among those that are paused; its replica_id stands for all ranks of its group."""


class RankState:
    """The protocol state of one rank."""

    def __init__(self, settings: RankSettings, *, lineage: int, now: float) -> None:
        self.settings = settings
        self.phase = Phase.OUTSIDE
        self.held = Held(lineage)
        self.data, self.departure, self.retries = DataPass(), Departure(), Retries()
        self.attempt = Attempt(settings, self.held, self.data, self.departure, now)
        self.formation: Formation | None = None
        """The wait for a quorum; None: it is in one, or needs none yet."""
        self.wish: Wish | None = None
        """What was wished of the quorum that was asked for last."""
        self.failure: Exception | None = None
        """Why the last wait for a quorum ended without one."""
        self.failed_inside = False
        """That wait was one of a step that was open, and would have gone on (R19)."""
        self.error: Exception | None = None
        """What went wrong first in the attempt that is open."""
        self.refused: Exception | None = None
        """The lighthouse does not want this replica, for good."""
        self.closed = False
        self.broken_reason = self.change_wanted = self.ask_next = ""
        """Why it cannot follow its quorum; why the ballot asks for another; why the next boundary does."""
        self.reason = ""
        """Why there is no quorum yet, while there is none."""
        self.highest_id = 0
        """The newest quorum_id it was in: ids only grow (R8)."""
        self.cast_in = self.fenced_in = 0
        """The newest quorum in which it gave a ballot, and in which a fence has completed (R22)."""
        self.asks = 0
        """Asks so far: the sequence number of the newest."""
        self.heals_late = False
        """Its last heal failed: it asks not to be counted on before it holds the state, so that a member that never
        heals costs the others one step at most (R11)."""
        self.unbuilt, self.unbuilt_here = "", False
        """Why this rank could not build the process groups of its quorum; '' also if a push had ended that before."""
        self.links: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        """Members of the last quorum that it could not, and that it could open a connection to."""
        self.links_at = -math.inf
        self.pauses, self.quorum_pauses = Pauses(), Pauses()
        """Of the members of the quorum and of itself (`MYSELF`); of those that the next quorum waits for."""
        self.paused_until = 0.0
        self.parted: tuple[int, ...] = ()
        """replica_ranks that have left and wait until what is under way has ended here (R16)."""
        self._lost_after_vote = ""
        """Why the quorum cannot go on, learnt since this rank voted."""
        self._agreed_to_stay = False
        """The ranks of this group agreed to stay in the quorum, and none of them has launched anything since."""
        self._early: dict[type[Push], Push] = {}
        """Pushes about a quorum that is announced but not entered yet: the newest of each kind."""

    def __repr__(self) -> str:
        extra = f", {self.broken_reason}" if self.phase is Phase.BROKEN else ""
        return f"Rank({self.held.version}, {self.phase.value}, {self.attempt!r}{extra})"

    # ------------------------------------------------------------ what others look at

    @property
    def plan(self) -> Plan | None:
        """Of the quorum that was entered last."""
        return self.attempt.plan

    @property
    def quorum(self) -> Quorum | None:
        """The quorum that was entered last."""
        return self.attempt.plan.quorum if self.attempt.plan else None

    @property
    def quorum_id(self) -> int:
        """Of that quorum; 0: there was none yet."""
        return self.attempt.plan.quorum_id if self.attempt.plan else 0

    @property
    def cast(self) -> bool:
        """It has given a ballot in that quorum."""
        return self.quorum_id in {0, self.cast_in}

    @property
    def fenced(self) -> bool:
        """A fence of that quorum has completed here: all its members have entered it (R22)."""
        return 0 < self.quorum_id == self.fenced_in

    @property
    def entered_by_all(self) -> bool:
        """All members are known to have entered that quorum, with all of their ranks (R22)."""
        alone = self.settings.group_world_size == 1
        return self.fenced and (alone or self.held.version.quorum_id == self.quorum_id)

    @property
    def after(self) -> tuple[Basis, ...]:
        """What that quorum grew out of, as long as it is not known to be entered by all."""
        return () if self.quorum is None or self.entered_by_all else self.quorum.after

    @property
    def broken(self) -> bool:
        """This rank cannot follow the quorum it was in."""
        return self.phase is Phase.BROKEN or (self.phase is Phase.ASKING and bool(self.broken_reason))

    @property
    def forming(self) -> bool:
        """There will be a quorum, or a `failure`."""
        return self.phase in WAITING

    @property
    def receiving(self) -> bool:
        """State that was planned is on its way."""
        return self.attempt.heal is Heal.PENDING and self.phase in USABLE

    @property
    def draining(self) -> bool:
        """This rank is to end at the next boundary that its group agrees on; nothing is worth waiting for any more."""
        departure = self.departure
        return self.settings.exits_on_drain and (departure.drain_wanted or departure.drain_agreed)

    @property
    def next_at(self) -> float:
        """When a Tick is due (s), if nothing happens before."""
        return self.formation.next_at if self.formation is not None and self.phase is Phase.ASKING else math.inf

    @property
    def _alike(self) -> bool:
        """Other ranks of this group decide with this one whether to go on (R12)."""
        return self.settings.group_world_size > 1 and self.settings.rules.r12_alike

    @property
    def _moves_with_others(self) -> bool:
        """The attempt is made in the next quorum if no other rank of the group has launched any of it (R12, R19).

        Also after a quorum whose process groups did not stand here: they may stand on the others.
        """
        formation = self.formation
        return self._alike and formation is not None and (formation.moves or formation.again)

    def overdue(self, limit_s: float, now: float) -> float | None:
        """When to look again at a collective that has waited for `limit_s`; None: nobody is paused, it is too long."""
        return self.pauses.look_again(-math.inf, limit_s, now)

    def gave_up(self) -> str:
        """Why this rank must stop retrying (max_retries), or ''."""
        return self.retries.gave_up(self.settings.max_retries)

    def validate(self) -> None:
        """Check every invariant. Raises AssertionError naming the one that does not hold."""
        phase, attempt = self.phase, self.attempt
        assert self.forming == (self.formation is not None), f"{phase} with formation {self.formation}"
        assert phase is not Phase.OUTSIDE or self.plan is None, "outside, after a quorum"
        assert phase not in USABLE or self.plan is not None, f"{phase} without a plan"
        assert (attempt.verdict is not None) == (phase is Phase.COUNTED), f"{phase} with verdict {attempt.verdict}"
        assert not attempt.voted or phase is Phase.COUNTED or not self.settings.rules.r0_verdict, f"voted in {phase}"
        assert phase is not Phase.BROKEN or self.broken_reason, "broken without a reason"
        assert phase not in USABLE or not self.broken_reason, f"{phase}, and broken: {self.broken_reason}"
        assert not self._lost_after_vote or attempt.voted, "lost after a vote that was not given"
        assert not self._agreed_to_stay or self._alike, "alone, and agreed with others"
        heals = self.plan is not None and self.plan.heals
        assert attempt.heal is Heal.NONE or heals, f"heal {attempt.heal} that was not planned"
        newer = self.plan is not None and self.held.version > attempt.base  # than what the room rolled back to (R2)
        assert not newer or heals, f"holds {self.held.version} after {attempt.base}"
        assert self.plan is None or self.highest_id >= self.plan.quorum_id, "an id that is not the newest"
        assert self.plan is None or self.held.stable <= attempt.base, f"{self.held.stable} stable at {attempt.base}"
        assert phase not in (Phase.REDUCING, Phase.COUNTED) or attempt.pinned, f"{phase}, and may move"
        if self.formation is not None:
            sent = self.formation.sent
            assert sent is None or sent.seq == self.asks, f"ask {sent.seq} is open, {self.asks} is the newest"

    def _to(self, cause: Cause) -> None:
        self.phase = TRANSITIONS[self.phase, cause]
