"""Replica groups that shard the model with FSDP2: plugin, config file, transformers' Trainer; kills, checkpoints.

Two groups of two processes on CPUs, started by ftrun or `ft-accelerate launch`. Digests are of each process's shards:
those of the processes of one rank must be equal in both groups.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

from ft_accelerate import (
    FaultTolerancePlugin,
    FaultTolerantAccelerator,
    FaultTolerantTrainer,
    _compat,
    fsdp,
)
from ft_accelerate.checkpoint_folders import MANAGER
from ft_accelerate.commands import launch, main
from ft_core.errors import ConfigError, NotAvailableError
from tests.accelerate.fsdp2_script import SAVE_EVERY, digest
from tests.accelerate.fsdp2_trainer import tiny_model
from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT, TRAINER = (ROOT / "tests/accelerate" / name for name in ("fsdp2_script.py", "fsdp2_trainer.py"))
GROUPS = ("--replicas", "2", "--nproc-per-replica", "2", "--standby", "0", "--timeout", "20")
CONFIG = """
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: bf16
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_state_dict_type: FULL_STATE_DICT
fault_tolerance_config:
  replicas: 2
  standby: 0
"""
process = [pytest.mark.process, pytest.mark.timeout(150), pytest.mark.usefixtures("forged_workers")]


def set_environment(patch: pytest.MonkeyPatch, **settings: str) -> None:
    for name, value in {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **settings}.items():
        patch.setenv(name, value)


def digests(text: str, word: str) -> dict[int, dict[str, set[str]]]:
    """Of each step, and each rank: what the groups printed; without the last step of a group that was killed.

    The others may have lost it before they saw that it was committed: then they make it again without that group.
    """
    found: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for life in lives(text):
        printed = re.findall(rf"\] {word} (\d+) \d (\d)(?: \d)? (\w{{12}})", life)
        last = max(int(step) for step, *_ in printed) if printed and "ended by SIGKILL" in life else -1
        for step, rank, value in printed:
            if int(step) != last:
                found[int(step)][rank].add(value)
    return found


def lives(text: str) -> list[str]:
    """The lines of each group, cut where it was started."""
    groups = [[line for line in text.splitlines() if f"[replica-{group}" in line] for group in (0, 1)]
    return [life for lines in groups for life in re.split(r"\n.*\] started.*", "\n" + "\n".join(lines))]


def check_alike(text: str, word: str) -> None:
    """After each step the shards of a rank are those of the same rank of the other group, and no other rank's."""
    for step, ranks in digests(text, word).items():
        assert all(len(values) == 1 for values in ranks.values()), (step, ranks)
        assert len(ranks) < 2 or ranks["0"] != ranks["1"], (step, ranks)


def ends(text: str) -> list[str]:
    """`GROUP RANK STEP DIGEST WHOLE`, sorted."""
    return sorted(re.findall(r"\] done (.*)", text))


def pid_of(running: Job, group: int, rank: int) -> int:
    return next(g for g in running.supervisor._groups.values() if g.name == f"replica-{group}").agent.pids()[rank]


def kill(running: Job, group: int, rank: int) -> None:
    os.kill(pid_of(running, group, rank), signal.SIGKILL)


class TestAccelerate:
    pytestmark = process

    def test_a_killed_process_comes_back_and_all_shards_stay_alike(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With accumulation, clipping and checkpoints; the killed one is of the group that writes these."""
        end = tmp_path / "end"
        set_environment(
            monkeypatch, ACCELERATE_USE_CPU="true", END_FILE=str(end), PACE_S="0.06", SAVE=str(tmp_path / "saved")
        )

        def finish(found: re.Match[str]) -> None:
            end.with_suffix(".tmp").write_text(str(int(found[1]) + 6))
            end.with_suffix(".tmp").rename(end)

        with job(SCRIPT, *GROUPS) as running:
            running.when(r"commit 5 0 1 2 ", lambda _: kill(running, 0, 1))
            running.when(r"0/1\] commit (\d+) 0 1 2 ", finish, after=["commit 5 0 1 2 ", r"\[replica-0\] started"])
            assert running.run() == 0, running.text
        assert running.count(r"\[replica-0\] started") == 2
        assert running.count(r"\[replica-1\] started") == 1
        check_alike(running.text, "commit")
        last, *others = [line.split()[2:] for line in ends(running.text)]
        assert len(others) == 3
        assert {steps for steps, *_ in others} == {last[0]}
        self.check_saved(tmp_path / "saved", int(last[0]), whole=last[-1])

    def check_saved(self, folder: pathlib.Path, steps: int, whole: str) -> None:
        names = [f"step_{step}" for step in range(SAVE_EVERY, steps + 1, SAVE_EVERY)]
        assert sorted(os.listdir(folder)) == sorted(["final", *names])
        for name in names:
            inside = set(os.listdir(folder / name))
            assert {"pytorch_model_fsdp_0", "optimizer_0", "random_states_0.pkl", "random_states_1.pkl"} <= inside
            assert len(list((folder / name / "optimizer_0").glob("*.distcp"))) == 2
            assert f"step_{json.loads((folder / name / MANAGER).read_text())['step']}" == name
        assert digest(dict(load_file(folder / "final/model.safetensors"))) == whole

    def test_two_groups_of_two_train_as_one_group_of_four(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same up to the order of sums: the data is divided among the processes of all groups."""
        set_environment(monkeypatch, ACCELERATE_USE_CPU="true", EFFICIENT="1", STEPS="4")
        models = []
        for groups in (1, 2):
            saved = tmp_path / str(groups)
            monkeypatch.setenv("SAVE", str(saved))
            with job(
                SCRIPT, "--replicas", str(groups), "--nproc-per-replica", str(4 // groups), *GROUPS[4:]
            ) as running:
                assert running.run() == 0, running.text
            models.append(load_file(saved / "final/model.safetensors"))
        torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)

    @pytest.mark.long
    def test_offloaded_and_of_a_parallelism_config(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On CPUs, so that scripts can be tried: the same bits as without."""
        set_environment(monkeypatch, ACCELERATE_USE_CPU="true", STEPS="3")
        found = []
        for settings in ({}, {"OFFLOAD": "1", "SHARD": "2"}):
            set_environment(monkeypatch, **settings)
            with job(SCRIPT, *GROUPS) as running:
                assert running.run() == 0, running.text
            found.append(ends(running.text))
            assert len(found[-1]) == 4
        assert found[0] == found[1]

    def test_fp16_where_one_process_overflows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All processes of all groups leave that step out, and halve the scale of the loss."""
        set_environment(
            monkeypatch, ACCELERATE_USE_CPU="true", STEPS="5", PRECISION="fp16", EFFICIENT="1", OVERFLOW="1"
        )
        with job(SCRIPT, *GROUPS) as running:
            assert running.run() == 0, running.text
        check_alike(running.text, "commit")
        assert len(ends(running.text)) == 4
        scales = [set(re.findall(rf"\] scale {step} \d \d (.*)", running.text)) for step in range(1, 6)]
        assert scales == [{"1024.0 False"}] * 2 + [{"512.0 True"}] + [{"512.0 False"}] * 2, running.text

    def test_config_file_and_resume(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """bf16; one process of each group reads the weights for the others; each group loads the leader's files."""
        config, saved = tmp_path / "config.yaml", tmp_path / "saved"
        config.write_text(CONFIG.format(version=2))
        order = ["launch", "--config_file", str(config), str(SCRIPT)]
        set_environment(monkeypatch, PLUGIN="0", EFFICIENT="1", STEPS="6", SAVE=str(saved))
        assert main(order) == 0, capfd.readouterr()
        first = capfd.readouterr().out
        set_environment(monkeypatch, STEPS="9", RESUME=str(saved / "step_4"), SAVE=str(tmp_path / "again"))
        assert main(order) == 0, capfd.readouterr()
        second = capfd.readouterr().out
        for text in (first, second):
            check_alike(text, "commit")
            assert len(ends(text)) == 4
        assert set(digests(first, "commit")) == set(range(1, 7))
        assert set(digests(second, "commit")) == set(range(5, 10))
        loaded = re.findall(r"\] loaded \d (\d) 4 (\w+)", second)
        assert len(loaded) == 4
        assert {(rank, value) for rank, value in loaded} == {
            (rank, value) for rank, values in digests(first, "commit")[4].items() for value in values
        }
        assert {"pytorch_model_fsdp.bin", "optimizer.bin"} <= set(os.listdir(saved / "step_4"))


class TestTrainer:
    pytestmark = process

    def test_a_killed_process_comes_back_and_a_checkpoint_is_resumed(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The model has tied embeddings; each group evaluates by itself."""
        set_environment(monkeypatch)
        with job(f"{TRAINER} {tmp_path} 9", *GROUPS) as running:
            running.when(r"step 4 1 1 2 ", lambda _: kill(running, 1, 1))
            assert running.run() == 0, running.text
        first = running.text
        assert running.count(r"\[replica-1\] started") == 2
        assert running.count(r"step \d+ 0 0 1 ")  # the other group went on alone
        assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-6", "checkpoint-9"]
        with job(f"{TRAINER} {tmp_path} 11 --resume", *GROUPS) as running:
            assert running.run() == 0, running.text
        assert digests(running.text, "begin")[9] == digests(first, "step")[9]
        assert set(digests(running.text, "step")) == {10, 11}
        for text in (first, running.text):
            check_alike(text, "step")
            assert len(ends(text)) == 4
            assert len({line.split()[2] for line in ends(text)}) == 1


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of an Accelerator that trains fault-tolerantly; Accelerate's own variables are forgotten afterwards."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "false")
    return {"cpu": True, "fault_tolerance_plugin": FaultTolerancePlugin(lighthouse="127.0.0.1:1")}


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            {"ACCELERATE_USE_FSDP": "true"},
            r"fsdp_version=1 cannot be used .* Use FSDP2: FullyShardedDataParallelPlugin",
        ),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"},
            r"ParallelismConfig\(dp_replicate_size=2\) cannot be used .* start 2 times as many groups",
        ),
    ],
)
def test_what_a_launcher_said_is_refused(
    environment: Mapping[str, str], text: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        FaultTolerantAccelerator(**settings)


def test_fsdp1_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match="fsdp_version=1 cannot be used with fault tolerance: FSDP1 flattens"):
        FaultTolerantAccelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1), **settings)


@pytest.mark.parametrize(
    ("sizes", "kind", "text"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, ConfigError, "replicas of the model are the replica groups"),
        ({"tp_size": 2, "dp_shard_size": 2}, NotAvailableError, r"ParallelismConfig\(tp_size=2\) cannot be used"),
        ({"cp_size": 2}, NotAvailableError, r"ParallelismConfig\(cp_size=2\) cannot be used with fault tolerance"),
    ],
)
def test_other_parallelism_is_refused(sizes: dict[str, int], kind: type[Exception], text: str, settings: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(kind, match=text):
        FaultTolerantAccelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**sizes), **settings)


def test_shards_without_fsdp_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"dp_shard_size=2\) without FSDP shards nothing: pass fsdp_plugin="):
        FaultTolerantAccelerator(parallelism_config=ParallelismConfig(dp_shard_size=2), **settings)


@pytest.mark.parametrize("processes", [1, 2])
def test_shards_over_other_processes_than_the_groups_are_refused(
    processes: int, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    plugin, sizes = FullyShardedDataParallelPlugin(fsdp_version=2), ParallelismConfig(dp_shard_size=4)
    with pytest.raises(ConfigError, match=rf"dp_shard_size=4\), but this replica group has {processes} process"):
        FaultTolerantAccelerator(fsdp_plugin=plugin, parallelism_config=sizes, **settings)


def test_a_group_of_one_process_shards_nothing(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = FaultTolerantAccelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), **settings)
    assert not accelerator.is_fsdp2
    assert "a replica group of one process: Accelerate shards nothing there" in caplog.text


def test_one_model_with_its_optimizer_as_accelerate_says(settings: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator: Any = FaultTolerantAccelerator(**settings)
    _compat.switch_fsdp_on(accelerator.state, plugin)
    models = [nn.Linear(2, 2) for _ in range(2)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)
    with pytest.raises(ValueError, match="Only one model is supported when using FSDP2"):
        accelerator.prepare(*models, optimizer)
    with pytest.raises(ValueError, match="a model and optimizer must be passed together"):
        accelerator.prepare(models[0])
    with pytest.raises(ValueError, match=r"should be done via `accelerate.prepare\(\)`"):
        accelerator.prepare_model(models[0])


def test_a_model_that_the_script_has_sharded_needs_the_plugin(settings: Any) -> None:
    accelerator = FaultTolerantAccelerator(**settings)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        with pytest.raises(
            ConfigError, match=r"prepare\(FSDPLinear\): the model is sharded already .* Pass fsdp_plugin="
        ):
            accelerator.prepare(fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))))
    finally:
        dist.destroy_process_group()


def test_the_launcher_refuses_fsdp1_and_replicas_inside(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(version=1))
    with pytest.raises(ConfigError, match="fsdp_version 1: fault tolerance works with FSDP2 only; write `fsdp_version"):
        launch.main(["--config_file", str(config), "train.py"])
    replicas = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    config.write_text(CONFIG.format(version=2) + replicas)
    with pytest.raises(ConfigError, match="parallelism_config_dp_replicate_size 2: replicas of the model are the"):
        launch.main(["--config_file", str(config), "train.py"])


def test_a_model_that_was_sharded_when_it_was_loaded_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_LIGHTHOUSE", "127.0.0.1:1")
    model: Any = tiny_model()
    model._is_distributed_loading_by_transformers = True
    with pytest.raises(NotAvailableError, match="load it without distributed_config, and shard it by TrainingArg"):
        FaultTolerantTrainer(
            model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no")
        )


def test_the_trainer_refuses_before_it_makes_an_accelerator_of_its_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_LIGHTHOUSE", "127.0.0.1:1")
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    arguments.parallelism_config = ParallelismConfig(dp_replicate_size=2)
    with pytest.raises(ConfigError, match=r"ParallelismConfig\(dp_replicate_size=2\) cannot be used"):
        FaultTolerantTrainer(tiny_model(), arguments)


def test_the_plugin_that_will_be_used(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fsdp.plugin_in_force({}) is None
    assert fsdp.plugin_in_force({"fsdp_plugin": "given"}) == "given"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert fsdp.plugin_in_force({}).fsdp_version == 2
