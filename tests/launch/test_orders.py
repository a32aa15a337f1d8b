"""ftrun told to stop, drain, grow or shrink at awkward moments, and started in awkward surroundings."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ft_core._pb import coordination_pb2 as pb
from ft_core.launch import agent as agent_module
from ft_core.launch.control_socket import order_resize
from ft_core.launch.lighthouse_watch import _seen
from ft_core.launch.output.streams import Output
from ft_core.launch.processes.keeper import Keeper
from ft_core.launch.rendezvous import Stopped, attempt_key, rendezvous
from ft_core.launch.spec import Script
from ft_core.launch.standby import pool as standby_module
from ft_core.launch.supervisor import Supervisor
from tests.launch.job import job
from tests.launch.test_groups import UNTIL_TOLD, pids

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from tests.held_ports import Hold


pytestmark = pytest.mark.process
SLOW_END = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(0)))\n"
"""Takes its time to drain."""


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """Write a worker script."""

    def write(text: str) -> pathlib.Path:
        path = tmp_path / "worker.py"
        path.write_text(f"import os, pathlib\nfolder = pathlib.Path({str(tmp_path)!r})\n{text}")
        return path

    return write


@pytest.fixture
def endpoint(hold: Hold) -> str:
    """An address where nobody listens."""
    return f"127.0.0.1:{hold()[0]}"


def terminate(_: re.Match[str]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# ---------------------------------------------------------------- resize


def test_a_group_that_is_wanted_again_while_it_drains_comes_back(write: Any, tmp_path: pathlib.Path) -> None:
    script = write(SLOW_END + "print('ready', flush=True)\n" + UNTIL_TOLD)

    answers: list[str] = []

    def orders(_: re.Match[str]) -> None:
        answers.extend(order_resize(wanted, "again") for wanted in (1, 2))

    with job(script, "--replicas", "2", "--run-id", "again") as running:
        running.when("replica-1/0] ready", orders)
        running.when("replica-1/0] ready", lambda _: (tmp_path / "end").touch(), after=[r"replica-1\] drained"])
        assert running.run() == 0
    assert answers == ["ok: 2 -> 1 groups", "ok: 1 -> 2 groups"]
    assert running.count(r"\[replica-1\] started") == 2
    assert "2 finished" in running.lines.all[-1]


def test_a_group_that_is_wanted_again_and_then_not_stays_away(write: Any, tmp_path: pathlib.Path) -> None:
    script = write(SLOW_END + "print('ready', flush=True)\n" + UNTIL_TOLD)

    def orders(_: re.Match[str]) -> None:
        for wanted in (1, 2, 1):
            order_resize(wanted, "never")

    with job(script, "--replicas", "2", "--run-id", "never") as running:
        running.when("replica-1/0] ready", orders)
        running.when(r"replica-1\] drained", lambda _: (tmp_path / "end").touch())
        assert running.run() == 0
    assert running.count(r"\[replica-1\] started") == 1
    assert "1 finished, 1 drained" in running.lines.all[-1]


# ---------------------------------------------------------------- signals


def test_a_group_that_waits_for_its_next_start_counts_as_drained(write: Any) -> None:
    script = write(
        "if os.environ['FT_REPLICA_GROUP'] == '1': raise SystemExit(9)\n" + SLOW_END + "print('ready')\n" + UNTIL_TOLD
    )
    with job(script, "--replicas", "2", "--crash-loop", "9") as running:
        running.when("starting again in", terminate, after=["replica-0/0] ready"])
        assert running.run() == 0
    assert "2 drained" in running.lines.all[-1]


def test_sigterm_before_there_is_a_worker_to_hear_it(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()

    def undrained(supervisor: Supervisor, name: str) -> None:
        signalled(supervisor, name)
        told.set()

    def slowly(*arguments: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(30)
        return attempt_key(*arguments)

    signalled = Supervisor._on_undrained
    monkeypatch.setattr(Supervisor, "_on_undrained", undrained)
    monkeypatch.setattr(agent_module, "attempt_key", slowly)
    script = write(UNTIL_TOLD)
    began = time.monotonic()
    with job(script) as running:
        assert running.run() == 1  # it was simply killed
    assert time.monotonic() - began < 10
    assert "1 stopped" in running.lines.all[-1]


def test_nohup(write: Any, tmp_path: pathlib.Path) -> None:
    script = write("print('ready', flush=True)\n" + UNTIL_TOLD)

    def hang_up(_: re.Match[str]) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        (tmp_path / "end").touch()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with job(script) as running:
            running.when("/0] ready", hang_up)
            assert running.run() == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "1 finished" in running.lines.all[-1]


# ---------------------------------------------------------------- a group that spans hosts


def test_waiting_for_the_other_hosts_can_be_given_up(write: Any, endpoint: str) -> None:
    options = ("--replica", "0", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--run-id", "alone")
    from ft_core.control.lighthouse.server import LighthouseServer

    server = LighthouseServer("127.0.0.1:0")
    try:
        with job(write(""), *options, "--lighthouse", server.address()) as running:
            timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
            began = time.monotonic()
            assert running.run() == 0
            assert time.monotonic() - began < 10
    finally:
        server.shutdown()
    assert "1 drained" in running.lines.all[-1]


def test_waiting_for_the_first_hosts_store_can_be_given_up() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    handler: Any = rendezvous("alone", "127.0.0.1", (2, 2), "192.0.2.1:29500", stop)
    handler._parameters.config["read_timeout"] = 1  # of torch's thread, which is left behind
    with pytest.raises(Stopped):
        handler.next_rendezvous()
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()


# ---------------------------------------------------------------- hangs


def test_a_process_that_the_lighthouse_does_not_hear_stands_still() -> None:
    frozen = _seen(pb.ReplicaStatus(replica_id="replica-1:ab", life="missed", since_ms=4400), 1.0)
    assert frozen.alive
    assert frozen.stalled == "replica-1:ab runs, but the lighthouse has not heard of it for 4 s"
    assert not _seen(pb.ReplicaStatus(replica_id="replica-1:ab", life="up"), 1.0).stalled


# ---------------------------------------------------------------- standby


def test_standbys_that_are_killed_are_replaced_as_often_as_it_takes(
    write: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "REFILL_S", 0.0)
    (tmp_path / "torch.py").write_text("")
    script = write("import time\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': time.sleep(60)\n")
    left = standby_module.MAX_FAILURES + 1

    def kill(_: re.Match[str]) -> None:
        nonlocal left
        left -= 1
        running.when("standby. 1 ready", kill)
        if left > 0:
            pool = running.supervisor._tools.pool
            assert pool is not None
            os.kill(pool._all[0].process.pid, signal.SIGKILL)
        elif left == 0:
            os.kill(pids(running, "replica-0")[0], signal.SIGKILL)

    with job(script, "--standby", "1") as running:
        running.when("standby. 1 ready", kill)
        assert running.run() == 0
    assert running.count("started from a warm standby") == 1
    assert running.count("given up") == 0


def test_a_standby_that_is_being_started_when_the_pool_is_closed_is_ended(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "REFILL_S", 0.0)
    starting, closing = threading.Event(), threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            starting.set()
            assert closing.wait(20)
            super().__init__(*arguments, **options)
            started.append(self)

    (tmp_path / "train.py").write_text("")
    keeper = Keeper(tempfile.mkdtemp(prefix="keeper."))
    output = Output(lambda *_: None)
    output.start()
    pool = standby_module.Pool(
        1, Script(str(tmp_path / "train.py")), str(tmp_path), keeper, output, lambda about, text: None
    )
    try:
        monkeypatch.setattr(subprocess, "Popen", Process)
        assert pool.start() == ""
        assert starting.wait(20)
        threading.Timer(0.2, closing.set).start()  # when `close` waits
        pool.close()
        pool._thread.join(20)
        assert [process.returncode for process in started] == [-signal.SIGKILL]
    finally:
        closing.set()
        keeper.close()
        output.close()
        for process in started:
            process.wait()


# ---------------------------------------------------------------- surroundings


@pytest.mark.parametrize(
    "closed",
    [pytest.param("<&-", marks=pytest.mark.long), pytest.param(">&- 2>&-", marks=pytest.mark.long), "<&- >&- 2>&-"],
)
def test_standard_streams_that_are_closed(write: Any, tmp_path: pathlib.Path, closed: str) -> None:
    script = write("print('x' * 9)\n(folder / 'ran').touch()")
    command = f'exec "$0" -m ft_core.launch "$1" {closed}'
    result = subprocess.run(
        ["sh", "-c", command, sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "ran").exists()
    assert "keeper" not in result.stderr


def test_killing_every_process_called_ftrun_spares_the_keeper(tmp_path: pathlib.Path) -> None:
    """`pkill -9 -f ftrun`: the keeper is still there to end the workers."""
    (tmp_path / "ftrun-0").mkdir()
    keeper = Keeper(str(tmp_path / "ftrun-0"))
    try:
        assert "ftrun" not in pathlib.Path(f"/proc/{keeper.process.pid}/cmdline").read_text()
    finally:
        keeper.close()
    assert not (tmp_path / "ftrun-0").exists()
