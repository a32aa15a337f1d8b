"""Replicas with different numbers of batches: nobody hangs, all end equal, and nothing of anybody's data is skewed."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator
from ft_accelerate.debug import ft_debug_launcher
from ft_core.errors import ConfigError
from tests.launch.job import job

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
EPOCHS = 2
INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


class Script:
    """A loop with clipping, momentum and a schedule, as a user writes it."""

    def __init__(self, **plugin: Any) -> None:
        self.accelerator = FaultTolerantAccelerator(
            fault_tolerance_plugin=FaultTolerancePlugin(**plugin),
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
        torch.manual_seed(self.accelerator.replica_group)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.seen = 0
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def loop(self, batches: Iterable[Any]) -> None:
        for (x,) in batches:
            self.step(x)

    def step(self, x: torch.Tensor) -> None:
        self.accelerator.backward(self.model(x).square().mean())
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.seen += 1

    def tell(self, folder: Path) -> None:
        parts = [*self.model.parameters(), *(s["momentum_buffer"] for s in self.optimizer.state.values())]
        digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in parts)).hexdigest()[:12]
        accelerator, schedule = self.accelerator, self.scheduler.scheduler
        told = f"{digest} {accelerator.committed_steps} {schedule.get_last_lr()[0]:.9g} {schedule.last_epoch}"
        name = f"{accelerator.replica_group}-{accelerator.process_index}"
        (folder / name).write_text(f"{self.seen} {told}")


def told(folder: Path) -> tuple[dict[str, int], set[str]]:
    """Batches that each process has trained on, and what they hold in the end."""
    lines = {path.name: path.read_text().split(" ", 1) for path in sorted(folder.iterdir())}
    return {name: int(seen) for name, (seen, _) in lines.items()}, {rest for _, rest in lines.values()}


def reference(*counts: int) -> str:
    """One process that makes the same steps: the mean over those who have a batch, of the gradients."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for step in (step for _ in range(EPOCHS) for step in range(max(counts))):
        firsts = [sum(counts[:group]) for group in range(len(counts))]
        rows = [INPUTS[2 * (f + step) :][:2] for f, count in zip(firsts, counts, strict=True) if step < count]
        torch.stack([model(x).square().mean() for x in rows]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        for _ in counts:
            scheduler.step()
        optimizer.zero_grad()
    return " ".join(f"{number:.5f}" for number in model.weight.flatten().tolist())


def own_loaders(folder: Path, counts: tuple[int, ...]) -> None:
    script = Script()
    group = script.accelerator.replica_group
    first = sum(counts[:group])
    for _ in range(EPOCHS):
        with script.accelerator.join_uneven_inputs([script.model]):
            script.loop((INPUTS[2 * n : 2 * n + 2],) for n in range(first, first + counts[group]))
    script.accelerator.end_training()
    script.tell(folder)
    weight = script.accelerator.unwrap_model(script.model).weight
    (folder / f"weight-{group}").write_text("0 " + " ".join(f"{n:.5f}" for n in weight.flatten().tolist()))


@pytest.mark.forks
def test_own_loaders_in_the_context(tmp_path: Path) -> None:
    """One group has fewer batches, by far; and the committed steps are those of one process on all that is there."""
    ft_debug_launcher(own_loaders, (tmp_path, (3, 8)))
    weights = {(tmp_path / f"weight-{group}").read_text() for group in range(2)}
    for group in range(2):
        (tmp_path / f"weight-{group}").unlink()
    seen, ends = told(tmp_path)
    assert seen == {"0-0": 3 * EPOCHS, "1-0": 8 * EPOCHS}
    assert len(ends) == 1, ends
    assert f" {8 * EPOCHS} " in ends.pop()
    assert weights == {f"0 {reference(3, 8)}"}


def prepared(folder: Path, policy: str) -> None:
    """15 batches are divided into 8 and 7, in the middle of the job into one part for each group that is left."""
    script = Script(on_exhausted=policy)
    loader = script.accelerator.prepare(DataLoader(TensorDataset(INPUTS[:30]), 2))
    for _ in script.accelerator.epochs(EPOCHS):
        script.loop(loader)
    script.accelerator.end_training()
    script.tell(folder)


@pytest.mark.forks
@pytest.mark.parametrize(
    ("policy", "batches", "steps"),
    [
        ("shadow", {"0-0": 16, "1-0": 14}, {16}),
        # The attempt in which one says that it has run out is nobody's: group 0's eighth batch is not trained on.
        ("stop_all", {"0-0": 16, "1-0": 14}, {14}),
        ("leave", {"0-0": 8, "1-0": 7}, {7, 8}),
    ],
)
def test_prepared_loaders_and_the_policies(
    tmp_path: Path, policy: str, batches: dict[str, int], steps: set[int]
) -> None:
    ft_debug_launcher(prepared, (tmp_path, policy))
    seen, ends = told(tmp_path)
    assert seen == batches
    assert {int(end.split()[1]) for end in ends} == steps, ends
    assert len(ends) == len(steps), ends


def one_ends_the_training(folder: Path) -> None:
    script = Script(on_exhausted="shadow")
    accelerator = script.accelerator
    counts = (3, 40)
    rows = INPUTS[: 4 * counts[accelerator.replica_group]].repeat(2, 1)[: 4 * counts[accelerator.replica_group]]
    for (x,) in accelerator.prepare(DataLoader(TensorDataset(rows), 2)):
        script.step(x)
        if script.seen == 7:
            break
    accelerator.end_training()
    script.tell(folder)


@pytest.mark.forks
def test_the_training_ends_while_one_waits(tmp_path: Path) -> None:
    ft_debug_launcher(one_ends_the_training, (tmp_path,))
    seen, ends = told(tmp_path)
    assert seen == {"0-0": 3, "1-0": 7}
    assert {end.split()[1] for end in ends} == {"7"}
    assert len(ends) == 1, ends


def several_processes(folder: Path) -> None:
    script = Script()
    with (
        pytest.raises(ConfigError, match="2 processes per replica group around a data loader that was not prepared"),
        script.accelerator.join_uneven_inputs([script.model]),
    ):
        script.step(INPUTS[:2])
    (folder / f"{script.accelerator.replica_group}-{script.accelerator.process_index}").touch()


@pytest.mark.forks
def test_own_loaders_in_groups_of_several_processes_are_refused(tmp_path: Path) -> None:
    ft_debug_launcher(several_processes, (tmp_path,), groups=1, num_processes=2)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("forged_workers")
def test_deaths_in_groups_of_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who is out of data is killed, comes back into a loop that has nothing for it; then who has data is killed."""
    root = Path(__file__).resolve().parents[2]
    settings = {"COUNTS": "4,20", "PACE_S": "0.05", "END": str(tmp_path / "end"), "OMP_NUM_THREADS": "1"}
    for name, value in {**settings, "PYTHONPATH": str(root)}.items():
        monkeypatch.setenv(name, value)

    def kill(name: str) -> None:
        os.kill(next(g for g in running.supervisor._groups.values() if g.name == name).agent.pids()[1], signal.SIGKILL)

    script, options = root / "tests/accelerate/uneven_script.py", ("--timeout", "20", "--standby", "0")
    with job(script, "--replicas", "2", "--nproc-per-replica", "2", *options) as running:
        late = r"1/1\] on 1 \d+ ([6-9]|1\d) 2"
        # Whoever is killed next has to be one of two that hold the state. The first batch after a death is printed with
        # the members of before it, so it does not show that.
        back = [[rf"\[replica-{g}\] started", *[rf"replica-{g}/\d\] .*: healed to step"] * 2, late] for g in (0, 1)]
        story = [late, *back[0], late, *back[1]]
        running.when(late, lambda _: kill("replica-0"))
        running.when(late, lambda _: kill("replica-1"), after=story[:5])
        running.when(late, lambda _: (tmp_path / "end").touch(), after=story[:-1])
        assert running.run() == 0, running.text
    assert running.count("was ended by SIGKILL") == 2
    ends = re.findall(r"\] done (.*)", running.text)
    assert len(ends) == 4
    assert len(set(ends)) == 1, ends
