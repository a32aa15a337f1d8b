"""Which process group carries the gradients: every wish, on every kind of device, with every kind of torch."""

from __future__ import annotations

import itertools

import pytest

from ft_core.backends import DEVICE_OF, TorchBuild, Wish, check_devices, check_tensor, choose, kind_of
from ft_core.errors import ConfigError
from ft_core.settings import AUTO, BACKENDS, Environment, check_backend

CPU = TorchBuild("2.13.0+cpu")
CUDA = TorchBuild("2.13.0+cu130", cuda="13.0", nccl=True, cuda_devices=8)
HIDDEN = TorchBuild("2.13.0+cu130", cuda="13.0", nccl=True, cuda_devices=0, visible="")
NO_NCCL = TorchBuild("2.13.0+cu130", cuda="13.0", cuda_devices=1)
XPU = TorchBuild("2.13.0+xpu", xccl=True, xpu_devices=2)
BUILDS = (CPU, CUDA, HIDDEN, NO_NCCL, XPU)
PLACES: tuple[list[str], ...] = (
    [],
    ["cpu"],
    ["cuda:0"],
    ["cuda"],
    ["cuda:0", "cuda:1"],
    ["cpu", "cuda:0"],
    ["xpu:0"],
    ["mps:0"],
    ["meta"],
)


def said(backend: str) -> Wish:
    return Wish(backend, f"FT_BACKEND={backend}") if backend != AUTO else Wish()


def test_nobody_has_to_say_it() -> None:
    assert choose(Wish(), ["cuda:3"], CUDA) == choose(Wish(), ["cuda"], CUDA) == "nccl"
    assert choose(Wish(), ["xpu:1"], XPU) == "xccl"
    assert [choose(Wish(), ["cpu"], build) for build in BUILDS] == ["gloo"] * len(BUILDS)
    assert choose(Wish(), [], CUDA) == "gloo"
    assert choose(Wish(), ["cuda:0"], NO_NCCL) == "gloo", "there is no other for it"


def test_whoever_says_it_has_it() -> None:
    for backend in ("gloo", "baby-gloo"):
        for build, devices in itertools.product(BUILDS, (["cpu"], ["cuda:0"], ["cpu", "cuda:0"])):
            assert choose(said(backend), devices, build) == backend
    for backend in ("nccl", "baby-nccl"):
        assert choose(said(backend), ["cuda:0"], CUDA) == backend
    assert choose(said("xccl"), ["xpu:0"], XPU) == "xccl"


def test_what_is_chosen_carries_the_model_and_is_there_and_all_else_is_refused_in_words() -> None:
    for backend, devices, build in itertools.product(BACKENDS, PLACES, BUILDS):
        try:
            chosen = choose(said(backend), devices, build)
        except ConfigError as error:
            text = str(error)
            assert ": " in text
            assert any(word in text for word in ("FT_BACKEND", "move it", "install", "correct")), text
            continue
        assert chosen in BACKENDS
        assert chosen != AUTO
        assert backend in (AUTO, chosen)
        kind = DEVICE_OF.get(chosen)
        kinds = {kind_of(name) for name in devices}
        assert kinds <= ({kind} if kind else {"cpu", "cuda"})
        if kind == "cuda":
            assert build.nccl
            assert build.cuda_devices
            assert len(devices) < 2
        if kind == "xpu":
            assert build.xccl
            assert build.xpu_devices


MIXED = "the trained parameters of the model are on cpu and cuda:0, and a process group has one device: put the whole"


@pytest.mark.parametrize(
    ("backend", "devices", "build", "says"),
    [
        (AUTO, ["cpu", "cuda:0"], CUDA, MIXED),
        (AUTO, ["cuda:0", "cuda:1", "cuda:2"], CUDA, "on cuda:0, cuda:1 and cuda:2, .* or set FT_BACKEND=gloo, which"),
        (
            AUTO,
            ["mps:0"],
            CPU,
            r"on mps:0, for which there is no process group between replicas: move it with model.to",
        ),
        (AUTO, ["cuda:0"], CPU, "device=cuda:0: torch 2.13.0.cpu is built without CUDA: install a CUDA build of it"),
        (AUTO, ["cuda"], HIDDEN, "device=cuda: no GPU is visible here .CUDA_VISIBLE_DEVICES=''.: correct"),
        (
            AUTO,
            ["xpu:0"],
            TorchBuild("2.9", xpu_devices=1),
            "no process group .*: torch 2.9 is built without XCCL: move",
        ),
        (
            "nccl",
            ["cpu"],
            CPU,
            "^FT_BACKEND=nccl: torch 2.13.0.cpu is built without CUDA: install .*; or leave out FT_B",
        ),
        (
            "nccl",
            ["cuda:0"],
            NO_NCCL,
            "FT_BACKEND=nccl: torch 2.13.0.cu130 is built without NCCL: .*; or leave out",
        ),
        (
            "nccl",
            ["cuda"],
            TorchBuild("2", "13", True),
            "torch finds no cuda device on this machine: see what nvidia-smi",
        ),
        (
            "nccl",
            ["cpu"],
            CUDA,
            "the model is on cpu, and nccl works on cuda devices only: move it with model.to.'cuda'",
        ),
        ("nccl", ["cpu", "cuda:0"], CUDA, "the model is on cpu and cuda:0, and nccl works on cuda devices only"),
        (
            "nccl",
            ["cuda:0", "cuda:1"],
            CUDA,
            "on cuda:0 and cuda:1, and a nccl group has one device: put the whole mod",
        ),
        ("baby-nccl", ["cpu"], CUDA, "FT_BACKEND=baby-nccl: the model is on cpu, and baby-nccl works on cuda devices"),
        ("xccl", ["xpu:0"], CUDA, "FT_BACKEND=xccl: torch finds no xpu device on this machine: see what xpu-smi shows"),
        (
            "gloo",
            ["mps:0"],
            CPU,
            "gloo works for models on the CPU, or on CUDA devices through host memory: move it wi",
        ),
    ],
)
def test_what_is_refused(backend: str, devices: list[str], build: TorchBuild, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(said(backend), devices, build)


def test_errors_are_in_the_words_of_the_interface() -> None:
    lightning = Wish("nccl", "FT_BACKEND=nccl", "write accelerator='{device}'")
    with pytest.raises(ConfigError, match="works on cuda devices only: write accelerator='cuda', or leave out FT_BACK"):
        check_devices("nccl", lightning, ["cpu"])


@pytest.mark.parametrize(
    ("device", "backend", "own", "says"),
    [
        ("cuda:0", "nccl", "cuda:0", ""),
        ("cuda:7", "gloo", None, ""),
        ("cuda:7", "baby-nccl", None, ""),
        ("cuda:1", "nccl", "cuda:0", r"^sum takes tensors on cuda:0, and this one is on cuda:1: move it with tensor\.to"
                                     r"\('cuda:0'\), or to the CPU: what is there travels over Gloo beside nccl$"),
        ("xpu:0", "nccl", "cuda:0", "takes tensors on cuda:0, and this one is on xpu:0"),
        ("xpu:0", "nccl", None, "takes tensors on cuda, and this one is on xpu:0"),
        ("xpu:0", "gloo", None, r"takes tensors on cpu and cuda, and this one is on xpu:0: move it with "
                                r"tensor\.to\('cpu'\)$"),
    ],
)  # fmt: skip
def test_which_tensors_of_a_scripts_travel_over_the_group(
    device: str, backend: str, own: str | None, says: str
) -> None:
    if not says:
        check_tensor(device, backend=backend, own=own, said="sum")
        return
    with pytest.raises(ConfigError, match=says):
        check_tensor(device, backend=backend, own=own, said="sum")


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"FT_BACKEND='ncll': unknown; did you mean nccl\? \(known: auto, gloo, nccl"):
        check_backend("ncll", "FT_BACKEND")
    with pytest.raises(ConfigError, match=r"FT_BACKEND='mpi': unknown; \(known: auto, gloo, nccl, xccl, baby-gloo"):
        Environment.read({"FT_BACKEND": "mpi"})
    assert Environment.read({"FT_BACKEND": "gloo"}).backend == "gloo"
    assert Environment.read({"FT_BACKEND": ""}).backend == ""
