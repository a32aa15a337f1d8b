"""`FaultTolerantTrainer`: equal to Trainer with DDP; kill, freeze, veto, resume; careful without replica groups.

The jobs are real: ftrun in this process, workers that train a tiny random Llama. The reference is plain Trainer under
torchrun, on the same data.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from ft_accelerate import FaultTolerantTrainer, FaultTolerantTrainerMixin
from ft_accelerate._compat.trainer import METHODS, check
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError, NotAvailableError
from ft_core.launch.control_socket import order_resize
from tests.accelerate.processes import elastic, outputs, store
from tests.accelerate.trainer_job import FREEZE_AT, THAW_AT, Text, reported, tiny_model
from tests.launch.job import job
from tests.process_group.ranks import wait_until

if TYPE_CHECKING:
    from tests.forge import Forge

WAIT_S = 60.0
STEPS = 90
SCRIPT = Path(__file__).with_name("trainer_job.py")


def ends(folder: Path, which: str) -> list[dict[str, Any]]:
    """What the processes of a run ended with, in order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"end-{which}-*.json"))]


def plain(forge: Forge, folder: Path, processes: int, *words: str) -> list[dict[str, Any]]:
    """Plain Trainer on the same script; several processes as torchrun starts them."""
    held = store()
    environ = [elastic(rank, processes, held.port) if processes > 1 else {} for rank in range(processes)]
    outputs(forge, folder, SCRIPT, [([str(folder), "--plain", *words], env) for env in environ], WAIT_S)
    return ends(folder, "plain")


# ---------------------------------------------------------------- jobs


@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.usefixtures("forged_workers")
def test_two_groups_are_ddp_of_two_to_the_bit(forge: Forge, tmp_path: Path) -> None:
    """With accumulation (the last update of an epoch is shorter), clipping, a schedule and uneven token counts."""
    words = ["--ragged", "--accumulate", "3", "--samples", "70", "--save", "8", "--evaluate", "4"]
    one, two = tmp_path / "plain", tmp_path / "groups"
    for folder in (one, two):
        folder.mkdir()
    expected = plain(forge, one, 2, *words)[0]
    with job(f"{SCRIPT} {two} {' '.join(words)}", "--replicas", "2", "--max-restarts", "0") as run:
        assert run.run() == 0, run.text
    found = ends(two, "[01]")
    assert len(found) == 2
    for end in found:
        for key in ("digest", "step", "max", "steps", "rates", "epoch"):
            assert end[key] == expected[key], key
        assert [entry["loss"] for entry in end["log"]] == [entry["loss"] for entry in expected["log"]]
    assert [end["first"] for end in found] == [True, False]
    assert {end["best"] for end in found} == {str(two / "out" / "checkpoint-12")}
    assert sorted(os.listdir(two / "out")) == sorted(os.listdir(one / "out")) == ["checkpoint-12", "checkpoint-8"]
    assert sorted(os.listdir(two / "out/checkpoint-12")) == [
        name.replace("rng_state_0", "rng_state") for name in sorted(os.listdir(one / "out/checkpoint-12"))
        if name != "rng_state_1.pth"
    ]  # fmt: skip
    assert (two / "out/checkpoint-12/of_the_script/note").read_text() == "12"  # written before the folder was there


@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.usefixtures("forged_workers")
def test_kill_of_the_leader_freeze_and_vetoes_then_plain_trainer_resumes(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_LIVENESS_S", "1")
    words = f"--steps {STEPS} --accumulate 2 --samples 50 --save 30 --together --kill 0:20 --veto 5,8"
    with job(f"{SCRIPT} {tmp_path} {words}", "--replicas", "2", "--timeout", "20") as run:

        def freeze(match: re.Match[str]) -> None:
            """Of the group that lives, when the other one has been back for a while."""
            pid = int(match[1])
            assert wait_until(lambda: reported(tmp_path, "0") >= FREEZE_AT, WAIT_S)
            (tmp_path / "alone").touch()
            os.kill(pid, signal.SIGSTOP)
            try:
                (tmp_path / "frozen").touch()
                assert wait_until(lambda: reported(tmp_path, "0") >= THAW_AT, WAIT_S)
            finally:
                os.kill(pid, signal.SIGCONT)
                (tmp_path / "alone").unlink()

        run.when(r"\[replica-1\] started \(pid (\d+)\)", freeze)
        assert run.run() == 0, run.text
    assert run.count("was ended by SIGKILL") == 1
    assert run.count(r"\[replica-0\] started") == 2
    found = ends(tmp_path, "[01]")
    assert len(found) == 2
    assert found[0]["digest"] == found[1]["digest"]
    for end in found:
        assert end["step"] == end["max"] == STEPS
        steps, first = end["steps"], end["steps"][0]
        assert sorted(set(steps)) == steps  # none twice, none back
        assert steps[-1] == STEPS
        rates = {int(step): rate for step, rate in end["rates"].items() if int(step) >= max(first, 3)}
        for step, rate in rates.items():  # linear from 1e-2 after 2 steps of warm-up; logged one step behind
            assert rate == pytest.approx(1e-2 * (STEPS - step + 1) / (STEPS - 2), rel=1e-6), step
    assert found[1]["steps"][:30] == list(range(1, 31))
    assert len({json.dumps(end["log"]) for end in found}) == 1  # the newcomer has the whole story

    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-60", "checkpoint-90"]
    shutil.rmtree(tmp_path / "out/checkpoint-90")
    # The same global batch in one process: only the order of summation differs.
    words = f"--resume --steps {STEPS} --accumulate 4 --samples 50 --save 30"
    resumed = plain(forge, tmp_path, 1, *words.split())[0]
    assert resumed["steps"] == list(range(61, STEPS + 1))
    assert [entry["step"] for entry in resumed["log"]] == [entry["step"] for entry in found[0]["log"]]
    assert resumed["log"][:60] == found[0]["log"][:60]


@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.usefixtures("forged_workers")
def test_a_group_lost_in_an_evaluation_does_not_change_what_the_others_measure(tmp_path: Path) -> None:
    """It dies between the first and the second batch of an evaluation that both make."""
    words = "--steps 8 --accumulate 1 --ragged --evaluate 2 --kill-evaluating 1:4"
    options = ("--replicas", "2", "--timeout", "20", "--max-restarts", "0", "--success", "min")
    with job(f"{SCRIPT} {tmp_path} {words}", *options) as run:
        assert run.run() == 0, run.text
    assert len(set(re.findall(r"\(pid (\d+)\) was ended by SIGKILL", run.text))) == 1
    survivor = ends(tmp_path, "0")[0]
    assert len(survivor["evaluated"]) == 4
    for reported_loss, loss in survivor["evaluated"]:
        assert reported_loss == loss


@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.usefixtures("forged_workers")
def test_a_late_group_of_two_processes_joins_one_of_two(tmp_path: Path) -> None:
    words = "--steps 24 --accumulate 2 --samples 64 --save 8 --together --late 9"
    options = ("--replicas", "1:2", "--nproc-per-replica", "2", "--run-id", "late-trainer", "--timeout", "20")
    with job(f"{SCRIPT} {tmp_path} {words}", *options, "--max-restarts", "0", "--standby", "0") as run:

        def grow(_: re.Match[str]) -> None:
            order_resize(2, "late-trainer")

        run.when(r"0/0\] now", grow)
        assert run.run() == 0, run.text
    first, late = ends(tmp_path, "0"), ends(tmp_path, "1")
    assert len(first) == len(late) == 2
    assert len({end["digest"] for end in first + late}) == 1
    assert {end["step"] for end in first + late} == {24}
    assert first[0]["steps"] == list(range(1, 25))
    for end in late:  # from the step at which it came on, none twice
        assert 9 < end["steps"][0] < 24
        assert end["steps"] == list(range(end["steps"][0], 25))
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-16", "checkpoint-24"]


# ---------------------------------------------------------------- without replica groups


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip


def test_without_groups_it_is_trainer(tmp_path: Path) -> None:
    results = []
    for kind in (Trainer, FaultTolerantTrainer):
        torch.manual_seed(3)
        trainer = kind(tiny_model(), arguments(tmp_path), train_dataset=Text(16))
        assert trainer.train().global_step == 3
        assert type(trainer.callback_handler) is CallbackHandler
        results.append([value.clone() for value in trainer.model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_evaluation_first_and_training_twice_are_fault_tolerant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model is prepared three times."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=50)
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address().removeprefix("http://"))
    monkeypatch.setenv("FT_HOSTNAME", "127.0.0.1")
    try:
        trainer = FaultTolerantTrainer(tiny_model(), arguments(tmp_path), train_dataset=Text(16), eval_dataset=Text(4))
        trainer.evaluate()
        for _ in range(2):
            assert trainer.train().global_step == trainer.accelerator.committed_steps == 3
    finally:
        server.shutdown()


def test_several_gpus_without_a_launcher_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = arguments(tmp_path)
    settings._n_gpu = 4  # what Trainer looks at
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    with pytest.raises(ConfigError, match=r"sees 4 GPUs.*ft-accelerate launch --ft_replicas 4 train.py --lr 0\.1"):
        FaultTolerantTrainer(tiny_model(), settings, train_dataset=Text(16))


def test_running_out_at_different_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FT_LIGHTHOUSE": "127.0.0.1:1", "ACCELERATE_FT_ON_EXHAUSTED": "shadow"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"on_exhausted='shadow' with transformers' Trainer.*elastic_data=True"):
        FaultTolerantTrainer(tiny_model(), arguments(tmp_path), train_dataset=Text(16))


def test_an_unknown_training_loop_is_an_error_at_once() -> None:
    check(FaultTolerantTrainer)

    class Other:
        """Has nothing of Trainer."""

    with pytest.raises(NotAvailableError, match=re.escape(f"({', '.join(METHODS)} missing)")):
        check(Other)
    assert issubclass(FaultTolerantTrainer, FaultTolerantTrainerMixin)
