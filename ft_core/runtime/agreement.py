"""What the members of a quorum decide together besides the commit, and who they are: a part of `Manager`.

How it works. A member that wants everybody to stop raises the STOP flag of its fences until a verdict carries it: the
fence's sum is the same on all members, so all of them learn it at the same attempt (`rank.Step.settle`).

Invariant: `stop_agreed` is never taken back; within a group it changes at the same attempt on all ranks (`group.py`).
Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_core.protocol.rank.rank import Step
    from ft_core.runtime.quorum_worker import Round
    from ft_core.runtime.session import Session
    from ft_core.runtime.step_attempt import StepAttempt


class Agreement:
    """Mixed into `Manager`."""

    _attempt: StepAttempt | None
    _round: Round | None
    _session: Session
    _step: Step

    if TYPE_CHECKING:

        def wait_quorum(self) -> None:
            """Of `Manager`."""

    def _pin(self) -> None:
        """The attempt that is open stays in its quorum: somebody is told who takes part, or the attempt ends (R19)."""
        session, attempt = self._session, self._attempt
        if session.movable is not None:
            with session.lock:
                session.movable = None
        if attempt is not None and attempt.moved:
            self._round, attempt.moved = attempt.round, False

    def request_stop(self) -> None:
        """Ask all members to stop training: told by every fence of this rank from the next one on."""
        with self._session.lock:
            self._step.departure.want_stop()

    @property
    def stop_agreed(self) -> bool:
        """Some member asked everybody to stop, and everybody knows it. Changes in should_commit only."""
        return self._step.departure.stop_agreed

    def num_participants(self) -> int:
        """Number of members whose gradients count in this attempt; 1 in a warm-up. Waits for the quorum."""
        self.wait_quorum()
        return len(self._step.participants) if self._step.plan is not None else 1

    def participating_rank(self) -> int | None:
        """This replica's position among the participants, or None. Waits for the quorum."""
        self.wait_quorum()
        plan = self._step.plan
        if plan is None or plan.replica_rank not in self._step.participants:
            return None
        return self._step.participants.index(plan.replica_rank)

    @property
    def _participating_replica_world_size(self) -> int:
        """`num_participants`, by the name that an example of the reference implementation prints."""
        return self.num_participants()

    @property
    def _participating_replica_rank(self) -> int | None:
        """`participating_rank`, likewise."""
        return self.participating_rank()

    def is_participating(self) -> bool:
        """Whether this replica's gradients count in this attempt. Waits for the quorum."""
        self.wait_quorum()
        return self._step.participating

    @property
    def quorum_id(self) -> int:
        """Of the quorum in force; 0 before the first one. The same on all members during an attempt."""
        self._pin()
        plan = self._step.plan
        return 0 if plan is None else plan.quorum_id

    @property
    def members(self) -> tuple[str, ...]:
        """replica_id of each member of the quorum in force, sorted; includes spares and those that heal."""
        self._pin()
        plan = self._step.plan
        return () if plan is None else tuple(plan.quorum.ids)

    @property
    def healing_members(self) -> tuple[str, ...]:
        """Those of `members` that received the others' state when this quorum began."""
        self._pin()
        plan = self._step.plan
        return () if plan is None else tuple(plan.quorum.ids[rank] for rank in plan.healing)
