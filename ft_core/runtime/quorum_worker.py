"""One round of asking: from "this rank needs a quorum" to "its process group is up and its state is there".

How it works. The training thread makes a `Round` (with a view of its state taken at that step boundary, in case others
must heal from it) and hands it to the quorum worker, a single long-lived thread. The worker asks, enters the quorum it
is answered with, offers or receives state and configures the lanes. If anything breaks meanwhile it asks again, until
`quorum_s` is over. The training thread waits for `configured` (before its first collective) and `healed` (before its
fence).

Invariants: a quorum_id is configured at most once (R14): a failed configure asks again. A received state belongs to
the quorum of its round. The events are always set in the end, with `error` telling why if the round failed.
Threads: the worker runs `QuorumWorker._run`; a Round's fields are written by the worker before the event that
publishes them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ft_core.errors import (
    CollectiveError,
    ConfigError,
    FaultToleranceError,
    HealError,
    LighthouseError,
    QuorumTimeoutError,
    StateRefusedError,
    ThisMachineError,
)
from ft_core.protocol.pauses import Wait
from ft_core.protocol.rank.moving import why_not_here
from ft_core.protocol.rank.phases import MustAsk, Phase
from ft_core.runtime.drain_signal import DrainedError
from ft_core.runtime.peer_links import LOOK_EVERY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.types import Ask, Quorum
    from ft_core.runtime.session import Session
    from ft_core.runtime.state_transfer import Healing, Received

log = logging.getLogger("ft_core")
TELL_S = 1.0
"""A wait for a quorum shorter than this is nobody's concern; a longer one is logged with its reason."""
REASK_PAUSE_S = 0.01
"""Between two asks after a failed configure: lets the pushes that explain the failure arrive."""


@dataclass(eq=False)
class Round:
    """One round of asking. Waited for by the training thread, worked on by the quorum worker."""

    why: MustAsk
    template: Ask
    room: str
    timeout_s: float
    state: Callable[[], Mapping[str, Any]] | None
    """Returns this rank's state at the boundary the ask was made at, or raises what kept it from being collected. None
    if it must not be a donor."""
    in_place: Mapping[str, Any] | None = None
    """Tensors to receive into directly: only while this rank's own state is worthless and forward is not running."""
    prefetch: bool = False
    moves: bool = False
    """An attempt that is open goes on in this quorum (R19), unless somebody needs state there."""
    hands_over: bool = False
    """This replica drains, and asks all the same: another member may lack its last commit."""
    asked: bool = False
    """This rank's ask is on its way, or was answered."""
    plan: Plan | None = None
    received: Received | None = None
    error: Exception | None = None
    raised: bool = False
    """The script has been told of `error`."""
    heal_error: Exception | None = None
    awaited: bool = False
    """The script can go no further before it is configured."""
    configured: threading.Event = field(default_factory=threading.Event)
    healed: threading.Event = field(default_factory=threading.Event)

    def __repr__(self) -> str:
        state = "done" if self.healed.is_set() else "configured" if self.configured.is_set() else "asking"
        return f"Round({state}, {self.why.reason}, error={self.error})"

    def again(self, why: MustAsk) -> Round:
        """A round for the rest of the step: nothing can be given to others in the middle of it."""
        template = replace(self.template, heals_before_forward=False)
        return Round(why, template, self.room, self.timeout_s, state=None, moves=True)

    def check(self) -> None:
        """Raise the error of this round, if it has one: to the script, which then knows that it has ended."""
        if self.error is not None:
            self.raised = True
            raise self.error

    def let_go(self) -> None:
        """Nobody can ask for this state any more: copies of it would last until the next quorum, which may be days."""
        self.state = self.in_place = None

    def wait_configured(self) -> None:
        """Block until the lanes are up or the round failed (`error`). Bounded by the worker's own deadlines."""
        self.awaited = True
        try:
            self.configured.wait()
        finally:
            self.awaited = False

    def wait_healed(self) -> None:
        """Block until the planned state was received or given up. Bounded by heal_s."""
        self.healed.wait()


class QuorumWorker:
    """The thread that works on rounds, one at a time."""

    def __init__(
        self,
        session: Session,
        healing: Healing,
        place: Callable[[Plan], tuple[str, int, int, bool]],
    ) -> None:
        self._session = session
        self._healing = healing
        self._place = place
        self._jobs: queue.Queue[Round | None] = queue.Queue(maxsize=4)
        self._stopping = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, name=f"ft-quorum-{session.step.settings.replica_id}", daemon=True
        )

    def __repr__(self) -> str:
        return f"QuorumWorker({'alive' if self._thread.is_alive() else 'ended'})"

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, round_: Round) -> None:
        """Begin a round. After `stop` it ends at once: nobody would take it from the queue."""
        with self._stopping:
            if not self._stopped:
                self._jobs.put(round_)
                return
        round_.error = LighthouseError("the manager was shut down before it had a quorum")
        round_.configured.set()
        round_.let_go()
        round_.healed.set()

    def stop(self, timeout_s: float) -> None:
        """End the thread; the session must be closed already, so that nothing it waits for lasts."""
        with self._stopping:
            self._stopped = True
            self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            round_ = self._jobs.get()
            if round_ is None:
                return
            try:
                self._work(round_)
            except FaultToleranceError as error:
                round_.error = error
            except Exception as error:
                log.exception("%s: unexpected failure while forming a quorum", self._session.step.settings.replica_id)
                round_.error = error
            finally:
                if round_.error is not None and (round_.asked or not isinstance(round_.error, DrainedError)):
                    with self._session.lock:
                        self._session.step.break_(str(round_.error))
                round_.configured.set()
                round_.let_go()
                self._healing.forget()
                round_.healed.set()

    def _work(self, round_: Round) -> None:
        with self._session.lock:
            wait = Wait(self._session.quorum_pauses, round_.timeout_s, time.monotonic())
        if round_.prefetch and not self._session.draining:
            self._prefetch(round_)
        why, session = round_.why, self._session
        while True:
            quorum = self._ask(round_, why, wait)
            if quorum is None:
                session.fail(CollectiveError("a newcomer needs state, which is given between two steps only"))
                return
            with session.lock:
                plan = session.step.enter(quorum)
                session.links.entered(quorum, session.step.settings.replica_id, session.step.settings.group_rank)
                if not session.step.soft_error:
                    session.error = None
            round_.plan = plan
            session.tell_members(quorum)
            if round_.moves and (refusal := why_not_here(plan)):
                session.fail(CollectiveError(refusal))
                return
            self._offer(round_, plan)
            if self._configure(plan):
                break
            with session.lock:
                why = MustAsk(session.step.broken_reason or "the process group could not be built", failed=True)
            with session.lock:
                over = wait.over(time.monotonic())
            if over:
                raise QuorumTimeoutError(f"no usable quorum within {round_.timeout_s:g} s: {why.reason}")
            log.info("%s: asking again: %s", session.step.settings.replica_id, why.reason)
            time.sleep(REASK_PAUSE_S)
        round_.configured.set()
        if plan.heals:
            self._heal(round_, plan)

    def _ask(self, round_: Round, why: MustAsk, wait: Wait) -> Quorum | None:
        """The next quorum; None: an attempt that moves (R19) must not wait for it any longer."""
        session = self._session
        with session.lock:
            if session.draining and not round_.hands_over:
                raise DrainedError("this replica drains and asks for no further quorum")
            session.links.refresh()
            ask = self._next_ask(round_, why)
            session.answers.clear()
            session.quorum_pauses.forget()
            session.reason = told = ""
        tell_at = time.monotonic() + TELL_S
        look_at = time.monotonic() + LOOK_EVERY_S
        round_.asked = True
        session.control.ask(ask, room=round_.room)
        while True:
            with session.changed:
                if session.fatal is not None:
                    raise session.fatal
                if session.closed:
                    raise LighthouseError("the manager was shut down while it waited for a quorum")
                quorum = session.answers.pop(ask.seq, None)
                if quorum is not None:
                    return quorum
                if session.draining and not round_.hands_over:
                    raise DrainedError("this replica drains and waits for no quorum")
                now = time.monotonic()
                if wait.over(now):
                    break
                if round_.moves and self._healing.snapshot_wanted:
                    return None  # a newcomer copies live state before it asks: given between two steps only
                self._offer_live(round_)
                if now >= tell_at and session.reason != told:
                    told = session.reason
                    log.warning("%s: waiting for a quorum: %s", session.step.settings.replica_id, told)
                session.changed.wait(min(wait.at - now, TELL_S))
                if now >= look_at and (ask.unreachable or not ask.reached):
                    look_at = now + LOOK_EVERY_S
                    session.links.look_again()
                if session.links.statement == (ask.unreachable, ask.reached) or ask.seq in session.answers:
                    continue
                ask = self._next_ask(round_, why)  # a link broke, or is whole again
            session.control.ask(ask, room=round_.room)
        reason = session.control.last_reason or "the lighthouse gave no reason"
        raise QuorumTimeoutError(f"no quorum within {round_.timeout_s:g} s (quorum_timeout): {reason}")

    def _next_ask(self, round_: Round, why: MustAsk) -> Ask:
        """An ask with what is known of the links. The session's lock is held."""
        unreachable, reached = self._session.links.statement
        return replace(self._session.step.ask(round_.template, why), unreachable=unreachable, reached=reached)

    def _offer_live(self, round_: Round) -> None:
        """A newcomer copies live state before it asks, and this quorum may be waiting for just that newcomer."""
        if round_.state is not None and self._healing.snapshot_wanted:
            self._healing.offer_live(round_.state)

    def _configure(self, plan: Plan) -> bool:
        session = self._session
        prefix, rank, size, both = self._place(plan)
        with session.lock:
            if session.step.phase is not Phase.ENTERED:
                return False  # a push said already that this quorum is over
            session.lanes.open(plan.quorum_id)
        session.expect(min(session.budget.connect_s, session.patience_s))
        try:
            session.lanes.configure(prefix, session.step.settings.replica_id, rank, size, both=both)
        except Exception as error:  # noqa: BLE001 - a peer died, a store is gone, an abort came: ask again
            here = isinstance(error, ConfigError | ThisMachineError)
            with session.lock:
                pushed = session.step.broken
            if not (pushed or here):  # nobody says that a peer is lost: is it the network?
                session.probe()
            with session.lock:
                session.step.cannot_build(str(error), here=here)
            session.lanes.abort()
            session.control.break_group(plan.quorum_id, str(error))
            return False
        finally:
            session.watchdog.disarm()
        with session.lock:
            return session.step.configured(plan.quorum_id)

    def _offer(self, round_: Round, plan: Plan) -> None:
        self._healing.close()
        holder = plan.replica_rank not in plan.healing and not plan.excluded
        if plan.healing and holder and round_.state is not None:
            self._healing.offer(plan, round_.state, self._session.budget.timeout_s)

    def _heal(self, round_: Round, plan: Plan) -> None:
        session = self._session
        name = session.step.settings.replica_id
        cancel = self._healing.cancelled  # taken before the look at the phase: a break in between is not missed
        with session.lock:
            if session.draining:
                session.step.heal_failed(plan.quorum_id, "this replica drains")
            if session.draining or session.step.phase is Phase.BROKEN:
                return
        if round_.state is not None:
            with contextlib.suppress(Exception):  # it could not be collected, which is for its receivers to know
                self._healing.know(round_.state())
        try:
            with session.busy("healing", session.budget.heal_s):
                received = self._healing.receive(plan, self._room_for(plan, round_), cancel)
        except StateRefusedError as error:
            # Asking again would heal nothing and disturb the others at every step: this replica ends (R11).
            round_.heal_error = round_.error = error
            session.fail(error)
            return
        except HealError as error:
            round_.heal_error = error
            log.warning("%s: healing failed, asking again: %s", name, error)
            with session.lock:
                session.step.heal_failed(plan.quorum_id, str(error))
            return
        with session.lock:
            if session.step.broken or not session.step.healed(plan.quorum_id):
                return
            round_.received = received

    def _room_for(self, plan: Plan, round_: Round) -> Mapping[str, Any] | None:
        """What to receive into; VOID from now on (R7). None stages: at step 0 the own state is as good as anybody's."""
        if round_.in_place is None or plan.target.step == 0:
            return None
        with self._session.lock:
            self._session.step.tear()
        return round_.in_place

    def _prefetch(self, round_: Round) -> None:
        session = self._session
        rank = session.step.settings.group_rank
        donors = [addresses[rank] for _, addresses in session.peers if len(addresses) > rank]
        if not donors:
            return
        with session.lock:
            before = session.step.version
            if round_.in_place is not None:
                session.step.tear()  # before the first byte (R7)
        written = False
        try:
            written = self._healing.prefetch(donors, round_.in_place)
        finally:
            if not written:
                with session.lock:
                    session.step.untouched(before)
