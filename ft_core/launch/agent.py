"""One replica group's elastic agent: torch's LocalElasticAgent, notified at once of what it would poll for.

How it works. torch's agent is the state machine (INIT -> HEALTHY -> SUCCEEDED, or FAILED/UNHEALTHY -> STOPPED ->
HEALTHY again, or FAILED for good). This subclass adds what a replica group needs:
- `_monitor_workers` sleeps on an event that the end of a process sets (`exits`), not for an interval;
- one worker's failure ends the rest of its group at once: their state is that worker's state;
- a run of which all are dead is replaced although the kernel may still be at their memory (`dying`);
- whether and when to restart is `restart_policy.RestartPolicy`'s decision; torch's counter only carries it;
- a stalled group is dumped (SIGABRT makes faulthandler print every thread's stack), killed and UNHEALTHY;
- `_start_workers` adopts a warm standby process where one is ready;
- the environment of FT_* and the pipes of the workers' output come in through torch's LogsSpecs, which is handed the
  workers' environments before they start.

Invariants: a worker is started through the stub, so that the keeper knows it; after `run` returns or raises, no
worker of the group is left. Every start of the group has a word of its own (FT_GROUP_ATTEMPT).

Threads: `run` and all overrides on the group's thread "ftrun-<name>"; `ended` on "ftrun-exits"; `drain`, `kill`,
`stall` from any.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext

from ft_core.launch.common_cause import Death, patience_s
from ft_core.launch.output.streams import TAIL
from ft_core.launch.output.tracebacks import last_error
from ft_core.launch.processes import stub
from ft_core.launch.processes.dying import REAP_S, Dying
from ft_core.launch.rendezvous import Stopped, attempt_key, rendezvous
from ft_core.launch.restart_policy import Quarantine, Restart, RestartPolicy
from ft_core.launch.spec import ERR, OUT
from ft_core.launch.standby.pool import AdoptedContext, base_environment
from ft_core.launch.worker_run import Failure, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core.launch.lighthouse_watch import Facts
    from ft_core.launch.output.streams import Output
    from ft_core.launch.processes.exits import Exits
    from ft_core.launch.processes.keeper import Keeper
    from ft_core.launch.spec import JobSpec
    from ft_core.launch.standby.pool import Pool, Standby

MANY_RESTARTS = 1_000_000
"""torch's own restart counter: ours decides."""
IDLE_S = 1.0
"""How often a group is looked at although nothing was received about it (with pidfds)."""
DUMP_S = 2.0
"""How long a stalled worker may take to print its stacks."""
SETTLE_S = 0.3


@dataclass
class Tools:
    """What all agents of one ftrun share."""

    spec: JobSpec
    keeper: Keeper
    exits: Exits
    output: Output
    pool: Pool | None
    lighthouse: str
    total: Callable[[], int]
    """Groups of the job now."""
    facts: Callable[[str], Facts]
    another_run: Callable[[str, threading.Event], bool]
    """Training has ended, but for this group another run of the script begins; the event ends the wait for it."""
    say: Callable[[str, str], None]
    """(group name, text) for the user."""
    started: Callable[[str, Mapping[int, int], bool], None]
    """(group name, pids by local rank, warm) after every start."""
    ended: Callable[[str], None]
    """All processes of this group have ended unasked."""
    failed: Callable[[Failure, Death, bool], None]
    """(how, the same for comparison, whether the job has committed) after every failure."""


class GroupLogs(LogsSpecs):
    """Where the workers' output goes, and their environment. torch calls `reify` before each start."""

    def __init__(self, agent: GroupAgent) -> None:
        super().__init__()
        self._agent = agent
        self.writing: list[int] = []

    @property
    def root_log_dir(self) -> str:
        """The log directory of all groups."""
        return self._agent.tools.spec.log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environments; open a pipe or a file per stream."""
        return self._agent.prepare(envs)


class GroupAgent(LocalElasticAgent):
    """Agent of one group. `run` (inherited) blocks until the group has ended for good.

    Args:
        tools: shared by the groups.
        number: the group's number in the job.
    """

    def __init__(self, tools: Tools, number: int) -> None:
        spec = tools.spec
        self.tools = tools
        self.number = number
        self.name = spec.group_name(number)
        self.restarts = 0
        self.quarantine = ""
        """Why the group is not started again, if it is not."""
        self.failure: Failure | None = None
        """The last one."""
        self._policy = RestartPolicy(spec.restarts)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._excused = ""
        self._stalled = ""
        self._run = Run()
        self._dying = Dying()
        self._delay_s = 0.0
        self._polled = True
        self._adopting = False
        self._logs = GroupLogs(self)
        command = spec.script.command()
        worker = WorkerSpec(
            role=self.name, local_world_size=spec.nproc, rdzv_handler=rendezvous(
                f"{spec.run_id}-{self.name}" if spec.nodes > 1 else spec.run_id, spec.host,
                (spec.min_nodes, spec.nodes), spec.rdzv_endpoint, self._stop,
            ),
            entrypoint=os.environ.get("PYTHON_EXEC", sys.executable),  # as with torchrun
            args=("-I", "-S", stub.__file__, *command), max_restarts=MANY_RESTARTS, monitor_interval=1e-6,
        )  # fmt: skip
        super().__init__(worker, self._logs, exit_barrier_timeout=30)

    def __repr__(self) -> str:
        return f"GroupAgent({self.name}, {self.state.name}, restarts={self.restarts})"

    @property
    def state(self) -> WorkerState:
        """torch's state of the worker group."""
        return self.get_worker_group().state

    def pids(self) -> dict[int, int]:
        """Process ids of the living workers, by local rank."""
        with self._lock:
            return {rank: pid for rank, pid in self._run.pids.items() if rank in self._run.alive}

    # ------------------------------------------------------------ orders, from any thread

    def retire(self) -> None:
        """Do not start again, whatever happens; the workers are left alone."""
        self._stop.set()
        self._wake.set()

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to every worker; `group`: also to the processes they started."""
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(pid, number)

    def excuse(self, why: str) -> None:
        """The next failure is ours (chaos): it costs no budget."""
        self._excused = why

    def stall(self, sentence: str) -> None:
        """The lighthouse reports that this group stands still while others wait: dump, kill, restart."""
        if not self._stop.is_set():
            self._stalled = sentence
            self._wake.set()

    def release(self) -> None:
        """Group's thread, after `run`: close the group's store."""
        group = self.get_worker_group()
        group.spec.rdzv_handler.shutdown()
        self._store = group.store = None

    # ------------------------------------------------------------ start

    def prepare(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Group's thread, inside torch's start: environments and streams of the workers about to start."""
        tools, spec, group = self.tools, self.tools.spec, self.get_worker_group()
        assert group.store is not None
        assert group.group_rank is not None
        shared = {
            **spec.environment(self.number, tools.lighthouse, tools.total()),
            **tools.keeper.environment(),
            "FT_GROUP_ATTEMPT": attempt_key(group.store, group.group_rank),
            "TORCHELASTIC_RUN_ID": spec.run_id,
            "FT_STARTED_AT": f"{time.time():.3f}",
        }
        if predecessors := self._dying.names():
            shared["FT_PREDECESSORS"] = predecessors
        shared |= spec.threads(os.environ) | spec.patience(os.environ)
        run = Run(started_at=time.monotonic())
        outs, errs, files = {}, {}, {}
        for rank, env in envs.items():
            env.update(shared)
            run.tails[rank] = deque(maxlen=TAIL)
            label = f"{self.name}/{env['RANK']}"
            outs[rank] = "" if self._adopting else self._stream(run, rank, OUT, label)
            errs[rank] = "" if self._adopting else self._stream(run, rank, ERR, label)
            files[rank] = os.path.join(self._folder(rank), "error.json") if spec.log_dir else ""
            env["TORCHELASTIC_ERROR_FILE"] = files[rank]
        with self._lock:
            self._run = run
        return LogsDest(outs, errs, {}, {}, files)

    def _folder(self, rank: int) -> str:
        spec = self.tools.spec
        folder = os.path.join(spec.log_dir, spec.run_id, self.name, f"attempt_{self.restarts}", str(rank))
        os.makedirs(folder, exist_ok=True)
        return folder

    def _stream(self, run: Run, rank: int, bit: int, label: str) -> str:
        """The file that torch opens for a stream: a log file, or the write end of a pipe of ours."""
        spec = self.tools.spec
        name = "stdout.log" if bit == OUT else "stderr.log"
        tee, redirect = spec.tee.of(rank) & bit, spec.redirects.of(rank) & bit
        if redirect and not tee:
            return os.path.join(self._folder(rank), name)
        path = os.path.join(self._folder(rank), name) if tee else ""
        stream, writing = self.tools.output.open(label, run.tails[rank], err=bit == ERR, path=path)
        run.streams.append(stream)
        self._logs.writing.append(writing)
        return f"/proc/self/fd/{writing}"

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._stop.is_set():
            raise Stopped
        if self.tools.spec.nodes > 1 and worker_group.group_rank == 0:
            self.tools.ended(self.name)  # all hosts are here, so no rank of the last start can commit any more
            self.tools.say(self.name, f"starts on {worker_group.group_world_size} of {self.tools.spec.nodes} hosts")
        standby = self._standby()
        try:
            pids = self._adopt(worker_group, standby) if standby is not None else {}
            warm = bool(pids)
            if not pids:
                pids = super()._start_workers(worker_group)
                assert isinstance(self._pcontext, SubprocessContext)
                for handler in self._pcontext.subprocess_handlers.values():
                    for file in (handler._stdout, handler._stderr):
                        if file is not None:
                            file.close()  # the worker has it: the stream must end when the worker does
        finally:
            for writing in self._logs.writing:
                os.close(writing)
            self._logs.writing.clear()
        run = self._run
        with self._lock:
            run.pids = dict(pids)
            run.alive = set(pids)
        self._stalled = self._excused = ""
        if self._stop.is_set():  # the order to end came when there was nobody yet who could have heard it
            self.send(signal.SIGTERM)
        self.tools.started(self.name, dict(pids), warm)
        self._polled = not all(
            self.tools.exits.watch(pid, lambda code, rank=rank: self._ended(run, rank, code))  # type: ignore[misc]
            for rank, pid in pids.items()
        )
        return pids

    def _standby(self) -> Standby | None:
        pool, spec = self.tools.pool, self.tools.spec
        return pool.take() if pool is not None and spec.nproc == spec.nodes == 1 else None

    def _adopt(self, group: WorkerGroup, standby: Standby) -> dict[int, Any]:
        """Hand this start to a process that has imported everything already."""
        env = base_environment(group, self.get_worker_group().spec, MANY_RESTARTS - self._remaining_restarts)
        self._adopting = True  # it has its own pipes
        try:
            self._pcontext = AdoptedContext(standby, self.tools.spec.script, self.name, {0: env}, self._logs)
            self._pcontext.start()
        except OSError:  # it has died while it waited
            standby.end()
            return {}
        finally:
            self._adopting = False
        self._run.tails[0], self._run.streams = standby.tail, standby.streams
        standby.relabel(f"{self.name}/{env['RANK']}")
        return {0: standby.process.pid}

    # ------------------------------------------------------------ watch

    def _ended(self, run: Run, rank: int, code: int | None) -> None:
        """A worker of `run` is dead and not reaped yet (thread of `exits`, or the group's where it polls)."""
        with self._lock:
            if rank not in run.alive:
                return
            run.alive.discard(rank)
            pid = run.pids[rank]
            others = [run.pids[r] for r in run.alive]
            current = run is self._run  # else a run that did not end in time: the name has a living bearer again
            failed = code is not None and code != 0
            if failed and run.first is None:
                assert code is not None
                run.first = (rank, pid, code, time.time())
        if failed:
            for other in (pid, *others):  # what it started dies with it, and so does the rest of the group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(other, signal.SIGKILL)
        if not others and current and self.tools.spec.nodes == 1:
            self.tools.ended(self.name)
        self._wake.set()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wake.wait(self.tools.spec.monitor_s if self._polled or self.tools.spec.nodes > 1 else IDLE_S)
        self._wake.clear()
        run = self._run
        if self._stalled and not self._stop.is_set():
            self._dump(self._stalled)
            return self._failed(RunResult(state=WorkerState.UNHEALTHY), f"it stood still: {self._stalled}")
        if self._polled and isinstance(self._pcontext, SubprocessContext):
            for rank, handler in self._pcontext.subprocess_handlers.items():
                if handler.proc.poll() is not None:
                    self._ended(run, rank, handler.proc.returncode)
        self._dying.reap()
        if run.first is not None:  # torch's poll would find it alive until its memory is free
            return self._failed(RunResult(state=WorkerState.FAILED), "")
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            if run.first is None:  # the poll was faster than the kernel's word
                first = min(result.failures.values(), key=lambda f: f.timestamp)
                run.first = (first.local_rank, first.pid, first.exitcode, time.time())
            return self._failed(result, "")
        return result

    def _failed(self, result: RunResult, reason: str) -> RunResult:
        """The run is over: decide what follows. torch's counter says so to torch's loop."""
        run = self._run
        self.tools.output.settle(SETTLE_S, run.streams)  # its last words belong into the report
        rank, pid, code, at = run.first or (0, run.pids.get(0, 0), -signal.SIGKILL, time.time())
        tail, why = tuple(run.tails.get(rank, ())), self._excused or reason
        self.failure = Failure(
            self.name, rank, pid, code, at, time.monotonic() - run.started_at, last_error(tail), tail, why
        )
        facts = self.tools.facts(self.name)
        death = Death.of(self.failure, facts)
        self.tools.failed(self.failure, death, facts.job_committed)
        self._delay_s = 0.0
        if self._stop.is_set():
            self._remaining_restarts = 0
            return result
        if facts.closed and not self.tools.another_run(self.name, self._stop):
            self._stop.set()
            self._remaining_restarts = 0
            self.tools.say(self.name, f"{self.failure}; training has ended, so it is not started again")
            return result
        decision = self._policy.failed(
            time.monotonic(), committed=facts.committed, excused=bool(self._excused) or not facts.reachable
        )
        why = why or str(self.failure)
        if not facts.reachable:
            why += "; the lighthouse does not answer"
        match decision:
            case Restart(after_s, text):
                # An error that hits every group is the supervisor's to notice, before a second round.
                groups, known = self.tools.spec.groups, facts.known
                look_s = patience_s(death, facts.job_committed, groups) if groups > 1 or not known else 0.0
                self._delay_s = after_s = round(max(after_s, look_s), 1)
                wait = f"in {after_s:g} s" if after_s else "now"
                detail = f" ({text})" if text and not self._excused and facts.reachable else ""
                self.tools.say(self.name, f"{why}; starting again {wait}{detail}")
            case Quarantine(text):
                self.quarantine = text
                self._remaining_restarts = 0
                self.tools.say(self.name, f"{why}; given up: {text}")
        return result

    def _dump(self, sentence: str) -> None:
        """Print the stacks of every worker of a stalled group, then end it."""
        self.tools.say(self.name, f"stands still while others wait ({sentence}); stacks of its workers follow")
        pids = self.pids()
        for pid in pids.values():
            if not self._py_spy(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))  # the stacks are wanted, not the memory
                    os.kill(pid, signal.SIGABRT)
                    os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + DUMP_S
        while self.pids() and time.monotonic() < deadline:
            self._wake.wait(0.1)
            self._wake.clear()
        self.send(signal.SIGKILL, group=True)

    def _py_spy(self, pid: int) -> bool:
        """Stacks with native frames, if py-spy is installed and may. False: use faulthandler."""
        try:
            result = subprocess.run(
                ["py-spy", "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_S * 5,
                check=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return False
        for line in result.stdout.splitlines():
            self.tools.say(self.name, line)
        return True

    # ------------------------------------------------------------ stop

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._stop.wait(self._delay_s):
            raise Stopped
        self.restarts += 1
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Kill what is left. Who is dead is not waited for, however long the kernel needs for its memory."""
        del worker_group
        self.send(signal.SIGKILL, group=True)
        deadline = time.monotonic() + REAP_S
        while self.pids() and not self._polled and time.monotonic() < deadline:
            self._wake.wait(0.1)
            self._wake.clear()
        self._let_go()
        if self._polled:
            self._dying.close()  # nobody says sooner that they are dead

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Whatever is left of the group ends now: draining was the supervisor's business, before this."""
        del death_sig, timeout
        self.send(signal.SIGKILL, group=True)
        self._let_go()
        self._dying.close()

    def _let_go(self) -> None:
        if isinstance(self._pcontext, SubprocessContext):
            self._dying.take(self._pcontext)
            self._pcontext = None
        super()._shutdown()  # of what else torch has for a run; torch before 2.12 takes no timeout
