"""Fabric: a real job that loses a replica, steps that are vetoed, checkpoints, and what is refused."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError, UsageError
from ft_core.loop.runs import Runs
from ft_lightning.fabric.strategy import FabricFaultTolerance, strategy_class
from tests.launch.job import Job, job
from tests.lightning.fabric_job import build, loss_of, set_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*srun:UserWarning")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/lightning/fabric_job.py"


# ---------------------------------------------------------------- real jobs


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, forged_workers: None) -> Callable[[int], None]:
    """Lets all replicas train to a step and end there."""
    path = tmp_path / "steps"
    monkeypatch.setenv("STEPS_FILE", str(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def end(step: int) -> None:
        partial = path.with_suffix(".tmp")
        partial.write_text(str(step))
        partial.rename(path)

    return end


def digests(running: Job) -> list[str]:
    return re.findall(r"\] done (\d+ \w+)", running.text)


@pytest.mark.process
def test_a_killed_replica_comes_back_and_all_end_equal(
    end: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICES", "1")
    with job(PROGRAM, "--replicas", "3", "--max-restarts", "2") as running:
        running.when(r"replica-1/0\] commit \d+ 3 (\d+)", lambda found: os.kill(int(found[1]), signal.SIGKILL))
        running.when(
            r"replica-1/0\] commit (\d+) 3",
            lambda found: end(int(found[1]) + 60),
            after=[r"replica-1\] rank 0 .* SIGKILL"],
        )
        assert running.run() == 0, running.text
    assert running.count(r"replica-1\] started") == 2
    assert len(digests(running)) == 3
    assert len(set(digests(running))) == 1
    steps = [int(n) for n in re.findall(r"replica-0/0\] commit (\d+) ", running.text)]
    # The registered object counts commits only; on a busy machine replica-0 may come when others have made the first.
    assert steps == list(range(steps[0], steps[-1] + 1))


@pytest.mark.process
def test_groups_of_two_ranks_average_over_all_ranks_before_they_clip(
    end: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICES", "2")
    monkeypatch.setenv("FABRIC", "lightning_fabric")
    end(10)
    options = ("--replicas", "2", "--nproc-per-replica", "2", "--min-replicas", "2", "--max-restarts", "2")
    with job(PROGRAM, *options) as running:
        assert running.run() == 0, running.text
    assert len(digests(running)) == 4
    assert len(set(digests(running))) == 1
    assert running.count(r"\] veto ") == 0

    model: Any = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    for step in range(10):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, shard) for shard in (0, 1, 8, 9)]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    found = {float(text) for text in re.findall(r"\] done \d+ \w+ (\S+)", running.text)}
    assert len(found) == 1
    assert found.pop() == pytest.approx(model[0].weight.abs().sum().item(), abs=2e-3)


# ---------------------------------------------------------------- in this process


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a Fabric that is the only replica group of a job."""
    made: list[Any] = []
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # Lightning sets them: they are to be as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address())
    monkeypatch.setenv("FT_REPLICA_ID", "alone")

    def fabric(**kwargs: Any) -> Any:
        made.append(Fabric(strategy="fault_tolerant", accelerator="cpu", devices=1, **kwargs))
        made[-1].launch()
        return made[-1]

    try:
        yield fabric
    finally:
        for one in made:
            one.strategy.finish()
        server.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def veto(fabric: Any) -> None:
    """The next vote fails."""
    fabric.strategy.manager.report_error(RuntimeError("for the test"))


def snapshot(*objects: Any) -> list[torch.Tensor]:
    states = [obj.state_dict() for obj in objects]
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(states) if isinstance(leaf, torch.Tensor)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_veto_changes_nothing_and_is_visible(alone: Callable[..., Any]) -> None:
    fabric = alone()
    model = nn.Linear(2, 2)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for clip in (False, True):
        for vetoed in (False, True, False):
            before = snapshot(model, optimizer)
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(1, 2)).sum())
            if vetoed:
                veto(fabric)
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                fabric.clip_gradients(model, optimizer, clip_val=0.05)
            optimizer.step()
            assert fabric.strategy.step_vetoed == vetoed
            assert same(before, snapshot(model, optimizer)) == vetoed
    assert fabric.strategy.manager.current_step() == 4


def test_a_veto_with_a_closure(alone: Callable[..., Any]) -> None:
    fabric = alone()
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for vetoed in (False, True):

        def closure(vetoed: bool = vetoed) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(1, 2)).sum()
            fabric.backward(loss)
            if vetoed:
                veto(fabric)
            return loss

        before = snapshot(model)
        assert (optimizer.step(closure) is None) == vetoed
        assert same(before, snapshot(model)) == vetoed


def test_a_veto_leaves_the_gradient_scaler_alone(alone: Callable[..., Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    fabric = alone(plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scales = []
    for vetoed in (True, False, True, False):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(1, 2)).sum())
        if vetoed:
            scaler.unscale_(optimizer.optimizer)  # as a loop does that looks at its gradients
            veto(fabric)
        optimizer.step()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0, 8.0, 16.0]


def test_accumulation_is_one_step(alone: Callable[..., Any]) -> None:
    fabric = alone()
    module = nn.Linear(2, 1, bias=False)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    before = module.weight.detach().clone()
    for last in (False, False, True):
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert torch.allclose(before - module.weight, torch.full((1, 2), 3.0))
    assert fabric.strategy.manager.current_step() == 1


def test_several_optimizers_that_step_together_vote_once(alone: Callable[..., Any]) -> None:
    fabric = alone()
    module = nn.Linear(2, 1)
    first, second = (torch.optim.SGD([p], lr=1.0) for p in module.parameters())
    model, first, second = fabric.setup(module, first, second)
    for vetoed in (False, True):
        before = snapshot(model)
        fabric.backward(model(torch.ones(1, 2)).sum())
        if vetoed:
            veto(fabric)
        first.step()
        second.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, snapshot(model), strict=True)]
        assert changed == [not vetoed] * 2
    assert fabric.strategy.manager.current_step() == 1


def test_optimizers_in_turns_are_refused(alone: Callable[..., Any]) -> None:
    fabric = alone()
    module = nn.Linear(2, 1)
    first, second = (torch.optim.SGD([p], lr=1.0) for p in module.parameters())
    model, first, second = fabric.setup(module, first, second)
    fabric.backward(model(torch.ones(1, 2)).sum())
    first.step()
    fabric.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigError, match="in turns"):
        second.step()


def test_evaluation_opens_no_step(alone: Callable[..., Any]) -> None:
    fabric = alone()
    module = nn.Linear(2, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    with torch.no_grad():
        model(torch.ones(1, 2))
    with pytest.raises(UsageError, match=r"call the model that fabric\.setup"):
        optimizer.step()
    assert fabric.strategy.manager.hooks.current_attempt() is None
    assert "group 0 of 1" in repr(fabric.strategy)


def test_checkpoints_hold_the_managers_step(alone: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    fabric = alone()
    module = nn.Linear(2, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    assert fabric.strategy.is_leader
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert fabric.strategy.is_leader
    fabric.save(tmp_path / "c.ckpt", {"model": model, "optimizer": optimizer, "manager": fabric.strategy.manager})
    fabric.strategy.finish()
    saved = torch.load(tmp_path / "c.ckpt")
    assert saved["manager"]["step"] == 1


def test_who_comes_when_all_is_done_ends_in_peace(alone: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a traceback, and with status 0: whoever started it is not to start it again."""
    one, late = alone(), alone()
    for fabric in (one, late):
        module = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        if fabric is late:
            with pytest.raises(SystemExit) as ended:
                fabric.setup(module, optimizer)
            assert ended.value.code == 0
        else:
            fabric.setup(module, optimizer)
            fabric.strategy.open_step()
            fabric.strategy.finish()
            monkeypatch.setattr("ft_core.loop.run.RUNS", Runs())  # as another process


def test_registering(alone: Callable[..., Any]) -> None:
    strategy: FabricFaultTolerance = alone().strategy
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    strategy.register("scheduler", torch.optim.lr_scheduler.ConstantLR(optimizer))
    with pytest.raises(ConfigError, match="taken by a ConstantLR"):
        strategy.register("scheduler", nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="object has no state_dict"):
        strategy.register("other", object())
    with pytest.raises(ConfigError, match="LBFGS"):
        strategy.setup_optimizer(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))
    with pytest.raises(UsageError, match=r"before fabric\.setup"):
        strategy.open_step()
    strategy.setup_module(nn.Linear(1, 1))
    strategy.open_step()
    with pytest.raises(UsageError, match="after the first step"):
        strategy.register("late", nn.Linear(1, 1))


def test_state_goes_around(alone: Callable[..., Any]) -> None:
    """What one replica hands out, another one takes: both functions that the Manager is given."""
    fabric = alone()
    torch.manual_seed(3)
    module = nn.Linear(2, 1)
    optimizer: Any = torch.optim.AdamW(module.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = set_up(fabric, module, optimizer, scheduler)
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    scheduler.step()
    state = fabric.strategy._state()

    other: Any = strategy_class()(accelerator=fabric.accelerator)
    twin = nn.Linear(2, 1)
    adam = torch.optim.AdamW(twin.parameters())
    other._modules, other._optimizers = [type("Wrapped", (), {"module": twin})], [adam]
    other.register("lr_scheduler_0", torch.optim.lr_scheduler.StepLR(adam, 1))
    other._run = fabric.strategy._run
    other._load(state)
    assert same(snapshot(module), snapshot(twin))
    assert other._state()["registered"] == state["registered"]
    other._run = None
    with pytest.raises(ConfigError, match=r"registered here: \['lr_scheduler_0'\]; on the others: \[\]"):
        other._load({**state, "registered": {}})
