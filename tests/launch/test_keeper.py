"""The keeper and the stub with real processes: whoever kills ftrun, and whenever, no worker is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ft_core.launch.processes import keeper as keeper_module
from ft_core.launch.processes import stub
from ft_core.launch.processes.keeper import Keeper
from tests.descriptors import descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process
PATIENCE_S = 20.0
SEED = random.randrange(10**6)

OWNER = """
import os, subprocess, sys
from ft_core.launch.processes import stub
from ft_core.launch.processes.keeper import Keeper
keeper = Keeper(sys.argv[1])
print("keeper", keeper.process.pid, flush=True)
for line in sys.stdin:
    if line == "renew\\n":
        keeper.process.wait()
        keeper.renew()
        print("keeper", keeper.process.pid, flush=True)
        continue
    command = [sys.executable, "-I", "-S", stub.__file__, "sh", "-c", line]
    env = os.environ | keeper.environment()
    subprocess.Popen(command, env=env, start_new_session=True, stdin=subprocess.DEVNULL)
"""
"""Stands for ftrun: starts a worker for every line it reads (`renew`: another keeper); workers print to its stdout."""


class Owner:
    """A process that holds a keeper, and pidfds of everything that said its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pidfds: list[int] = []
        self.keeper = self.read("keeper")

    def read(self, word: str) -> int:
        """The pid that the next line carries, which starts with `word`."""
        first, pid = self.line()
        assert first == word
        self.pidfds.append(os.pidfd_open(pid))
        return pid

    def line(self) -> tuple[str, int]:
        """The next line, a word and a pid."""
        assert self.process.stdout is not None
        word, pid = self.process.stdout.readline().split()
        return word, int(pid)

    def start(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def rest(self) -> str:
        """What was printed meanwhile; returns once nobody who could print is left, because all have the pipe."""
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        for pidfd in self.pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


@pytest.fixture
def owner() -> Iterator[Owner]:
    holder = Owner(Path(tempfile.mkdtemp(prefix="keeper.")))
    yield holder
    holder.close()


def ended(pidfd: int) -> bool:
    """Waits for the end of the process."""
    return bool(select.select([pidfd], [], [], PATIENCE_S)[0])


def test_killing_the_owner_ends_workers_their_children_and_stopped_ones(owner: Owner) -> None:
    owner.start("sleep 1000 & echo child $!; echo worker $$; wait")
    child, worker = owner.read("child"), owner.read("worker")
    owner.start("echo worker $$; exec sleep 1000")
    os.kill(owner.read("worker"), signal.SIGSTOP)
    owner.start('trap "" TERM INT HUP; echo worker $$; while :; do sleep 1000; done')
    owner.read("worker")
    assert os.getpgid(child) == worker
    owner.kill()
    assert [ended(pidfd) for pidfd in owner.pidfds] == [True] * 5
    assert not owner.folder.exists()


def test_killing_the_owner_and_its_keeper_at_once_ends_workers(owner: Owner) -> None:
    """The keeper is dead before it could learn of the owner's death, and nobody is left to start another one."""
    for _ in range(2):
        owner.start("echo worker $$; exec sleep 1000")
        owner.read("worker")
    os.kill(owner.process.pid, signal.SIGSTOP)
    os.kill(owner.keeper, signal.SIGKILL)
    assert ended(owner.pidfds[0])
    owner.kill()
    assert all(ended(pidfd) for pidfd in owner.pidfds)


def test_a_worker_that_ended_before_is_not_signalled(owner: Owner) -> None:
    """Its child, still in its process group, shows it: the number may be somebody else's by now."""
    owner.start("(echo child $(sh -c 'echo $PPID'); exec sleep 1000) & echo worker $$")
    pids = dict(owner.line() for _ in range(2))
    child = os.pidfd_open(pids["child"])
    owner.pidfds.append(child)
    with contextlib.suppress(ProcessLookupError):
        worker = os.pidfd_open(pids["worker"])
        owner.pidfds.append(worker)
        assert ended(worker)
    owner.kill()
    assert ended(owner.pidfds[0]), "the keeper"
    assert not select.select([child], [], [], 0)[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_keeper_outlives_what_ends_a_terminals_processes(owner: Owner, number: signal.Signals) -> None:
    owner.start("echo worker $$; exec sleep 1000")
    owner.read("worker")
    os.kill(owner.keeper, number)
    owner.start("echo worker $$; exec sleep 1000")
    owner.read("worker")
    owner.kill()
    assert all(ended(pidfd) for pidfd in owner.pidfds)
    assert not owner.folder.exists()


def test_a_keeper_that_replaces_another_knows_its_workers(owner: Owner) -> None:
    """Nobody tells it who they are: the owner may not have heard of a worker that has registered."""
    owner.start("echo worker $$; exec sleep 1000")
    owner.read("worker")
    os.kill(owner.keeper, signal.SIGKILL)
    owner.start("renew")
    owner.read("keeper")
    owner.start("echo worker $$; exec sleep 1000")
    owner.read("worker")
    owner.kill()
    assert [ended(pidfd) for pidfd in owner.pidfds] == [True] * 4
    assert not owner.folder.exists()


def test_the_owner_may_die_at_any_moment() -> None:
    """Workers are being forked, connecting, starting children; whenever the owner dies, nobody is left."""
    draw = random.Random(SEED)
    for _ in range(6):
        folder = Path(tempfile.mkdtemp(prefix="keeper.", dir="/tmp"))
        holder = Owner(folder)
        try:
            for _ in range(4):
                holder.start("(sleep 1000 & sleep 1000 & wait); wait")
            select.select([], [], [], draw.random() * 0.15)
            holder.kill()
            assert ended(holder.pidfds[0]), f"the keeper; seed {SEED}"
            reader = threading.Thread(target=holder.rest, daemon=True)
            reader.start()
            reader.join(PATIENCE_S)
            assert not reader.is_alive(), f"somebody still holds the pipe; seed {SEED}"
            assert not folder.exists(), f"seed {SEED}"
        finally:
            holder.close()


# ---------------------------------------------------------------- in this process


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    held = Keeper(tempfile.mkdtemp(prefix="keeper."))
    yield held
    held.close()


def stub_of(keeper_env: dict[str, str], *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", stub.__file__, *command], env={**os.environ, **keeper_env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_close_ends_everything_and_may_be_repeated(keeper: Keeper) -> None:
    assert keeper.alive()
    assert repr(keeper) == f"Keeper(pid={keeper.process.pid}, running)"
    worker = stub_of(keeper.environment(), "sh", "-c", "echo on; exec sleep 1000")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "on\n"
    began = time.monotonic()
    keeper.close()
    assert time.monotonic() - began < 1.0, "nothing to wait for"
    worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == -signal.SIGKILL
    assert not keeper.alive()
    assert repr(keeper) == f"Keeper(pid={keeper.process.pid}, ended)"
    assert not Path(keeper.address).parent.exists()
    keeper.close()


def test_close_of_a_keeper_that_was_killed_or_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "END_S", 0.1)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        held = Keeper(tempfile.mkdtemp(prefix="keeper."))
        held.process.send_signal(number)
        held.close()
        assert not held.alive()
        assert not Path(held.address).parent.exists()


def test_a_keeper_that_cannot_be_started_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with pytest.raises(OSError, match="No such file"):
        Keeper(str(tmp_path / "missing"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(OSError, match="No such file"):
        Keeper(str(tmp_path))
    assert descriptors() - before == set()


def test_a_stub_without_a_keeper_ends(keeper: Keeper) -> None:
    env = keeper.environment()
    keeper.close()
    worker = stub_of(env, "echo", "ran")
    out, err = worker.communicate(timeout=PATIENCE_S)
    assert (worker.returncode, out) == (143, "")
    assert err == "ftrun: its keeper process is gone, so no worker may start (who killed it?)\n"


def test_a_stub_whose_keeper_is_killed_registers_with_the_next_one(keeper: Keeper) -> None:
    """Killed between hearing the stub and answering it; for a while there is none; then there is another one."""
    keeper.process.kill()
    keeper.process.wait()
    os.unlink(keeper.address)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(keeper.address)
        door.listen()
        door.settimeout(PATIENCE_S)
        worker = stub_of(keeper.environment(), "sh", "-c", "echo on; exec sleep 1000")
        for _ in range(2):
            door.accept()[0].close()
    keeper.renew()
    assert worker.stdout is not None
    assert worker.stdout.readline() == "on\n"
    keeper.close()
    worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == -signal.SIGKILL


def test_a_stub_does_not_wait_for_ever_for_a_keeper(keeper: Keeper) -> None:
    keeper.process.kill()
    keeper.process.wait()
    hurried = f"import sys; sys.path.insert(0, {os.path.dirname(stub.__file__)!r}); import stub; stub.WAIT_S = 0.1"
    worker = subprocess.Popen(
        [sys.executable, "-c", f"{hurried}; sys.exit(stub.main(['echo', 'ran']))"],
        env={**os.environ, **keeper.environment()}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = worker.communicate(timeout=PATIENCE_S)
    assert (worker.returncode, out) == (143, "")
    assert err == "ftrun: its keeper process is gone, so no worker may start (who killed it?)\n"


def test_a_stub_that_finds_ftrun_gone_ends_quietly(keeper: Keeper) -> None:
    worker = stub_of({**keeper.environment(), "FTRUN_PID": "1"}, "echo", "ran")
    assert worker.communicate(timeout=PATIENCE_S) == ("", "")
    assert worker.returncode == 143


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [("no-such-program", 127, "No such file or directory"), ("/etc", 126, "Permission denied"),
     ("/dev/null/x", 127, "Not a directory"), ("{text}", 126, "Exec format error")],
)  # fmt: skip
def test_what_cannot_be_run(keeper: Keeper, tmp_path: Path, name: str, code: int, says: str) -> None:
    text = tmp_path / "text"
    text.write_text("words")
    text.chmod(0o755)
    name = name.format(text=text)
    worker = stub_of(keeper.environment(), name, "--x")
    assert worker.communicate(timeout=PATIENCE_S) == ("", f"ftrun: cannot run {name}: {says}\n")
    assert worker.returncode == code


def test_the_worker_is_as_if_started_directly(keeper: Keeper) -> None:
    """Same process, arguments untouched, no trace of ftrun's own variables, default signals."""
    shows = "import os, signal, sys; print(sys.argv[1:], os.getpid(), 'FTRUN_KEEPER' in os.environ, os.environ['A'])"
    worker = stub_of({**keeper.environment(), "A": "b"}, sys.executable, "-c", shows, "a b", "--x", "")
    out, _ = worker.communicate(timeout=PATIENCE_S)
    assert out == f"['a b', '--x', ''] {worker.pid} False b\n"
    worker = stub_of(keeper.environment(), "grep", "SigIgn", "/proc/self/status")
    assert int(worker.communicate(timeout=PATIENCE_S)[0].split()[1], 16) == 0


def test_stacks_can_be_dumped_unless_the_user_forbids_it(keeper: Keeper) -> None:
    for given, value in (({}, "1"), ({"PYTHONFAULTHANDLER": "0"}, "0")):
        worker = stub_of({**keeper.environment(), **given}, "sh", "-c", "echo $PYTHONFAULTHANDLER")
        assert worker.communicate(timeout=PATIENCE_S)[0] == f"{value}\n"


# ---------------------------------------------------------------- ftrun as a whole


def processes_with(word: str) -> list[str]:
    """Command lines of processes whose environment has FTRUN_TEST=word."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"FTRUN_TEST={word}\0".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def listening() -> set[str]:
    """Inodes of TCP sockets that listen."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[9] for line in lines if line[3] == "0A"}


@pytest.fixture
def base() -> Iterator[Path]:
    """A TMPDIR with a name short enough for sockets below it."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        yield Path(folder)


def test_nothing_is_left_of_an_ftrun_that_was_killed(tmp_path: Path, base: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print('up', flush=True)\n"
        "child.wait()\n"
    )
    env = {**os.environ, "FTRUN_TEST": str(base), "TMPDIR": str(base), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ft_core.launch", "--replicas", "2", "--standby", "1", str(script)]
    ftrun = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ftrun.stdout is not None
    assert ftrun.stderr is not None
    assert sorted(ftrun.stdout.readline() for _ in range(2)) == ["[replica-0/0] up\n", "[replica-1/0] up\n"]
    sockets = listening()
    own = {os.readlink(fd)[8:-1] for fd in Path(f"/proc/{ftrun.pid}/fd").iterdir() if "socket:" in os.readlink(fd)}
    assert sockets & own
    ftrun.kill()
    began = time.monotonic()
    ftrun.communicate(timeout=PATIENCE_S)  # all others have ftrun's stderr, or a pipe to it: the keeper ends last
    while processes_with(str(base)) and time.monotonic() - began < PATIENCE_S:
        os.sched_yield()
    assert processes_with(str(base)) == []
    assert time.monotonic() - began < 2.0
    assert not listening() & own
    assert list((base / f"ftrun-{os.getuid()}").iterdir()) == []
