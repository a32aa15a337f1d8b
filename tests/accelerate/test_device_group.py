"""Accelerate with a group of devices: no CPU memory travels over it; which is taken, and what is refused."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from ft_accelerate import FaultTolerantAccelerator
from ft_core.backends import TorchBuild
from ft_core.errors import ConfigError
from ft_core.process_group import default
from tests import device_only
from tests.launch.job import job

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_two_trainings_and_a_kill_send_no_cpu_memory_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "tests/accelerate/two_runs_job.py"
    for name, value in {"DEVICE_ONLY": str(script), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    with job(ROOT / "tests/device_only.py", "--replicas", "2", "--max-restarts", "2") as running:
        assert running.run() == 0, running.text
    device_only.check(running.text, 2)  # the killed one says nothing


@pytest.mark.usefixtures("forgotten")
def test_a_backend_that_the_device_cannot_use_is_refused_when_the_accelerator_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FT_LIGHTHOUSE", "127.0.0.1:1")
    monkeypatch.setenv("FT_BACKEND", "nccl")
    built = TorchBuild("2.13.0+cu130", cuda="13.0", nccl=True, cuda_devices=8)
    monkeypatch.setattr(default, "torch_build", lambda: built)
    with pytest.raises(
        ConfigError, match=r"^FT_BACKEND=nccl: the model is on cpu, .*: Accelerator\(cpu=True\), or ft-acc"
    ):
        FaultTolerantAccelerator(cpu=True)
    monkeypatch.setattr(default, "torch_build", lambda: TorchBuild("2.13.0+cpu"))
    with pytest.raises(ConfigError, match=r"^FT_BACKEND=nccl: torch 2.13.0.cpu is built without CUDA"):
        FaultTolerantAccelerator(cpu=True)
