"""How a replica ends: it leaves in agreement with the others, drains when told to, shuts down. A part of `Manager`.

How it works. `leave` contributes zeros to one last attempt with the change flag up, so the others commit that step
without waiting for anybody, and says goodbye to the lighthouse. A replica that was asked to drain does that at its next
boundary (`_end_drained`, out of `start_quorum`), as does one that is shut down at a boundary. How it is told is
`drain_signal`'s.

Invariants: one goodbye per Manager; `shutdown` is idempotent, bounded in time, and never raises for what a peer does.
All ranks of a group drain at the same boundary. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, cast

from ft_core.errors import CollectiveError, FaultToleranceError
from ft_core.protocol.rank.handover import hands_over
from ft_core.protocol.rank.phases import Go, Heal, MustAsk, Phase
from ft_core.protocol.types import Outcome
from ft_core.runtime import drain_signal
from ft_core.runtime.drain_signal import EXIT_S

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ft_core.manager import Manager
    from ft_core.protocol.rank.rank import Step
    from ft_core.protocol.types import Verdict
    from ft_core.reduction.interface import Carrier
    from ft_core.runtime.quorum_worker import QuorumWorker, Round
    from ft_core.runtime.session import Session
    from ft_core.runtime.startup import Config
    from ft_core.runtime.state_transfer import Healing
    from ft_core.runtime.step_attempt import StepAttempt

log = logging.getLogger("ft_core")


def _failing() -> bool:
    """An error is on its way out of the script, or has ended it; what a user's Ctrl-C ends is not missed."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return isinstance(error, Exception)


class Leaving:
    """Mixed into `Manager`."""

    _attempt: StepAttempt | None
    _config: Config
    _healing: Healing
    _carriers: list[Carrier]
    _round: Round | None
    _session: Session
    _step: Step
    _step_open: bool
    _store: Store | None
    _worker: QuorumWorker
    _left = _shut_down = False

    if TYPE_CHECKING:

        def _agree(self, attempt: StepAttempt, limit_s: float) -> Verdict: ...
        def _begin_round(self, why: MustAsk, timeout: timedelta | None, *, hands_over: bool = False) -> Round: ...
        def _new_attempt(self) -> None: ...
        def _pin(self) -> None: ...

    @property
    def drain_reason(self) -> str:
        """Why this replica is to end at the next step boundary, or ''. Changes at the same step on all ranks."""
        told, step = self._session.drain_reason, self._step
        if step.departure.drain_agreed:
            return told or "another rank of its group was asked to drain"
        return told if self._config.world_size == 1 or step.plan is None else ""

    def leave(self, reason: str = "left", finished: bool = False) -> None:
        """Leave the quorum without costing the others a step: agree in a last fence, then say goodbye (R16).

        Call at a step boundary. In a step that is open (start_quorum, and no should_commit yet) the others lose it if
        the script makes collectives of its own in each step: nobody here makes these calls. `finished`: training is
        over; the lighthouse keeps the room closed for latecomers, so a late restart does not train again over the
        checkpoints.
        """
        if self._left or self._shut_down:
            return
        self._left = True
        self._pin()
        session, step = self._session, self._step
        agreed, last = self._last_fence(reason)
        if not agreed and session.draining and self._hand_over():
            agreed, last = self._last_fence(reason)
        if not agreed and step.plan is not None:
            session.control.break_group(step.plan.quorum_id, f"this rank has left: {reason}")
        session.control.leave(
            reason=reason, finished=finished, version=step.version, agreed=agreed,
            timeout_s=min(EXIT_S, self._config.budget.timeout_s), over=not session.draining and not _failing(),
        )  # fmt: skip
        if not last:
            self._let_peers_finish()

    def _last_fence(self, reason: str) -> tuple[bool, bool]:
        """Tell the others in a fence that this replica leaves. Returns (they know it, they leave, too)."""
        session, step = self._session, self._step
        with session.lock:
            decision = step.boundary() if step.plan is not None else None
            if isinstance(decision, Go):
                step.departure.leave()
            if step.heal is Heal.PENDING:
                self._healing.cancel()  # the last fence waits for what becomes of it
        if isinstance(decision, MustAsk) and not decision.failed:
            return True, False  # the last fence told everybody to ask: nobody waits for this rank
        if step.awaits_lease and isinstance(decision, Go):
            # The others wait in sums of their own, which end with this replica's connections.
            session.fail(CollectiveError(f"this replica leaves while no member has a lease: {reason}"))
            return False, False
        unknown = self._step_open and (not self._carriers or step.expects_user_op)
        if not isinstance(decision, Go) or self._round is None or not self._round.configured.is_set() or unknown:
            return False, False
        step.data.run_out(applies=True, ends=False)
        self._new_attempt()
        assert self._attempt is not None
        with contextlib.suppress(FaultToleranceError):
            verdict = self._agree(self._attempt, session.patience_s)
            # Not settled: the others may commit this step, here nobody steps the optimizer.
            return verdict.outcome is not Outcome.BROKEN, verdict.exhausted
        return False, False

    def _let_peers_finish(self) -> None:
        """R16: a fence that completed here may still be on its way at a peer, and this replica's part of it, too.

        Not in the middle of an attempt: there peers wait for this replica, and closed connections tell them.
        """
        if self._step.phase is not Phase.LAUNCHED:
            self._session.lanes.linger(min(EXIT_S, self._config.budget.timeout_s))

    def _hand_over(self) -> bool:
        """Enter one more quorum if this replica may be the only one that holds its last commit (R16). True: it has.

        Within EXIT_S: nobody may be left who could take it.
        """
        session, step = self._session, self._step
        with session.lock:
            why = hands_over(step)
        if why is None:
            return False
        session.lanes.abort()  # the others may be waiting for this replica in a collective
        round_ = self._begin_round(why, timedelta(seconds=EXIT_S), hands_over=True)
        round_.wait_configured()
        if round_.error is not None:
            name = step.settings.replica_id
            log.info("%s: leaves with step %d, which nobody took: %s", name, step.version.step, round_.error)
        return round_.error is None

    def _end_drained(self) -> NoReturn:
        reason, step = self._session.drain_reason or "asked to drain", cast("Manager", self).current_step()
        self.leave(f"drained: {reason}")
        self.shutdown()
        name = self._step.settings.replica_id
        log.warning("%s: drained at step %d (%s): left the quorum, ending with status 0", name, step, reason)
        raise SystemExit(0)

    def shutdown(self, wait: bool = True) -> None:
        """Leave if that is possible, then stop every thread and close every socket. Idempotent, bounded in time.

        `wait=False`: do not take part in a last fence; peers lose the step in flight, but not one that this replica has
        committed: its connections stay open until they have it, or for EXIT_S.
        """
        if self._shut_down:
            return
        session = getattr(self, "_session", None)
        if session is None:
            self._shut_down = True
            return
        if not self._left and session.control.connected:
            if wait:
                self.leave("shut down")
            else:
                self._left = True
                session.control.leave(
                    reason="shut down",
                    finished=False,
                    version=self._step.version,
                    agreed=False,
                    timeout_s=1.0,
                    over=not session.draining and not _failing(),
                )
                self._let_peers_finish()
        self._shut_down = True
        session.death.release()
        drain_signal.forget(session)
        with session.changed:
            session.closed = True
            session.changed.notify_all()
        self._healing.cancel()
        session.watchdog.stop()
        session.peer_ends.stop()
        session.lanes.shutdown()
        self._worker.stop(EXIT_S)
        session.control.shutdown(EXIT_S)
        self._healing.shutdown()
        self._store = None  # if it is this replica's own, its server ends here
