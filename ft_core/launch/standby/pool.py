"""Warm standby: processes that have imported torch and the script's modules, waiting to become a worker.

How it works. `Pool` keeps K processes of `worker.py`, started through the stub like any worker. Each connects to the
pool's socket, receives what to import, and reports when it is ready. A group whose worker died takes one: it is sent
the environment, argv and working directory of the worker it becomes, and the group's agent watches it as its own
child from then on. The pool starts another in its place.

What cannot be preloaded (no Python script, or one that does not parse) is reported once, and groups start cold.

Threads: one per pool ("ftrun-standby") receives the processes; `take` from the groups' threads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ft_core.launch.output.streams import TAIL
from ft_core.launch.processes import stub

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.multiprocessing.api import LogsSpecs

    from ft_core.launch.output.streams import Output, Stream
    from ft_core.launch.processes.keeper import Keeper
    from ft_core.launch.spec import Script

REFILL_S = 2.0
"""How long a new one waits, at the start and when one was taken: the workers that start then need the cores now."""
MAX_FAILURES = 3
log = logging.getLogger("ft_core.launch")
"""Standby processes that may die before they are ready before the pool gives up."""
WARM = os.path.join(os.path.dirname(__file__), "worker.py")
"""What a standby process runs: as a file, so that its sys.path is the script's."""


@dataclass(eq=False)
class Standby:
    """One waiting process."""

    process: subprocess.Popen[bytes]
    streams: list[Stream]
    tail: deque[str]
    connection: socket.socket | None = None
    ready: bool = False
    heard: bytes = b""

    def relabel(self, label: str) -> None:
        """What it prints belongs to this worker from now on."""
        for stream in self.streams:
            stream.label = label

    def end(self) -> None:
        """End the process, and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.connection is not None:
            self.connection.close()

    def hand_over(self, env: dict[str, str], argv: list[str]) -> None:
        """Make it the worker."""
        assert self.connection is not None
        order = {"env": env, "argv": argv, "cwd": os.getcwd()}
        with self.connection as connection:
            connection.sendall(json.dumps(order).encode() + b"\n")


@dataclass
class Pool:
    """Keeps `size` standby processes for `script`.

    Args:
        folder: the run directory; the pool's socket lives there.
        say: (about, text) for the user.
    """

    size: int
    script: Script
    folder: str
    keeper: Keeper
    output: Output
    say: Callable[[str, str], None]
    threads: dict[str, str] = field(default_factory=dict)
    """OMP_NUM_THREADS, where ftrun sets it: OpenMP reads it when it is loaded."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _all: list[Standby] = field(default_factory=list)
    _failures: int = 0
    _refill_at: float = 0.0
    _told: bool = False
    _closed: bool = False

    def start(self) -> str:
        """Start the processes. Returns why there are none, or ''."""
        from ft_core.launch.standby.imports import plan

        self._plan = plan(self.script.path, self.script.module, self.script.no_python)
        if self._plan.reason:
            return self._plan.reason
        self._address = os.path.join(self.folder, "standby")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self._address)
        self._door.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._refill_at = time.monotonic() + REFILL_S
        self._thread = threading.Thread(target=self._run, name="ftrun-standby", daemon=True)
        self._thread.start()
        return ""

    def take(self) -> Standby | None:
        """A ready process, or None."""
        with self._lock:
            found = next((s for s in self._all if s.ready and s.process.poll() is None), None)
            if found is not None:
                self._all.remove(found)
                self._refill_at = time.monotonic() + REFILL_S
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(found.connection)  # type: ignore[arg-type]
        if found is not None:
            self._wake()
        return found

    def ready(self) -> int:
        """How many could be taken now."""
        with self._lock:
            return sum(s.ready for s in self._all)

    def close(self) -> None:
        """End them all."""
        with self._lock:
            self._closed = True
        if hasattr(self, "_thread"):
            self._wake()
            self._thread.join(5.0)
            self._door.close()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        with self._lock:
            waiting = list(self._all)  # only now: the thread may have been starting one
            self._all.clear()
        for standby in waiting:
            standby.end()

    # ------------------------------------------------------------ the thread

    def _wake(self) -> None:
        os.write(self._wake_write, b"w")

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception as error:
                log.exception("ftrun: a mistake of ftrun's own, in its standby processes (please report it)")
                self._failures = MAX_FAILURES
                self._told = True
                self.say("standby", f"given up: {type(error).__name__}: {error}; groups start cold")
                return

    def _turn(self) -> None:
        self._fill()
        for key, _ in self._selector.select(1.0):
            if key.fileobj is self._door:
                self._receive()
            elif key.fd == self._wake_read:
                os.read(self._wake_read, 4096)
            else:
                self._hear(key.data)

    def _fill(self) -> None:
        """Start what is missing; forget what has died."""
        with self._lock:
            dead = [s for s in self._all if s.process.poll() is not None]
            for standby in dead:
                self._all.remove(standby)
                if standby.connection is not None:
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(standby.connection)
                    standby.connection.close()
                self._failures += not standby.ready
                self._refill_at = time.monotonic() + REFILL_S
            missing = self.size - len(self._all)
        if self._failures >= MAX_FAILURES:
            if not self._told:
                self._told = True
                self.say(
                    "standby", f"given up: {self._failures} processes ended before they were ready; groups start cold"
                )
            return
        for _ in range(missing):
            if not self._closed and time.monotonic() >= self._refill_at:
                try:
                    self._spawn()
                except OSError:  # no descriptors or processes left
                    self._failures += 1
                    self._refill_at = time.monotonic() + REFILL_S

    def _spawn(self) -> None:
        tail: deque[str] = deque(maxlen=TAIL)
        streams, ends = zip(*(self.output.open("standby", tail, err=err) for err in (False, True)), strict=True)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", stub.__file__, sys.executable, "-u", WARM],
                env={**os.environ, **self.keeper.environment(), "FTRUN_STANDBY": self._address, **self.threads},
                stdout=ends[0], stderr=ends[1], start_new_session=True,
            )  # fmt: skip
        finally:
            for end in ends:
                os.close(end)
        with self._lock:
            self._all.append(Standby(process, list(streams), tail))

    def _receive(self) -> None:
        connection, _ = self._door.accept()
        pid = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
        with self._lock:
            standby = next((s for s in self._all if s.process.pid == pid), None)
            if standby is None:
                connection.close()
                return
            standby.connection = connection
            self._selector.register(connection, selectors.EVENT_READ, standby)
        imports = [*self._plan.imports, *self._plan.names]
        order = {"script": self.script.path, "module": self.script.module, "imports": imports}
        with contextlib.suppress(OSError):  # it has died already
            connection.sendall(json.dumps(order).encode() + b"\n")

    def _hear(self, standby: Standby) -> None:
        with self._lock:
            if standby not in self._all or standby.connection is None:
                return  # taken meanwhile
            try:
                data = standby.connection.recv(65536)
            except OSError:  # it has died before it read its order
                data = b""
            standby.heard += data
            if not data:
                self._selector.unregister(standby.connection)
                return
            if b"\n" not in standby.heard or standby.ready:
                return
            report: dict[str, Any] = json.loads(standby.heard)
            standby.ready = True
            count = sum(s.ready for s in self._all)
        self.say("standby", f"{count} ready after {report['seconds']:.1f} s")
        failed = report.get("failed") or {}
        if failed and not self._told:
            self._told = True
            names = ", ".join(f"{name} ({error})" for name, error in sorted(failed.items()))
            self.say("standby", f"could not preload {names}; the worker imports it itself")


class AdoptedHandler(SubprocessHandler):
    """torch's handle of a worker process, for one that was started before it was one."""

    def __init__(self, standby: Standby) -> None:
        self._stdout = self._stderr = None
        self.local_rank_id = 0
        self.proc = standby.process


class AdoptedContext(SubprocessContext):
    """torch's context of a group's processes, whose one process is an adopted standby."""

    def __init__(
        self, standby: Standby, script: Script, name: str, envs: dict[int, dict[str, str]], logs: LogsSpecs
    ) -> None:
        super().__init__(name, script.path, {0: script.args}, envs, logs)
        self._standby = standby

    def _start(self) -> None:
        env = {name: value for name, value in {**os.environ, **self.envs[0]}.items() if not name.startswith("FTRUN_")}
        env.setdefault("PYTHONFAULTHANDLER", "1")  # as the stub does for others
        self._standby.hand_over(env, [str(self.entrypoint), *self.args[0]])
        self.subprocess_handlers = {0: AdoptedHandler(self._standby)}


def base_environment(group: WorkerGroup, spec: WorkerSpec, restart_count: int) -> dict[str, str]:
    """What torch's agent puts into the environment of the one worker of a group (it does not say so for others)."""
    worker = group.workers[0]
    return {
        "LOCAL_RANK": "0",
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
