"""ftrun's line to the lighthouse: what it knows of our groups, the word that a process ended, and drain orders.

How it works. One thread reads what the lighthouse sends when something has changed for our groups (`watch`), and opens
that stream again when it ends. Another asks for the status when somebody waits for facts, and sends words and orders in
the order in which they were given. The lighthouse may be away at any time: nothing here fails because of it, the last
picture is kept, and only `facts` says that it does not know. That a group ended is reported until a lighthouse knows it
(`end_reports`). Of two lighthouses the client asks the one that is active.

A lighthouse that is frozen ends no stream. So where there are two, one of which nothing was received for SILENT_S is
asked for its status; if it does not answer that either within LOOK_S, the client goes on to the other one, and the
stream with it.

Threads: "ftrun-watch" asks and sends, "ftrun-follow" reads; `ended`, `drain`, `look`, `facts` from any.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.errors import FaultToleranceError, RefusedError
from ft_core.launch.end_reports import EndReports
from ft_core.launch.picture import Picture, Seen
from ft_core.settings import DEFAULT_ROOM, run_of_room

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core._pb import coordination_pb2 as pb
    from ft_core.control.lighthouse.lighthouse_channel import StatusStream

log = logging.getLogger("ft_core.launch")
STUMBLED = "ftrun: a mistake of ftrun's own, in its line to the lighthouse (please report it): %s"
AGAIN_S = 0.5
"""After so long a stream that ended is opened again."""
STALE_S = 2.0
"""Of two pictures of one lighthouse the one that it made later counts, also if the other arrives last; it arrives
within so long."""
SILENT_S = 1.4
"""After so long without a picture one of two lighthouses is asked whether it is still there."""
LOOK_S = timedelta(seconds=1)
CALL_S = timedelta(seconds=2)
MANY_S = 60.0
"""How long nothing is looked at if there is nothing to wait for."""
MAX_OVER = 64
BETWEEN_S = 10.0
"""How long a group that failed waits for the others to begin another run, after the end of one."""
FACTS_S = 3 * CALL_S.total_seconds()
"""How long a group that failed waits at most until the lighthouse has answered, or a call to it has failed: a slow
answer, on a machine that is overloaded, is none that is missing. Two calls may be under way before."""


@dataclass(frozen=True)
class Facts:
    """What the lighthouse knows of a run that has ended."""

    known: bool
    """It held a lease."""
    committed: bool
    closed: str
    """The room is closed: training has ended."""
    job_committed: bool = False
    """A group of the job has committed in this run of it."""
    reachable: bool = True
    """The lighthouse answered; otherwise nothing is known, and the run's end may have been its absence."""


class Watch:
    """The line. `start` it; `close` ends its thread.

    Args:
        address, token: of the lighthouse, or of two.
        changed: called on the watch's thread after each new picture.
        undrained: called with the group's name if nobody could be told to drain: signals have to do.
        admin_token: for orders to drain; '': the token.
    """

    def __init__(
        self,
        address: str,
        token: str,
        changed: Callable[[], None],
        undrained: Callable[[str], None],
        admin_token: str = "",
    ) -> None:
        self.address = address
        self._token, self._admin_token = token, admin_token
        self._changed = changed
        self._undrained = undrained
        self._orders: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._picture = Picture()
        self._tried_at = 0.0
        """When the last question was asked (monotonic s) that was answered, or failed."""
        self._over: dict[str, dict[str, None]] = {}
        """replica_ids of each group whose processes have ended, the oldest first; at most MAX_OVER per group."""
        self._names: frozenset[str] = frozenset()
        """The groups that were started here: a lighthouse of many groups need not tell of the others. Empty: all."""
        self._came: set[str] = set()
        """Groups that were started here, and that the lighthouse has told of."""
        self._job_committed = False
        self._given_up: dict[str, str] = {}
        """Groups that are not started again, and why; as many as ftrun has groups."""
        self._known: set[str] = set()
        """Those of them of whom the lighthouse knows it."""
        self._telling = False
        """An order to report the others is under way."""
        self._made_s = 0.0
        """How long the lighthouse had been running when it made the picture."""
        self._made_at = ""
        """Its address."""
        self._reports = EndReports()
        self._heard_at = time.monotonic()
        """When something was received, or asked because of the silence, last (monotonic s)."""
        self._stream: StatusStream | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ftrun-watch", daemon=True)
        self._reader = threading.Thread(target=self._follow, name="ftrun-follow", daemon=True)

    def __repr__(self) -> str:
        return f"Watch({self.address})"

    def connect(self, timeout: timedelta) -> None:
        """Reach the lighthouse. Raises what LighthouseClient raises."""
        self._client = LighthouseClient(self.address, timeout, token=self._token, admin_token=self._admin_token)

    def start(self) -> None:
        """Start the threads; `connect` comes first."""
        self._thread.start()
        self._reader.start()

    def look(self) -> Picture:
        """The last picture."""
        return self._picture

    def now(self, name: str) -> Seen | None:
        """What the last picture says of the run of a group that is under way.

        Not of one before: the lighthouse may believe for long that a killed process only went silent.
        """
        return self._picture.now(name, self._over.get(name, ()))

    def ended(self, name: str) -> None:
        """Supervisor's word: every process of this group has ended."""
        self._orders.put(("ended", name, ""))

    def gave_up(self, name: str, reason: str) -> None:
        """Supervisor's word: this group has ended and is not started again, so nobody has to wait for it.

        It is repeated to a lighthouse that does not know it: one that was restarted, or another run's room.
        """
        with self._condition:
            self._given_up[name] = reason
        self._orders.put(("look", "", ""))

    def starts(self, name: str) -> None:
        """This group is started (again) after all; from now on the pictures are of the groups that were."""
        with self._condition:
            self._given_up.pop(name, None)
            if name not in self._names:
                self._names = self._names | {name}
                self._end_stream()

    def drain(self, name: str, reason: str) -> None:
        """Ask the group to finish its step and leave. `undrained(name)` is called if nobody could be told."""
        self._orders.put(("drain", name, reason))

    def facts(self, name: str) -> Facts:
        """What is known of the run of `name` that has just ended; asks anew, and forgets it for the next run."""
        asked = time.monotonic()
        self._orders.put(("look", "", ""))
        with self._condition:
            self._condition.wait_for(lambda: self._tried_at >= asked, FACTS_S)
            picture = self._picture
        old = self._over.get(name, {})
        runs = [seen for seen in picture.of(name) if seen.replica_id not in old]
        both = [*old, *(seen.replica_id for seen in runs)]
        self._over[name] = dict.fromkeys(both[-MAX_OVER:])  # replaced, not changed: `now` reads it on another thread
        return Facts(
            known=bool(runs), committed=any(seen.committed for seen in runs), closed=picture.closed,
            job_committed=self._job_committed, reachable=picture.at >= asked,
        )  # fmt: skip

    def nobody_came(self, name: str) -> bool:
        """Neither `name`, which has ended, nor another group was ever seen; False if that is not known. Asks anew."""
        if self._came:
            return False
        facts = self.facts(name)
        return facts.reachable and not (facts.known or facts.closed or self._came)

    def nobody_came_by(self, at: float) -> bool:
        """The same of all groups, as it was asked last: at `at` (monotonic s) or later."""
        picture = self._picture
        return not (self._came or picture.closed) and picture.at >= at

    def another_run(self, alone: Callable[[], bool], stop: threading.Event) -> bool:
        """Training has ended in the newest room: wait up to BETWEEN_S whether another run of the same script begins.

        Between two runs (Lightning's `fit`, called twice) the others are still there, and no room is open for a moment.

        Args:
            alone: no other group runs any more.
            stop: ends the wait.
        """
        deadline = time.monotonic() + BETWEEN_S
        while not alone() and time.monotonic() < deadline:
            if not self._picture.closed:
                return True
            if stop.wait(AGAIN_S):
                break
        return False

    def close(self) -> None:
        """End the threads and the connection, after what was ordered before."""
        self._orders.put(("close", "", ""))
        with self._condition:
            self._closing = True
            self._end_stream()
            self._condition.notify_all()
        for thread in (self._thread, self._reader):
            if thread.ident is not None:
                thread.join(5.0)
        with contextlib.suppress(FaultToleranceError):
            self._client.close()

    # ------------------------------------------------------------ what the lighthouse sends

    def _follow(self) -> None:
        while True:
            if self._closing:
                return
            names = self._names
            try:
                self._read(self._client.watch(names), names)
            except FaultToleranceError:
                pass  # it is away: the last picture is kept
            except Exception:
                log.exception(STUMBLED, "what the lighthouse sends is read anew")
            with self._condition:
                if self._names is names and not self._closing:
                    self._condition.wait(AGAIN_S)

    def _read(self, stream: StatusStream, names: frozenset[str]) -> None:
        with self._condition:
            self._stream = stream
            if self._closing or self._names is not names:
                stream.cancel()
        try:
            for status in stream:
                self._take(status, time.monotonic())
                self._changed()
        finally:
            with self._condition:
                self._stream = None

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._condition.notify_all()

    # ------------------------------------------------------------ what is asked and ordered

    def _run(self) -> None:
        while True:
            kind, name, text = self._next()
            if kind == "close":
                return
            try:
                if kind == "ended":
                    self._report_ended(name)
                elif kind == "drain":
                    self._drain(name, text)
                elif kind == "given up":
                    self._report_given_up()
                elif kind == "silent":
                    self._look(LOOK_S)
                else:
                    self._look()
            except Exception as error:
                if not isinstance(error, FaultToleranceError):
                    log.exception(STUMBLED, f"the order {kind or 'to look'!r} is left, the next one is carried out")
                if kind == "drain":
                    self._undrained(name)

    def _next(self) -> tuple[str, str, str]:
        """The next order; a report that is due again waits for orders, so that none of them waits for it."""
        now = time.monotonic()
        waits = [self._reports.wait_s(now), self._heard_at + SILENT_S - now if "," in self.address else None]
        try:
            return self._orders.get(timeout=max(0.0, min((s for s in waits if s is not None), default=MANY_S)))
        except queue.Empty:
            now = time.monotonic()
            if "," in self.address and now - self._heard_at >= SILENT_S:
                self._heard_at = now
                return "silent", "", ""
            return "ended", self._reports.due(now), ""

    def _report_ended(self, name: str) -> None:
        if not name:  # an order came in between
            return
        known: bool | None = None
        try:
            known = self._client.report_ended(name, CALL_S)
        except RefusedError:
            known = True  # as far as it can be
        finally:
            self._reports.sent(name, time.monotonic(), known=known)

    def _report_given_up(self) -> None:
        """Report those of whom the last picture does not say it."""
        with self._condition:
            self._telling = False
            untold = {name: why for name, why in self._given_up.items() if name not in self._known}
            self._known |= untold.keys()
        for name, why in untold.items():
            self._client.report_given_up(name, why, CALL_S)

    def _drain(self, name: str, reason: str) -> None:
        try:
            told = self._client.drain(name, reason)
        except RefusedError:  # a lighthouse without a token takes no orders, or this ftrun lacks the admin token
            told = []
        if not told:
            self._undrained(name)

    def _look(self, within: timedelta = CALL_S) -> None:
        at = time.monotonic()
        try:
            self._take(self._client.status(within, self._names), at)
        finally:
            with self._condition:
                self._tried_at = at
                self._condition.notify_all()
        self._changed()

    def _take(self, status: pb.StatusResponse, at: float) -> None:
        """The picture that was asked for at `at`, or arrived then."""
        self._heard_at = max(self._heard_at, at)
        room = max(status.rooms, key=lambda room: run_of_room(room.room), default=None)
        room = room if room is not None and run_of_room(room.room) >= 0 else None
        picture = Picture(at)
        if room is not None:
            groups: dict[str, list[Seen]] = {}
            for replica in room.replicas:
                groups.setdefault(replica.replica_id.rpartition(":")[0], []).append(_seen(replica, at))
            picture = Picture(
                at, tuple((name, tuple(runs)) for name, runs in groups.items()), room.member_count, room.reason,
                room.closed,
            )  # fmt: skip
        with self._condition:
            everybody = {r.replica_id.rpartition(":")[0] for one in status.rooms for r in one.replicas}
            self._came |= self._names & everybody  # in whatever room: a Manager may name its own
            made_s, made_at = status.uptime_ms / 1000, self._client.active
            if made_at == self._made_at and self._made_s - STALE_S < made_s < self._made_s:
                return
            self._made_s, self._made_at, self._picture = made_s, made_at, picture
            self._client.room = room.room if room is not None else DEFAULT_ROOM
            self._job_committed |= any(seen.committed for _, runs in picture.groups for seen in runs)
            self._known = set(room.given_up) if room is not None else set()
            untold = bool(self._given_up.keys() - self._known) and not self._telling
            self._telling |= untold
        if untold:
            self._orders.put(("given up", "", ""))


def _seen(replica: pb.ReplicaStatus, at: float) -> Seen:
    stalled = replica.stalled
    if replica.life == "missed":  # frozen altogether: its connection is still there
        stalled = (
            f"{replica.replica_id} runs, but the lighthouse has not heard of it for {replica.since_ms / 1000:.0f} s"
        )
    return Seen(
        replica_id=replica.replica_id, alive=replica.life in ("up", "missed", "unknown"), member=replica.member,
        step=replica.step, phase=replica.phase, committed=replica.committed, stalled=stalled, at=at,
    )  # fmt: skip
