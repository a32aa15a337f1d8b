"""`RankEvents`: what happens to one rank, as events for the job's log. It derives them, and decides nothing.

How it works. The shell calls `handled` after each event that it gave the machine, and `settled` after each verdict.
Most events follow from the phase before and after (`protocol.rank.phases`), the rest from the machine's actions. The
first thing that disturbs the rank after a commit is kept: if the next commit is late, that is the cause of the gap.
What may happen in every step is written at most once in COUNT_S (counters) or VETO_S (vetoes).

Invariants: nothing here blocks or raises for what it sees; without a log everything returns at once. Only rank 0 of a
group has a log. Threads: whoever holds the shell's lock; `received`, `prefetched` and `pause` from any thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from ft_core.events import schema
from ft_core.events.event_log import SILENT, Events, open_events
from ft_core.events.schema import GAP_CAUSES, REPLICA, VOTE_BOUNDS_S
from ft_core.metrics.metrics import beside
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import USABLE, Phase
from ft_core.protocol.rank.state import MYSELF
from ft_core.protocol.types import VOID, Outcome
from ft_core.rpc.channel import release
from ft_core.runtime.veto_cause import cause_of_veto

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.metrics.metrics import Metrics
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.rank import Rank
    from ft_core.protocol.types import Verdict
    from ft_core.runtime.state_transfer import Received

COUNT_S = 1.0
"""How often counters are written."""
VETO_S = 0.1
"""How often vetoes are written at most; those between are counted."""
LATE = 5.0
LATE_S = 0.25
"""A commit is late without any disturbance if it took so many times longer than usual, and so much longer."""
SMOOTH = 0.05
"""Share of the newest step in what is usual."""

LOST, LEFT, CHANGE, VETO, HEAL, PAUSE, PEER_PAUSE, BROKEN, SLOW = GAP_CAUSES
"""Causes of gaps."""


class RankEvents:
    """The log of one rank, and what is needed to write it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._log: Events = SILENT
        self._phase = rank.phase
        self._members: tuple[str, ...] = ()
        self._parted: set[str] = set()
        """Members of its quorum that have said goodbye."""
        self._waiting = ""
        self._heal: Plan | None = None
        """The heal that is under way."""
        self._received: Received | None = None
        self._prefetched = 0
        self._cause = self._detail = ""
        """What disturbed this rank first since its last commit."""
        self._committed_at = self._settled_at = self._count_at = 0.0
        self._usual_s = self._trained_s = self._voted_s = 0.0
        self._votes = [0] * (len(VOTE_BOUNDS_S) + 1)
        """How many votes took how long."""
        self._commits = self._vetoes = self._breaks = 0
        self._veto_at = 0.0
        self._unsaid, self._unsaid_s = 0, 0.0
        """Vetoes of one cause that were not written yet, and the work in them."""
        self._unsaid_why, self._unsaid_cause = "", cause_of_veto("")
        """The last veto's; the next one mostly has the same, and finding out the cause costs as much as the rest."""

    def __repr__(self) -> str:
        return f"RankEvents({self._log!r}, {self._commits} commits)"

    def open(self, folder: str, name: str, metrics: Metrics | None = None) -> None:
        """Begin the log, in a folder; '' for none. Its events are counted, too, if there are metrics. Once."""
        settings = self._rank.settings
        if settings.group_rank == 0:
            self._log = beside(open_events(folder, REPLICA, name, release()), metrics)
            step = max(0, self._rank.held.version.step)
            self._log.emit("made", replica_id=settings.replica_id, ranks=settings.group_world_size, step=step)

    def close(self) -> None:
        """End it. Idempotent."""
        if self._log.on:
            self._count(time.monotonic())
            self._log.close()
            self._log = SILENT

    # ------------------------------------------------------------ what the machine did

    def handled(self, event: on.Event, actions: do.Actions, now: float) -> None:
        """The machine has taken an event. Under the shell's lock."""
        if not self._log.on:
            return
        for action in actions:
            self._acted(action)
        self._moved(event, now)
        match event:
            case on.NoQuorumYet() if event.reason != self._waiting:
                self._waiting = event.reason
                self._log.emit("waiting", reason=event.reason)
            case on.MemberLost() if event.held == VOID:
                self._disturbed(LOST, f"lost {', '.join(event.lost)}")
            case on.MemberLost():
                self._parted.update(event.lost)
                self._disturbed(LEFT, f"left by {', '.join(event.lost)}")
            case on.Paused() if event.replica_id != MYSELF and event.for_s > 0:
                self._log.emit("peer_paused", replica_id=event.replica_id, max_s=event.for_s)
                self._disturbed(PEER_PAUSE, event.replica_id)
            case on.PrefetchEnded():
                self._log.emit("prefetch_ended", bytes=self._prefetched, error=str(event.error or ""))
            case on.StateApplied():
                self._heal_ended(ok=True)
            case on.ReceiveFailed() if self._rank.plan is self._heal:
                self._heal_ended(ok=False, reason=str(event.error))
            case on.DrainOrdered():
                self._log.emit("draining", reason=event.reason)
            case _:
                pass

    def settled(self, verdict: Verdict, now: float, *, commit: bool, voted_s: float = 0.0) -> None:
        """An attempt has ended, the vote about it took so long. Under the shell's lock, in every step."""
        if not self._log.on:
            return
        self._voted_s += voted_s
        self._votes[bisect_left(VOTE_BOUNDS_S, voted_s)] += 1
        if commit:
            self._commits += 1
            self._committed(now)
        elif verdict.outcome is Outcome.VETO:
            self._vetoed(verdict, now)
        if self._rank.phase is not self._phase:
            self._moved(None, now)
        self._settled_at = now
        if now >= self._count_at:
            self._count(now)

    def received(self, received: Received) -> None:
        """State has been received; it is loaded later."""
        self._received = received

    def prefetched(self, size: int) -> None:
        """So many bytes of live state have been copied beforehand."""
        self._prefetched = size

    def pause(self, reason: str, max_s: float) -> float:
        """The script announces to be busy. Returns when, for `pause_over`."""
        self._log.emit("pause_begun", reason=reason, max_s=float(max_s))
        self._disturbed(PAUSE, reason)
        return time.monotonic()

    def pause_over(self, reason: str, began: float) -> None:
        """It is back."""
        self._log.emit("pause_ended", reason=reason, seconds_s=time.monotonic() - began)

    def left(self, reason: str, *, finished: bool) -> None:
        """It has said goodbye."""
        self._log.emit("left", reason=reason, finished=finished, step=max(0, self._rank.held.version.step))

    # ------------------------------------------------------------ what that means

    def _acted(self, action: do.Action) -> None:
        log = self._log
        match action:
            case do.Entered():
                plan = action.plan
                joined = [member for member in plan.quorum.ids if member not in self._members]
                lost = [member for member in self._members if member not in plan.quorum.ids]
                cause = schema.JOINED if joined else schema.SAME
                if lost:
                    cause = schema.LEFT if self._parted.issuperset(lost) else schema.LOST
                log.emit(
                    "entered", quorum_id=plan.quorum_id, members=plan.quorum.ids, step=max(0, plan.target.step),
                    heals=plan.heals, cause=cause if self._members else schema.FIRST,
                )  # fmt: skip
                if self._members:
                    self._disturbed(*((LOST, f"lost {', '.join(lost)}") if lost else (CHANGE, ", ".join(joined))))
                self._members, self._phase = plan.quorum.ids, Phase.FORMING
                self._parted.clear()
            case do.Prefetch():
                self._prefetched = 0
                log.emit("prefetch_begun")
            case do.Receive():
                self._heal, self._received = action.plan, None
                ids = action.plan.quorum.ids
                log.emit(
                    "heal_begun", quorum_id=action.plan.quorum_id, step=max(0, action.plan.target.step),
                    donors=[ids[rank] for rank in action.plan.donors],
                )  # fmt: skip
                self._disturbed(HEAL, "this replica received state")
            case _:
                pass

    def _moved(self, event: on.Event | None, now: float) -> None:
        """Look at the phase, and at whether a heal is over."""
        rank, before = self._rank, self._phase
        after = self._phase = rank.phase
        if after is before:
            return
        asks_broken = after is Phase.ASKING and before is not Phase.BROKEN and rank.broken
        if before not in (Phase.OUTSIDE, Phase.BROKEN, Phase.ASKING) and (after is Phase.BROKEN or asks_broken):
            self._broke(event, now)
        if after is Phase.ASKING and rank.formation is not None:
            why = rank.formation.why
            self._waiting = ""
            self._log.emit("asking", reason=why.reason, failed=why.failed, step=max(0, rank.held.version.step))
            self._disturbed(BROKEN if why.failed else CHANGE, why.reason)
        elif after in USABLE and before is Phase.FORMING:
            self._log.emit("formed", quorum_id=rank.quorum_id)
        elif before is Phase.ASKING and after in (Phase.OUTSIDE, Phase.BROKEN):
            self._log.emit("no_quorum", reason=str(rank.failure or rank.broken_reason))

    def _broke(self, event: on.Event | None, now: float) -> None:
        rank = self._rank
        moves = rank.formation is not None and rank.formation.moves
        self._breaks += 1
        opened_at = rank.attempt.opened_at
        work_s = now - opened_at if opened_at >= self._settled_at else 0.0  # else it is between two steps
        self._log.emit(
            "broken", quorum_id=rank.quorum_id, reason=rank.broken_reason, step=max(0, rank.held.version.step),
            attempt_s=work_s, moves=moves,
        )  # fmt: skip
        if self._heal is not None:
            self._heal_ended(ok=False, reason=rank.broken_reason)
        gone = isinstance(event, on.PeerEnded)
        self._disturbed(LOST if gone else BROKEN, rank.broken_reason)

    def _heal_ended(self, *, ok: bool, reason: str = "") -> None:
        plan, received = self._heal, self._received
        self._heal = self._received = None
        if plan is None:
            return
        donors: Sequence[str] = received.donors if received is not None else ()
        self._log.emit(
            "heal_ended", ok=ok, bytes=received.bytes if received is not None else 0,
            seconds_s=received.seconds if received is not None else 0.0, donors=list(donors),
            step=max(0, plan.target.step), reason=reason,
        )  # fmt: skip

    # ------------------------------------------------------------ every step

    def _disturbed(self, cause: str, detail: str) -> None:
        """Keep the first cause; that a member was lost says more than that something broke."""
        if not self._cause or (self._cause == BROKEN and cause in (LOST, LEFT)):
            self._cause, self._detail = cause, detail

    def _committed(self, now: float) -> None:
        took_s, before = now - self._committed_at, self._committed_at
        self._committed_at = now
        usual_s = self._usual_s
        if not before:
            self._cause = self._detail = ""
            return  # the first step has nothing to be compared with
        if self._cause or (usual_s and took_s > usual_s * LATE and took_s > usual_s + LATE_S):
            self._log.emit(
                "gap", cause=self._cause or SLOW, detail=self._detail, seconds_s=took_s, usual_s=usual_s,
                step=self._rank.held.version.step,
            )  # fmt: skip
            self._cause = self._detail = ""
            self._trained_s += min(took_s, usual_s)
        else:
            self._trained_s += took_s
            self._usual_s = usual_s + (took_s - usual_s) * SMOOTH if usual_s else took_s

    def _vetoed(self, verdict: Verdict, now: float) -> None:
        self._vetoes += 1
        cause = self._unsaid_cause if verdict.reason == self._unsaid_why else cause_of_veto(verdict.reason)
        if self._unsaid and cause != self._unsaid_cause:
            self._tell_vetoes()
        self._unsaid += 1
        self._unsaid_cause = cause
        opened_at = self._rank.attempt.opened_at
        self._unsaid_s += max(0.0, now - opened_at) if opened_at >= self._settled_at else 0.0
        self._disturbed(VETO, verdict.reason)
        self._unsaid_why = verdict.reason
        if now >= self._veto_at:
            self._veto_at = now + VETO_S
            self._tell_vetoes()

    def _tell_vetoes(self) -> None:
        self._log.emit(
            "vetoed", reason=self._unsaid_why, step=max(0, self._rank.held.version.step), attempt_s=self._unsaid_s,
            attempts=self._unsaid, cause=self._unsaid_cause,
        )  # fmt: skip
        self._unsaid, self._unsaid_s = 0, 0.0

    def _count(self, now: float) -> None:
        self._count_at = now + COUNT_S
        if self._unsaid:
            self._tell_vetoes()
        self._log.emit(
            "counters", step=max(0, self._rank.held.version.step), commits=self._commits, vetoes=self._vetoes,
            broken=self._breaks, usual_s=self._usual_s, trained_s=self._trained_s, voted_s=self._voted_s,
            votes=tuple(self._votes),
        )  # fmt: skip
