"""Trainer and Fabric with a group of devices: which they take, and that no CPU memory travels over it."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import lightning as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.accelerators import CPUAccelerator

from ft_core.backends import TorchBuild
from ft_core.errors import ConfigError
from ft_core.process_group import default
from ft_lightning.placement import Place, keep
from tests import device_only
from tests.launch.job import job

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]
ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/device_only.py"


def run(monkeypatch: pytest.MonkeyPatch, script: str, environment: Mapping[str, str], *options: str) -> str:
    """A job of two groups; what it printed."""
    given = {"DEVICE_ONLY": str(ROOT / "tests/lightning" / script), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name, value in {**given, **environment}.items():
        monkeypatch.setenv(name, value)
    with job(PROGRAM, "--replicas", "2", *options) as running:
        assert running.run() == 0, running.text
    return running.text


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_a_trainers_two_fits_send_no_cpu_memory_over_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The leader's state, the end of a fit, and who leads the next."""
    device_only.check(run(monkeypatch, "two_fits_job.py", {"FOLDER": str(tmp_path), "KILL": "9 9", "GAP_S": "0"}), 2)


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_fabric_sends_no_cpu_memory_over_it(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    steps = tmp_path / "steps"
    steps.write_text("20")
    device_only.check(run(monkeypatch, "fabric_job.py", {"STEPS_FILE": str(steps), "DEVICES": "1"}), 2)


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_shared_evaluation_sends_no_cpu_memory_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device_only.check(run(monkeypatch, "sharing_job.py", {"OPTIONS": "share=1 loaders=1 epochs=1 devices=1"}), 2)


# ---------------------------------------------------------------------------------------------------- which it takes


def test_each_group_of_one_machine_keeps_the_gpu_with_its_number() -> None:
    gpus = [torch.device("cuda", index) for index in range(8)]
    for group in range(8):
        assert keep(gpus, Place(launched=True, groups=8, group=group, total=8)) == [gpus[group]]
    assert keep(gpus[4:6], Place(launched=True, groups=2, group=1, total=2)) == [gpus[5]], "devices=[4, 5]"
    assert keep(gpus, Place(launched=False)) == [gpus[0]], "validate and test run on one device"
    assert keep(gpus[:2], Place(launched=True, total=4, world_size=2, local_world_size=2)) == gpus[:2], "ftrun's ranks"


def test_the_device_is_set_before_a_manager_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning calls `torch.cuda.set_device` in `setup_device`; whatever allocates on a GPU comes after it."""
    from ft_core.control.lighthouse.server import LighthouseServer
    from tests.lightning.test_steps import Module, fit

    order: list[str] = []
    set_up = CPUAccelerator.setup_device

    def setup_device(self: Any, device: torch.device) -> None:
        order.append(f"setup_device {device}")
        set_up(self, device)

    made = default.ByDevice.make

    def make(self: default.ByDevice, device: Any) -> Any:
        order.append(f"group for {device}")
        return made(self, device)

    monkeypatch.setattr(CPUAccelerator, "setup_device", setup_device)
    monkeypatch.setattr(default.ByDevice, "make", make)
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address().removeprefix("http://"))
    monkeypatch.setenv("FT_HOSTNAME", "127.0.0.1")
    try:
        fit(Module())
    finally:
        server.shutdown()
    assert order == ["setup_device cpu", "group for [device(type='cpu')]"]


@pytest.mark.parametrize("host", [pl.Trainer, Fabric])
def test_a_backend_that_the_device_cannot_use_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, host: Any
) -> None:
    monkeypatch.setenv("FT_BACKEND", "nccl")
    built = TorchBuild("2.13.0+cu130", cuda="13.0", nccl=True, cuda_devices=8)
    monkeypatch.setattr(default, "torch_build", lambda: built)
    with pytest.raises(
        ConfigError, match=r"^FT_BACKEND=nccl: the model is on cpu, .*: write accelerator='gpu' for a mo"
    ):
        host(strategy="fault_tolerant", accelerator="cpu", devices=2)
    monkeypatch.setattr(default, "torch_build", lambda: TorchBuild("2.13.0+cpu"))
    with pytest.raises(ConfigError, match=r"^FT_BACKEND=nccl: torch 2.13.0.cpu is built without CUDA"):
        host(strategy="fault_tolerant", accelerator="cpu", devices=2)
    monkeypatch.setenv("FT_BACKEND", "ncll")
    with pytest.raises(ConfigError, match=r"^FT_BACKEND='ncll': unknown; did you mean nccl"):
        host(strategy="fault_tolerant", accelerator="cpu", devices=2)
