"""`RankShell`: the machine of one rank with its lock, its clock, its network and its threads.

How it works. Every protocol decision is `protocol.rank.Rank`'s; this class hands it what happens (`dispatch`), under
the one lock, and performs what follows after releasing it, by a table. What may block (building process groups, state
that is received) is done by the quorum worker, in order. Who waits for the machine waits on the lock's condition, which
every dispatch notifies. It is the `PushHandler` of the control link.

Threads (the map stands in manager.py): the training thread, the lease thread (`on_push`), the quorum worker, the
timeout thread, autograd threads. Invariants: nothing blocks while `lock` is held, and `lock` is the only one held when
the machine is called; of two asks the older one is never sent last.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ft_core.errors import CollectiveError, ConfigError, HealError, StateRefusedError
from ft_core.process_group import socket_table
from ft_core.process_group.peer_ends import PeerEnds
from ft_core.protocol.pushes import Order, Welcome
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import Heal, Phase
from ft_core.protocol.rank.state import MYSELF
from ft_core.protocol.types import Outcome
from ft_core.runtime import notices, unbuilt
from ft_core.runtime.collective_limits import CollectiveLimits
from ft_core.runtime.peer_links import Links
from ft_core.runtime.push_events import event_of
from ft_core.runtime.quorum_worker import QuorumWorker
from ft_core.runtime.rank_events import RankEvents
from ft_core.runtime.user_works import UserWorks
from ft_core.witness.link import DeathNotice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ft_core.control.link import Control
    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.pushes import Push
    from ft_core.protocol.rank.formation import Wish
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.phases import MustAsk
    from ft_core.protocol.rank.rank import Rank
    from ft_core.protocol.types import Verdict
    from ft_core.runtime.communicators import Communicators
    from ft_core.runtime.state_transfer import Healing, Received
    from ft_core.settings import TimeBudget

log = logging.getLogger("ft_core")


class RankShell:
    """What the threads of one rank share; see the module's text."""

    def __init__(self, rank: Rank, communicators: Communicators, transfer: Healing, budget: TimeBudget) -> None:
        self.rank = rank
        self.communicators = communicators
        self.transfer = transfer
        self.budget = budget
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified after every event."""
        self.control: Control
        """The way to the lighthouse; given when it is set up."""
        self.hello: Callable[[], Hello]
        """What to present when the lease is (re-)opened; given when it is set up."""
        self.place: Callable[[Plan], tuple[str, bool]]
        """Where the process groups of a quorum meet (store prefix), and whether ballots ride on gradients; likewise."""
        self.kill: Callable[[str], None] | None = None
        """An operator asks this process to end; given when it is set up."""
        self.control_ports: frozenset[int] = frozenset()
        """TCP ports of the control plane that this rank connects to, or is connected to at; given likewise."""
        self.peers: tuple[tuple[str, tuple[str, ...]], ...] = ()
        """(replica_id, heal addresses per rank) of the running members, known before we join: for prefetch."""
        self.awaited = False
        """The script can go no further before there is a quorum."""
        self.works = UserWorks(self.fail)
        """The user's collectives and futures that the next vote has to wait for."""
        self.links = Links()
        self.events = RankEvents(rank)
        """What happens here, for the job's log."""
        self.limits = CollectiveLimits(
            rank, self.lock, communicators, self.works, self.links, self.dispatch, budget.timeout_s
        )
        self.worker = QuorumWorker(
            rank.settings.replica_id, self.changed, lambda: rank.next_at,
            lambda: self.dispatch(on.Tick(self.control.last_reason)), self._look_at_newcomers,
        )  # fmt: skip
        self._view: Callable[[], Mapping[str, Any]] | None = None
        """Returns this rank's state at the boundary the open ask was made at, or raises what kept it from being
        collected. None if there is no ask, or this rank must not be a donor."""
        self._in_place: Mapping[str, Any] | None = None
        """Tensors to receive into: only while this rank's own state is worthless and forward is not running."""
        self.received: Received | None = None
        """A verified state, until it is applied."""
        self.death = DeathNotice(self._lifelines)
        """Tells the others of the death of this process before its memory has gone."""
        self.peer_ends = PeerEnds(rank.settings.replica_id, lambda q: self.dispatch(on.PeerEnded(q)))
        self._busy: dict[object, tuple[float, str]] = {}
        """Open pauses of this rank: until when (monotonic s) and why."""
        self._told = ""
        """The reason that was logged last."""
        self._sending = threading.Lock()
        """Held while an ask is sent, so that an older one cannot overtake it."""
        self._membership, self._vetoes = notices.Membership(), notices.Vetoes()
        communicators.on_formed = self._formed

    def __repr__(self) -> str:
        return f"RankShell({self.rank!r}, {'closed' if self.rank.closed else 'open'})"

    # ------------------------------------------------------------ events and actions

    def dispatch(self, event: on.Event) -> None:
        """Hand the machine an event, and perform what follows. Any thread that does not hold the lock."""
        with self.changed:
            actions = self._handle(event)
        self.perform(actions)

    def _handle(self, event: on.Event) -> do.Actions:
        """The same, for who holds the lock and performs later."""
        now = time.monotonic()
        actions = self.rank.handle(event, now)
        self.events.handled(event, actions, now)
        self.changed.notify_all()
        return actions

    def ask(
        self, wish: Wish, why: MustAsk | None, view: Callable[[], Mapping[str, Any]] | None,
        in_place: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        """Training thread: another quorum is needed, for which this rank's state is `view()`."""
        with self.changed:
            self._view, self._in_place, self.received = view, in_place, None
            actions = self._handle(on.QuorumWanted(wish, why))
        self.perform(actions)

    def perform(self, actions: do.Actions) -> None:
        """Do what the machine returned; what may block is left to the worker."""
        for action in actions:
            what, blocks = PERFORM[type(action)]
            if blocks:
                self.worker.add(partial(self._do, what, action))
            else:
                what(self, action)
        self._let_go()

    def _do(self, what: Callable[[RankShell, Any], None], action: do.Action) -> None:
        """Perform an action that may block. Whatever it raises ends what it was for: nobody would wake the script."""
        try:
            what(self, action)
        except Exception as error:
            log.exception("%s: unexpected failure while a quorum forms", self._name)
            self.dispatch(on.WorkFailed(error))

    def _let_go(self) -> None:
        """Nobody can ask for the state of that boundary any more: copies of it would last until the next quorum."""
        if self._view is None and self._in_place is None:
            return
        with self.lock:
            if not (self.rank.forming or self.rank.receiving):
                self._view = self._in_place = None
                self.transfer.forget()

    def _send_ask(self, action: do.SendAsk) -> None:
        with self._sending:
            with self.lock:
                formation = self.rank.formation
                if formation is None or formation.sent is not action.ask:
                    return
            try:
                self.control.ask(action.ask, room=action.room)
                return
            except Exception as error:  # noqa: BLE001 - the link has been refused: the reason is the machine's to keep
                refused = error
        self.dispatch(on.Refused(refused))

    def _abort(self, action: do.Abort) -> None:
        self.communicators.abort(action.quorum_id)
        with self.lock:
            current = self.rank.quorum_id <= action.quorum_id
        if current:
            self.transfer.cancel()

    def _tell_group(self, action: do.TellGroup) -> None:
        self._told = action.reason
        log.info("%s: leaving quorum %#x: %s", self._name, action.quorum_id, action.reason)
        self.control.break_group(action.quorum_id, action.reason)

    def _entered(self, action: do.Entered) -> None:
        settings, quorum = self.rank.settings, action.plan.quorum
        self.links.entered(quorum, settings.replica_id, settings.group_rank)
        for line in self._membership.entered(quorum, settings.replica_id) if settings.group_rank == 0 else ():
            notices.say(line)

    def _report(self, action: do.Report) -> None:
        log.log(logging.WARNING if action.warns else logging.INFO, "%s: %s", self._name, action.text)

    def _look_again(self, _: do.LookAtLinks) -> None:
        self.links.look_again(lambda: self.dispatch(on.LinksSeen(*self.links.statement)))

    @property
    def _name(self) -> str:
        return self.rank.settings.replica_id

    # ------------------------------------------------------------ what may block (quorum worker)

    def _look_at_newcomers(self) -> None:
        if self.transfer.snapshot_wanted:
            self.dispatch(on.StateWanted())

    def _offer_live(self, _: do.OfferLive) -> None:
        view = self._view
        if view is not None:
            self.transfer.offer_live(view)

    def _prefetch(self, action: do.Prefetch) -> None:
        rank, error = self.rank, None
        place = rank.settings.group_rank
        donors = [addresses[place] for _, addresses in self.peers if len(addresses) > place]
        before, written = rank.held.version, False
        with self.lock:
            if not rank.forming:
                return  # the script was told already that there is no quorum
            into = self._in_place
            self.worker.writes = into is not None
        if donors and into is not None:
            self.dispatch(on.StateTorn())  # before the first byte (R7)
        try:
            written = bool(donors) and self.transfer.prefetch(donors, into, action.within_s)
        except Exception as failed:  # noqa: BLE001 - the script is told, which waits for a quorum
            error = failed
        if donors and into is not None and not written:
            self.dispatch(on.StateUntouched(before))
        self.events.prefetched(self.transfer.prefetched_bytes)
        self.dispatch(on.PrefetchEnded(error))

    def _offer(self, action: do.Offer) -> None:
        plan, view = action.plan, self._view
        self.transfer.close()
        holder = plan.replica_rank not in plan.healing and not plan.excluded
        if plan.healing and holder and view is not None:
            self.transfer.offer(plan, self.place(plan)[0], view, self.budget.timeout_s)

    def _forms(self, plan: Plan) -> bool:
        return self.rank.phase is Phase.FORMING and self.rank.plan is plan

    def _configure(self, action: do.Configure) -> None:
        plan = action.plan
        with self.lock:
            if not self._forms(plan):
                return  # a push said already that this quorum is over
            self.communicators.open(plan.quorum_id)
        prefix, rides = self.place(plan)
        self.limits.expect(min(self.budget.connect_s, self.limits.patience_s))
        try:
            self.communicators.configure(prefix, self._name, plan.replica_rank, plan.size, rides=rides)
        except Exception as error:  # noqa: BLE001 - a peer died, a store is gone, an abort came: ask again
            self.limits.disarm()
            why, here = unbuilt.explain(self._name, error)
            if not here and self._forms(plan):
                self.limits.probe()  # nobody says that a peer is lost: is it the network?
            self.communicators.abort(plan.quorum_id)
            self.dispatch(on.GroupsFailed(plan.quorum_id, why, here))
        else:
            self.limits.disarm()
            self.dispatch(on.GroupsUp(plan.quorum_id))

    def _receives(self, plan: Plan) -> bool:
        return self.rank.receiving and self.rank.plan is plan

    def _receive(self, action: do.Receive) -> None:
        plan, rank, cancel = action.plan, self.rank, self.transfer.cancelled  # before the look: a break is not missed
        with self.lock:
            if not self._receives(plan):
                return
            # At step 0 the own state is as good as anybody's: it is not written over before the other has come.
            into = self._in_place if plan.target.step > 0 else None
            self.worker.writes = self._in_place is not None  # also at step 0, where it was copied to before
        if into is not None:
            self.dispatch(on.StateTorn())  # before the first byte (R7)
        view = self._view
        if view is not None:
            with contextlib.suppress(Exception):  # it could not be collected, which is for its receivers to know
                self.transfer.know(view())
        try:
            with self.busy("healing", self.budget.heal_s, told=False):
                received = self.transfer.receive(plan, self.place(plan)[0], into, cancel)
        except HealError as error:
            # If no donor can send it, asking again would disturb the others at every step: this replica ends (R11).
            self.dispatch(on.ReceiveFailed(plan.quorum_id, error, final=isinstance(error, StateRefusedError)))
            return
        except Exception as error:
            if self._receives(plan):
                raise
            log.info("%s: what was received ended with its quorum: %s", self._name, error)
            return
        with self.lock:
            self.received = received
        self.events.received(received)
        self.dispatch(on.StateReceived(plan.quorum_id))
        with self.lock:
            if rank.attempt.heal is not Heal.READY:
                self.received = None  # that quorum ended before

    # ------------------------------------------------------------ waits

    def wait_formed(self, timeout_s: float | None = None) -> bool:
        """Block until there is a quorum, or the reason why there is none (`rank.failure`). False: not in that time.

        Without a timeout the machine's own limits bound it.
        """
        rank = self.rank
        if not rank.forming:
            return True
        self.awaited = True
        try:
            with self.changed:
                return self.changed.wait_for(lambda: not rank.forming, timeout_s)
        finally:
            self.awaited = False

    def wait_received(self) -> None:
        """Block until state that was planned has been received, or was given up. Bounded by heal_s."""
        with self.changed:
            self.changed.wait_for(lambda: not (self.rank.forming or self.rank.receiving))

    # ------------------------------------------------------------ failures

    def fail(self, error: BaseException) -> None:
        """A collective of the current quorum failed here: this rank is broken, and everybody learns it at once."""
        self.dispatch(on.CollectiveFailed(error if isinstance(error, Exception) else CollectiveError(str(error))))

    def report(self, error: BaseException) -> None:
        """Report a failure that leaves the collectives usable: zeros, and a veto."""
        self.dispatch(on.SoftError(error if isinstance(error, Exception) else CollectiveError(str(error))))

    def untold(self, reason: str) -> str:
        """For the end of a log line: the reason, unless the line before it said just that."""
        return "" if reason == self._told else f": {reason}"

    def tell_not_committed(self, step: int, verdict: Verdict) -> None:
        """An attempt on the state of `step` has failed; that all have agreed to skip it is said once per job."""
        plan, settings, reason = self.rank.plan, self.rank.settings, verdict.reason
        first = plan is not None and plan.replica_rank == 0 and settings.group_rank == 0
        said = self._vetoes.vetoed(step, reason, time.monotonic()) if first and verdict.outcome is Outcome.VETO else ""
        if said:
            notices.say(said)
        else:
            log.info("%s: step %d not committed%s", settings.replica_id, step, self.untold(reason))

    # ------------------------------------------------------------ announcements

    @contextlib.contextmanager
    def busy(self, what: str, max_s: float, *, told: bool = True) -> Iterator[None]:
        """Announce that peers (and the own watchdog) must wait for this rank. May be nested. Raises ConfigError.

        `told`: it is an event of its own in the job's log.
        """
        if not max_s > 0:
            raise ConfigError(f"pause(max_s={max_s!r}) must be a positive number of seconds")
        token, began = object(), self.events.pause(what, max_s) if told else 0.0
        with self.lock:
            self._busy[token] = (time.monotonic() + max_s, what)
        self._announce_busy()
        try:
            yield
        finally:
            with self.lock:
                del self._busy[token]
            self._announce_busy()
            if told:
                self.events.pause_over(what, began)

    def _announce_busy(self) -> None:
        """Tell the others the longest of the pauses that are open, or that there is none."""
        held = self.rank.held
        with self.lock:
            until, what = max(self._busy.values(), default=(0.0, "step"))
            left_s = max(0.001, until - time.monotonic()) if until else 0.0
        self.dispatch(on.Paused(0, MYSELF, left_s))
        self.control.progress(held.version.step, what, held.stable, paused_s=left_s)

    def report_progress(self) -> None:
        """Training thread, after a vote: where this rank is. A pause that is open stays announced."""
        if self._busy:
            self._announce_busy()
        else:
            held = self.rank.held
            self.control.progress(held.version.step, "step", held.stable)

    def drain(self, reason: str) -> None:
        """Ask all ranks of this group to leave (any thread; comes back as an Order)."""
        self.control.drain(reason)

    # ------------------------------------------------------------ connections

    def _lifelines(self) -> list[int]:
        """Descriptors of the connections whose end says that this process is gone."""

        def controls(connection: socket_table.Connection) -> bool:
            return not self.control_ports.isdisjoint((connection.peer.port, connection.local.port))

        return [*self.communicators.connection_fds(), *socket_table.connections(controls)]

    def _formed(self) -> None:
        """A process group has formed (the thread that formed it)."""
        self.death.update()
        self.peer_ends.watch(self.communicators.quorum_id, self.communicators.connection_fds())

    # ------------------------------------------------------------ PushHandler (lease thread)

    def on_push(self, push: Push) -> None:
        """Something arrived from the lighthouse, or from group rank 0."""
        event = event_of(push)
        if event is not None:
            self.dispatch(event)
        elif isinstance(push, Welcome):
            with self.changed:
                self.peers = push.peers
                self.changed.notify_all()
            self.death.update()
        elif isinstance(push, Order):
            log.warning("%s: is ordered to end: %s", self._name, push.reason)
            if self.kill is not None:
                self.kill(push.reason)


PERFORM: Mapping[type[do.Action], tuple[Callable[[RankShell, Any], None], bool]] = {
    do.SendAsk: (RankShell._send_ask, False),
    do.Abort: (RankShell._abort, False),
    do.AbortUserGroup: (lambda shell, action: shell.communicators.abort_users(action.quorum_id), False),
    do.CancelReceive: (lambda shell, _: shell.transfer.cancel(), False),
    do.TellGroup: (RankShell._tell_group, False),
    do.TellParted: (lambda shell, action: shell.communicators.tell_parted(action.ranks), False),
    do.Entered: (RankShell._entered, False),
    do.LookAtLinks: (RankShell._look_again, False),
    do.Report: (RankShell._report, False),
    do.Prefetch: (RankShell._prefetch, True),
    do.Offer: (RankShell._offer, True),
    do.OfferLive: (RankShell._offer_live, True),
    do.Configure: (RankShell._configure, True),
    do.Receive: (RankShell._receive, True),
}
"""What is done about each action, and whether it may block: then it is the worker's."""
