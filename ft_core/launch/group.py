"""One local replica group as ftrun sees it: its agent and thread, what is being done to it, how it ended.

How it works. Values that the main thread keeps, and the small rules that only need them: how an end is called, what a
status line says, how fast the group is. Used on the main thread only.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from ft_core.launch.output.status_screen import Row

if TYPE_CHECKING:
    import threading

    from ft_core.launch.agent import GroupAgent
    from ft_core.launch.picture import Seen

SPEED_S = 2.0
"""Over how long the speed on the status line is measured."""
DRAINED_CODES = (0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""How a worker that was asked to drain may end: by the Manager, or by SIGTERM if it has none."""


@dataclass(eq=False)
class Group:
    """One local replica group."""

    number: int
    name: str
    agent: GroupAgent
    thread: threading.Thread
    ended: str = ""
    """One of `exit_status.KINDS`, once it has ended for good."""
    draining: float = 0.0
    """Deadline (monotonic) of a drain that is under way."""
    frozen_until: float = 0.0
    """By --chaos, monotonic."""
    again: bool = False
    """To be started anew when its drain is over (--chaos)."""
    started_at: float = 0.0
    """Monotonic, of its processes that run now; 0: none were started yet."""
    training: bool = False
    """It has committed since its last start."""
    stalled: str = ""
    """The lighthouse's reason, while others wait for it."""
    stalled_at: float = 0.0
    shot: bool = False
    """Its agent was notified."""
    speed: float | None = None
    last: tuple[float, int] | None = None
    """(monotonic s, step) from which the speed is measured."""

    def started(self, now: float) -> None:
        """New processes: nothing is known of them yet."""
        self.started_at = now
        self.training, self.stalled, self.shot, self.last, self.speed = False, "", False, None, None

    def end(self, result: RunResult | None, error: BaseException | None, *, stopping: bool, hopeless: bool) -> str:
        """How a run of the agent that returned like this ends the group.

        `stopping`: everything is being stopped; `hopeless`: because the job has failed. A worker that SIGTERM ended has
        left no agreement behind: of a job that is stopped the batch system must see that.
        """
        failure = self.agent.failure
        well = result is not None and result.state is WorkerState.SUCCEEDED
        waited = result is None and error is None  # for its next start: there was nobody to drain
        if self.draining:
            killed = failure is not None and failure.code in DRAINED_CODES
            clean = well or (waited and not hopeless) or (killed and not stopping)
            self.ended = "drained" if clean else "stopped"
        elif well:
            self.ended = "finished"
        elif stopping:
            self.ended = "stopped"
        else:
            late = "missed" if failure is not None and failure.code < 0 else "failed"
            self.ended = "quarantined" if self.agent.quarantine or error is not None else late
        return self.ended

    def observe(self, seen: Seen, now: float) -> None:
        """A new picture from the lighthouse."""
        if seen.committed and seen.member:
            self.training = True
        if self.last is None or seen.step < self.last[1]:
            self.last = (now, seen.step)
        elif now - self.last[0] >= SPEED_S:
            self.speed = (seen.step - self.last[1]) / (now - self.last[0])
            self.last = (now, seen.step)

    def stands_still(self, seen: Seen, now: float, limit_s: float) -> bool:
        """Whether its agent shall end it now: others have waited for it in vain, and for `limit_s` it has not come.

        A step that merely takes longer than the others expect is not a hang; one that takes longer than the timeout is.
        """
        if not seen.stalled or self.frozen_until or self.draining:
            self.stalled = ""
            return False
        if not self.stalled:
            self.stalled_at = now
        self.stalled = seen.stalled
        self.shot, before = self.shot or now - self.stalled_at >= limit_s, self.shot
        return self.shot and not before

    def row(self, seen: Seen | None) -> Row:
        """Its status line."""
        state = self.ended or ("draining" if self.draining else "frozen (chaos)" if self.frozen_until else "")
        if not state:
            state = "training" if seen and seen.member else "joining" if seen else "starting"
            if seen and seen.phase not in ("", "step"):
                state = seen.phase
        step = seen.step if seen else self.last[1] if self.last else None
        return Row(self.name, state, step, self.agent.restarts, None if self.ended else self.speed, self.stalled)
