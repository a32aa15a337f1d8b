"""`ft_debug_launcher`: runs a function in the processes of several replica groups on this machine's CPU.

How it works. As accelerate's `debug_launcher` it forks, so that a function may be a closure of a test or a notebook.
The processes are forked first, while this process has opened nothing yet, and wait for a message on their pipes. Then a
keeper (`ft_core.launch.processes.keeper`), a lighthouse process and one c10d store per group are started, each process
receives its environment, registers with the keeper, and runs the function.

Invariants: when `ft_debug_launcher` returns or raises, no process that it started is left; if this process itself is
killed, the keeper ends them. A failure anywhere ends everything.

Threads: the caller's; c10d's store servers have their own.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ft_accelerate._compat import is_initialized
from ft_core.errors import ConfigError, LighthouseError, UsageError
from ft_core.launch.control_socket import base_folder
from ft_core.launch.processes import stub
from ft_core.launch.processes.keeper import Keeper
from ft_core.process_group import open_store
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.context import ForkProcess

MAX_PROCESSES = 1024
"""Processes of one group; far more than a debugging machine can run."""
HERE = "127.0.0.1"
STORE_S = 60.0
END_S = 5.0
"""How long a process that was killed, or has sent its traceback, may take to end."""
MAX_TRACEBACK = 30_000
"""Characters: fits into a pipe's buffer, as the launcher reads only after the process has ended."""
LISTENS = "listens on "


@dataclass(frozen=True)
class _Place:
    """One process: which group, which rank in it."""

    group: int
    rank: int


def ft_debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), groups: int = 2, num_processes: int = 1
) -> None:
    """Run `function(*args)` in `groups` replica groups of `num_processes` CPU processes each, with a lighthouse.

    For tests and debugging, as accelerate's `debug_launcher`. A quorum needs all groups: nobody trains alone.

    Args:
        function: what each process runs; may be a closure. It makes its own `FaultTolerantAccelerator`.
        args: its arguments.
        groups: replica groups, 1 to 1024.
        num_processes: processes of each group.

    Raises:
        ConfigError: `groups` or `num_processes` is out of range.
        UsageError: an Accelerator exists in this process already; the processes would inherit it.
        ProcessRaisedException: the function raised in a process; the message has its traceback.
        ProcessExitedException: a process ended otherwise, by a signal or an exit status.
    """
    _check(groups, num_processes)
    places = [_Place(group, rank) for group in range(groups) for rank in range(num_processes)]
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in places]
    ours, theirs = [pair[0] for pair in pipes], [pair[1] for pair in pipes]
    processes: list[ForkProcess] = []
    with contextlib.ExitStack() as stack:
        for end in (*ours, *theirs):
            stack.callback(end.close)
        stack.callback(_end, processes)
        for index in range(len(places)):
            others = [*ours, *(end for end in theirs if end is not theirs[index])]
            process = fork.Process(target=_process, args=(theirs[index], others, function, tuple(args)))
            process.start()
            processes.append(process)
        for end in theirs:
            end.close()
        environments = _open(stack, places, groups, num_processes)
        stack.callback(_end, processes)  # before what they need goes
        for place, end in zip(places, ours, strict=True):
            with contextlib.suppress(OSError):  # it has ended: `_watch` reports how
                end.send(environments[place])
        _watch(processes, ours)


def _check(groups: int, num_processes: int) -> None:
    if not 1 <= groups <= MAX_REPLICAS:
        raise ConfigError(f"groups={groups} must be 1 to {MAX_REPLICAS} replica groups")
    if not 1 <= num_processes <= MAX_PROCESSES:
        raise ConfigError(f"num_processes={num_processes} must be 1 to {MAX_PROCESSES} processes of each group")
    if is_initialized() or PartialState._shared_state:
        raise UsageError(
            "ft_debug_launcher: this process has an Accelerator (or PartialState) already, and the processes would "
            "inherit it: make it inside the function only, and restart the notebook"
        )


# ---------------------------------------------------------------- what the processes need


def _open(
    stack: contextlib.ExitStack, places: Sequence[_Place], groups: int, num_processes: int
) -> dict[_Place, dict[str, str]]:
    """Start keeper, lighthouse and stores. Returns the environment of each process."""
    keeper = Keeper(tempfile.mkdtemp(prefix="ft_debug.", dir=base_folder()))
    stack.callback(keeper.close)
    token = secrets.token_hex(16)
    lighthouse = _lighthouse(stack, keeper, groups, token)
    stores = [open_store(HERE, timedelta(seconds=STORE_S)) for _ in range(groups)]
    stack.callback(stores.clear)
    attempts = [secrets.token_hex(8) for _ in range(groups)]
    common = {
        **keeper.environment(),
        "FT_LIGHTHOUSE": lighthouse, "FT_TOKEN": token, "FT_ADMIN_TOKEN": "", "FT_HOSTNAME": HERE,
        "FT_NUM_REPLICA_GROUPS": str(groups), "FT_MIN_REPLICAS": str(groups),
        "WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": HERE,
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "yes", "ACCELERATE_MIXED_PRECISION": "no", "FORK_LAUNCHED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip
    return {
        place: {
            **common,
            "FT_REPLICA_ID": f"replica-{place.group}", "FT_REPLICA_GROUP": str(place.group),
            "FT_GROUP_ATTEMPT": attempts[place.group], "MASTER_PORT": str(stores[place.group].port),
            "RANK": str(place.rank), "LOCAL_RANK": str(place.rank),
        }
        for place in places
    }  # fmt: skip


def _lighthouse(stack: contextlib.ExitStack, keeper: Keeper, groups: int, token: str) -> str:
    """Start one as a process: with gRPC's threads in this one, a later fork of it could hang. Returns its address."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", stub.__file__, sys.executable, "-m", "ft_core.lighthouse",
         "--bind", f"{HERE}:0", "--min-replicas", str(groups)],
        env={**os.environ, **keeper.environment(), "FT_TOKEN": token, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    stack.callback(process.communicate)  # takes what it wrote, reaps it
    stack.callback(process.kill)
    line = process.stdout.readline()
    if LISTENS not in line:
        _, rest = process.communicate()
        raise LighthouseError(f"ft_debug_launcher: its lighthouse did not start: {(line + rest).strip()}")
    return line.partition(LISTENS)[2].strip()


# ---------------------------------------------------------------- one process


def _process(end: Connection, others: Sequence[Connection], function: Callable[..., Any], args: Sequence[Any]) -> None:
    """The forked process: wait for the environment, run, send the traceback of what was raised."""
    for other in others:
        other.close()
    atexit._clear()  # of the launching program; a Manager of ours registers one, with which it leaves
    os.setsid()  # Ctrl-C is the launcher's; the keeper kills by process group
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # the handlers of the launching program (pytest, a notebook) are not ours
    try:
        environment = end.recv()
    except EOFError:  # the launcher failed, and reports that itself
        os._exit(1)
    try:
        _become(environment)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP's threads did not survive the fork
        try:
            function(*args)
        except SystemExit as end_of_it:  # of a drained Manager, or the function's own
            if end_of_it.code not in (None, 0):
                raise
        atexit._run_exitfuncs()  # multiprocessing ends a forked process without them
    except BaseException:  # noqa: BLE001 - sent to the launcher, which raises it
        end.send(traceback.format_exc()[-MAX_TRACEBACK:])
        raise SystemExit(1) from None  # the launcher prints it


def _become(environment: Mapping[str, str]) -> None:
    """Take the environment, and register with the keeper.

    Raises:
        LighthouseError: the keeper is gone.
    """
    rest = dict(environment)
    address, parent = rest.pop("FTRUN_KEEPER"), int(rest.pop("FTRUN_PID"))
    os.environ.update(rest)
    if not stub.register(address) or os.getppid() != parent:
        raise LighthouseError("ft_debug_launcher: its keeper process is gone (who killed it?)")


# ---------------------------------------------------------------- the end


def _watch(processes: Sequence[ForkProcess], ends: Sequence[Connection]) -> None:
    """Until all have ended well; raise for the first that did not."""
    left = {process.sentinel: index for index, process in enumerate(processes)}
    while left:
        for sentinel in wait(list(left)):
            assert isinstance(sentinel, int)
            index = left.pop(sentinel)
            process = processes[index]
            process.join()
            if process.exitcode:
                _raise(index, process, ends[index])


def _raise(index: int, process: ForkProcess, end: Connection) -> None:
    code, pid = process.exitcode or 0, process.pid or 0
    with contextlib.suppress(EOFError, OSError):
        if end.poll():
            text = end.recv()
            raise ProcessRaisedException(
                f"\n\n-- Process {index:d} terminated with the following error:\n{text}", index, pid
            )
    if code < 0:
        name = signal.Signals(-code).name
        text = f"process {index:d} terminated with signal {name}"
        raise ProcessExitedException(text, error_index=index, error_pid=pid, exit_code=code, signal_name=name)
    text = f"process {index:d} terminated with exit code {code:d}"
    raise ProcessExitedException(text, error_index=index, error_pid=pid, exit_code=code)


def _end(processes: list[ForkProcess]) -> None:
    """Kill what is left, with what it started itself; forget them."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    for process in processes:
        process.join(END_S)
        process.close()
    processes.clear()
