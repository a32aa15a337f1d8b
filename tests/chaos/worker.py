"""A trainer process for the chaos tests. Prints one line per event: `commit STEP PARTICIPANTS LINEAGE RANK`, `veto STEP
RANK`, `done DIGEST RANK`.

Behaviour comes from the environment: STEPS_FILE (train until this file names a step, and to that step), STEP_MS (how
long a step takes at least), FORK (keep a forked child alive, as DataLoader workers do), HANG_AT (stop before this
step), HANG_ONCE (name:steps: that group hangs after so many commits of its first run), BN (a BatchNorm layer), METRIC
(a collective of the user's after backward; SILENT_AT: stop before that of this step), PARITY (parity_check_every),
CORRUPT_AT (rank:step after which this rank's parameters silently change), FILES (how many files it may open after its
start), INERT_MB (so much more state), DIES_GIVING (N:file: removes the file and kills itself with SIGKILL amid the Nth
range that it gives over a process group), HOLDS_BACK (a file: while it is there it gives none), TRACED (anybody may
trace it), MACHINE (the network namespace to run in), GROUP (the class of process group; one in a child prints `child
PID`), PIDS and LOG (say more).
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import os
import pathlib
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import nn

from ft_core import DistributedDataParallel, Manager, Optimizer, process_group
from ft_core.checkpointing.pg.donor import PgDonor

CLONE_NEWNET = 0x40000000
PR_SET_PTRACER = 0x59616D61


def say(*words: object) -> None:
    # One write per line: the ranks of a group share a pipe.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def move_to(namespace: str | None) -> None:
    """Live in that network namespace from now on, if one is given: this thread, and all that it starts."""
    if namespace is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as there:
        if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")


def hangs(step: int, commits: int) -> bool:
    env = os.environ
    first_run = env.get("TORCHELASTIC_RESTART_COUNT") == "0"
    return env.get("HANG_AT") == str(step) or (
        first_run and env.get("HANG_ONCE") == f"{env.get('FT_REPLICA_ID')}:{commits}"
    )


def limit_files(more: str | None) -> None:
    """From now on this process may open so many files more."""
    if more is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + int(more), most))


def change_giving(dies_at: str | None, holds_back: str | None) -> None:
    """Over process groups, this one kills itself with a range on its way, or gives none while a file is there."""
    original, given, pause = PgDonor._send, itertools.count(1), threading.Event()

    def send(donor: PgDonor, answer: Any) -> None:
        until = time.monotonic() + 30
        while holds_back is not None and os.path.exists(holds_back) and time.monotonic() < until:
            pause.wait(0.005)
        original(donor, answer)
        if dies_at is not None and next(given) == int(dies_at.partition(":")[0]):
            say("dies giving")
            pathlib.Path(dies_at.partition(":")[2]).unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    if dies_at is not None or holds_back is not None:
        mock.patch.object(PgDonor, "_send", send).start()


def let_trace(wanted: str | None) -> None:
    """Anybody may trace this process (Yama)."""
    if wanted is not None:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1))


def say_child(group: Any, said: int) -> int:
    """Print the child that the group runs in, if it is another than the one that was printed last; returns it."""
    incarnation = getattr(group, "_incarnation", None)
    child = getattr(incarnation, "child", None)
    if child is None or child.pid is None or child.pid == said:
        return said
    say("child", child.pid)
    return int(child.pid)


def main() -> int:
    torch.set_num_threads(1)
    env = os.environ
    move_to(env.get("MACHINE"))
    end, step_s = pathlib.Path(env["STEPS_FILE"]), float(env.get("STEP_MS", "5")) / 1000
    rank = int(env.get("RANK", "0"))
    if env.get("PIDS"):
        say("pid", os.getpid(), rank)
    torch.manual_seed(os.getpid())  # replicas start apart on purpose
    if env.get("LOG"):
        logging.basicConfig(level=logging.INFO)
    layers = [nn.Linear(20, 64), *([nn.BatchNorm1d(64)] if env.get("BN") else []), nn.ReLU(), nn.Linear(64, 4)]
    model = nn.Sequential(*layers)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inert = torch.full((int(env.get("INERT_MB", "0")) << 18,), float(os.getpid()))
    change_giving(env.get("DIES_GIVING"), env.get("HOLDS_BACK"))

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    group = getattr(process_group, env.get("GROUP", "ProcessGroupGloo"))()
    manager = Manager(
        pg=group,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict(), "inert": inert},
        load_state_dict=load_state,
        timeout=timedelta(seconds=float(env.get("TIMEOUT_S", "20"))),
        parity_check_every=int(env.get("PARITY", "0")),
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    let_trace(env.get("TRACED"))
    if env.get("FORK"):
        child = os.fork()
        if child == 0:
            threading.Event().wait(60)
            os._exit(0)
        say("pid", child)
    limit_files(env.get("FILES"))
    say("ready", manager.replica_id)
    generator = torch.Generator().manual_seed(os.getpid())
    pace = threading.Event()
    commits, child_pid = 0, 0
    while not end.exists() or manager.current_step() < int(end.read_text()):
        if hangs(manager.current_step(), commits):
            say("hanging")
            pace.wait()
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 20, generator=generator)).square().mean()
        pace.wait(step_s)
        loss.backward()
        if env.get("METRIC"):  # the loss, averaged for logging: a collective of the user's, after the fence
            if manager.current_step() == int(env.get("SILENT_AT", "-1")):
                say("silent")
                pace.wait()
            manager.allreduce(loss.detach().clone()).wait()
        optimizer.step()
        if env.get("CORRUPT_AT") and f"{rank}:{manager.current_step()}" == env["CORRUPT_AT"]:
            with torch.no_grad():
                next(iter(model.parameters())).add_(1.0)
        if optimizer.committed:
            commits += 1
            lineage = manager.state_dict()["lineage"]
            child_pid = say_child(group, child_pid)
            say("commit", manager.current_step(), manager.num_participants(), f"{lineage:x}", rank)
        else:
            say("veto", manager.current_step(), rank)
    manager.leave("finished", finished=True)
    digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in model.state_dict().values()))
    say("done", digest.hexdigest()[:16], rank)
    manager.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
