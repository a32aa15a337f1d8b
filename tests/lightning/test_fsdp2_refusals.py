"""What `strategy="fault_tolerant_fsdp2"` refuses, in which words; its names, and where its checkpoints are put."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ft_lightning
from ft_core.errors import ConfigError
from ft_core.reduction.bucket_plan import BucketSettings
from ft_core.reduction.sharded.inventory import take_shards
from ft_lightning import _compat, registration
from ft_lightning.arguments import OURS
from ft_lightning.classes import fsdp2_strategy_class, strategy_class
from ft_lightning.trainer import sharded_arguments as refusals
from ft_lightning.trainer.checkpoint_folders import replace

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "fault_tolerant_fsdp2"
TREES = [tree for tree in _compat.TREES if importlib.util.find_spec(tree.partition(".")[0])]
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("tree", TREES)
def test_one_class_per_tree(tree: str) -> None:
    cls = fsdp2_strategy_class(tree)
    assert cls is fsdp2_strategy_class(tree)
    assert cls.__name__ == "FaultTolerantFSDP2Strategy"
    assert "data_parallel_size" in str(cls.__doc__)
    assert issubclass(cls, _compat.part(tree, "strategies.ModelParallelStrategy"))
    assert not issubclass(cls, strategy_class(tree))
    strategies = importlib.import_module(f"{tree}.strategies")
    registry = getattr(strategies, registration.REGISTRIES[f"{tree}.strategies"])
    assert type(registry.get(NAME)) is cls


def test_the_package_names_it() -> None:
    assert ft_lightning.FaultTolerantFSDP2Strategy is fsdp2_strategy_class("lightning")
    with pytest.raises(ConfigError, match=r"'lightning\.fabric'.*lightning\.pytorch"):
        fsdp2_strategy_class("lightning.fabric")


def test_arguments_reach_lightning_and_the_manager() -> None:
    strategy: Any = fsdp2_strategy_class()(
        min_replicas=2, timeout=20, data_parallel_size=4, tensor_parallel_size=2, save_distributed_checkpoint=False
    )
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (4, 2)
    assert strategy._save_distributed_checkpoint is False
    assert strategy._arguments.for_manager()["min_replica_size"] == 2


# ---------------------------------------------------------------- arguments

BAD: list[tuple[dict[str, Any], str]] = [
    ({"min_replicas": 0}, "min_replicas=0"),
    ({"data_parallel_size": 0}, "data_parallel_size=0 must be 'auto' or a whole number"),
    ({"tensor_parallel_size": "all"}, "tensor_parallel_size='all' must be 'auto' or a whole number"),
    ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1 must be"),
    (
        {"tensor_parallel": 2},
        "FaultTolerantFSDP2Strategy has no argument tensor_parallel; did you mean tensor_parallel",
    ),
    ({"sharding_strategy": "HYBRID_SHARD"}, "sharding_strategy='HYBRID_SHARD' cannot be used .*ftrun --replicas N"),
    ({"device_mesh": (2, 2)}, r"device_mesh=\(2, 2\) cannot be used .*ftrun --replicas N"),
    ({"find_unused_parameters": False}, "find_unused_parameters=False cannot be used .*leave it out"),
    *[({"manager_kwargs": {name: 1}}, f"{name} cannot be given: ") for name in OURS],
    *[({name: object()}, f"{name}=.* cannot be used with strategy='{NAME}'") for name in refusals.REFUSED],
]


@pytest.mark.parametrize(("kwargs", "message"), BAD, ids=str)
def test_bad_arguments_are_refused_by_the_constructor(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fsdp2_strategy_class()(**kwargs)


@pytest.mark.parametrize(
    ("data", "tensor", "ranks", "mesh"),
    [
        ("auto", "auto", 4, (4, 1)),
        ("auto", 2, 4, (2, 2)),
        (2, 2, 4, (2, 2)),
        (1, 4, 4, (1, 4)),
        ("auto", "auto", 1, (1, 1)),
    ],
)
def test_sizes_of_the_mesh(data: Any, tensor: Any, ranks: int, mesh: tuple[int, int]) -> None:
    assert refusals.mesh_sizes(data, tensor, ranks) == mesh


@pytest.mark.parametrize(("data", "tensor", "ranks"), [(2, "auto", 4), (4, 2, 4), ("auto", 3, 4), ("auto", 2, 1)])
def test_a_mesh_that_is_not_the_groups(monkeypatch: pytest.MonkeyPatch, data: Any, tensor: Any, ranks: int) -> None:
    """Is refused when the Trainer is made."""
    for name, value in {"FT_LIGHTHOUSE": "host:1", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    strategy: Any = fsdp2_strategy_class()(data_parallel_size=data, tensor_parallel_size=tensor)
    words = rf"data_parallel_size={data!r} and tensor_parallel_size={tensor!r} .* this replica group has {ranks} rank"
    with pytest.raises(ConfigError, match=words + ".*ftrun --nproc-per-replica"):
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=ranks, **QUIET)


@pytest.mark.parametrize("precision", ["64-true", "16-mixed"])
def test_precisions_of_other_strategies(precision: str) -> None:
    """Lightning asks only where a strategy object was passed; on CPUs it takes bf16-mixed for 16-mixed."""
    if precision == "16-mixed":
        refusals.check_precision("bf16-mixed")
        with pytest.raises(ConfigError, match=r"precision='16-mixed' cannot be used .*'bf16-mixed'"):
            refusals.check_precision(precision)
        return
    with pytest.raises(ConfigError, match=r"precision='64-true' cannot be used .*'bf16-mixed'"):
        pl.Trainer(strategy=NAME, accelerator="cpu", devices=1, precision="64-true", **QUIET)


def test_plugins_of_fsdp1() -> None:
    plugin = _compat.part("lightning.pytorch", "plugins.FSDPPrecision")("bf16-mixed")
    with pytest.raises(ConfigError, match=rf"FSDPPrecision cannot be used with strategy='{NAME}'"):
        pl.Trainer(strategy=NAME, accelerator="cpu", devices=1, plugins=[plugin], **QUIET)


def test_training_takes_a_launcher() -> None:
    trainer = pl.Trainer(strategy=NAME, accelerator="cpu", devices=2, **QUIET)
    with pytest.raises(ConfigError, match=r"without a launcher.*ftrun --replicas 2 --nproc-per-replica 2"):
        trainer.fit(Model())


# ---------------------------------------------------------------- models


class Model(pl.LightningModule):
    """Two layers; `fully_shard` is called on what `how` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Never comes."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 4))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process is rank 0 of a group of four, as far as meshes know."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_that_is_not_sharded() -> None:
    with pytest.raises(ConfigError, match=r"Model is not sharded: .*Model\.configure_model\(\) to call .*fully_shard"):
        refusals.check_model(Model())


@pytest.mark.usefixtures("four_ranks")
def test_models_that_are_not_sharded_as_a_whole() -> None:
    mesh, model = init_device_mesh("cpu", (4,)), Model()
    fully_shard(model.last, mesh=mesh)
    with pytest.raises(ConfigError, match=r"parameter first\.weight is trained and not sharded"):
        refusals.check_model(model)
    model.first.requires_grad_(False)
    refusals.check_model(model)
    take_shards([model.last], BucketSettings(), 4)


@pytest.mark.usefixtures("four_ranks")
def test_replicas_inside_a_group() -> None:
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), Model()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    refusals.check_model(model)
    with pytest.raises(ConfigError, match=r"replicate dimension of 2 inside the replica group.* 2 times as many"):
        take_shards([model], BucketSettings(), 4)


def test_modules_in_fsdp1() -> None:
    model = Model()
    model.first = object.__new__(torch.distributed.fsdp.FullyShardedDataParallel)  # type: ignore[assignment]
    nn.Module.__init__(model.first)
    with pytest.raises(ConfigError, match=r"Model has modules in FullyShardedDataParallel \(FSDP1\), .*fully_shard"):
        refusals.check_model(model)


@pytest.mark.parametrize(
    "callback",
    [
        pl.callbacks.StochasticWeightAveraging(0.1),
        pl.callbacks.ModelPruning("l1_unstructured"),
        pl.callbacks.BackboneFinetuning(),
    ],
    ids=lambda made: type(made).__name__,
)
def test_callbacks_that_copy_or_change_the_module(callback: Any) -> None:
    trainer = pl.Trainer(accelerator="cpu", callbacks=[callback], **QUIET)
    with pytest.raises(ConfigError, match=rf"the callback .* cannot be used with strategy='{NAME}'"):
        refusals.check_trainer(trainer)


def test_elastic_data() -> None:
    refusals.check_elastic(1, 1)
    with pytest.raises(ConfigError, match=r"elastic data with tensor_parallel_size=2"):
        refusals.check_elastic(2, 1)
    with pytest.raises(ConfigError, match=r"elastic data with 2 modules"):
        refusals.check_elastic(1, 2)


# ---------------------------------------------------------------- the place of a checkpoint


@pytest.fixture
def new(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint beside its place."""
    made = tmp_path / ".last.ckpt.3.partial"
    made.mkdir()
    (made / "meta.pt").write_text("new")
    return made


def test_a_folder_replaces_a_checkpoint_as_a_whole(new: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "last.ckpt"
    target.mkdir()
    for name in ("meta.pt", "__9_0.distcp"):
        (target / name).write_text("old")
    replace(str(new), str(target))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert {path.name: path.read_text() for path in target.iterdir()} == {"meta.pt": "new"}


@pytest.mark.parametrize("kind", ["nothing", "file", "link"])
def test_a_folder_replaces_a_file(new: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    target, other = tmp_path / "last.ckpt", tmp_path / "other"
    other.mkdir()
    if kind == "file":
        target.write_text("old")
    elif kind == "link":
        target.symlink_to(other)
    replace(str(new), str(target))
    assert (target / "meta.pt").read_text() == "new"
    assert not target.is_symlink()
    assert list(other.iterdir()) == []


def test_other_things_in_the_place_stay(new: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes").write_text("mine")
    replace(str(new), str(target))
    assert sorted(path.name for path in target.iterdir()) == ["meta.pt", "notes"]
    assert not new.exists()
    file = tmp_path / ".mine.4.partial"
    file.write_text("new")
    (target / "meta.pt").unlink()
    with pytest.raises(IsADirectoryError, match=r"mine is a folder, and no checkpoint"):
        replace(str(file), str(target))
