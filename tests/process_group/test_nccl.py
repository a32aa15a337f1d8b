"""`ProcessGroupNCCL`, `-XCCL` and `-Accelerator` where there is no device: what they refuse, and what they set."""

from __future__ import annotations

import inspect
import logging
import os
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from ft_core.backends import MIN_NCCL, TorchBuild, lacks
from ft_core.errors import ConfigError
from ft_core.process_group import ProcessGroupAccelerator, ProcessGroupNCCL, ProcessGroupXCCL, availability
from ft_core.process_group.accelerator import kind_for
from ft_core.process_group.nccl import environment

AT_IMPORT = set(os.environ)
GOOD = TorchBuild("2.13.0", cuda="13.0", nccl=True, cuda_devices=1, nccl_version=(2, 29, 7))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.NEEDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "_said", False)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("kind", [ProcessGroupNCCL, ProcessGroupXCCL, ProcessGroupAccelerator])
def test_the_reference_signature_is_kept(kind: type) -> None:
    parameters = list(inspect.signature(kind).parameters.values())
    assert (parameters[0].name, parameters[0].default) == ("timeout", timedelta(seconds=60))
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters[1:])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            ProcessGroupNCCL,
            r"ProcessGroupNCCL: (torch .* without CUDA|torch finds no|no GPU is).*ProcessGroupGloo",
        ),
        (ProcessGroupXCCL, r"ProcessGroupXCCL: torch (.* without XCCL|finds no xpu).*ProcessGroupGloo"),
        (ProcessGroupAccelerator, r"ProcessGroupAccelerator: torch sees no accelerator.*cuda, xpu.*ProcessGroupGloo"),
    ],
)
def test_without_a_device_construction_says_what_to_do(kind: type[ProcessGroupNCCL], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kind(timedelta(seconds=1))


def test_what_nccl_needs_is_named_in_the_order_in_which_it_is_to_be_mended() -> None:
    assert lacks("nccl", GOOD) == lacks("nccl", replace(GOOD, nccl_version=MIN_NCCL)) == ""
    for found, says in (
        (replace(GOOD, cuda="", nccl=False, cuda_devices=0), "built without CUDA: install"),
        (replace(GOOD, nccl=False, cuda_devices=0), "no cuda device on this machine: see what nvidia-smi shows"),
        (replace(GOOD, cuda_devices=0, visible=""), "(CUDA_VISIBLE_DEVICES=''): correct that, or see nvidia-smi"),
        (replace(GOOD, nccl=False), "built without NCCL: install"),
        (replace(GOOD, nccl_version=(2, 21, 5)), "NCCL 2.21.5 is too old, its abort cannot be relied on: install 2.25"),
    ):
        assert says in lacks("nccl", found)
        assert lacks("baby-nccl", found) == lacks("nccl", found)


def test_the_driver_has_to_answer_and_the_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "torch_build", lambda: replace(GOOD, nccl_version=()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^X: torch finds no cuda device .*; or use ProcessGroupGloo, which"):
        availability.check_here("X", "nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 21, 5, "suffix"))
    with pytest.raises(ConfigError, match=r"^X: NCCL 2\.21\.5 is too old.*; or use ProcessGroupGloo, which"):
        availability.check_here("X", "baby-nccl")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 25, 1))
    availability.check_here("X", "nccl")


def test_what_xccl_needs_is_named() -> None:
    assert lacks("xccl", TorchBuild("2.13.0", xccl=True, xpu_devices=1)) == ""
    assert "no xpu device on this machine: see what xpu-smi" in lacks("xccl", TorchBuild("2.13.0", xccl=True))
    assert "built without XCCL: install" in lacks("xccl", TorchBuild("2.13.0", xpu_devices=1))


def test_the_accelerator_decides_the_kind() -> None:
    assert kind_for("cuda") is ProcessGroupNCCL
    assert kind_for("xpu") is ProcessGroupXCCL
    with pytest.raises(ConfigError, match="there is no group for tensors on mps"):
        kind_for("mps")


# -------------------------------------------------------------------------------------------------------- environment


def test_torchs_settings_are_there_while_a_backend_is_made_and_put_back_after() -> None:
    with environment.applied():
        assert {name: os.environ.get(name) for name in environment.NEEDED} == environment.NEEDED
    assert not [name for name in environment.NEEDED if name in os.environ]
    with pytest.raises(ZeroDivisionError), environment.applied():
        _ = 1 // 0
    assert not [name for name in environment.NEEDED if name in os.environ]


@pytest.mark.parametrize("name", environment.NEEDED)
def test_what_a_launcher_or_the_user_has_set_is_another_value_meanwhile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's agent, and ours, set TORCH_NCCL_ASYNC_ERROR_HANDLING=1 for every worker."""
    monkeypatch.setenv(name, "1")
    for _ in range(2):
        with environment.applied():
            assert os.environ[name] == environment.NEEDED[name]
        assert os.environ[name] == "1"


def test_torchs_debug_level_is_off_while_a_backend_is_made() -> None:
    """With DETAIL torch takes ASYNC_ERROR_HANDLING=0 for 3, and ends the process when a peer dies."""
    set_debug_level(DebugLevel.DETAIL)
    try:
        with environment.applied():
            assert get_debug_level() == DebugLevel.OFF
        assert get_debug_level() == DebugLevel.DETAIL
    finally:
        set_debug_level(DebugLevel.OFF)


@pytest.mark.parametrize(
    ("had", "backend", "has", "told"),
    [
        (None, None, "0", False),
        (None, "cpu:gloo,cuda:nccl", "0", True),
        (None, "cpu:gloo", "0", False),
        ("0", "cuda:nccl", "0", False),
        ("1", "cuda:nccl", "1", True),
        ("1", None, "1", False),
    ],
)
def test_the_scripts_own_groups_do_not_take_a_failure_of_ours_for_theirs(
    had: str | None, backend: str | None, has: str, told: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """torch tells the first NCCL group of a process of each failure, and that ends the process if it looks."""
    monkeypatch.setattr(dist, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    variables = {} if had is None else {environment.OF_ALL_GROUPS: had}
    late = environment.set_for_all_groups(variables)
    assert (variables, bool(late)) == ({environment.OF_ALL_GROUPS: has}, told)
    monkeypatch.setattr(environment, "_too_late", late)
    monkeypatch.setenv(environment.OF_ALL_GROUPS, has)
    with environment.applied():
        assert told == any(environment.OF_ALL_GROUPS in record.message for record in caplog.records)


def test_it_is_set_when_the_library_is_imported() -> None:
    assert environment.OF_ALL_GROUPS in AT_IMPORT


def test_the_settings_are_named_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with environment.applied():
            pass
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert all(f"{name}=0" in lines[0] for name in environment.NEEDED)
    assert "docs/nccl.md" in lines[0]


def test_every_setting_says_why_and_is_in_the_documentation() -> None:
    assert set(environment.WHY) == set(environment.NEEDED)
    with open("docs/nccl.md", encoding="utf-8") as file:
        text = file.read()
    assert not [name for name in environment.NEEDED if name not in text]
