"""What the threads of one Manager share: the step machine and its lock, the lanes, the control link.

How it works. Every protocol decision is `rank.Step`'s; this class calls it under `lock`, and performs what follows
*after* releasing it (decide, release, act): abort the lanes, tell the other ranks, wake who waits. It is the
`LeaseHandler` of the control link.

Threads (the map stands in manager.py): the training thread, the lease thread (all `on_*`), the quorum worker, the
watchdog. Invariant: nothing blocks while `lock` is held, and `lock` is the only one held when calling `step`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from ft_core.errors import CollectiveError
from ft_core.process_group import socket_table
from ft_core.process_group.peer_ends import PeerEnds
from ft_core.protocol.pauses import Pauses
from ft_core.protocol.rank.moving import may_move
from ft_core.protocol.rank.phases import MustAsk, Phase
from ft_core.protocol.types import VOID, Outcome
from ft_core.runtime import notices
from ft_core.runtime.collective_timeout import Watchdog
from ft_core.runtime.peer_links import PROBE_S, Links
from ft_core.runtime.user_works import UserWorks
from ft_core.witness.link import DeathNotice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core.control.link import Control
    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.rank.rank import Step
    from ft_core.protocol.types import Quorum, Verdict, Version
    from ft_core.runtime.communicators import Lanes
    from ft_core.runtime.quorum_worker import Round
    from ft_core.runtime.step_attempt import StepAttempt
    from ft_core.settings import TimeBudget

log = logging.getLogger("ft_core")
MAX_ANSWERS = 4
"""Quorum answers kept until the worker takes them: there is one open ask at a time."""
MAX_STORY = 32
"""Events kept to tell in an error message how it came to this."""
MYSELF = ""
"""This rank among those that are paused; its replica_id stands for all ranks of its group."""


class Session:
    """Shared state of one rank; see the module's text."""

    def __init__(self, step: Step, lanes: Lanes, budget: TimeBudget, hello: Callable[[], Hello]) -> None:
        self.step = step
        self.lanes = lanes
        self.budget = budget
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when an answer arrived, the rank broke, or the session ended."""
        self.control: Control
        self.watchdog = Watchdog(step.settings.replica_id, self._overdue, self._look_at_links)
        self.links = Links()
        self.answers: dict[int, Quorum] = {}
        self.fatal: Exception | None = None
        """The lighthouse refused us for good, or the job is finished."""
        self.closed = False
        self.error: Exception | None = None
        """What went wrong in the current attempt, for `Manager.errored`."""
        self.peers: tuple[tuple[str, tuple[str, ...]], ...] = ()
        """(replica_id, heal addresses per rank) of the running members, known before we join: for prefetch."""
        self.reason = ""
        """Why there is no quorum yet, while there is none."""
        self.drain_reason = ""
        """Why this replica is to leave at the next boundary (the whole group knows it, or is being told)."""
        self.exits_on_drain = True
        """The Manager ends the process then; False: the training loop decides."""
        self._told = ""
        """The reason that was logged last."""
        self._membership, self._vetoes = notices.Membership(), notices.Vetoes()
        self.movable: StepAttempt | None = None
        """The attempt that is open, as long as nothing of it was launched and nobody was told who takes part in it."""
        self._open_since = 0.0
        """When that one was opened (monotonic s)."""
        self.submit: Callable[[Round], None]
        """Begins a round of asking (`QuorumWorker.submit`)."""
        self.works = UserWorks(self.fail)
        """The user's collectives and futures that the next vote has to wait for."""
        self.given_s: float | None = None
        self._given_until = 0.0
        """The timeout that should_commit was given, while it runs, and when that is over (monotonic s)."""
        self.parted: list[tuple[int, int]] = []
        """(quorum_id, replica_rank) of members that have left and are to be told when what is under way has ended here;
        bounded by the members of the quorum."""
        self._waits_for_works = False
        """The watchdog was armed for `works` only: once they have ended there is nothing to end."""
        self.pauses = Pauses()
        """Of the members of the quorum, of this rank itself (`MYSELF`) and of its group's other ranks."""
        self.quorum_pauses = Pauses()
        """Of those that the next quorum waits for, as the lighthouse says."""
        self.kill: Callable[[str], None] | None = None
        self.cancel_heal: Callable[[], None] = lambda: None
        self.patience_s = budget.timeout_s
        """How long a collective may wait for a silent peer: `timeout`, less when the interpreter exits."""
        self._busy: dict[object, tuple[float, str]] = {}
        """Open pauses of this rank: until when (monotonic s) and why."""
        self._hello = hello
        self.control_ports: frozenset[int] = frozenset()
        """TCP ports of the control plane that this rank connects to, or is connected to at: given when it is set up."""
        self.death = DeathNotice(self._lifelines)
        """Tells the others of the death of this process before its memory has gone."""
        self.peer_ends = PeerEnds(step.settings.replica_id, self._peer_ended)
        lanes.on_formed = self._formed

    def __repr__(self) -> str:
        return f"Session({self.step!r}, {'closed' if self.closed else 'open'})"

    @property
    def draining(self) -> bool:
        """This rank is to end at the next boundary that its group agrees on; nothing is worth waiting for any more."""
        return self.exits_on_drain and (bool(self.drain_reason) or self.step.departure.drain_agreed)

    def drain(self, reason: str) -> None:
        """Ask all ranks of this group to leave (any thread; comes back as `on_drain`)."""
        self.control.drain(reason)

    # ------------------------------------------------------------ failures

    def fail(self, error: BaseException) -> None:
        """A collective of the current quorum failed here: this rank is broken, and everybody learns it at once."""
        with self.lock:
            quorum_id = self.step.plan.quorum_id if self.step.plan else 0
            broke = self.step.break_(str(error) or type(error).__name__)
            if self.error is None:
                self.error = error if isinstance(error, Exception) else CollectiveError(str(error))
        if broke:
            self._broken(quorum_id, str(error))

    def untold(self, reason: str) -> str:
        """For the end of a log line: the reason, unless the line before it said just that."""
        return "" if reason == self._told else f": {reason}"

    def _broken(self, quorum_id: int, reason: str, *, abort: bool = True) -> None:
        self._told = reason
        log.info("%s: leaving quorum %#x: %s", self.step.settings.replica_id, quorum_id, reason)
        if abort:
            self.lanes.abort(quorum_id)
        with self.lock:
            if self.step.plan is None or self.step.plan.quorum_id <= quorum_id:
                self.cancel_heal()
        self.control.break_group(quorum_id, reason)
        with self.changed:
            self.changed.notify_all()

    def _lost(self, quorum_id: int, reason: str, held: Version = VOID, *, moves: bool = False) -> None:
        moved: Round | None = None
        with self.lock:
            was = self.step.phase
            open_s = time.monotonic() - self._open_since
            open_ = self.movable if moves and may_move(self.step, open_s, self.patience_s) else None
            abort = self.step.lost(quorum_id, reason, held)
            broke = self.step.broken and was is not Phase.BROKEN
            fenced = self.step.phase is Phase.FENCED and held <= self.step.base
            if broke and self.error is None:
                self.error = CollectiveError(reason)
            if broke and open_ is not None:
                moved, self.movable = open_.move(MustAsk(reason, failed=True)), None
        if broke:
            self._broken(quorum_id, reason, abort=abort)
            if moved is not None:
                self.submit(moved)
        elif fenced:
            self.lanes.abort_user_lane(quorum_id)

    def limit(self, given_s: float | None) -> None:
        """All that is waited for from now on has to come within `given_s`; None: each within `patience_s`."""
        self.given_s = given_s
        self._given_until = time.monotonic() + (given_s or 0.0)

    def expect(self, within_s: float | None = None, *, works_only: bool = False) -> None:
        """A collective, or a configure, begins: from now on the watchdog gives it `within_s` (else `patience_s`)."""
        self._waits_for_works = works_only
        if within_s is None and self.given_s is not None:
            self.watchdog.arm(self._given_until)
        else:
            self.watchdog.arm(time.monotonic() + (self.patience_s if within_s is None else within_s))

    def _overdue(self) -> float | None:
        """Watchdog thread: a collective or a configure has waited for `timeout_s`."""
        now = time.monotonic()
        if self._waits_for_works and self.works.all_ended():
            return None
        with self.lock:
            later = self.pauses.look_again(-math.inf, self.given_s or self.patience_s, now)
        if later is not None:
            return later
        self.probe()
        limit = f"{self.given_s:g} s (should_commit's timeout)" if self.given_s else f"timeout={self.patience_s:g} s"
        self.lanes.abort()  # also if this rank is broken already: whatever waits must end
        self.fail(
            CollectiveError(
                f"a peer did not take part in a collective within {limit} "
                "(if it legitimately takes long, wrap that part in manager.pause(reason, max_s))"
            )
        )
        return None

    def probe(self) -> tuple[str, ...]:
        """Look which peers can be reached; the next ask says so (the lighthouse leaves out who is cut off)."""
        return self.links.probe(min(PROBE_S, (self.given_s or self.patience_s) / 4))

    def _look_at_links(self) -> None:
        """Watchdog thread: a collective or a configure waits for long. For a peer that cannot be reached, no longer."""
        with self.lock:
            if self.step.phase not in (Phase.ENTERED, Phase.OPEN, Phase.LAUNCHED):
                return  # nothing that could be given up any more
        if self._waits_for_works and self.works.all_ended():
            return
        unreachable = self.probe()
        if unreachable:
            self.lanes.abort()
            self.fail(CollectiveError(f"{', '.join(unreachable)} cannot be reached over the network"))

    @contextlib.contextmanager
    def busy(self, what: str, max_s: float) -> Iterator[None]:
        """Announce that peers (and the own watchdog) must wait for this rank for at most `max_s`. May be nested."""
        token = object()
        with self.lock:
            self._busy[token] = (time.monotonic() + max_s, what)
        self._announce_busy()
        try:
            yield
        finally:
            with self.lock:
                del self._busy[token]
            self._announce_busy()

    def _lifelines(self) -> list[int]:
        """Descriptors of the connections whose end says that this process is gone."""

        def controls(connection: socket_table.Connection) -> bool:
            return not self.control_ports.isdisjoint((connection.peer.port, connection.local.port))

        return [*self.lanes.connection_fds(), *socket_table.connections(controls)]

    def opened(self, attempt: StepAttempt | None) -> None:
        """A step begins (training thread). `attempt`: goes on in the next quorum if this one ends meanwhile (R19)."""
        self.movable, self._open_since = attempt, time.monotonic()

    def _formed(self) -> None:
        """A process group has formed (the thread that formed it)."""
        self.death.update()
        self.peer_ends.watch(self.lanes.quorum_id, self.lanes.connection_fds())

    def _peer_ended(self, quorum_id: int) -> None:
        """A peer has ended a connection of this quorum's group. Whoever waits in a collective learns it there."""
        with self.lock:
            waits = self.step.phase is Phase.LAUNCHED
        if not waits:
            self._lost(quorum_id, "a peer has ended its connection", moves=True)

    def _announce_busy(self) -> None:
        """Tell the others the longest of the pauses that are open, or that there is none."""
        step = self.step
        with self.lock:
            now = time.monotonic()
            until, what = max(self._busy.values(), default=(0.0, "step"))
            left_s = max(0.001, until - now) if until else 0.0
            self.pauses.announce(MYSELF, left_s, now)
        self.control.progress(step.version.step, what, step.stable, paused_s=left_s)

    def report_progress(self) -> None:
        """Training thread, after a vote: where this rank is. A pause that is open stays announced."""
        if self._busy:
            self._announce_busy()
        else:
            step = self.step
            self.control.progress(step.version.step, "step", step.stable)

    # ------------------------------------------------------------ LeaseHandler (lease thread)

    def hello(self) -> Hello:
        """What to present when the lease is (re-)opened."""
        return self._hello()

    def on_welcome(self, peers: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
        """The lease is open; `peers` are the running members."""
        with self.changed:
            self.peers = peers
            self.changed.notify_all()
        self.death.update()

    def on_quorum(self, seq: int, quorum: Quorum) -> None:
        """An ask was answered."""
        with self.changed:
            while len(self.answers) >= MAX_ANSWERS:
                self.answers.pop(next(iter(self.answers)))
            self.answers[seq] = quorum
            now = time.monotonic()
            self.pauses.forget()  # those of its members are announced anew
            self.pauses.announce(MYSELF, max(self._busy.values(), default=(0.0, ""))[0] - now, now)
            self.changed.notify_all()

    def on_reason(self, reason: str, paused_s: float = 0.0) -> None:
        """There is no quorum yet. The worker tells the user, if it lasts."""
        with self.changed:
            self.reason = reason
            self.quorum_pauses.announce("", paused_s, time.monotonic())

    def on_change_pending(self, quorum_id: int, reason: str) -> None:
        """Somebody wants to join or leave."""
        with self.lock:
            self.step.want_change(quorum_id, reason)

    def on_member_lost(self, quorum_id: int, lost: tuple[str, ...], held: Version = VOID) -> None:
        """Members of the quorum are gone; `held`: the state that all of them held when they said goodbye."""
        reason = f"{'lost' if held == VOID else 'left by'} {', '.join(lost)}"
        self._lost(quorum_id, reason, held, moves=held == VOID)
        if held == VOID:
            return
        with self.lock:
            plan, waits = self.step.plan, self.step.phase is Phase.LAUNCHED
            if plan is None or plan.quorum_id != quorum_id:
                return
            self.parted += [(quorum_id, rank) for rank, member in enumerate(plan.quorum.ids) if member in lost]
        if not waits:
            self.tell_parted()

    def tell_parted(self) -> None:
        """Nothing that members wait for who have left is under way here: they need not keep their connections open."""
        with self.lock:
            parted, self.parted = self.parted, []
            current = self.step.plan.quorum_id if self.step.plan is not None else 0
        self.lanes.tell_parted([rank for quorum_id, rank in parted if quorum_id == current])

    def on_paused(self, quorum_id: int, replica_id: str, for_s: float) -> None:
        """A peer announces to be busy for at most `for_s` (0: it is back)."""
        with self.lock:
            if self.step.plan is not None and quorum_id < self.step.plan.quorum_id:
                return  # of the next quorum it may be told before this rank has entered it
            self.pauses.announce(replica_id, for_s, time.monotonic())

    def on_superseded(self, quorum_id: int) -> None:
        """The others have formed a newer quorum without us."""
        self._lost(quorum_id, "the other replicas have formed a newer quorum")

    def tell_members(self, quorum: Quorum) -> None:
        """A quorum was entered: tell the user who was lost, and who is back."""
        settings = self.step.settings
        for line in self._membership.entered(quorum, settings.replica_id) if settings.group_rank == 0 else ():
            notices.say(line)

    def tell_not_committed(self, step: int, verdict: Verdict) -> None:
        """An attempt on the state of `step` has failed; that all have agreed to skip it is said once per job."""
        plan, settings, reason = self.step.plan, self.step.settings, verdict.reason
        first = plan is not None and plan.replica_rank == 0 and settings.group_rank == 0
        said = self._vetoes.vetoed(step, reason, time.monotonic()) if first and verdict.outcome is Outcome.VETO else ""
        if said:
            notices.say(said)
        else:
            log.info("%s: step %d not committed%s", settings.replica_id, step, self.untold(reason))

    def on_refused(self, error: Exception) -> None:
        """Final: the lighthouse will not have us."""
        with self.changed:
            self.fatal = self.fatal or error
            self.changed.notify_all()
        self.fail(error)

    def on_drain(self, reason: str) -> None:
        """An operator asks this replica to leave at the next boundary."""
        with self.changed:
            if self.drain_reason:
                return
            self.drain_reason = reason or "drain requested"
            self.step.departure.want_drain()
            self.changed.notify_all()
        log.info("%s: asked to drain: %s", self.step.settings.replica_id, self.drain_reason)
        if self.exits_on_drain:
            self.cancel_heal()

    def on_kill(self, reason: str) -> None:
        """An operator asks this process to end."""
        log.warning("%s: asked to end by the lighthouse: %s", self.step.settings.replica_id, reason)
        if self.kill is not None:
            self.kill(reason)
