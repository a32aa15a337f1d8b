"""The group that is taken where the user names none, on this machine and on one that has GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ft_core import process_group
from ft_core.backends import MIN_NCCL, TorchBuild
from ft_core.errors import ConfigError
from ft_core.process_group import (
    ByDevice,
    FakeProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyNCCL,
    ProcessGroupDummy,
    ProcessGroupGloo,
    availability,
    check_group,
    check_tensors,
    default,
    default_process_group,
    host_process_group,
)
from ft_core.process_group.baby import children
from ft_core.settings import AUTO, BACKENDS
from tests.process_group.fake_communicator import FakeNCCL

if TYPE_CHECKING:
    from collections.abc import Iterator

EIGHT = TorchBuild("2.13.0+cu130", cuda="13.0", nccl=True, cuda_devices=8)


class OfDevice(ProcessGroup):
    """Stands for ProcessGroupNCCL."""

    made_on: list[str] = []  # noqa: RUF012 - reset by the fixture

    def __init__(self) -> None:
        super().__init__()
        self.made_on.append(Current.device)

    @property
    def torch_backend(self) -> str:
        return "nccl"

    @property
    def carries_cpu_memory(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Nothing was opened."""


class Current:
    """Stands for `torch.cuda.device`, the context."""

    device = "none"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        Current.device = str(self._device)

    def __exit__(self, *_: object) -> None:
        Current.device = "none"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine with eight, as far as one sees that."""
    monkeypatch.delenv("FT_BACKEND", raising=False)
    monkeypatch.setattr(default, "torch_build", lambda: EIGHT)
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(process_group, "ProcessGroupNCCL", OfDevice)
    OfDevice.made_on.clear()
    return iter([OfDevice.made_on])


def test_every_name_has_a_class_and_the_other_way_round() -> None:
    assert set(default.CLASSES) == set(BACKENDS) - {AUTO}
    for name in default.CLASSES.values():
        assert issubclass(getattr(process_group, name), ProcessGroup)


@pytest.mark.usefixtures("gpus")
def test_a_model_on_a_gpu_has_the_gpus_collectives_made_on_that_gpu() -> None:
    assert isinstance(default_process_group("cuda:5"), OfDevice)
    assert isinstance(default_process_group(torch.device("cuda", 2)), OfDevice)
    assert isinstance(ByDevice().make([torch.device("cuda:7")]), OfDevice)
    assert isinstance(default_process_group("cuda"), OfDevice)
    assert OfDevice.made_on == ["cuda:5", "cuda:2", "cuda:7", "none"]


@pytest.mark.usefixtures("gpus")
def test_the_environment_overrides_and_an_argument_overrides_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_BACKEND", "gloo")
    assert isinstance(default_process_group("cuda:0"), ProcessGroupGloo)
    assert isinstance(default_process_group("cuda:0", "nccl"), OfDevice)
    assert isinstance(default_process_group("cuda:0", "auto"), OfDevice)
    monkeypatch.setenv("FT_BACKEND", "nccl")
    with pytest.raises(ConfigError, match=r"^FT_BACKEND=nccl: the model is on cpu"):
        default_process_group("cpu")
    assert isinstance(host_process_group(), ProcessGroupGloo), "what travels in CPU memory does so whatever is said"
    monkeypatch.setenv("FT_BACKEND", "ncll")
    with pytest.raises(ConfigError, match="FT_BACKEND='ncll': unknown; did you mean nccl"):
        default_process_group("cpu")
    with pytest.raises(ConfigError, match=r"backend='ncll': unknown"):
        default_process_group("cpu", "ncll")


@pytest.mark.usefixtures("gpus")
def test_mixed_devices_are_refused_unless_gloo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="on cpu and cuda:0"):
        default_process_group(["cuda:0", "cpu", "cuda:0"])
    with pytest.raises(ConfigError, match="on cpu and cuda:0"):
        ByDevice().check(["cuda:0", "cpu"])
    monkeypatch.setenv("FT_BACKEND", "gloo")
    assert isinstance(default_process_group(["cuda:0", "cpu"]), ProcessGroupGloo)


def test_on_a_machine_without_gpus_it_is_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FT_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert isinstance(default_process_group(), ProcessGroupGloo)
    assert isinstance(default_process_group("cpu"), ProcessGroupGloo)


def test_without_a_model_it_is_that_of_the_accelerator(
    monkeypatch: pytest.MonkeyPatch, gpus: Iterator[list[str]]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(default_process_group(), OfDevice)


def test_what_torch_has_is_read_without_initialising_a_device() -> None:
    found = availability.torch_build()
    assert found.version == torch.__version__
    assert bool(found.cuda) == bool(torch.version.cuda or torch.version.hip)
    assert not torch.cuda.is_initialized()


def test_a_group_that_was_given_is_compared_with_the_model() -> None:
    check_group(ProcessGroupGloo(), ["cpu"])
    check_group(ProcessGroupGloo(), ["cpu", "cuda:0"])
    check_group(OfDevice(), ["cuda:1"])
    with pytest.raises(
        ConfigError, match=r"^pg=OfDevice\(\): the model is on cpu, and nccl works on cuda devices only"
    ):
        check_group(OfDevice(), ["cpu"])
    with pytest.raises(ConfigError, match=r"^pg=FakeProcessGroupWrapper\(\): the model is on cpu and cuda:0"):
        check_group(FakeProcessGroupWrapper(OfDevice()), ["cpu", "cuda:0"])
    with pytest.raises(ConfigError, match="gloo works for models on the CPU"):
        check_group(ProcessGroupDummy(0, 1), ["mps:0"])


def test_a_group_of_another_device_than_the_models_is_refused() -> None:
    group = FakeNCCL(device="cuda:0")
    for given in (group, FakeProcessGroupWrapper(group)):
        check_group(given, ["cuda:0"])
        check_group(given, [])
        with pytest.raises(ConfigError, match=r"the model is on cuda:1, and this group carries tensors on cuda:0"):
            check_group(given, ["cuda:1"])


def test_tensors_of_a_collective_are_compared_with_the_group_and_those_of_the_cpu_go_beside_it() -> None:
    away = torch.empty(1, device="meta")
    of_one, of_a_kind = FakeNCCL(device="meta"), OfDevice()
    check_tensors("allreduce", FakeProcessGroupWrapper(of_one), [torch.ones(1), away])
    for given in (FakeProcessGroupWrapper(FakeNCCL(device="cuda:0")), of_a_kind, ProcessGroupGloo()):
        check_tensors("allreduce", given, [torch.ones(1)])
        with pytest.raises(ConfigError, match=rf"^allreduce over {type(given).__name__} .* this one is on meta: move"):
            check_tensors("allreduce", given, [torch.ones(1), away])


def test_a_group_in_a_child_has_the_device_that_is_current_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is configured: the Manager does that on a thread whose current device is the first one."""
    monkeypatch.setattr(availability, "torch_build", lambda: EIGHT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: MIN_NCCL)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(children.Children, "prepare", lambda _: None)
    group = ProcessGroupBabyNCCL()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    third = {"device": torch.device("cuda:3")}
    assert (group._inner_arguments(), group.sibling()._inner_arguments()) == (third, third)
    check_group(group, ["cuda:3"])
    with pytest.raises(ConfigError, match="the model is on cuda:0, and this group carries tensors on cuda:3"):
        check_group(group, ["cuda:0"])
    with pytest.raises(ConfigError, match=r"device='cuda:4': this process sees 4 of cuda"):
        ProcessGroupBabyNCCL(device="cuda:4")
