"""A warm standby: a process that has imported a script's modules, waits, and then becomes a worker that runs it.

How it works. Run as a file (`python -u .../warm.py`), standard library only, so that nothing but the script's own
modules is ever imported. FTRUN_STANDBY names a Unix stream socket; each message is one line of JSON:

    <- {"script": "train.py", "module": false, "imports": ["torch", "my.model"]}
    -> {"ready": true, "pid": 17, "failed": {"my.model": "KeyError: 'RANK'"}, "seconds": 1.4}
    <- {"env": {...all of it...}, "argv": ["train.py", "--lr", "0.1"], "cwd": "/work"}

End of file at any moment: nobody needs this process, it exits 0 in silence. After the last message the process is
the worker: environment, arguments and folder are replaced, the socket is closed, and the script runs as `__main__`,
once the worker that it replaces is gone (FT_PREDECESSORS).

Invariants: from then on nothing but the command line in `ps` tells the worker from `python -u script args` (or `-m`):
`sys.path[0]`, `__main__` with its `__file__` and `__spec__` (so pickle and spawned children find it), `sys.argv`,
`sys.orig_argv`, tracebacks without a frame of this file, exit status, SIGINT, atexit, threads at exit. What the imports
themselves put into `os.environ` stays, as it would have. What the interpreter or a library reads once, when it starts
or is loaded (OMP_NUM_THREADS, PYTHONHASHSEED, LD_LIBRARY_PATH), is what it was when the standby started. A module that
was changed on disk while the standby waited runs as it was.

While it waits SIGINT is ignored: Ctrl-C in a terminal reaches every process, and ftrun decides. Everything happens on
the main thread.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder, whose modules must not hide anybody's

import builtins
import faulthandler
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import socket
import time
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn, cast

MAX_MESSAGE = 16 * 1024 * 1024
"""Bytes of one message; the kernel's limit for an environment is far below."""
MAX_ERROR = 300
"""Characters of a failed import that are reported."""


class Line:
    """The socket to ftrun: one JSON object per line, both ways."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._heard = b""
        try:
            self._socket.connect(address)
        except OSError:
            os._exit(0)  # ftrun is gone

    def receive(self) -> dict[str, Any]:
        """The next message. Ends the process if there will be none."""
        while b"\n" not in self._heard:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                os._exit(0)
            self._heard += data
            if len(self._heard) > MAX_MESSAGE:
                sys.exit(f"ftrun standby: a message of more than {MAX_MESSAGE} bytes")
        line, _, self._heard = self._heard.partition(b"\n")
        return cast("dict[str, Any]", json.loads(line))

    def send(self, message: dict[str, Any]) -> None:
        """Say something. Ends the process if nobody listens."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)

    def close(self) -> None:
        """The worker does not have it."""
        self._socket.close()


def main() -> None:
    """Import, wait, become the worker."""
    line = Line(os.environ.pop("FTRUN_STANDBY"))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = line.receive()
    script, module = str(order["script"]), bool(order["module"])
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.realpath(script)))
    sys.argv = ["-m" if module else script]
    path = os.path.abspath(script)
    before = dict(os.environ)
    line.send(preload(order["imports"]))
    run = line.receive()
    line.close()
    become(run, before)
    if os.environ.get("FT_PREDECESSORS"):
        wait_for_predecessors()
    sys.orig_argv = [sys.executable, "-u", *(["-m", script] if module else [script]), *sys.argv[1:]]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        if module:
            run_module(script)
        else:
            run_script(path)
    except SystemExit:
        raise
    except BaseException:
        hide_frames()
        raise


def preload(names: list[str]) -> dict[str, Any]:
    """Import `names`; returns the report. What fails is left to the script, which may expect it."""
    started = time.monotonic()
    failed: dict[str, str] = {}
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            loaded = importlib.import_module(module)
            if attribute and not hasattr(loaded, attribute):  # hasattr: packages load their parts when asked for them
                importlib.import_module(f"{module}.{attribute}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: an import must not end the standby
            failed.setdefault(module, f"{type(error).__name__}: {error}".split("\n")[0][:MAX_ERROR])
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        sys.exit("ftrun standby: an import initialises CUDA before its GPU is known; run without --standby")
    gc.collect()
    gc.freeze()  # it stays: forked DataLoader workers share these pages, and no later collection walks them
    return {"ready": True, "pid": os.getpid(), "failed": failed, "seconds": round(time.monotonic() - started, 3)}


def become(run: dict[str, Any], before: dict[str, str]) -> None:
    """Take over environment, arguments and folder. `before`: the environment that the imports began with."""
    env: dict[str, str] = dict(run["env"])
    for name, value in os.environ.items():
        # An import's doing. Whether it would have replaced a value it did not find here, nobody knows: ours stays.
        if before.get(name) != value and (name in before or name not in env):
            env[name] = value
    for name in before.keys() - os.environ.keys():
        env.pop(name, None)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(run["cwd"])
    sys.argv = list(run["argv"])
    if env.get("PYTHONFAULTHANDLER") and not faulthandler.is_enabled():
        faulthandler.enable()


def wait_for_predecessors() -> None:
    """Wait until the memory of the worker that this process replaces is free, as `import ft_core` would have."""
    launch = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.path.join(launch, "processes", "predecessors.py")
    predecessors = ModuleType("predecessors")  # by its file, and not left behind: the script may never import ft_core
    with open(path) as source:
        exec(compile(source.read(), path, "exec"), predecessors.__dict__)
    predecessors.wait()


def run_script(path: str) -> None:
    """Run the file as `python path` does."""
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    here = new_main()
    here.__file__ = path
    here.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    here.__dict__.update(__package__=None, __spec__=None, __cached__=None)
    execute(compile(source, path, "exec", dont_inherit=True), here)


def run_module(name: str) -> None:
    """Run the module as `python -m name` does."""
    spec = find_module(name)
    if spec.submodule_search_locations is not None:
        spec = find_module(f"{name}.__main__")
    code = cast("importlib.abc.InspectLoader", spec.loader).get_code(spec.name)
    if code is None:
        sys.exit(f"{sys.executable}: No code object available for {spec.name}")
    here = new_main()
    here.__file__ = spec.origin
    here.__loader__ = spec.loader
    here.__dict__.update(__package__=spec.parent, __spec__=spec, __cached__=spec.cached)
    sys.argv[0] = spec.origin or name
    execute(code, here)


def find_module(name: str) -> importlib.machinery.ModuleSpec:
    """Where the module is; ends the process with Python's words if it is not."""
    spec = None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
    return spec or no_module(name)


def no_module(name: str) -> NoReturn:
    """What `python -m` says."""
    sys.exit(f"{sys.executable}: No module named {name}")


def new_main() -> ModuleType:
    """A fresh `__main__` for the script; this file's own stays alive through the frames that run it."""
    here = ModuleType("__main__")
    here.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        here.__annotations__ = {}
    sys.modules["__main__"] = here
    return here


def execute(code: CodeType, here: ModuleType) -> None:
    """Run the code in its module."""
    exec(code, here.__dict__)


def hide_frames() -> None:
    """Let whatever shows the error that ends this process show the script's frames only.

    The error itself goes on up, so that the interpreter does what it always does: excepthook, threads, atexit, and the
    signal after a KeyboardInterrupt.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        while trace is not None and ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def ours(filename: str) -> bool:
    """Is it this file, or the import machinery on the way to the script's first line?"""
    return filename == ours.__code__.co_filename or filename.startswith("<frozen importlib")


if __name__ == "__main__":
    main()
