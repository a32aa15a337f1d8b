"""LightningCLI for real: its config.yaml, and a logger's run, when the replica that writes them dies and comes back."""

from __future__ import annotations

import csv
import importlib.util
import pathlib
import re
from typing import TYPE_CHECKING

import pytest

from tests.launch.job import job
from tests.lightning.cli_job import AT

if TYPE_CHECKING:
    from tests.launch.job import Job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/lightning/cli_job.py"
LOGGERS = ["CSVLogger", *(["TensorBoardLogger"] if importlib.util.find_spec("tensorboard") else [])]


def logged(folder: pathlib.Path) -> list[int]:
    """The steps of all that was logged, in the order of its files."""
    if (folder / "metrics.csv").exists():
        with (folder / "metrics.csv").open() as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        EventFileLoader,
    )

    files = sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    events = (event for path in files for event in EventFileLoader(str(path)).Load())
    return [event.step for event in events for value in event.summary.value if value.tag == "loss"]


@pytest.mark.parametrize(
    ("dies", "logger"),
    [
        pytest.param(dies, logger, marks=[pytest.mark.long] if turn != index else [])
        for turn, dies in enumerate(["in a step", "before it logs"]) for index, logger in enumerate(LOGGERS)
    ],
)  # fmt: skip
def test_the_leader_dies_and_comes_back(
    dies: str, logger: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step that the other one then loses, or between two: either way one batch is not logged."""
    monkeypatch.setenv("DIES", dies)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    (tmp_path / "in.yaml").write_text(
        f"""
trainer:
  strategy: {{class_path: ft_lightning.FaultTolerantStrategy, init_args: {{timeout: 20}}}}
  accelerator: cpu
  devices: 1
  max_epochs: 1000
  log_every_n_steps: 1
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  logger: {{class_path: lightning.pytorch.loggers.{logger}, init_args: {{save_dir: {tmp_path}, name: run}}}}
model: {{lr: 0.05, last: {tmp_path}/last}}
"""
    )

    def end(found: re.Match[str]) -> None:
        partial = tmp_path / "partial"
        partial.write_text(str(int(found[0].split()[-2]) + 30))
        partial.rename(tmp_path / "last")

    running: Job
    with job(f"--replicas 2 --timeout 20 {SCRIPT} fit --config {tmp_path}/in.yaml") as running:
        back = [r"was ended by SIGKILL", r"\[replica-0\] started", r"replica-0/0\] step \d+ 2"]
        running.when(back[-1], end, after=back[:-1])
        assert running.run() == 0, running.text
    ends = re.findall(r"\] done (\d+) (\w+)", running.text)
    assert len(ends) == 2, running.text
    assert len(set(ends)) == 1, running.text
    assert running.count(r"\[replica-0\] started") == 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]
    folder = tmp_path / "run/version_0"
    config = (folder / "config.yaml").read_text()
    assert "\n  lr: 0.05\n" in config
    assert "class_path: ft_lightning.FaultTolerantStrategy\n" in config
    assert "lr: 0.05\n" in (folder / "hparams.yaml").read_text()
    steps = logged(folder)
    assert steps == sorted(set(steps)), steps
    # Loggers count batches, from 0 on, the vetoed ones too.
    assert sorted(set(range(steps[-1])) - set(steps)) == [AT if dies == "in a step" else AT - 1]
    assert steps[-1] == int(ends[0][0]) - (0 if dies == "in a step" else 1)
