"""`strategy="fault_tolerant"` by name without an import, the classes of the four trees, arguments, CLI and YAML."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from lightning.fabric.accelerators import XLAAccelerator

import ft_lightning
from ft_core.errors import ConfigError
from ft_lightning import _compat, registration
from ft_lightning.arguments import DDP_ONLY, OUR_OPTIONS, OURS, check_surroundings
from ft_lightning.classes import strategy_class

pytestmark = pytest.mark.filterwarnings("ignore:.*srun:UserWarning")  # Lightning's, where Slurm is installed
TREES = [tree for tree in (*_compat.TREES, *_compat.FABRICS) if importlib.util.find_spec(tree.partition(".")[0])]

BY_NAME = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    Host = getattr(module, "Trainer", None) or module.Fabric
    assert not {"ft_core", "ft_lightning.trainer.strategy"} & set(sys.modules) or found
    host = Host(strategy="Fault_Tolerant" if found else "fault_tolerant", accelerator="cpu", devices=2)
    found[name] = [base.__module__ for base in type(host.strategy).__mro__]
print(json.dumps(found))
"""


@pytest.mark.process
def test_by_name_without_importing_anything_of_ours() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BY_NAME, *TREES], capture_output=True, text=True, timeout=50,
        cwd=pathlib.Path.home(), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for tree, modules in json.loads(result.stdout.splitlines()[-1]).items():
        assert f"{tree}.strategies.ddp" in modules


BY_PACKAGE = """
import ft_lightning, sys; assert "torch" not in sys.modules
from lightning.fabric import Fabric
fabric = Fabric(strategy="fault_tolerant", accelerator="cpu", devices=2)
print(type(fabric.strategy).__module__)
fabric.launch()
"""


@pytest.mark.long  # the finder below, and Fabric's launcher (test_launcher.py), are tested each time
@pytest.mark.process
def test_importing_the_package_is_enough_where_torch_runs_no_entry_points(tmp_path: pathlib.Path) -> None:
    """And a program from standard input, which cannot be started again in each group, is told what to do."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-"], input=BY_PACKAGE, capture_output=True, text=True, timeout=50,
        check=False, cwd=tmp_path, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip
    assert result.stdout.split() == ["ft_lightning.fabric"], result.stderr
    assert result.returncode == 1
    assert re.search(r"ConfigError: .*standard input.*ftrun --replicas 3 train\.py", result.stderr), result.stderr


# ---------------------------------------------------------------- the finder


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module and makes it one of the REGISTRIES; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def make(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setitem(registration.REGISTRIES, name, "REGISTRY")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return make


REGISTRY = """
class R(dict):
    def register(self, name, strategy, description):
        self[name] = strategy
REGISTRY = R()
"""


def test_a_registry_is_filled_when_its_module_is_imported(package: Any) -> None:
    registration.install()
    module = importlib.import_module(package("ft_registry_a", REGISTRY))
    assert list(module.REGISTRY) == ["fault_tolerant"]
    importlib.reload(module)
    assert list(module.REGISTRY) == ["fault_tolerant"]


def test_a_registry_that_is_loaded_already_is_filled_at_once(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not getattr(f, "ft_lightning", False)])
    module = importlib.import_module(package("ft_registry_b", REGISTRY))
    assert not module.REGISTRY
    registration.install()
    assert list(module.REGISTRY) == ["fault_tolerant"]


def test_installing_again_changes_nothing(package: Any) -> None:
    registration.install()
    registration.install()
    assert sum(getattr(finder, "ft_lightning", False) for finder in sys.meta_path) == 1
    assert "fault_tolerant" in importlib.import_module(package("ft_registry_c", REGISTRY)).REGISTRY


UNABLE = "class R:\n    def __contains__(self, x): raise OSError\nREGISTRY = R()"


@pytest.mark.parametrize("source", ["", "REGISTRY = 3", UNABLE])
def test_whatever_a_registry_has_become_importing_it_works(package: Any, source: str) -> None:
    registration.install()
    importlib.import_module(package("ft_registry_d", source))
    registration.install()


def test_a_module_that_cannot_be_imported_fails_in_its_own_words(package: Any) -> None:
    registration.install()
    name = package("ft_registry_e", "raise ValueError('mine')")
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(package("ft_registry_f", "") + ".below")


def test_a_broken_finder_of_somebody_else_is_not_our_affair(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "ft_registry_g":
                raise RuntimeError("theirs")

    registration.install()
    sys.meta_path.insert(1, Broken())
    with pytest.raises(RuntimeError, match="theirs"):
        importlib.import_module(package("ft_registry_g", REGISTRY))
    registration.register(ModuleType("unknown"))


# ---------------------------------------------------------------- classes and arguments


@pytest.mark.parametrize("tree", TREES)
def test_one_class_per_tree(tree: str) -> None:
    cls = strategy_class(tree)
    assert cls is strategy_class(tree)
    assert cls.__name__ == "FaultTolerantStrategy"
    assert "min_replicas" in str(cls.__doc__)
    assert issubclass(cls, _compat.part(tree, "strategies.DDPStrategy"))
    others = {strategy_class(other) for other in TREES if other != tree}
    assert not any(issubclass(cls, other) or issubclass(other, cls) for other in others)
    strategies = importlib.import_module(f"{tree}.strategies")
    registry = getattr(strategies, registration.REGISTRIES[f"{tree}.strategies"])
    assert type(registry.get("fault_tolerant")) is cls


def test_the_package_names_the_class_of_the_tree_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch

    assert ft_lightning.FaultTolerantStrategy is strategy_class("lightning.pytorch") is strategy_class("lightning")
    assert issubclass(ft_lightning.FaultTolerantStrategy, lightning.pytorch.strategies.DDPStrategy)
    from ft_lightning import fabric

    assert fabric.FaultTolerantStrategy is strategy_class("lightning.fabric")
    assert _compat.imported(("not.there", "json", "os")) == "json"
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert _compat.imported(("not.there", "wave")) == "wave"
    with pytest.raises(AttributeError, match="FaultTolerantStrategi"):
        _ = ft_lightning.FaultTolerantStrategi
    with pytest.raises(ConfigError, match=r"'keras'.*lightning_fabric"):
        strategy_class("keras")


@pytest.mark.parametrize("tree", ["lightning.pytorch", "lightning.fabric"])
def test_arguments_reach_the_manager_and_ftrun(tree: str) -> None:
    strategy = strategy_class(tree)(
        min_replicas=2, timeout=20, manager_kwargs={"max_retries": 7}, ftrun_options=["--standby", 1],
        bucket_cap_mb=1.0, from_scratch=True,
    )  # fmt: skip
    assert strategy._arguments.for_manager() == {
        "max_retries": 7, "min_replica_size": 2, "timeout": timedelta(seconds=20), "lighthouse_addr": None,
        "warm_up": False, "from_scratch": True,
    }  # fmt: skip
    told = strategy._arguments.for_ftrun()
    assert told == ["--min-replicas", "2", "--timeout", "20", "--from-scratch", "--standby", "1"]
    for said in None, False:
        other = strategy_class(tree)(from_scratch=said)._arguments
        assert other.for_manager()["from_scratch"] is said
        assert other.for_ftrun() == []
    assert strategy._ddp_kwargs["bucket_cap_mb"] == 1.0
    same = strategy_class(tree)(timeout=timedelta(minutes=1))
    assert same._arguments.timeout_s == 60


BAD: list[tuple[dict[str, Any], str]] = [
    ({"min_replicas": 0}, "min_replicas=0"),
    ({"min_replicas": True}, "min_replicas=True"),
    ({"timeout": -1}, "timeout=-1"),
    ({"timeout": timedelta(0)}, "timeout="),
    ({"timeout": "30"}, "timeout='30' must be a timedelta or a number"),
    ({"timeout": float("inf")}, "timeout=inf"),
    ({"from_scratch": "no"}, "from_scratch='no' must be True .* False, or left out"),
    ({"manager_kwargs": ["max_retries"]}, "manager_kwargs=.*must be a dict"),
    ({"lighthouse": "host"}, "lighthouse='host'.*host:port"),
    ({"lighthouse": "a:1,a:1"}, "lighthouse='a:1,a:1' names one lighthouse twice"),
    ({"manager_kwargs": {"max_retry": 1}}, "did you mean max_retries"),
    ({"ftrun_options": "--standby 1"}, r"\['--standby', '1'\]"),
    ({"static_grap": True}, "FaultTolerantStrategy has no argument static_grap; did you mean static_graph="),
    ({"min_replica": 2}, "did you mean min_replicas="),
    ({"zebra": 1}, r"has no argument zebra \(it has broadcast_buffers, "),
    *[({"manager_kwargs": {name: 1}}, f"{name} cannot be given: ") for name in OURS],
    *[({"ftrun_options": [f"{name}=3"]}, f"{name} cannot be given: ") for name in OUR_OPTIONS],
    ({"ftrun_options": ["--run_id", "x"]}, "--run-id cannot be given"),
    ({"ftrun_options": ["--rdzv-id", "x"]}, r"--run-id \(as --rdzv-id\) cannot be given"),
    ({"ftrun_options": ["--nproc_per_node=2"]}, r"--nproc-per-replica \(as --nproc_per_node\) cannot be given"),
    ({"ftrun_options": ["--events"]}, r"ftrun_options=\['--events'\]: --events needs a value: DIR"),
    ({"ftrun_options": ["--standbye", "1"]}, "there is no option --standbye; did you mean --standby"),
    ({"ftrun_options": ["--standby", "1", "more"]}, "'more' is neither an option nor the value of one"),
    *[({name: object()}, f"{name}=.* cannot be used") for name in DDP_ONLY],
]


@pytest.mark.parametrize("tree", ["lightning.pytorch", "lightning.fabric"])
@pytest.mark.parametrize(("kwargs", "message"), BAD, ids=str)
def test_bad_arguments_are_refused_by_the_constructor(tree: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy_class(tree)(**kwargs)


@pytest.mark.parametrize("tree", ["lightning.pytorch", "lightning.fabric"])
@pytest.mark.parametrize("name", ["DeepSpeedPrecision", "FSDPPrecision"])
def test_plugins_for_other_strategies_are_refused_at_once(tree: str, name: str) -> None:
    """Lightning takes them, and the first batch fails with an error about dtypes."""
    trainer = tree == "lightning.pytorch"
    host = getattr(importlib.import_module(tree), "Trainer" if trainer else "Fabric")
    plugin = _compat.part(tree, f"plugins.{name}" if trainer else f"plugins.precision.{name}")
    with pytest.raises(ConfigError, match=f"{name} cannot be used.*precision='bf16-mixed'"):
        host(strategy="fault_tolerant", accelerator="cpu", devices=2, plugins=[plugin("bf16-mixed")])


def test_tpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"XLAAccelerator cannot be used .* use CPUs or GPUs"):
        check_surroundings(object.__new__(XLAAccelerator))  # to make one takes torch_xla


# ---------------------------------------------------------------- LightningCLI

COMMON = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false", "--seed_everything=false"]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's use of it
    return run_cli


def run_cli(arguments: list[str]) -> Any:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    return LightningCLI(BoringModel, run=False, save_config_callback=None, args=[*COMMON, *arguments]).trainer.strategy


def test_cli_by_name(cli: Any) -> None:
    assert type(cli(["--trainer.strategy=fault_tolerant"])) is strategy_class()


def test_cli_by_class_path(cli: Any) -> None:
    strategy: Any = cli(["--trainer.strategy=ft_lightning.FaultTolerantStrategy", "--trainer.strategy.min_replicas=2"])
    assert strategy._arguments.min_replicas == 2
    assert type(strategy) is strategy_class()
    with pytest.raises(SystemExit):
        cli(["--trainer.strategy=ft_lightning.FaultTolerantStrategy", "--trainer.strategy.min_replicas=two"])


@pytest.mark.parametrize("by", ["name", "class path"])
def test_yaml(cli: Any, by: str, tmp_path: pathlib.Path) -> None:
    named = "fault_tolerant"
    path = """
    class_path: ft_lightning.FaultTolerantStrategy
    init_args:
      timeout: "0:00:20"
      ftrun_options: ["--standby", "1"]
"""
    (tmp_path / "config.yaml").write_text(f"trainer:\n  strategy: {named if by == 'name' else path}")
    strategy: Any = cli(["--config", str(tmp_path / "config.yaml")])
    assert strategy._arguments.timeout_s == (None if by == "name" else 20)
    assert type(strategy) is strategy_class()
