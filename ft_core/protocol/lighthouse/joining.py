"""`Joining`: when the members of the quorum in force learn that somebody wants to join it. Pure.

How it works. Each newcomer costs the members a new quorum, and new process groups. Replicas that are started together
arrive within moments of each other: each opens its lease, copies live state, then asks. So while there is a newcomer
that has opened its lease and not asked yet, the members are told of the one that has asked only when it has waited for
one of their steps, or none is left that may come. That costs the members nothing, and who joins alone waits for nobody.

How long a step takes is seen in the members' reports: from one advance of their newest step to the next one that is
SAMPLE_S or more later.

Invariants: nobody is kept waiting for longer than a step, nor for longer than TOGETHER_MAX_S; the members of a quorum
that has ended are told at once. Ownership: `room.Room` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.pushes import change_pending, joiners
from ft_core.protocol.lighthouse.view import Life

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.lighthouse.current_quorum import CurrentQuorum
    from ft_core.protocol.lighthouse.events import ChangePending
    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.rules import Rules

TOGETHER_MAX_S = 10.0
SAMPLE_S = 0.5


class Joining:
    """What one room knows of its members' pace, and who waits to join them."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """How long a step of the members takes; 0: not known."""
        self._until: float | None = None
        """Until when those who wait now are waited with; None: nobody waits."""
        self._quorum_id = 0
        self._step = 0
        """The newest step that was reported by a member of that quorum, when a sample of the pace was last taken."""
        self._at = 0.0

    def __repr__(self) -> str:
        return f"Joining(steps of {self.step_s:.3f} s)"

    def reported(self, quorum: CurrentQuorum, replica_id: str, step: int, now: float) -> None:
        """A replica reports its step."""
        current = quorum.value
        if current is None or replica_id not in current.among:
            return
        if current.quorum_id != self._quorum_id or step < self._step:
            self._quorum_id, self._step, self._at = current.quorum_id, step, now
        elif step > self._step and now - self._at >= SAMPLE_S:
            self.step_s = (now - self._at) / (step - self._step)
            self._step, self._at = step, now

    def tell(
        self, quorum: CurrentQuorum, records: Mapping[str, Record], held: Mapping[str, str], now: float, rules: Rules
    ) -> tuple[list[ChangePending], float | None]:
        """Tell the members of the quorum in force who wants to join, once per set.

        Args:
            quorum: in force.
            records: of the room.
            held: who asks and is held back.
            now: instant.
            rules: in force.

        Returns:
            What to send, and when to look again.
        """
        current = quorum.value
        ready = joiners(current, records, held)
        if current is None or not ready - quorum.waiting:
            self._until = None
            return [], None
        if self._until is None:
            first = min(records[i].asked_at for i in ready - quorum.waiting)
            self._until = first + min(self.step_s, TOGETHER_MAX_S)
        if rules.together and not current.ended and now < self._until and _on_its_way(current.among, records):
            return [], self._until
        quorum.waiting, self._until = ready, None
        return change_pending(current, records, ready), None


def _on_its_way(members: frozenset[str], records: Mapping[str, Record]) -> bool:
    """Whether there is a newcomer that has opened its lease and not asked yet."""
    return any(
        r.life is Life.UP and r.ask is None and i not in members and not (r.hello.unary or r.same_name_until)
        for i, r in records.items()
    )
