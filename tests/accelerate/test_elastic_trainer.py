"""Elastic data under FaultTolerantTrainer: one group alone, of two that are configured, and a job with a kill."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn import functional as F
from transformers import TrainerCallback, TrainingArguments

from ft_accelerate import FaultTolerantTrainer
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError
from ft_core.loop.runs import Runs
from tests.accelerate.trainer_job import Text, tiny_model
from tests.launch.job import job

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, BATCH, ACCUMULATE, GROUPS, EPOCHS = 31, 2, 3, 2, 2
GLOBAL = BATCH * ACCUMULATE * GROUPS
UPDATES = math.ceil(SAMPLES / GLOBAL)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One group, that has the batch of two."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=50)
    settings = {
        "FT_LIGHTHOUSE": server.address().removeprefix("http://"), "FT_HOSTNAME": "127.0.0.1", "FT_REPLICA_GROUP": "0",
        "FT_NUM_REPLICA_GROUPS": "1", "ACCELERATE_USE_CPU": "true", "ACCELERATE_FT_ELASTIC_DATA": "1",
        "ACCELERATE_FT_GLOBAL_BATCH_SIZE": str(GLOBAL),
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ft_core.loop.run.RUNS", Runs())
    yield
    server.shutdown()
    AcceleratorState._reset_state(reset_partial_state=True)


class Numbered(Text):
    """Each sample says which one it is."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "position_ids": torch.arange(12), "number": torch.tensor(index)}


class Recording(FaultTolerantTrainer):
    """Notes what each committed step was made of."""

    def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
        self.held += inputs.pop("number").tolist()
        self.micro_batches += 1
        return super().training_step(model, inputs, *more)


class Watch(TrainerCallback):
    """Vetoes some attempts, and knows which steps were committed."""

    def __init__(self, *vetoes: int) -> None:
        self.vetoes, self.attempts = vetoes, 0
        self.trainer: Any = None
        self.steps: list[list[int]] = []
        self.sizes: list[int] = []
        self.epochs: list[float] = []
        self.ended: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attempts += 1
        if self.attempts in self.vetoes:
            self.trainer.accelerator.manager.report_error(RuntimeError("a step that fails, for the test"))
            self.trainer.held, self.trainer.micro_batches = [], 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(self.trainer.held)
        self.sizes.append(self.trainer.micro_batches)
        self.epochs.append(state.epoch)
        self.trainer.held, self.trainer.micro_batches = [], 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended.append(state.global_step)


def trained(folder: Path, watch: Watch, *, resume: str | None = None, batch: int = BATCH, **options: Any) -> Any:
    torch.manual_seed(3)
    arguments = TrainingArguments(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=batch, gradient_accumulation_steps=ACCUMULATE,
        use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, logging_steps=1, learning_rate=0.5,
        lr_scheduler_type="linear", optim="sgd", max_grad_norm=0.5, remove_unused_columns=False,
        **{"save_strategy": "no", **options},
    )  # fmt: skip
    trainer = Recording(tiny_model(), arguments, train_dataset=Numbered(SAMPLES, ragged=True), callbacks=[watch])
    trainer.held, trainer.micro_batches, watch.trainer = [], 0, trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def alone_on(steps: list[list[int]]) -> torch.Tensor:
    """What one process makes of these batches: means over tokens, clipping, the schedule."""
    torch.manual_seed(3)
    model, text = tiny_model().train(), Text(SAMPLES, ragged=True)
    rate, total = 0.5, UPDATES * EPOCHS
    for number, step in enumerate(steps):
        samples = [text[index] for index in step]
        ids = torch.stack([s["input_ids"] for s in samples])
        labels = torch.stack([s["labels"] for s in samples])
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * (1 - number / total) * parameter.grad
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.usefixtures("alone")
def test_one_group_of_two_makes_the_same_steps(tmp_path: Path) -> None:
    """Twice as many micro-batches per step, also with vetoes (the last step of an epoch, too) and ragged tokens."""
    watch = Watch(2, 4, 5)
    trainer = trained(tmp_path, watch)
    assert trainer.state.global_step == trainer.state.max_steps == UPDATES * EPOCHS
    assert [len(step) for step in watch.steps] == [12, 12, 7] * EPOCHS
    assert watch.sizes == [6, 6, 4] * EPOCHS
    for epoch in range(EPOCHS):
        of_epoch = itertools.chain.from_iterable(watch.steps[epoch * UPDATES : (epoch + 1) * UPDATES])
        assert sorted(of_epoch) == list(range(SAMPLES))
    assert watch.epochs == pytest.approx([12 / 31, 24 / 31, 1, 1 + 12 / 31, 1 + 24 / 31, 2])
    assert watch.ended == [3, 6]
    assert trainer.args.gradient_accumulation_steps == ACCUMULATE
    found = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    torch.testing.assert_close(found, alone_on(watch.steps), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plain", [False, True])
def test_resume_in_the_middle_of_an_epoch(tmp_path: Path, plain: bool) -> None:
    """The rest of the epoch: from our file, or from a checkpoint of a plain Trainer by its number of steps."""
    first = Watch()
    whole = trained(tmp_path, first, save_strategy="steps", save_steps=4)
    folder = tmp_path / "checkpoint-4"
    assert (folder / "ft_data.json").exists()
    arguments = torch.load(folder / "training_args.bin", weights_only=False)
    assert arguments.gradient_accumulation_steps == ACCUMULATE
    if plain:
        (folder / "ft_data.json").unlink()
    AcceleratorState._reset_state(reset_partial_state=True)
    second = Watch()
    resumed = trained(tmp_path, second, resume=str(folder))
    assert second.steps == first.steps[4:]
    assert resumed.state.global_step == UPDATES * EPOCHS
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.usefixtures("alone")
def test_an_own_loader_that_is_not_prepared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer itself takes it; here nobody would divide it, or know which batch is next."""
    own = torch.utils.data.DataLoader(Text(SAMPLES), 4)
    monkeypatch.setattr(Recording, "get_train_dataloader", lambda _: own)
    with pytest.raises(ConfigError, match=r"get_train_dataloader.. returned a DataLoader .*accelerator.prepare"):
        trained(tmp_path, Watch())


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_a_killed_group_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FT_ELASTIC_DATA", "1")
    words = "--accumulate 2 --samples 67 --epochs 4 --ragged --together --kill 0:12 --veto 3,5"
    script = Path(__file__).with_name("trainer_job.py")
    with job(f"{script} {tmp_path} {words}", "--replicas", "2", "--timeout", "20") as run:
        assert run.run() == 0, run.text
    assert run.count("was ended by SIGKILL") == 1
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("end-*.json"))]
    assert len(ends) == 2, run.text
    assert len({end["digest"] for end in ends}) == 1
    assert len({json.dumps(end["log"]) for end in ends}) == 1
    steps = 4 * math.ceil(67 / 8)
    for end in ends:
        assert end["step"] == end["max"] == steps
        assert end["epoch"] == 4
        assert end["steps"] == list(range(end["steps"][0], steps + 1))
    assert ends[1]["steps"][0] == 1


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_two_groups_of_two_processes_are_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps, as means over tokens, also where processes have shares of several lengths, or none."""
    monkeypatch.setenv("ACCELERATE_FT_ELASTIC_DATA", "1")
    monkeypatch.setenv("ACCELERATE_FT_GLOBAL_BATCH_SIZE", "18")
    script, found = Path(__file__).with_name("trainer_job.py"), []
    for name, size in (("one", ["1"]), ("four", ["2", "--nproc-per-replica", "2"])):
        (tmp_path / name).mkdir()
        with job(f"{script} {tmp_path / name} --samples 57 --epochs 2 --ragged", "--replicas", *size) as run:
            assert run.run() == 0, run.text
        found.append([json.loads(path.read_text()) for path in sorted((tmp_path / name).glob("end-*.json"))])
    (one,), four = found
    assert len(four) == 4
    assert len({end["digest"] for end in four}) == 1
    assert one["steps"] == four[0]["steps"] == list(range(1, 9))
    assert four[0]["weights"] == pytest.approx(one["weights"], rel=1e-3, abs=1e-5)
