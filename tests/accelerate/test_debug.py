"""`ft_debug_launcher`: real processes, a real lighthouse; nothing is left, however it ends."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from accelerate.state import PartialState
from torch import distributed, nn
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator
from ft_accelerate.debug import LISTENS, ft_debug_launcher
from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from ft_core.errors import ConfigError, UsageError
from tests.accelerate import debug_job
from tests.descriptors import descriptors
from tests.process_group.ranks import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.forks]


def children() -> set[int]:
    """Of this process, the dead ones that were not reaped included."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # c10d keeps a pipe from its first store on
    before, files = children(), descriptors()
    yield
    assert children() - before == set()
    assert descriptors() - files == set()


def train(folder: Path, steps: int = 4) -> None:
    """A few committed steps with the bare Manager; differing seeds, so that equality shows agreement."""
    group, rank, world = os.environ["FT_REPLICA_GROUP"], os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    if world > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(int(group))
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(
        pg=ProcessGroupGloo(), state_dict=lambda: {"m": model.state_dict()},
        load_state_dict=lambda state: model.load_state_dict(state["m"]),
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        ddp(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    told = [manager.num_participants(), *model.weight.flatten().tolist()]
    (folder / f"{group}-{rank}").write_text(repr(told))


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_groups_train_together(tmp_path: Path, processes: int) -> None:
    def function(folder: Path, word: str) -> None:  # a closure: nothing is pickled
        assert (word, processes) == ("word", int(os.environ["WORLD_SIZE"]))
        train(folder)

    ft_debug_launcher(function, (tmp_path, "word"), groups=2, num_processes=processes)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(told) == {f"{group}-{rank}" for group in range(2) for rank in range(processes)}
    assert all(text.startswith("[2, ") for text in told.values())
    assert told["0-0"] == told["1-0"]


def accelerate_script(folder: Path) -> None:
    """What users debug: a script with our Accelerator, which finds everything in the environment."""
    accelerator = FaultTolerantAccelerator()
    torch.manual_seed(1)
    inputs = torch.randn(32, 4)
    torch.manual_seed(accelerator.replica_group)
    model: nn.Module = nn.Linear(4, 2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(inputs), 4)
    )
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    told = accelerator.committed_steps, accelerator.num_replica_groups, accelerator.device.type
    accelerator.end_training()
    weight = accelerator.unwrap_model(model).weight
    (folder / str(accelerator.replica_group)).write_text(repr((told, weight.tolist())))


def test_a_script_with_our_accelerator(tmp_path: Path) -> None:
    ft_debug_launcher(accelerate_script, (tmp_path,))
    first, second = ((tmp_path / group).read_text() for group in "01")
    assert first.startswith("((4, 2, 'cpu'), ")
    assert first == second


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """A process, for which one group is enough. Its address."""
    command = [sys.executable, "-m", "ft_core.lighthouse", "--bind", "127.0.0.1:0", "--min-replicas", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().partition(LISTENS)[2].strip()
        finally:
            process.kill()


def two_runs(folder: Path, address: str, ends: bool) -> None:
    """Group 0 leaves the first run after a step; the second one could begin with its model, as its name comes first."""
    del os.environ["FT_TOKEN"]
    accelerator = FaultTolerantAccelerator(
        fault_tolerance_plugin=FaultTolerancePlugin(lighthouse=address, min_replicas=1)
    )
    plugin, group = accelerator.fault_tolerance_plugin, accelerator.replica_group
    torch.manual_seed(group)
    plain, inputs, seen = nn.Linear(4, 2), torch.ones(3, 4), []
    plain.register_forward_pre_hook(lambda module, args: seen.append(module.weight.tolist()))

    def train(steps: int) -> None:
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for _ in range(steps):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    train(1 + 3 * group)
    trained = plain.weight.tolist()
    if ends and group == 1:
        accelerator.end_training()
    accelerator.free_memory()
    (folder / f"first-{group}").write_text(repr((len(seen), trained)))
    assert wait_until((folder / f"first-{1 - group}").exists, 30)
    assert plugin is not None
    plugin.min_replicas = 2
    seen.clear()
    train(2)
    (folder / f"second-{group}").write_text(repr((seen[0], accelerator.committed_steps, plain.weight.tolist())))
    accelerator.end_training()


@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_second_run_begins_with_the_model_that_was_trained_longer(tmp_path: Path, ends: bool) -> None:
    with lighthouse() as address:
        ft_debug_launcher(two_runs, (tmp_path, address, ends))
    steps, trained = ast.literal_eval((tmp_path / "first-1").read_text())
    assert steps == 4
    assert ast.literal_eval((tmp_path / "first-0").read_text())[1] != trained
    first, second = (ast.literal_eval((tmp_path / f"second-{group}").read_text()) for group in range(2))
    assert first == second
    assert first[:2] == (trained, 2)


def scaled(folder: Path) -> None:
    """Group 1 begins with another scale, which it may not keep; its gradients overflow in the third step."""
    accelerator = FaultTolerantAccelerator()
    group = accelerator.replica_group
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 - 5 * group), growth_interval=2)
    torch.manual_seed(group)
    model: nn.Module = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    told = []
    for step in range(6):
        loss = model(torch.ones(3, 4)).square().mean()
        accelerator.backward(loss * float("inf") if (group, step) == (1, 2) else loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()))
    weight = accelerator.unwrap_model(model).weight
    accelerator.end_training()
    (folder / str(group)).write_text(repr((told, weight.tolist())))


def test_a_scaler_is_taken_over_and_an_overflow_skips_the_step_everywhere(tmp_path: Path) -> None:
    ft_debug_launcher(scaled, (tmp_path,))
    first, second = (ast.literal_eval((tmp_path / group).read_text()) for group in "01")
    assert first == second
    skipped, scales = zip(*first[0], strict=True)
    assert skipped == (False, False, True, False, False, False)
    assert scales == (2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11, 2.0**11)


def test_an_accelerator_of_the_launching_program_would_be_inherited() -> None:
    PartialState(cpu=True)
    try:
        with pytest.raises(UsageError, match=r"has an Accelerator .* already"):
            ft_debug_launcher(train)
    finally:
        PartialState._reset_state()


def test_a_failure_ends_everything_and_brings_its_traceback(tmp_path: Path) -> None:
    def function() -> None:
        if os.environ["FT_REPLICA_GROUP"] == "1":
            raise ValueError("what went wrong")
        debug_job.wait_for_ever(str(tmp_path))

    started = time.monotonic()
    with pytest.raises(ProcessRaisedException, match=re.compile("Process 1 .*in function.*what went wrong", re.DOTALL)):
        ft_debug_launcher(function)
    assert time.monotonic() - started < 20


def test_a_killed_process_an_exit_status_and_a_good_one() -> None:
    def function(how: str) -> None:
        if os.environ["FT_REPLICA_GROUP"] == "0":
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.exit(0 if how == "good" else 7)

    with pytest.raises(ProcessExitedException, match="process 0 terminated with signal SIGKILL"):
        ft_debug_launcher(function, ("kill",))
    with pytest.raises(ProcessRaisedException, match="SystemExit: 7"):
        ft_debug_launcher(function, ("bad",))
    ft_debug_launcher(function, ("good",))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), pytest.param(signal.SIGINT, -2, marks=pytest.mark.long)]
)
def test_nothing_outlives_the_launcher(tmp_path: Path, number: int, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, debug_job.__file__, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.DEVNULL,
    ) as program:  # fmt: skip
        try:
            assert wait_until(lambda: len(os.listdir(tmp_path)) == 2, 30)
            pids = [int(name) for name in os.listdir(tmp_path)]
            program.send_signal(number)
            assert program.wait(20) == status
        finally:
            program.kill()
    assert wait_until(lambda: not any(alive(pid) for pid in pids), 20)


def alive(pid: int) -> bool:
    """Whether a process that is no child of ours runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("groups", "processes", "words"), [(0, 1, "groups=0 must be 1 to 1024"), (1, 0, "num_processes=0 must be 1 to")]
)
def test_out_of_range(groups: int, processes: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ft_debug_launcher(train, groups=groups, num_processes=processes)
