"""`ftrun` at work: starts the lighthouse, the keeper and a group agent per thread, and stays in charge of signals.

How it works. The main thread runs `Supervisor.run`: it waits on one queue for what happens (a group started, failed or
ended; a signal; a new picture from the lighthouse; an order from `ftrun resize`) and for deadlines (a drain that takes
too long, the next act of --chaos). Everything slow happens elsewhere: agents in their threads, calls to the lighthouse
on the watch's, output on its own.

The job goes on while at least min_replicas groups can still train, and ends when no group is left (`exit_status.KINDS`
says how a group ends).

Invariants: signal handlers only put into the queue; every group's thread is joined, every process is gone, every
socket is closed before `run` returns, whatever it returns.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError
from ft_core.launch.agent import GroupAgent, Tools
from ft_core.launch.apart import Apart
from ft_core.launch.chaos_injector import Monkey
from ft_core.launch.common_cause import CommonCause
from ft_core.launch.control_socket import Remote
from ft_core.launch.exit_status import KINDS, exit_status
from ft_core.launch.group import Group
from ft_core.launch.lighthouse_watch import Watch
from ft_core.launch.output.streams import Output
from ft_core.launch.processes.exits import Exits
from ft_core.launch.rendezvous import Stopped
from ft_core.launch.run_events import RunEvents
from ft_core.launch.standby.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from torch.distributed.elastic.agent.server.api import RunResult

    from ft_core.launch.common_cause import Death
    from ft_core.launch.output.status_screen import Screen
    from ft_core.launch.processes.keeper import Keeper
    from ft_core.launch.spec import JobSpec
    from ft_core.launch.worker_run import Failure

SAME_S = 1.0
"""SIGTERMs within this time are one."""
KILL_S = 60.0
JOIN_S = 10.0
"""How long the thread of a group whose workers are gone may take to end; it hangs only in torch's store."""
STATUS_S = 0.5
"""How often the status lines are renewed where no picture comes."""
DRAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GONE_FOR_GOOD = ("quarantined", "drained", "stopped")
"""How a group ends that comes no more, while the others train on (`exit_status.KINDS`)."""


@dataclass
class Supervisor:
    """One run. `run` is the whole of it.

    Args:
        spec: what to run.
        keeper: running already.
        folder: the run directory.
        screen: where lines go.
    """

    spec: JobSpec
    keeper: Keeper
    folder: str
    screen: Screen
    _events: queue.SimpleQueue[tuple[Any, ...]] = field(default_factory=queue.SimpleQueue)
    _groups: dict[int, Group] = field(default_factory=dict)
    _past: list[Group] = field(default_factory=list)
    _wanted: int = 0
    _why: str = ""
    """Why everything is being stopped."""
    _status: int | None = None
    _signalled_at: float = 0.0
    _started_at: float = field(default_factory=time.monotonic)

    # ------------------------------------------------------------ the run

    def run(self) -> int:
        """Run the job. Returns the exit status. Raises ConfigError or LighthouseError before anything is started."""
        spec = self.spec
        self._wanted = spec.groups
        self._common = CommonCause(str(spec.script), whole_job=spec.whole_job)
        with contextlib.ExitStack() as stack:
            spec = self._open_log(stack)
            lighthouse, dashboard = spec.lighthouse, ""
            if not lighthouse:
                server = self._embed(spec)
                stack.callback(server.shutdown)
                lighthouse, dashboard = self._log.embedded(server), server.http_line()
            self._watch = Watch(
                lighthouse, spec.token, partial(self._put, "picture"), partial(self._put, "undrained"), spec.admin_token
            )
            self._apart = Apart(self._watch, self._say_about, self._total, str(spec.script))
            self._watch.connect(timedelta(seconds=spec.connect_s))
            stack.callback(self._watch.close)
            self._watch.start()
            self._exits = Exits(self.keeper.deaths)
            self._exits.start()
            stack.callback(self._exits.close)
            self._watch_keeper()
            self._output = Output(self.screen.workers)
            self._output.start()
            stack.callback(self._output.close)
            self._remote = Remote(self.folder, lambda n, reply: self._put("resize", n, reply))
            self._remote.start()
            stack.callback(self._remote.close)
            pool = None
            if spec.standby:
                threads = spec.threads(os.environ)
                pool = Pool(spec.standby, spec.script, self.folder, self.keeper, self._output, self._say_about, threads)
                stack.callback(pool.close)
                stack.callback(self._output.settle, 1.0)
            self._tools = Tools(
                spec=spec, keeper=self.keeper, exits=self._exits, output=self._output, pool=pool,
                lighthouse=lighthouse, total=self._total, facts=self._watch.facts, say=self._say_about,
                another_run=self._another_run,
                started=lambda n, pids, warm: self._put("started", n, pids, warm), ended=self._watch.ended,
                failed=lambda *how: self._put("failed", *how),
            )  # fmt: skip
            stack.callback(self._stop_everything)
            self._install_signals(stack)
            self.screen.start()
            stack.callback(self.screen.close)
            for line in (*spec.announcement(lighthouse), *filter(None, [dashboard])):
                self.screen.say(line)
            self._log.run_started(lighthouse, self._total())
            for number in range(spec.first, spec.first + spec.groups):
                self._start(number)
            if pool is not None:
                why = pool.start()
                if why:
                    self.screen.say(f"--standby {spec.standby}: {why}; groups start cold")
            self._loop()
            self._output.settle(2.0)
            return self._finish()

    def _another_run(self, name: str, stop: threading.Event) -> bool:
        def alone() -> bool:
            return all(group.ended for group in list(self._groups.values()) if group.name != name)

        return self._watch.another_run(alone, stop)

    def _open_log(self, stack: contextlib.ExitStack) -> JobSpec:
        """Begin to write events, what --chaos does among them. Returns the spec, which says where they go."""
        spec = self.spec
        self._log = RunEvents(spec, self.screen.say)
        self._log.start()
        stack.callback(lambda: self._log.close(self._status, self._restarts()))
        elsewhere, ordered = 0 if spec.whole_job else spec.total, partial(self._log.order, chaos=True)
        self._monkey = Monkey(spec.chaos, elsewhere, self._say_about, self._drain, ordered)
        self.spec = replace(spec, events=self._log.folder, metrics=self._log.metrics)
        return self.spec

    def _embed(self, spec: JobSpec) -> LighthouseServer:
        try:
            return LighthouseServer(
                spec.lighthouse_bind, spec.min_replicas, token=spec.token, admin_token=spec.admin_token,
                insecure=spec.insecure, one_job=True, events=spec.events, http=spec.http,
                metrics="" if spec.metrics else None,
            )  # fmt: skip
        except ConfigError as error:
            raise ConfigError(str(error).replace("bind=", "--lighthouse-bind ").replace("http=", "--http ")) from None

    def _loop(self) -> None:
        while any(not group.ended for group in self._groups.values()):
            try:
                kind, *rest = self._events.get(timeout=self._patience())
            except queue.Empty:
                kind, rest = "", []
            match kind:
                case "started":
                    self._on_started(*rest)
                case "failed":
                    self._on_failed(*rest)
                case "ended":
                    self._on_ended(*rest)
                case "picture":
                    self._on_picture()
                case "":
                    self._show()  # if the picture is old it says so
                case "undrained":
                    self._on_undrained(*rest)
                case "signal":
                    self._on_signal(*rest)
                case "resize":
                    self._on_resize(*rest)
            self._on_time()

    def _put(self, *event: Any) -> None:
        self._events.put(event)

    def _patience(self) -> float:
        now = time.monotonic()
        times = [STATUS_S, self._monkey.patience(now)]
        times += [group.draining - now for group in self._groups.values() if group.draining and not group.ended]
        times += [group.frozen_until - now for group in self._groups.values() if group.frozen_until]
        return max(0.0, min(times))

    # ------------------------------------------------------------ groups

    def _total(self) -> int:
        spec = self.spec
        return max(self._wanted, spec.total if spec.total > spec.groups else 0) if spec.whole_job else spec.total

    def _start(self, number: int) -> None:
        agent = GroupAgent(self._tools, number)
        thread = threading.Thread(target=self._serve, args=(agent,), name=f"ftrun-{agent.name}", daemon=True)
        old = self._groups.get(number)
        if old is not None:
            self._past.append(old)
        self._groups[number] = Group(number, agent.name, agent, thread)
        self._watch.starts(agent.name)
        thread.start()

    def _serve(self, agent: GroupAgent) -> None:
        """The group's thread."""
        result: RunResult | None = None
        error: BaseException | None = None
        try:
            result = agent.run()
            self._apart.ended(agent.name, result)
        except Stopped:
            pass
        except BaseException as caught:  # noqa: BLE001 - reported by the main thread, which ends the group
            error = caught
        finally:
            agent.release()
            self._put("ended", agent, result, error)

    def _named(self, name: str) -> Group | None:
        return next((group for group in self._groups.values() if group.name == name), None)

    def _on_started(self, name: str, pids: Mapping[int, int], warm: bool) -> None:
        group = self._named(name)
        if group is not None:
            group.started(time.monotonic())
            self._log.started(name, pids, group.agent.restarts, warm=warm)
        which = ", ".join(str(pid) for pid in pids.values())
        self._say_about(name, f"started{' from a warm standby' if warm else ''} (pid {which})")

    def _on_failed(self, failure: Failure, death: Death, job_committed: bool) -> None:
        """A group has failed: does that end the job?"""
        self._log.failed(failure)
        now = time.monotonic()
        ages = {g.name: now - g.started_at if g.agent.pids() else 0.0 for g in self._groups.values() if not g.ended}
        if failure.name not in ages or self._why:
            return
        why = self._common.failed(death, ages, job_committed=job_committed)
        if not why:
            return
        self._status = 1
        self._stop_all(why)
        for other in self._groups.values():
            other.agent.send(signal.SIGKILL, group=True)

    def _on_ended(self, agent: GroupAgent, result: RunResult | None, error: BaseException | None) -> None:
        group = next(g for g in self._groups.values() if g.agent is agent)
        group.thread.join()
        failure = agent.failure
        group.end(result, error, stopping=bool(self._why), hopeless=self._status == 1)
        self._log.ended(group.name, group.ended)
        if error is not None:
            self._say_about(group.name, f"its agent failed: {type(error).__name__}: {error}")
        elif group.ended in ("drained", "stopped", "finished"):
            self._say_about(group.name, group.ended)
        if group.ended == "quarantined" and failure is not None:
            self.screen.say(failure.report())
        if group.again and not self._why and group.ended in ("drained", "stopped"):
            self._start(group.number)
            return
        if group.ended in GONE_FOR_GOOD and not self._why:
            self._watch.gave_up(group.name, agent.quarantine or (str(error) if error is not None else group.ended))
        self._enough()

    def _enough(self) -> None:
        """Stop if too few groups can still train."""
        if self._why or not self.spec.whole_job:
            return
        able = [g for g in self._groups.values() if not g.ended or g.ended == "finished"]
        lost = [g for g in self._groups.values() if g.ended == "quarantined"]
        if lost and len(able) < self.spec.min_replicas:
            names = ", ".join(g.name for g in lost)
            self._stop_all(
                f"only {len(able)} groups are left, min_replicas is {self.spec.min_replicas} (lost: {names})"
            )

    # ------------------------------------------------------------ pictures

    def _on_picture(self) -> None:
        now = time.monotonic()
        for group in (one for one in self._groups.values() if not one.ended):
            if (seen := self._watch.now(group.name)) is None:
                continue
            self._common.began()
            group.observe(seen, now)
            if group.stands_still(seen, now, self.spec.stall_s):
                group.agent.stall(seen.stalled)
        self._show()

    def _show(self) -> None:
        if self.screen.live:
            rows = [group.row(self._watch.now(group.name)) for _, group in sorted(self._groups.items())]
            self.screen.rows(rows, self._watch.look().title(self._total(), time.monotonic()))

    # ------------------------------------------------------------ time

    def _watch_keeper(self) -> None:
        """Be told at once when it ends: until there is another one, nothing is protected and no worker can start."""
        self._exits.watch(self.keeper.process.pid, lambda _: self._put("keeper"))

    def _on_time(self) -> None:
        now = time.monotonic()
        if not self.keeper.alive():
            self.screen.say("the keeper process was ended; another one is started")
            self.keeper.renew()
            self._watch_keeper()
        for group in self._groups.values():
            if group.draining and not group.ended and now >= group.draining:
                group.draining = now + KILL_S
                self._say_about(group.name, f"did not drain within {self.spec.drain_s:g} s (--drain-timeout): killed")
                group.agent.send(signal.SIGKILL, group=True)
        self._apart.on_time(self._groups.values(), now)
        self._monkey.on_time(self._groups.values(), bool(self._why or self._watch.look().closed))

    # ------------------------------------------------------------ stopping

    def _drain(self, group: Group, reason: str) -> None:
        if group.ended or group.draining:
            return
        group.draining = time.monotonic() + self.spec.drain_s
        group.agent.retire()
        self._monkey.thaw(group)
        self._log.order(group.name, "drain", reason)
        self._watch.drain(group.name, reason)

    def _on_undrained(self, name: str) -> None:
        """The lighthouse could not tell the group: SIGTERM, which a Manager takes as the same order."""
        group = self._named(name)
        if group is not None and not group.ended:
            group.agent.send(signal.SIGTERM, group=self.spec.script.no_python)

    def _stop_all(self, why: str, reason: str = "", more: str = "") -> None:
        self._why = why
        self._log.stopping(why)
        running = any(not group.ended for group in self._groups.values())
        self.screen.say(f"{why}: draining what runs{more}" if running else why)
        for group in self._groups.values():
            group.again = False
            self._drain(group, reason or why)

    def _stop_everything(self) -> None:
        """Last resort on the way out: no group is left behind."""
        for group in self._groups.values():
            group.agent.retire()
            group.agent.send(signal.SIGKILL, group=True)
        until = time.monotonic() + JOIN_S
        for group in itertools.chain(self._groups.values(), self._past):
            group.thread.join(max(0.0, until - time.monotonic()))

    def _on_resize(self, wanted: int, reply: Callable[[str], None]) -> None:
        spec = self.spec
        if self._why:
            reply(f"error: {self._why}")
            return
        if not 1 <= wanted <= spec.max_groups or wanted < spec.min_replicas:
            low = max(1, spec.min_replicas)
            reply(
                f"error: resize {wanted} is out of range: this job runs {low} to {spec.max_groups} groups "
                f"(--replicas {spec.groups}:{spec.max_groups}, --min-replicas {spec.min_replicas})"
            )
            return
        before = self._wanted
        self._wanted = wanted
        for number in range(spec.first, spec.first + wanted):
            group = self._groups.get(number)
            if group is None or group.ended in ("drained", "stopped"):
                self._start(number)
            elif group.draining and not group.ended:
                group.again = True
        for number in range(spec.first + wanted, spec.first + spec.max_groups):
            group = self._groups.get(number)
            if group is not None:
                group.again = False
                self._drain(group, f"scaled down to {wanted} groups")
        self._log.resized(before, wanted)
        self.screen.say(f"resized from {before} to {wanted} groups")
        reply(f"ok: {before} -> {wanted} groups")

    # ------------------------------------------------------------ signals

    def _install_signals(self, stack: contextlib.ExitStack) -> None:
        def handle(number: int, _frame: FrameType | None) -> None:
            self._events.put(("signal", number))  # SimpleQueue.put is reentrant: it may interrupt anything here

        here = threading.current_thread() is threading.main_thread()  # elsewhere they are the program's, as it is one
        for number in DRAIN_SIGNALS if here else ():
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            stack.callback(signal.signal, number, signal.signal(number, handle))

    def _on_signal(self, number: int) -> None:
        """The first one drains, the next one kills; launchers repeat SIGTERM at once and mean one."""
        name, now = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGINT:
            self._status = 130
        if not self._why:
            self._signalled_at = now
            self._stop_all(name, name, "; once more kills" if number == signal.SIGINT else "")
        elif number == signal.SIGINT or now - self._signalled_at > SAME_S:
            self.screen.say("killed")
            for group in self._groups.values():
                group.draining = group.draining or now + KILL_S
                group.agent.send(signal.SIGKILL, group=True)

    # ------------------------------------------------------------ the end

    def _finish(self) -> int:
        ends = [group.ended for group in self._groups.values()]
        counts = ", ".join(f"{ends.count(kind)} {kind}" for kind in KINDS if kind in ends)
        restarts, after = self._restarts(), f"after {time.monotonic() - self._started_at:.1f} s"
        self.screen.close()
        self.screen.say(f"{counts} {after}, {restarts} restart{'' if restarts == 1 else 's'}")
        if self._status is None:
            spec = self.spec
            self._status = exit_status(ends, spec.success, spec.min_replicas, whole_job=spec.whole_job)
        return self._status

    def _restarts(self) -> int:
        return sum(g.agent.restarts for g in (*self._groups.values(), *self._past))

    def _say_about(self, name: str, text: str) -> None:
        self.screen.say(text, name)
