"""How a replica ends: it leaves in agreement with the others, drains when told to, shuts down.

How it works. `leave` contributes zeros to one last attempt with the change flag up, so the others commit that step
without waiting for anybody, and says goodbye to the lighthouse. A replica that was asked to drain does that at its next
boundary, as does one that is shut down at a boundary. How it is told is `drain_signal`'s.

Invariants: one goodbye per Manager; `shutdown` is idempotent, bounded in time, and never raises for what a peer does.
All ranks of a group drain at the same boundary. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from ft_core.errors import CollectiveError, FaultToleranceError
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import Go, Heal, MustAsk, Phase
from ft_core.protocol.types import Outcome
from ft_core.runtime import drain_signal
from ft_core.runtime.drain_signal import EXIT_S

if TYPE_CHECKING:
    from ft_core.runtime.steps import Steps

log = logging.getLogger("ft_core")


def _failing() -> bool:
    """An error is on its way out of the script, or has ended it; what a user's Ctrl-C ends is not missed."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return isinstance(error, Exception)


class Leaving:
    """The end of one rank."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._shell, self._rank, self._config = steps, steps.shell, steps.rank, steps.config
        self.left = False
        """A goodbye was said."""
        self.shut_down = False

    def __repr__(self) -> str:
        return f"Leaving({'shut down' if self.shut_down else 'left' if self.left else 'has not left'})"

    @property
    def drain_reason(self) -> str:
        """Why this replica is to end at the next step boundary, or ''. Changes at the same step on all ranks."""
        departure = self._rank.departure
        if departure.drain_agreed:
            return departure.drain_reason or "another rank of its group was asked to drain"
        return departure.drain_reason if self._config.world_size == 1 or self._rank.plan is None else ""

    def request_stop(self) -> None:
        """As `Manager.request_stop`."""
        self._shell.dispatch(on.StopWanted())

    def leave(self, reason: str, *, finished: bool) -> None:
        """As `Manager.leave`."""
        if self.left or self.shut_down:
            return
        self.left = True
        shell, rank = self._shell, self._rank
        with shell.lock:
            rank.pin()
        agreed, last = self._last_fence(reason)
        if not agreed and rank.draining and self._hand_over():
            agreed, last = self._last_fence(reason)
        if not agreed and rank.plan is not None:
            shell.control.break_group(rank.quorum_id, f"this rank has left: {reason}")
        shell.control.leave(
            reason=reason, finished=finished, version=rank.held.version, agreed=agreed,
            timeout_s=min(EXIT_S, self._config.budget.timeout_s), over=not rank.draining and not _failing(),
        )  # fmt: skip
        shell.events.left(reason, finished=finished)
        if not last:
            self._let_peers_finish()

    def _last_fence(self, reason: str) -> tuple[bool, bool]:
        """Tell the others in a fence that this replica leaves. Returns (they know it, they leave, too)."""
        steps, shell, rank = self._steps, self._shell, self._rank
        with shell.lock:
            decision = rank.boundary() if rank.plan is not None else None
        if isinstance(decision, Go):
            shell.dispatch(on.LeaveWanted())
        if rank.attempt.heal is Heal.PENDING:
            shell.transfer.cancel()  # the last fence waits for what becomes of it
        if isinstance(decision, MustAsk) and not decision.failed:
            return True, False  # the last fence told everybody to ask: nobody waits for this rank
        if rank.attempt.awaits_lease and isinstance(decision, Go):
            # The others wait in sums of their own, which end with this replica's connections.
            shell.fail(CollectiveError(f"this replica leaves while no member has a lease: {reason}"))
            return False, False
        unknown = steps.is_open and (not steps.reducers or rank.attempt.expects_user_op)
        if not isinstance(decision, Go) or rank.forming or unknown:
            return False, False
        shell.dispatch(on.DataEnded(applies=True, ends=False))
        with contextlib.suppress(FaultToleranceError):
            attempt = steps.new_attempt()
            attempt.leaves = True
            verdict = steps.agree(attempt, shell.limits.patience_s)
            # Not settled: the others may commit this step, here nobody steps the optimizer.
            return verdict.outcome is not Outcome.BROKEN, verdict.exhausted
        return False, False

    def _let_peers_finish(self) -> None:
        """R16: a fence that completed here may still be on its way at a peer, and this replica's part of it, too.

        Not in the middle of an attempt: there peers wait for this replica, and closed connections tell them.
        """
        if self._rank.phase is not Phase.REDUCING:
            self._shell.communicators.linger(min(EXIT_S, self._config.budget.timeout_s))

    def _hand_over(self) -> bool:
        """Enter one more quorum if this replica may be the only one that holds its last commit (R16). True: it has.

        Within EXIT_S: nobody may be left who could take it.
        """
        shell, rank = self._shell, self._rank
        with shell.lock:
            why = rank.hands_over()
        if why is None:
            return False
        self._steps.ask(why, timedelta(seconds=EXIT_S), hands_over=True)
        shell.wait_formed()
        if rank.failure is not None:
            name, step = rank.settings.replica_id, rank.held.version.step
            log.info("%s: leaves with step %d, which nobody took: %s", name, step, rank.failure)
        return rank.failure is None

    def end_drained(self) -> NoReturn:
        """Leave in agreement, shut down, and end the process with status 0."""
        rank = self._rank
        reason, step = rank.departure.drain_reason or "asked to drain", max(0, rank.attempt.base.step)
        self.leave(f"drained: {reason}", finished=False)
        self.shutdown(wait=True)
        name = rank.settings.replica_id
        log.warning("%s: drained at step %d (%s): left the quorum, ending with status 0", name, step, reason)
        raise SystemExit(0)

    def shutdown(self, *, wait: bool) -> None:
        """As `Manager.shutdown`."""
        if self.shut_down:
            return
        shell, rank = self._shell, self._rank
        if not self.left and shell.control.connected:
            if wait:
                self.leave("shut down", finished=False)
            else:
                self.left = True
                shell.control.leave(
                    reason="shut down", finished=False, version=rank.held.version, agreed=False, timeout_s=1.0,
                    over=not rank.draining and not _failing(),
                )  # fmt: skip
                shell.events.left("shut down", finished=False)
                self._let_peers_finish()
        self.shut_down = True
        shell.death.release()
        drain_signal.forget(shell)
        shell.dispatch(on.ShutDown())
        shell.transfer.cancel()
        shell.limits.stop()
        shell.peer_ends.stop()
        shell.communicators.shutdown()
        shell.worker.stop(EXIT_S)
        shell.control.shutdown(EXIT_S)
        shell.transfer.shutdown()
        shell.events.close()
        for reducer in self._steps.reducers:
            reducer.remove_hooks()
