"""Worker processes that have imported torch and more already: real, started in milliseconds instead of seconds.

How it works. `Forge` starts one process of this file, which imports the modules it is told, and starts no thread.
For every order it forks twice: the one in between ends, and as the test's process is the "child subreaper" meanwhile,
the new process becomes the test's own child. It has its own session, output and environment, registers with ftrun's
keeper as ftrun's stub does, and runs the script as `python -u script args` would (`launch.standby.worker`). So ftrun
supervises, kills and reaps it like any other worker; `Forged` is what torch's agent sees of it. An order may be for a
launcher (`launches`): that process gets a forge of its own, a fork of itself, which forges the workers it starts.

What it does not show: set-up from a cold start, and what differs with each interpreter's PYTHONHASHSEED. Some tests
start real interpreters for that, and so does a standby.

Threads: orders come from ftrun's agents, one at a time. The forge has one thread.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this file's folder, in which `lightning` and `accelerate` are our tests

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ft_core.launch.processes import stub
from ft_core.launch.standby import worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TORCH = (
    "torch",
    "torch._dynamo",
    "torch.distributed.elastic.utils.distributed",
    "ft_core",
    "ft_core.manager",
    "ft_core.ddp",
)
"""What every forge imports first."""
START_S, ORDER_S = 60.0, 20.0
PR_SET_CHILD_SUBREAPER = 36
ROOT = pathlib.Path(__file__).resolve().parents[1]


class Forged:
    """A child that was forged: the part of `subprocess.Popen` that supervisors use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, once it has ended."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = threading.Event()
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            pause.wait(0.01)
        return code

    def kill(self) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Forge:
    """Starts the process that forges. `close` ends it.

    Args:
        imports: modules that it imports besides TORCH.
        forked: it is a fork of this process, which has imported all of it and has one thread.
    """

    def __init__(self, imports: Sequence[str] = (), *, forked: bool = False) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | Forged
        with theirs:
            if not forked:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", __file__, str(theirs.fileno()), *imports], pass_fds=[theirs.fileno()],
                    cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )  # fmt: skip
            else:
                pid = os.fork()
                if pid == 0:
                    self._line.close()
                    os.setsid()
                    try:
                        serve(theirs, imports)
                    finally:
                        os._exit(0)
                self._process = Forged(pid)
        self._line.settimeout(START_S)
        try:
            assert self._line.recv(64) == b"ready"
        except BaseException:
            self.close()
            raise
        self._line.settimeout(ORDER_S)

    def start(
        self, command: Sequence[str], env: Mapping[str, str], out: int = 1, err: int = 2, cwd: str | None = None,
        *, launches: bool = False,
    ) -> Forged:  # fmt: skip
        """A new child of this process, in a session of its own, that runs `command`: [stub] python -u SCRIPT ...

        Or `-m MODULE` instead of SCRIPT. `launches`: torch's agents in it (ftrun, torchrun) start workers like it.
        """
        words = {"command": list(command), "env": dict(env), "cwd": cwd or os.getcwd(), "launches": launches}
        order = json.dumps(words).encode()
        libc = ctypes.CDLL(None, use_errno=True)
        with self._lock:
            if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
            try:
                socket.send_fds(self._line, [order], [out, err])
                return Forged(int(self._line.recv(64)))
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    @property
    def alive(self) -> bool:
        """It can start processes."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the forge; what it forged lives on."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def serves_ftrun(self) -> Iterator[None]:
        """While this lasts, torch's agents in this process get their workers from here."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        handler: Any = SubprocessHandler
        before = handler._popen

        def popen(this: Any, args: Sequence[str], env: Mapping[str, str]) -> Forged:
            out, err = (file.fileno() if file else number for number, file in ((1, this._stdout), (2, this._stderr)))
            return self.start(args, env, out, err)

        handler._popen = popen
        try:
            yield
        finally:
            handler._popen = before


# ---------------------------------------------------------------- in the process that forges


def serve(line: socket.socket, imports: Sequence[str]) -> None:
    """Import, then fork until nobody orders any more."""
    before = dict(os.environ)
    for name in (*TORCH, *imports):
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads must not fork"
    gc.collect()
    gc.freeze()
    line.send(b"ready")
    while True:
        data, streams, *_ = socket.recv_fds(line, 1 << 20, 2)
        if not data:
            return
        pid = fork_twice(line, streams, json.loads(data), before)
        for stream in streams:
            os.close(stream)
        line.send(str(pid).encode())


def fork_twice(line: socket.socket, streams: list[int], order: dict[str, Any], before: dict[str, str]) -> int:
    """Returns the process that runs the order, once it is its new parent's."""
    said, say = os.pipe()
    wait, go = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os.write(say, str(pid).encode())
            os._exit(0)
        for end in (said, say, go):
            os.close(end)
        line.close()
        os.read(wait, 1)  # end of file: the one in between was reaped
        os.close(wait)
        work(streams, order, before)
    os.close(say)
    os.close(wait)
    pid = int(os.read(said, 64))
    os.waitpid(middle, 0)
    os.close(said)
    os.close(go)
    return pid


def work(streams: list[int], order: dict[str, Any], before: dict[str, str]) -> NoReturn:
    """Become the worker, with its output, environment and arguments, and run the script to its end."""
    os.setsid()
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    command: list[str] = order["command"]
    if stub.__file__ in command:
        command = register(command[command.index(stub.__file__) + 1 :], order["env"])
    script = command[command.index("-u") + 1 :]
    module = script[0] == "-m"
    sys.path.insert(0, order["cwd"] if module else os.path.dirname(os.path.realpath(script[0])))
    sys.orig_argv = command
    with contextlib.ExitStack() as stack:
        if order["launches"]:
            stack.enter_context(Forge(forked=True).serves_ftrun())
        worker.become({"env": order["env"], "cwd": order["cwd"], "argv": script[module:]}, before)
        if ours := sys.modules.get("ft_lightning.names"):
            ours.STARTED_IN = os.getcwd()  # type: ignore[attr-defined]  # noted when it was imported
        leave(run(os.path.abspath(script[0]), script[1] if module else None))


def run(path: str, module: str | None) -> int:
    """Run it to its end. Returns the exit status."""
    try:
        if module is None:
            worker.run_script(path)
        else:
            worker.run_module(module)
    except SystemExit as end:
        return ended(end)
    except BaseException as error:  # noqa: BLE001 - what the interpreter does with it
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def register(command: list[str], env: dict[str, str]) -> list[str]:
    """What the stub does, up to its exec. Changes `env` as the stub changes the environment."""

    class Exec(BaseException):
        pass

    def execvp(_file: str, _argv: list[str]) -> None:
        raise Exec

    own, execs = dict(os.environ), os.execvp
    os.environ.update(env)
    os.execvp = execvp  # type: ignore[assignment]
    try:
        leave(stub.main(command))
    except Exec:
        for name in ("FTRUN_KEEPER", "FTRUN_PID"):
            env.pop(name)
        env.setdefault("PYTHONFAULTHANDLER", "1")
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # as the new interpreter would
        return command
    finally:
        os.execvp = execs
        os.environ.clear()
        os.environ.update(own)


def ended(end: SystemExit) -> int:
    """The exit status of a SystemExit."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def leave(status: int) -> NoReturn:
    """As the interpreter ends: threads, atexit, output; but `sys.exit` would unwind into the forge's loop."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
