"""Trainers of other projects with the mixin in front: in their examples the leading group is killed, and comes back.

trl and sentence-transformers are no dependencies of this project; scripts/check-trainers gets them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.accelerate.test_examples import ROOT, run_with_kill

if TYPE_CHECKING:
    import pathlib

    from tests.launch.job import Job

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The working tree can be imported beside what scripts/check-trainers put on the path; no downloads."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def trained(name: str, package: str, steps: int, folder: pathlib.Path) -> Job:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; scripts/check-trainers gets it")
    options = f"--cpu --width=16 --steps={steps} --save_steps={steps // 2} --dir={folder}/out"
    done = run_with_kill(f"{name} {options}", r"'loss': ", folder / "away")
    assert done.count(rf"done: .* step {steps},") == 2, done.text
    assert {path.name for path in (folder / "out").glob("checkpoint-*")} == {
        f"checkpoint-{steps // 2}", f"checkpoint-{steps}",
    }  # fmt: skip
    return done


def losses(done: Job) -> list[float]:
    return [float(text) for text in re.findall(r"'loss': '?([\d.e-]+)", done.text)]


def test_supervised_fine_tuning_with_trl(tmp_path: pathlib.Path) -> None:
    said = losses(trained("train_trl.py", "trl", 200, tmp_path))
    assert said[-1] < said[0] / 2, said


def test_sentence_transformers(tmp_path: pathlib.Path) -> None:
    said = losses(trained("train_sentence_transformers.py", "sentence_transformers", 200, tmp_path))
    assert said[-1] < said[0] / 2, said
