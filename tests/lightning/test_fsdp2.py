"""`strategy="fault_tolerant_fsdp2"` with ftrun and real processes: two groups of two ranks that shard the model.

One run loses a rank of the leading group to `kill -9` in the middle of an epoch, and ends with equal shards. Another
one saves, resumes and compares with one process that trains on all samples.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from tests.launch.job import Job, job
from tests.lightning import fsdp2_job
from tests.lightning import fsdp2_kinds_job as kinds
from tests.lightning.fsdp2_job import ACCUMULATE, BATCH, CLIP, SAVED_AT, STEPS, loss_of, net, optimizer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = [pytest.mark.process, pytest.mark.timeout(150), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/lightning/fsdp2_job.py"
GROUPS = RANKS = 2
STEPS_LEFT = 8
"""After a killed group is back; enough for all to read of it before."""
OPTIONS = ("--replicas", str(GROUPS), "--nproc-per-replica", str(RANKS), "--timeout", "20")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for name, value in {"FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)


def pid_of(running: Job, name: str, rank: int) -> int:
    return next(g for g in running.supervisor._groups.values() if g.name == name).agent.pids()[rank]


def shards(running: Job, what: str) -> list[tuple[str, str]]:
    """How the ranks of one run ended, for each rank: digest of its shards, steps and epoch. Equal in all groups."""
    found = re.findall(rf"\] done {what} (\d) (\d) (.*)", running.text)
    assert sorted(line[:2] for line in found) == [(str(g), str(r)) for g in range(GROUPS) for r in range(RANKS)]
    ends = sorted({line[1:] for line in found})
    assert len(ends) == RANKS, running.text
    return ends


def test_a_rank_of_the_leading_group_is_killed_in_the_middle_of_an_epoch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("WAY", "kill")

    def kill(_: re.Match[str]) -> None:
        os.kill(pid_of(running, "replica-0", rank=1), signal.SIGKILL)
        running.when(r"replica-0/0\] on 0 0 \d+ 2 (\d+)", end, after=[r"\[replica-0\] started"])

    def end(on: re.Match[str]) -> None:
        (tmp_path / "end.tmp").write_text(str(int(on[1]) + STEPS_LEFT))
        (tmp_path / "end.tmp").rename(tmp_path / "end")

    with job(SCRIPT, *OPTIONS) as running:
        running.when(r"replica-0/0\] on 0 0 9 2", kill)
        assert running.run() == 0, running.text
    shards(running, "kill")
    assert running.count(r"\] veto ") <= 2 * RANKS, running.text
    taken = re.findall(r"replica-0/(\d)\] took over the run in (epoch 0 before batch (\d+)) ", running.text)
    assert sorted(rank for rank, *_ in taken) == ["0", "1"], running.text
    assert len({place for _, place, _ in taken}) == 1
    assert int(taken[0][2]) > 9
    assert int(taken[0][2]) % ACCUMULATE == 0
    saved = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("end"))
    assert len(saved) == 2, saved  # the newest and last.ckpt: complete, and nothing beside them
    assert saved[0] == "last.ckpt"
    for name in saved:
        assert len(list((tmp_path / name).iterdir())) == RANKS + 2  # shards, their index, and Lightning's part


def batches(readers: int, count: int) -> Iterator[Tensor]:
    """What all readers of a run train on: batch after batch, each of them one tensor."""
    data = fsdp2_job.samples()
    samplers: list[DistributedSampler[Any]] = [DistributedSampler(data, readers, number) for number in range(readers)]
    per_epoch = len(samplers[0]) // BATCH
    for batch in range(count):
        for sampler in samplers:
            sampler.set_epoch(batch // per_epoch)
        first = batch % per_epoch * BATCH
        numbers = [number for sampler in samplers for number in list(sampler)[first : first + BATCH]]
        yield data[numbers][1]


def trained_alone(model: nn.Module, readers: int, steps: int) -> nn.Module:
    """One process, in whose batches are those of all readers."""
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    for number, x in enumerate(batches(readers, steps * ACCUMULATE)):
        (loss_of(model, x) / ACCUMULATE).backward()
        if (number + 1) % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model


def manual_alone() -> nn.Module:
    """Likewise, with two optimizers."""
    both = nn.ModuleDict({"maker": kinds.even(), "critic": kinds.critic()})
    of_maker, of_critic = optimizer_of(both["maker"]), optimizer_of(both["critic"])
    for x in batches(GROUPS * RANKS, kinds.STEPS // 2 + 1):
        made = both["maker"](x)
        of_critic.zero_grad()
        kinds.judged(both["critic"], made.detach(), x).backward()
        of_critic.step()
        of_maker.zero_grad()
        kinds.fooled(both["critic"], made, x).backward()
        of_maker.step()
    return both


def check_close(path: pathlib.Path, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """A checkpoint that is one file has these weights. Returns it."""
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    whole = {name.removeprefix("net."): value for name, value in saved["state_dict"].items()}
    assert list(whole) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)
    return saved


def test_saved_resumed_and_compared_with_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """As folders and as files, from the middle of an epoch."""
    monkeypatch.setenv("WAY", "resume")
    with job(SCRIPT, *OPTIONS) as running:
        assert running.run() == 0, running.text
    ways = [shards(running, what) for what in ("folder", "folder-resumed", "file", "file-resumed")]
    assert all(way == ways[0] for way in ways), ways
    assert ways[0][0][1].endswith(f" {STEPS} 2"), ways
    assert running.count(r"\] validated \d \d ") == GROUPS * RANKS
    assert len(set(re.findall(r"\] validated \d \d (.*)", running.text))) == 1
    torch.manual_seed(1)
    expected = trained_alone(net(), GROUPS * RANKS, STEPS).state_dict()
    saved = check_close(tmp_path / "end.ckpt", expected)
    assert saved["global_step"] == STEPS
    assert sorted(saved["optimizer_states"][0]["state"]) == list(range(len(expected)))  # as a plain Trainer saves it
    assert (tmp_path / f"folder-step={SAVED_AT}.ckpt").is_dir()
    assert (tmp_path / f"file-step={SAVED_AT}.ckpt").is_file()


def test_kinds_of_training(tmp_path: pathlib.Path) -> None:
    """Tensor parallelism, manual optimization, elastic data, mixed precision: as one process does it, or `ddp`."""
    with job(ROOT / "tests/lightning/fsdp2_kinds_job.py", *OPTIONS) as running:
        assert running.run() == 0, running.text
    for what in ("tensor-0", "manual-0", "manual-1", "elastic-0", "bf16-0"):
        shards(running, what)
    torch.manual_seed(1)
    check_close(tmp_path / "tensor.ckpt", trained_alone(kinds.even(), GROUPS, kinds.STEPS).state_dict())
    torch.manual_seed(1)
    check_close(tmp_path / "manual.ckpt", manual_alone().state_dict())
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    check_close(tmp_path / "elastic.ckpt", {name.removeprefix("net."): value for name, value in whole.items()})
