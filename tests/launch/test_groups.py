"""ftrun with real processes: every WorkerState transition, restarts, quarantine, drain, hangs, resize, clean-up."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.launch import agent as agent_module
from ft_core.launch.control_socket import order_resize
from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup

    from tests.held_ports import Hold


pytestmark = pytest.mark.process
ROOT = pathlib.Path(__file__).resolve().parents[2]
UNTIL_TOLD = "import time\nwhile not (folder / 'end').exists(): time.sleep(0.01)\n"
"""Goes on until the test makes the file."""


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """Write a worker script."""

    def write(text: str) -> pathlib.Path:
        path = tmp_path / "worker.py"
        path.write_text(f"import os, pathlib\nfolder = pathlib.Path({str(tmp_path)!r})\n{text}")
        return path

    return write


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The WorkerStates that each group goes through, in order."""
    seen: dict[str, list[str]] = {}

    class Recording(agent_module.GroupAgent):
        def note(self) -> None:
            states = seen.setdefault(self.name, [])
            if not states or states[-1] != self.state.name:
                states.append(self.state.name)

        def _initialize_workers(self, worker_group: WorkerGroup) -> None:
            self.note()
            super()._initialize_workers(worker_group)
            self.note()

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            if seen[self.name][-1] != result.state.name:
                seen[self.name].append(result.state.name)
            return result

        def run(self, role: str = "default") -> RunResult:
            try:
                result: RunResult = super().run(role)
                return result
            finally:
                self.note()

    monkeypatch.setattr("ft_core.launch.supervisor.GroupAgent", Recording)
    return seen


def pids(running: Job, name: str) -> dict[int, int]:
    """Living workers of a group; waits for them, as a worker may print before its agent has noted it."""
    agent = next(g for g in running.supervisor._groups.values() if g.name == name).agent
    until = time.monotonic() + 20
    while not agent.pids() and time.monotonic() < until:
        threading.Event().wait(0.01)
    return agent.pids()


def gone(pid: int) -> bool:
    """The process has ended (it may not have been reaped by its parent yet)."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# ---------------------------------------------------------------- states


def test_a_group_that_ends_well(write: Any, states: dict[str, list[str]]) -> None:
    shard = "os.environ['REPLICA_GROUP_ID'], 'of', os.environ['NUM_REPLICA_GROUPS']"
    script = write(f"print('hello from', os.environ['FT_REPLICA_GROUP'])\nprint('shard', {shard})")
    with job(script, "--replicas", "2") as running:
        assert running.run() == 0
    assert "[replica-1/0] shard 1 of 2" in running.lines.all, "for scripts of the reference implementation"
    assert states == {"replica-0": ["INIT", "HEALTHY", "SUCCEEDED"], "replica-1": ["INIT", "HEALTHY", "SUCCEEDED"]}
    assert "[replica-1/0] hello from 1" in running.lines.all
    assert "ftrun: [replica-1] finished" in running.lines.all
    assert re.search(r"2 finished after .* 0 restarts", running.lines.all[-1])


def test_one_group_is_told_that_nothing_survives_its_loss(write: Any) -> None:
    script = write("print('hello')")
    for groups, times in ("1", 1), ("1:2", 0), ("2", 0):
        with job(script, "--replicas", groups) as running:
            assert running.run() == 0
        assert running.count("one replica group: nothing survives its loss") == times


def test_a_group_that_fails_once_is_restarted_and_nobody_else(write: Any, states: dict[str, list[str]]) -> None:
    script = write(
        "first = folder / 'first'\n"
        "if os.environ['FT_REPLICA_GROUP'] == '1' and not first.exists():\n"
        "    first.touch(); raise RuntimeError('the first try')\n"
        "print('run', os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['FT_GROUP_ATTEMPT'])"
    )
    with job(script, "--replicas", "2") as running:
        assert running.run() == 0
    assert states["replica-1"] == ["INIT", "HEALTHY", "FAILED", "STOPPED", "HEALTHY", "SUCCEEDED"]
    assert states["replica-0"] == ["INIT", "HEALTHY", "SUCCEEDED"]
    assert running.count(r"^\[replica-1/0\] run 1 \w{16}$") == 1
    assert running.count(r"^\[replica-0/0\] run 0 ") == 1
    assert running.count(r"^ftrun: \[replica-1\] rank 0 .* code 1: RuntimeError: the first try; starting again in") == 1
    assert "1 restart" in running.lines.all[-1]


def test_no_restarts_wanted(write: Any, states: dict[str, list[str]]) -> None:
    script = write("if os.environ['FT_REPLICA_GROUP'] == '0': raise SystemExit(3)")
    with job(script, "--replicas", "2", "--max-restarts", "0", "--min-replicas", "2") as running:
        assert running.run() == 1
    assert states["replica-0"] == ["INIT", "HEALTHY", "FAILED"]
    assert running.count("exited with code 3; given up: .*--max-restarts") == 1


@pytest.mark.parametrize(("success", "status"), [("all", 1), ("min", 0)])
def test_a_crash_loop_is_quarantined_and_the_job_goes_on(
    write: Any, tmp_path: pathlib.Path, success: str, status: int
) -> None:
    script = write(
        "if os.environ['FT_REPLICA_GROUP'] == '1':\n"
        "    print('about to fail'); raise ValueError('always')\n" + UNTIL_TOLD
    )
    with job(script, "--replicas", "2", "--crash-loop", "2", "--success", success) as running:
        running.when("given up", lambda _: (tmp_path / "end").touch())
        assert running.run() == status
    assert running.count(r"\[replica-1\] started") == 2
    assert running.count("given up: .*2 times in a row before its first commit") == 1
    report = running.text[running.text.index("replica-1 failed for good") :]
    assert "exited with code 1: ValueError: always" in report
    assert "ftrun:     ValueError: always" in report  # the last traceback
    assert "1 finished, 1 quarantined" in running.lines.all[-1]


WAITS = (
    "import sys, dataclasses\n"
    f"sys.path.insert(0, {str(ROOT)!r})\n"
    "from tests.control.recorder import Replica\n"
    "one = Replica(os.environ['FT_LIGHTHOUSE'], 'replica-0:x', token=os.environ['FT_TOKEN'], start=False,\n"
    "              expected=int(os.environ['FT_NUM_REPLICA_GROUPS']))\n"
    "one.recorder.presented = dataclasses.replace(one.recorder.presented, join_s=600.0)\n"
    "one.lease.start(); one.ask(); print('in a quorum of', len(one.answer().members), flush=True)\n"
)
"""A worker that waits for its quorum, and for other groups for ten minutes."""


def test_nobody_waits_for_a_group_that_was_given_up(write: Any, tmp_path: pathlib.Path) -> None:
    """Its survivors would wait for a group that never comes, as they may for one that is late."""
    script = write("if os.environ['FT_REPLICA_GROUP'] == '1': os._exit(7)\n" + WAITS + UNTIL_TOLD)
    with job(script, "--replicas", "2", "--crash-loop", "2") as running:
        running.when("in a quorum of 1", lambda _: (tmp_path / "end").touch())
        assert running.run() == 1
    assert running.count("in a quorum of 1") == 1


def test_the_budget_ends_a_job_that_needs_the_group(write: Any) -> None:
    script = write("if os.environ['FT_REPLICA_GROUP'] == '1': os._exit(7)\n" + UNTIL_TOLD)
    options = ("--replicas", "2", "--max-restarts", "1", "--crash-loop", "9", "--min-replicas", "2")
    with job(script, *options) as running:
        assert running.run() == 1
    assert running.count(r"\[replica-1\] started") == 2
    assert running.count("only 1 groups are left, min_replicas is 2 .lost: replica-1.: draining") == 1


def test_a_stalled_group_is_dumped_killed_and_restarted(write: Any, states: dict[str, list[str]]) -> None:
    script = write(
        "def stuck_in_this_function():\n    import threading; print('stuck'); threading.Event().wait()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': stuck_in_this_function()"
    )

    def stall(_: re.Match[str]) -> None:
        running.supervisor._groups[0].agent.stall("replica-0 is alive but did not arrive")

    with job(script) as running:
        running.when(r"/0\] stuck", stall)
        assert running.run() == 0
    assert states["replica-0"] == ["INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "HEALTHY", "SUCCEEDED"]
    assert running.count("stands still while others wait .replica-0 is alive but did not arrive.") == 1
    assert running.count("stuck_in_this_function") == 1  # the stack of the main thread
    assert running.count("it stood still: .*; starting again now") == 1


def test_an_agent_that_lost_track_ends_its_group(write: Any, states: dict[str, list[str]]) -> None:
    """UNKNOWN: torch's agent finds processes that it did not start."""
    script = write("print('pid', os.getpid())\n" + UNTIL_TOLD)
    found: list[int] = []

    def confuse(match: re.Match[str]) -> None:
        found.append(int(match[1]))
        running.supervisor._groups[0].agent.get_worker_group().workers[0].id = 1

    with job(script) as running:
        running.when(r"/0\] pid (\d+)", confuse)
        assert running.run() == 1
    assert states["replica-0"] == ["INIT", "HEALTHY", "UNKNOWN"]
    assert running.count("its agent failed: Exception: .* in UNKNOWN state") == 1
    assert gone(found[0])


def test_one_worker_takes_its_group_along_and_is_named_first(write: Any) -> None:
    script = write(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\n"
        "if os.environ['RANK'] == '1':\n"
        "    while len(list(folder.glob('ready*'))) < 1: pass\n"
        "    raise RuntimeError('rank 1 breaks')\n"
        "(folder / 'ready').touch()\n" + UNTIL_TOLD
    )
    with job(script, "--nproc-per-replica", "2", "--max-restarts", "0") as running:
        assert running.run() == 1
    assert running.count("rank 1 .* exited with code 1: RuntimeError: rank 1 breaks; given up") == 1
    children = {int(pid) for pid in re.findall(r"child (\d+)", running.text)}
    assert len(children) == 2
    assert all(gone(pid) for pid in children)


def test_a_membership_change_restarts_a_group_that_spans_hosts(write: Any, tmp_path: pathlib.Path, hold: Hold) -> None:
    """Two ftruns, one group: when one host's workers fail, its rejoining restarts the other host's workers as well."""
    script = write(
        "run = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['FT_GROUP_ATTEMPT'], os.environ['GROUP_RANK']\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], *run, flush=True)\n"
        "mark = folder / ('failed' + os.environ['NODE'])\n"
        "import time\n"
        "if os.environ['NODE'] == '1' and not mark.exists():\n"
        "    while not (folder / 'up').exists(): time.sleep(0.01)\n"
        "    mark.touch(); raise SystemExit(5)\n"
        "(folder / 'up').touch()\n"
        "if not (folder / 'failed1').exists(): signal_me = time.sleep(60)\n"
        "while len(list(folder.glob('again*'))) < 2:\n"
        "    (folder / ('again' + os.environ['NODE'])).touch(); time.sleep(0.01)\n"
    )
    endpoint = f"127.0.0.1:{hold()[0]}"
    server = LighthouseServer("127.0.0.1:0")
    processes = []
    try:
        for node in range(2):
            command = [
                sys.executable, "-m", "ft_core.launch", "--replica", "0", "--nnodes", "2", "--rdzv-endpoint", endpoint,
                "--lighthouse", server.address(), "--run-id", "spans", "--monitor-interval", "0.05", str(script),
            ]  # fmt: skip
            env = os.environ | {"NODE": str(node), "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )
        texts = [process.communicate(timeout=50)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.shutdown()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    runs = re.findall(r"rank (\d) of 2 (\d+) (\w+) (\d)", "\n".join(texts))
    attempts = {attempt for _, _, attempt, _ in runs}
    assert len(attempts) == 2  # one word per start of the group, the same on both hosts
    assert sorted(rank for rank, _, _, _ in runs) == ["0", "0", "1", "1"]


@pytest.mark.long
def test_hosts_of_a_group_come_and_go(write: Any, tmp_path: pathlib.Path, hold: Hold) -> None:
    """--nnodes 1:2: it trains on one host, on both when the second comes, and on one when that is lost."""
    script = write(
        "import datetime, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=20))\n"
        "told = torch.zeros(1)\n"
        "print('node', os.environ['NODE'], 'of', dist.get_world_size(), flush=True)\n"
        "(folder / f'size{dist.get_world_size()}').touch()\n"
        "while not told:\n"
        "    told += dist.get_rank() == 0 and (folder / 'end').exists()\n"
        "    dist.all_reduce(told); time.sleep(0.005)\n"
    )

    def wait_for(true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 40
        while not true():
            assert time.monotonic() < deadline, "".join(log.read_text() for log in logs)
            assert processes[0].poll() is None, logs[0].read_text()
            threading.Event().wait(0.02)

    endpoint = f"127.0.0.1:{hold()[0]}"
    logs, processes = [tmp_path / f"node{node}.txt" for node in range(2)], list[subprocess.Popen[str]]()

    def start(node: int) -> None:
        command = [
            sys.executable, "-m", "ft_core.launch", "--replica", "0", "--nnodes", "1:2", "--rdzv-endpoint", endpoint,
            "--lighthouse", server.address(), "--run-id", "range", "--monitor-interval", "0.05", str(script),
        ]  # fmt: skip
        env = os.environ | {"NODE": str(node), "OMP_NUM_THREADS": "1"}
        with logs[node].open("w") as log:
            processes.append(subprocess.Popen(command, env=env, text=True, stdout=log, stderr=subprocess.STDOUT))

    server = LighthouseServer("127.0.0.1:0")
    try:
        start(0)
        wait_for((tmp_path / "size1").exists)
        (tmp_path / "size1").unlink()
        start(1)
        wait_for((tmp_path / "size2").exists)
        processes[1].kill()
        wait_for((tmp_path / "size1").exists)
        (tmp_path / "end").touch()
        assert processes[0].wait(30) == 0, logs[0].read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.shutdown()
    assert re.findall(r"node 0 of (\d)", logs[0].read_text()) == ["1", "2", "1"]
    assert re.findall(r"\[replica-0\] starts on (\d)", logs[0].read_text()) == ["1", "2", "1"]


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(("leaves", "status", "end"), [(True, 0, "drained"), (False, 1, "stopped")])
def test_sigterm_drains_and_the_status_is_0_if_the_script_leaves(
    write: Any, leaves: bool, status: int, end: str
) -> None:
    """A script that SIGTERM simply ends has saved nothing and agreed with nobody."""
    handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" if leaves else ""
    script = write(f"{handler}print('ready')\n" + UNTIL_TOLD)
    with job(script, "--replicas", "2") as running:
        ready = [r"replica-0/0\] ready", r"replica-1/0\] ready"]
        up = threading.Barrier(2, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
        for line in ready:
            running.when(line, lambda _: (up.wait(20), None)[1])
        assert running.run() == status
    assert running.count("SIGTERM: draining what runs") == 1
    assert f"2 {end}" in running.lines.all[-1]


def test_ctrl_c_drains_and_twice_kills(write: Any) -> None:
    script = write("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n" + UNTIL_TOLD)
    with job(script) as running:
        running.when(r"/0\] ready", lambda _: os.kill(os.getpid(), signal.SIGINT))
        running.when("once more kills", lambda _: os.kill(os.getpid(), signal.SIGINT))
        assert running.run() == 130
    assert running.count("^ftrun: killed") == 1
    assert "1 stopped" in running.lines.all[-1]


def test_a_drain_has_a_limit(write: Any) -> None:
    script = write("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n" + UNTIL_TOLD)
    with job(script, "--drain-timeout", "0.3") as running:
        running.when(r"/0\] ready", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        assert running.run() == 1
    assert running.count(r"did not drain within 0.3 s \(--drain-timeout\): killed") == 1


def test_a_signal_while_a_group_waits_for_its_next_start(write: Any) -> None:
    script = write("raise SystemExit(9)")
    with job(script, "--crash-loop", "9", "--max-restarts", "9") as running:
        running.when("starting again in", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        running.run()
    assert running.count(r"\[replica-0\] started") == 1


def test_resize_adds_and_drains_groups(write: Any, tmp_path: pathlib.Path) -> None:
    script = write("print('of', os.environ['FT_NUM_REPLICA_GROUPS'], flush=True)\n" + UNTIL_TOLD)
    answers: list[str] = []

    def order(wanted: int) -> Callable[[re.Match[str]], None]:
        return lambda _: answers.append(order_resize(wanted, "resizing"))

    with job(script, "--replicas", "1:3", "--run-id", "resizing") as running:
        running.when(r"replica-0/0\] of 1", order(3))
        running.when(r"replica-2/0\] of 3", order(4))
        running.when(r"replica-2/0\] of 3", order(2))
        running.when(r"replica-2\] drained", lambda _: (tmp_path / "end").touch())
        assert running.run() == 0
    assert sorted(answers)[-2:] == ["ok: 1 -> 3 groups", "ok: 3 -> 2 groups"]
    assert "resize 4 is out of range: this job runs 1 to 3 groups" in sorted(answers)[0]
    assert "2 finished, 1 drained" in running.lines.all[-1]


def test_a_script_that_fails_everywhere_is_reported_once(write: Any) -> None:
    script = write("import not_a_module_at_all")
    with job(script, "--replicas", "3") as running:
        assert running.run() == 1
    assert running.count("Traceback") == 1
    assert running.count("fails at its start in all 3 groups .ModuleNotFoundError: No module named") == 1
    assert running.count(r"the same error as \[replica-\d/0\]") >= 1


def test_a_setting_that_cannot_work_is_reported_once(write: Any) -> None:
    script = write("class ConfigError(Exception): ...\nraise ConfigError('LBFGS cannot be used')")
    with job(script, "--replicas", "1") as running:
        assert running.run() == 1
    assert running.count(r"\] started") == 1
    assert running.count("fails at its start .*ConfigError: LBFGS cannot be used") == 1


def test_what_ftrun_gives_to_workers_is_what_torchrun_gives(write: Any, tmp_path: pathlib.Path) -> None:
    """Cold or from a standby: the same environment, and torchrun's for what torchrun sets."""
    script = write(
        "import json, sys\n"
        "name = os.environ.get('FT_REPLICA_ID', 'torchrun') + os.environ.get('TORCHELASTIC_RESTART_COUNT', '')\n"
        "(folder / (name + '.json')).write_text(json.dumps([dict(os.environ), sys.argv, sys.path[0]]))\n"
        "print('written', flush=True)\n"
        "if 'FT_REPLICA_ID' in os.environ and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n" + _indent(UNTIL_TOLD)
    )
    (tmp_path / "torch.py").write_text("")  # the standby's import of torch costs nothing here

    written = threading.Event()

    def kill(_: re.Match[str]) -> None:
        assert written.wait(30)
        os.kill(pids(running, "replica-0")[0], signal.SIGKILL)

    with job(f"{script} --flag 1", "--standby", "1") as running:
        running.when("/0] written", lambda _: written.set())
        running.when("standby.* ready", kill)
        assert running.run() == 0
    assert running.count("started from a warm standby") == 1
    cold, warm = (json.loads((tmp_path / f"replica-0{i}.json").read_text()) for i in range(2))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script), "--flag", "1"]
    subprocess.run(command, check=True, timeout=50, cwd="/")
    plain = json.loads((tmp_path / "torchrun0.json").read_text())
    assert cold[1] == warm[1] == plain[1]
    assert cold[2] == warm[2] == plain[2]
    changing = {"TORCHELASTIC_RESTART_COUNT", "FT_GROUP_ATTEMPT", "FT_STARTED_AT", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    changing |= {"ROLE_NAME"}
    ours = {"TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE", "MASTER_ADDR", "LOGLEVEL", "PWD"}
    ours |= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "LINES", "COLUMNS"}
    assert {k: v for k, v in cold[0].items() if k not in changing} == {
        k: v for k, v in warm[0].items() if k not in changing
    }
    assert set(cold[0]) == set(warm[0])
    missing = {k: v for k, v in plain[0].items() if cold[0].get(k) != v}
    assert set(missing) <= changing | ours, missing
    assert not any(name.startswith("FTRUN_") for name in cold[0])


def test_a_keeper_that_is_killed_is_replaced(write: Any, tmp_path: pathlib.Path) -> None:
    script = write("print('up', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n" + UNTIL_TOLD)
    known: list[str] = []

    def look(_: re.Match[str]) -> None:
        """The second keeper knows the worker that the first one knew, and protects new ones."""
        command = pathlib.Path(f"/proc/{running.supervisor.keeper.process.pid}/cmdline").read_text()
        known.extend(pid for pid in command.split("\0") if pid == str(pids(running, "replica-1")[0]))
        (tmp_path / "end").touch()

    with job(script, "--replicas", "2") as running:
        running.when("replica-0/0] up 0", lambda _: os.kill(running.supervisor.keeper.process.pid, signal.SIGKILL))
        running.when("another one is started", lambda _: os.kill(pids(running, "replica-0")[0], signal.SIGKILL))
        running.when("replica-0/0] up 1", look)
        assert running.run() == 0
    assert len(known) == 1
    assert running.count(r"\[replica-1\] started") == 1, running.text


def test_a_keeper_that_is_killed_while_workers_start_costs_none_of_them(write: Any, tmp_path: pathlib.Path) -> None:
    """Their stubs are about to register, or have and wait for the answer."""
    script = write("print('up', flush=True)\n" + UNTIL_TOLD)
    up = threading.Barrier(3)

    def end(_: re.Match[str]) -> None:
        up.wait(20)
        (tmp_path / "end").touch()

    with job(script, "--replicas", "3") as running:
        running.when(r"\[replica-0\] started", lambda _: os.kill(running.supervisor.keeper.process.pid, signal.SIGKILL))
        for number in range(3):
            running.when(rf"replica-{number}/0\] up", end)
        assert running.run() == 0
    assert running.count("another one is started") == 1
    assert "3 finished" in running.lines.all[-1]
    assert "0 restarts" in running.lines.all[-1], running.text


@pytest.mark.usefixtures("forged_workers")
def test_a_group_of_two_that_uses_init_process_group_comes_back(write: Any) -> None:
    """Every start has a store of its own: addresses of the dead, left under the same keys, would be dialled."""
    script = write(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total); print('sum', int(total), flush=True); dist.barrier()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1': os._exit(9)\n"
        "dist.barrier()\n"
    )
    with job(script, "--nproc-per-replica", "2", "--timeout", "10") as running:
        assert running.run() == 0, running.text
    assert running.count(r"\] sum 2") == 4
    assert "1 restart" in running.lines.all[-1]


def test_nothing_is_left_open(write: Any) -> None:
    command = [sys.executable, "-m", "tests.launch.left_open", str(write("print('x')"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], []]


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
