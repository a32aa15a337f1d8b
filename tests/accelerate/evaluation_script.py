"""A script that evaluates shared data, for tests: a loop of its own, or with `trainer` as its argument transformers'.

After each epoch (two steps with Trainer) each group prints a line `evaluated {...}`: group, number, how many bodies it
ran, the samples that it was given results of, in order, and a digest of these; and `alone`, that of the same without
sharing. KILL=GROUP:NUMBER:BODY:PLACE: that group sends itself SIGNAL once, before that result of that body.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ft_accelerate import FaultTolerantAccelerator as Accelerator
from ft_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = int(os.environ.get("FT_REPLICA_GROUP", "0"))
FOLDER = pathlib.Path(os.environ.get("FOLDER", "."))
KILL = [int(number) for number in os.environ.get("KILL", "-1:0:0:0").split(":")]
SIGNAL = os.environ.get("SIGNAL", "SIGKILL")
WORKERS = int(os.environ.get("WORKERS", "0"))
SHUFFLE = os.environ.get("SHUFFLE", "")
"""Of evaluation data: "same" in all groups, or in each "another" way."""
OTHERWISE = os.environ.get("OTHERWISE") == "1"
"""Before the last evaluation the data is read in ways of which nothing is shared."""
SAMPLES, BATCH, EPOCHS, STEPS_BETWEEN = 50, 4, 3, 2


def maybe_die(*place: int) -> None:
    """As KILL says: number of the evaluation, body, result."""
    marker = FOLDER / "killed"
    if [GROUP, *place] == KILL and not marker.exists():
        marker.touch()
        print("goes", os.getpid(), flush=True)
        os.kill(os.getpid(), getattr(signal, SIGNAL))


def digest(*arrays: Any) -> str:
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(torch.as_tensor(array).contiguous().numpy().tobytes())
    return hashed.hexdigest()[:12]


def report(number: int, bodies: int, ids: list[int], shared: str, alone: str) -> None:
    said = {"group": GROUP, "number": number, "bodies": bodies, "ids": ids, "digest": shared, "alone": alone}
    print("evaluated", json.dumps(said), flush=True)


# ---------------------------------------------------------------- a loop of its own


def evaluate(accelerator: Any, model: Any, loader: Any, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The loop as Accelerate's documentation has it."""
    ids, losses, bodies = [], [], 0
    model.eval()
    with torch.no_grad():
        for batch_ids, x in loader:
            loss = (model(x) - x.sum(1, keepdim=True)).square().squeeze(1)
            maybe_die(number, bodies, 0)
            ids.append(accelerator.gather_for_metrics(batch_ids))
            maybe_die(number, bodies, 1)
            losses.append(accelerator.gather_for_metrics(loss))
            bodies += 1
            assert bodies <= len(loader)
    assert bodies == 0 or accelerator.gradient_state.end_of_dataloader is False  # the loop is over
    return bodies, torch.cat(ids), torch.cat(losses)


def own_loop() -> None:
    set_seed(7)
    numbers = torch.arange(SAMPLES)
    data = TensorDataset(numbers, torch.stack([numbers % 7, numbers % 11, numbers % 13], 1) / 10)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    accelerator: Any = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True} if WORKERS else {}
    model, optimizer, training = accelerator.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
    torch.manual_seed(100 + GROUP if SHUFFLE == "another" else 100)
    rest = accelerator.prepare(DataLoader(data, BATCH, shuffle=SHUFFLE != "", **options))
    for epoch in accelerator.epochs(int(os.environ.get("EPOCHS", EPOCHS))):
        model.train()
        for _, x in training:
            accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if OTHERWISE and epoch == EPOCHS - 1:
            read_otherwise(accelerator, model, rest)
        bodies, ids, losses = evaluate(accelerator, model, rest, epoch)
        plain = list(iter_plain(model, data))
        report(epoch, bodies, ids.tolist(), digest(ids.sort()[0], losses[ids.argsort()]), digest(numbers, *plain))
    print("done", digest(*model.state_dict().values()), flush=True)
    accelerator.end_training()


def read_otherwise(accelerator: Any, model: Any, loader: Any) -> None:
    """One batch; all without gathering; the results of every other batch; two loops at once."""
    model.eval()
    with torch.no_grad():
        first = next(iter(loader))[0]
        assert first.tolist() == list(range(GROUP * BATCH, GROUP * BATCH + BATCH)), first
        assert len([None for _ in loader]) < len(loader)
        some = [accelerator.gather_for_metrics(ids) for number, (ids, _) in enumerate(loader) if number % 2]
        print("some", torch.cat(some).tolist(), flush=True)
        try:
            list(zip(loader, loader, strict=True))
        except UsageError as error:
            print("refused", error, flush=True)


def iter_plain(model: Any, data: Any) -> Iterator[torch.Tensor]:
    """The same without Accelerate, by this group alone."""
    with torch.no_grad():
        yield torch.cat([(model(x) - x.sum(1, keepdim=True)).square().squeeze(1) for _, x in DataLoader(data, BATCH)])


# ---------------------------------------------------------------- transformers


def with_trainer() -> None:
    from transformers import TrainerCallback, TrainingArguments

    from ft_accelerate import FaultTolerantTrainer
    from tests.accelerate.trainer_job import Text, tiny_model

    class Evaluates(TrainerCallback):
        """Predicts every two steps: shared, then alone."""

        trainer: Any = None
        number = bodies = 0
        quiet = False

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.quiet:
                maybe_die(self.number, self.bodies, 0)
                self.bodies += 1

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % STEPS_BETWEEN:
                return
            self.number, self.bodies, trainer = state.global_step // STEPS_BETWEEN, 0, self.trainer
            shared = trainer.predict(Text(SAMPLES - 23, ragged=True))
            run, self.quiet = trainer.accelerator._run, True
            sharing, run.sharing = run.sharing, None
            alone = trainer.predict(Text(SAMPLES - 23, ragged=True))
            run.sharing, self.quiet = sharing, False
            found = [
                digest(p.predictions, p.label_ids, p.metrics["test_loss"], p.metrics["test_sum"])
                for p in (shared, alone)
            ]
            report(self.number, self.bodies, shared.predictions[:, 0, 0].tolist(), *found)

    torch.manual_seed(5)
    callback = Evaluates()
    trainer = FaultTolerantTrainer(
        tiny_model(),
        TrainingArguments(
            output_dir=str(FOLDER / f"out-{GROUP}"), max_steps=EPOCHS * STEPS_BETWEEN, per_device_train_batch_size=2,
            per_device_eval_batch_size=2, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True, seed=5,
            dataloader_pin_memory=False,
        ),
        train_dataset=Text(64), callbacks=[callback],
        compute_metrics=lambda p: {"sum": float(p.predictions.sum()), "samples": len(p.predictions)},
    )  # fmt: skip
    callback.trainer = trainer
    trainer.train()
    print("done", digest(*trainer.model.state_dict().values()), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    torch.set_num_threads(1)
    with_trainer() if "trainer" in sys.argv else own_loop()
