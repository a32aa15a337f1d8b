"""`share_evaluation=True`: what each group knows, and what it evaluated, with real processes and real signals."""

from __future__ import annotations

import pathlib
import re
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ft_core.errors import ConfigError
from ft_lightning import FaultTolerantStrategy
from tests.launch.job import job

if TYPE_CHECKING:
    from tests.held_ports import Hold

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOB = ROOT / "tests/lightning/sharing_job.py"
GROUPS = 3
BATCHES = 15  # of the first loader
FIRST, SECOND = 4, 8  # steps before the two validations
APART = 1e-6
"""Relative: the sums of parts are added in another order than one group adds."""

ONCE = ("--max-restarts", "0", "--success", "min")

long = pytest.mark.long


def run(monkeypatch: pytest.MonkeyPatch, options: str, *flags: str) -> str:
    environment = {"OPTIONS": options, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with job(JOB, "--replicas", str(GROUPS), "--timeout", "20", *flags) as running:
        assert running.run() == 0, running.text
        return str(running.text)


def validated(text: str, step: int) -> dict[str, tuple[int, dict[str, float]]]:
    """By process: batches that it evaluated, and the metrics it knows."""
    found = re.findall(rf"\[(\S+)\] validated {step} (\d+) True (.*)", text)
    return {name: (int(batches), numbers(told)) for name, batches, told in found}


def numbers(told: str) -> dict[str, float]:
    return {name: float.fromhex(value) for name, value in re.findall(r"'(\S+)': '(\S+)'", told)}


def alike(found: dict[str, tuple[int, dict[str, float]]]) -> dict[str, float]:
    """The metrics, which are the same to the last bit everywhere."""
    metrics = [metrics for _, metrics in found.values()]
    assert all(one == metrics[0] for one in metrics), metrics
    return metrics[0]


@pytest.fixture(scope="module")
def unshared() -> dict[str, str]:
    """Texts of jobs in which each group evaluates everything, by options."""
    return {}


def compare(monkeypatch: pytest.MonkeyPatch, unshared: dict[str, str], text: str, options: str, step: int) -> None:
    if options not in unshared:
        unshared[options] = run(monkeypatch, options)
    wanted = alike(validated(unshared[options], step))
    assert alike(validated(text, step)) == pytest.approx(wanted, rel=APART)


@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.usefixtures("forged_workers")
class TestJobs:
    """With three groups."""

    @pytest.mark.parametrize(
        "options",
        [
            "loaders=2",
            pytest.param("workers=2 limit=7", marks=long),
            pytest.param("accumulate=4 every=3", marks=long),
            pytest.param("reshuffle=1 limit=7", marks=long),
        ],
    )
    def test_each_group_does_its_part_and_knows_everything(
        self, monkeypatch: pytest.MonkeyPatch, unshared: dict[str, str], options: str
    ) -> None:
        text = run(monkeypatch, f"share=1 {options}")
        steps = [int(step) for step in dict.fromkeys(re.findall(r"validated (\d+) ", text))]
        for step in steps:
            found = validated(text, step)
            assert len(found) == GROUPS
            once = BATCHES if "limit" not in options else 7
            # The second loader has two batches: two groups do one each, and the third one does the first one, too.
            assert sum(batches for batches, _ in found.values()) == once + (3 if "loaders" in options else 0), text
            compare(monkeypatch, unshared, text, options, step)
        assert re.findall(r"tested (\d+) (\S+)", text) == [("5", re.findall(r"tested \d+ (\S+)", text)[0])] * GROUPS
        assert re.findall(r"predicted (\d+) (\w+)", text) == [("5", "True")] * GROUPS, text
        assert re.findall(r"written (\w+)", text) == ["True"] * GROUPS

    def test_the_part_of_a_killed_group_is_evaluated_again(
        self, monkeypatch: pytest.MonkeyPatch, unshared: dict[str, str]
    ) -> None:
        text = run(monkeypatch, f"share=1 loaders=2 signal={signal.SIGKILL:d}:1:2:2", *ONCE)
        found = validated(text, SECOND)
        assert sorted(found) == ["replica-0/0", "replica-2/0"], text
        assert [batches for batches, _ in found.values()] in ([11, 12], [12, 11], [11, 11], [12, 12]), text
        compare(monkeypatch, unshared, text, "loaders=2", SECOND)
        assert text.count("of shared work is done here as well: its owner's process has ended") >= 2, text
        # What follows is divided among those that are left, at once.
        assert sorted(re.findall(r"tested (\d+) ", text)) == ["7", "8"], text
        assert [right for _, right in re.findall(r"predicted (\d+) (\w+)", text)] == ["True", "True"]

    @long
    def test_the_part_of_a_frozen_group_is_evaluated_again(
        self, monkeypatch: pytest.MonkeyPatch, unshared: dict[str, str]
    ) -> None:
        text = run(monkeypatch, f"share=1 loaders=2 signal={signal.SIGSTOP:d}:1:2:2")
        assert {"replica-0/0", "replica-2/0"} <= set(validated(text, SECOND)), text
        compare(monkeypatch, unshared, text, "loaders=2", SECOND)

    def test_groups_that_read_in_different_orders_evaluate_everything(
        self, monkeypatch: pytest.MonkeyPatch, unshared: dict[str, str]
    ) -> None:
        text = run(monkeypatch, "share=1 shuffle=1")
        found = validated(text, SECOND)
        assert [batches for batches, _ in found.values()] == [BATCHES] * GROUPS
        assert "is the order of the data the same on all groups?" in text
        assert {metrics["samples"] for _, metrics in found.values()} == {58.0}

    def test_with_a_metric_that_cannot_be_merged_each_group_evaluates_everything(
        self, monkeypatch: pytest.MonkeyPatch, unshared: dict[str, str]
    ) -> None:
        text = run(monkeypatch, "share=1 correlation=1")
        found = validated(text, SECOND)
        assert [batches for batches, _ in found.values()] == [BATCHES] * GROUPS
        assert "the metric correlation has a state with dist_reduce_fx=None" in text
        compare(monkeypatch, unshared, text, "correlation=1", SECOND)

    def test_groups_of_two_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = run(monkeypatch, "share=1 devices=2", "--nproc-per-replica", "2")
        for step in (2, 4):
            found = validated(text, step)
            assert len(found) == 2 * GROUPS, text
            assert {batches for batches, _ in found.values()} <= {2, 3}  # of 8 in each rank
            for rank in (0, 1):
                assert alike({name: one for name, one in found.items() if name.endswith(f"/{rank}")})["seen"] == 58.0


class Counting(pl.LightningModule):
    """Says how many batches it has seen."""

    def validation_step(self, batch: Any) -> None:
        self.log("batches", 1.0, reduce_fx="sum", batch_size=1)


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about torch's deprecations
def test_without_a_lighthouse_everything_is_evaluated_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hold: Hold
) -> None:
    address = f"127.0.0.1:{hold()[0]}"
    for name, value in {"FT_LIGHTHOUSE": address, "FT_REPLICA_GROUP": "0", "FT_NUM_REPLICA_GROUPS": "2"}.items():
        monkeypatch.setenv(name, value)
    impatient = {"connect_timeout": timedelta(seconds=0.5)}
    trainer = pl.Trainer(
        strategy=FaultTolerantStrategy(share_evaluation=True, manager_kwargs=impatient), accelerator="cpu", devices=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    found = trainer.validate(Counting(), DataLoader(TensorDataset(torch.zeros(6, 1)), 2), verbose=False)
    assert found == [{"batches": 3.0}]
    assert any("reads all data of this validate run" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_what_is_neither_true_nor_false_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"share_evaluation=.* must be True or False"):
        FaultTolerantStrategy(share_evaluation=value)
