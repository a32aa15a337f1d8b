"""What `replicate` refuses, and state functions that communicate. In this process, which is a whole group."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.testing._internal.distributed.fake_pg import FakeStore

from ft_core import Manager, ProcessGroupGloo, fsdp
from ft_core.coordination import LighthouseServer
from ft_core.errors import ConfigError, UsageError
from ft_core.fsdp import replicate, shard_settings
from ft_core.reduction.sharded.inventory import take_shards
from ft_core.runtime.no_collectives import NoCollectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def manager() -> Iterator[Manager]:
    server = LighthouseServer("127.0.0.1:0", boot_window_ms=0, token="")
    made = Manager(
        pg=ProcessGroupGloo(), load_state_dict=lambda _: None, state_dict=dict, min_replica_size=1, rank=0,
        world_size=1, lighthouse_addr=server.address(), replica_id="one", timeout=timedelta(seconds=10),
    )  # fmt: skip
    yield made
    made.shutdown()
    server.shutdown()


def sharded(module: nn.Module, *names: str, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,) * max(1, len(names)), mesh_dim_names=names or None)
    fully_shard(module, mesh=mesh[names[0]] if len(names) > 1 else mesh, **options)
    return module


class WithAdapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(2, 2), nn.Linear(2, 2)


def adapter_left_out() -> nn.Module:
    module = WithAdapter()
    return sharded(module, ignored_params=set(module.adapter.parameters()))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return sharded(nn.Linear(2, 2))


def frozen() -> nn.Module:
    return sharded(nn.Linear(2, 2).requires_grad_(requires_grad=False))


@pytest.mark.parametrize(
    ("made", "ranks", "words"),
    [
        (lambda: nn.Linear(2, 2), 1, r"replicate\(Linear\): the module is not sharded; call torch's fully_shard"),
        (adapter_left_out, 1, r"parameter adapter.weight is trained and not sharded \(ignored_params"),
        (on_meta, 1, r"parameter weight is on the meta device: materialize it"),
        (frozen, 1, r"no parameter requires a gradient"),
        (
            lambda: sharded(nn.Linear(2, 2)),
            2,
            r"parameter weight is sharded on a mesh of 1 processes, and this replica",
        ),
    ],
)
def test_models_that_cannot_be_replicated(made: Callable[[], nn.Module], ranks: int, words: str) -> None:
    module = made()
    with pytest.raises(ConfigError, match=words):
        take_shards((module,), shard_settings((module,), None), ranks)


@pytest.mark.parametrize("cap", [0, -1.0, float("nan"), float("inf"), True, "4"])
def test_bucket_sizes(cap: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a number of MiB, more than 0"):
        shard_settings((nn.Linear(1, 1),), cap)


def test_no_module() -> None:
    with pytest.raises(ConfigError, match="pass the sharded model"):
        shard_settings((), None)


def test_one_that_is_replicated_already(manager: Manager) -> None:
    module = sharded(nn.Linear(2, 2))
    replicated = replicate(manager, module)
    with pytest.raises(ConfigError, match=r"replicate\(FSDPLinear\): it is replicated already"):
        replicate(manager, module)
    replicated.unwrap()
    replicated.unwrap()
    replicate(manager, module).unwrap()


def test_parameters_that_were_replaced(manager: Manager) -> None:
    module = sharded(nn.Linear(2, 2))
    replicated = replicate(manager, module)
    manager.start_quorum()
    module(torch.ones(1, 2)).sum().backward()
    assert manager.should_commit()
    module.load_state_dict({key: value.clone() for key, value in module.state_dict().items()}, assign=True)
    manager.start_quorum()
    with pytest.raises(UsageError, match=r"parameter weight was replaced after replicate\(\), as load_state_dict"):
        module(torch.ones(1, 2))
    with torch.no_grad():
        module(torch.ones(1, 2))  # nothing would be reduced
    replicated.unwrap()
    module(torch.ones(1, 2)).sum().backward()


def test_parameters_that_were_frozen_before(manager: Manager) -> None:
    """Their gradient would stay inside the group, and nothing would say so."""
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(requires_grad=False)
    replicated = replicate(manager, sharded(module))
    manager.start_quorum()
    module(torch.ones(1, 2)).sum().backward()
    assert manager.should_commit()
    module[0].requires_grad_(requires_grad=True)
    manager.start_quorum()
    with pytest.raises(UsageError, match=r"requires_grad of 0.weight was False at replicate\(\), and is True now"):
        module(torch.ones(1, 2))
    replicated.unwrap()


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_another_method_than_forward(manager: Manager) -> None:
    """`register_fsdp_forward_method`: no hook of a module runs, and gradients are averaged all the same."""
    module: Any = sharded(WithMethod())
    register_fsdp_forward_method(module, "encode")
    replicated = replicate(manager, module)
    for _ in range(2):
        manager.start_quorum()
        module.zero_grad()
        module.encode(torch.ones(1, 2)).sum().backward()
        assert replicated.gradient_reducer.unsettled, "before they are clipped"
        assert manager.should_commit()
        assert torch.equal(module.inner.weight.grad.full_tensor(), torch.ones(2, 2))
    replicated.unwrap()


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda _: dist.all_reduce(torch.ones(1)), "allreduce_"),
        (lambda _: dist.all_gather_object([None], 1), "gather"),
        (lambda _: dist.broadcast_object_list([1]), "broadcast_"),
        (lambda _: dist.barrier(), "barrier"),
    ],
)
def test_state_functions_that_communicate(function: Callable[[Any], object], operator: str) -> None:
    """What gathers shards does so with two ranks only: test_faults.py."""
    module = sharded(nn.Linear(2, 2))
    words = rf"state function 'job' communicates inside the group \(.*{operator}"
    with pytest.raises(ConfigError, match=words), NoCollectives("job"):
        function(module)


def test_state_functions_that_do_not() -> None:
    module: Any = sharded(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with NoCollectives("job"):
        state: Any = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "sum": module.weight.data * 2}
        torch.get_rng_state()
    assert state["model"]["weight"].placements == module.weight.placements


def test_a_mesh_dimension_over_which_nothing_is_sharded() -> None:
    """With two ranks, whose collectives are none: nothing is communicated before it is refused."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "copies"))
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=mesh["shard"])
    with pytest.raises(ConfigError, match=r"no parameter is sharded over mesh dimension 'copies', so its ranks hold"):
        take_shards((module,), shard_settings((module,), None), 2)


def test_a_mesh_of_which_several_dimensions_were_made_one() -> None:
    """As Accelerate does with those of a ParallelismConfig."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("here", "there"))
    module = nn.Linear(4, 4)
    fully_shard(module, mesh=mesh["here", "there"]._flatten("both"))
    lines = take_shards((module,), shard_settings((module,), None), 4).plan.describe()
    assert "on mesh (4,) (both) of [0, 1, 2, 3]" in lines[0]


def test_gradients_have_one_copy_which_is_the_buckets(manager: Manager) -> None:
    """FSDP2's own reduced gradients are given back as soon as they are in a bucket."""
    module: Any = sharded(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    replicated = replicate(manager, module)
    flats = [bucket.flat for bucket in replicated.gradient_reducer._memory.buckets]
    shards = sum(parameter._local_tensor.nbytes for parameter in module.parameters())
    assert shards <= sum(flat.nbytes for flat in flats) < shards + 4096, "the shards, and the vote behind them"
    manager.start_quorum()
    module(torch.ones(1, 64)).sum().backward()
    assert manager.should_commit()
    memory = {flat.untyped_storage().data_ptr() for flat in flats}
    assert {p.grad._local_tensor.untyped_storage().data_ptr() for p in module.parameters()} <= memory
    replicated.unwrap()


def test_compiled_autograd_where_torch_skips_the_hooks(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 does not; before 2.12 it did."""
    monkeypatch.setattr(fsdp, "SKIPS_HOOKS", False)
    module = sharded(nn.Linear(2, 2))
    replicated = replicate(manager, module)
    manager.start_quorum()
    with torch._dynamo.config.patch(compiled_autograd=True):
        module(torch.ones(1, 2))
        monkeypatch.setattr(fsdp, "SKIPS_HOOKS", True)
        with pytest.raises(UsageError, match=r"compiled_autograd: this version of torch skips the hooks"):
            module(torch.ones(1, 2))
    replicated.unwrap()
