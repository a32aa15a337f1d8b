"""The wrapper: torch's class from outside, its arguments, copies of it, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ft_core.ddp import DistributedDataParallel, PureDistributedDataParallel
from ft_core.errors import ConfigError, NotAvailableError, UsageError
from tests.reduction.fakes import FakeHost, FakeWork, wrap

if TYPE_CHECKING:
    from collections.abc import Callable


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_it_is_torchs_class_from_outside() -> None:
    model, host = wrap(build())
    assert isinstance(model, TorchDDP)
    assert isinstance(model, Joinable)
    assert host.reducers == [model.gradient_reducer]
    assert set(model.state_dict()) == {f"module.{name}" for name in build().state_dict()}
    assert model.device == torch.device("cpu")
    assert model.broadcast_buffers
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([])
    anything: Any = model
    assert anything._get_ddp_logging_data()["num_buckets"] == 1


def test_keyword_arguments_and_structures_pass_through() -> None:
    class Output(NamedTuple):
        y: Tensor
        other: dict[str, Any]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, *, scale: float) -> Output:
            return Output(self.layer(x) * scale, {"x": [x, None, "text"]})

    model, _ = wrap(Model())
    output = model(torch.ones(1, 2), scale=2.0)
    assert isinstance(output, Output)
    assert output.other["x"][1:] == [None, "text"]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dim": 0, "init_sync": False, "gradient_as_bucket_view": False, "static_graph": True, "check_reduction": True},
        {"process_group": None, "device_mesh": None, "mixed_precision": None, "skip_all_reduce_unused_params": False},
        {"device_ids": None, "output_device": None},
        {"device_ids": []},
        {"bucket_cap_mb": 1, "find_unused_parameters": True, "broadcast_buffers": False},
        {"bucket_cap_mb_list": [1, 5], "forward_sync_buffers": True},
    ],
)
def test_torchs_arguments_are_accepted(kwargs: dict[str, Any]) -> None:
    model, host = wrap(build(), **kwargs)
    host.start()
    model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bucket_cap": 3}, "unknown argument: bucket_cap$"),
        ({"process_group": object()}, "process_group=.* cannot be used: the group belongs to the Manager"),
        ({"device_mesh": object()}, "device_mesh"),
        ({"mixed_precision": object()}, "mixed_precision=.*autocast"),
        ({"delay_all_reduce_named_params": []}, "delay_all_reduce_named_params"),
        ({"skip_all_reduce_unused_params": True}, "skip_all_reduce_unused_params"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive"),
        ({"bucket_cap_mb_list": [1, "x"]}, "bucket_cap_mb_list must be positive"),
        ({"device_ids": 0}, "device_ids must be None or a list, got 0"),
        ({"device_ids": [0, 1]}, "one device"),
        ({"device_ids": [0]}, "device_ids=.* must be None for a module on cpu"),
        ({"output_device": 0}, "output_device needs device_ids"),
    ],
)
def test_what_cannot_work_is_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    host = FakeHost()
    with pytest.raises(ConfigError, match=message):
        DistributedDataParallel(host, build(), **kwargs)
    assert host.reducers == []


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LazyLinear(3), "weight is not initialized"),
        (nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
        (nn.Embedding(3, 2, sparse=True), "weight has sparse gradients"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (nn.ReLU(), "ReLU has no parameter"),
    ],
)
def test_parameters_that_cannot_work_are_refused_by_name(module: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrap(module)


def test_a_manager_that_refuses_the_reducer_leaves_no_hooks() -> None:
    class Refusing(FakeHost):
        def register_reducer(self, reducer: object) -> None:
            raise UsageError("too late")

    module = build()
    with pytest.raises(UsageError, match="too late"):
        DistributedDataParallel(Refusing(), module)
    module(torch.randn(3, 4)).sum().backward()


def test_frozen_parameters_may_not_thaw_and_trained_ones_not_freeze() -> None:
    module = build()
    module[0].bias.requires_grad_(False)
    model, host = wrap(module)
    host.start()
    model(torch.randn(3, 4)).sum().backward()
    assert module[0].bias.grad is None
    module[0].bias.requires_grad_(True)
    with pytest.raises(UsageError, match=r"requires_grad of 0\.bias was False .* is True now"):
        model(torch.randn(3, 4))
    module[0].bias.requires_grad_(False)
    module[2].weight.requires_grad_(False)
    with pytest.raises(UsageError, match=r"requires_grad of 2\.weight was True"):
        model(torch.randn(3, 4))


def replace(module: Any) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())


def add(module: Any) -> None:
    module[1].extra = nn.Parameter(torch.ones(1))


def exchange(module: Any) -> None:
    module[2] = nn.Linear(5, 2)


def append(module: Any) -> None:
    module.append(nn.Linear(2, 2))


@pytest.mark.parametrize("change", [replace, add, exchange, append])
def test_a_parameter_that_comes_after_the_wrapping_is_refused_by_name(change: Callable[[Any], None]) -> None:
    """Each replica would apply its own gradient to it, and nobody would notice."""
    module = build()
    model, host = wrap(module)
    host.start()
    change(module)
    with pytest.raises(UsageError, match=r"^(0|1|2|3)\.\w+ is trained and was not in the module when it was wrapped"):
        model(torch.randn(3, 4))


def test_a_module_may_change_where_nothing_that_is_trained_comes_in() -> None:
    module: Any = build()
    model, host = wrap(module)
    host.start()
    module.append(nn.ReLU())
    module[1].table = nn.Parameter(torch.ones(1), requires_grad=False)
    module[0].weight = module[0].weight
    model(torch.randn(3, 4))
    ahead = {f"module.{name}": value - 0.1 for name, value in module.named_parameters()}
    torch.func.functional_call(model, ahead, (torch.randn(3, 4),)).sum().backward()
    assert module[0].weight.grad is not None
    module[1].table.requires_grad_(True)
    with pytest.raises(UsageError, match=r"1\.table is trained"):
        model(torch.randn(3, 4))


def test_unwrap_lets_go_of_everything() -> None:
    module = build()
    model, host = wrap(module)
    assert model.unwrap() is module
    assert host.reducers == []
    module(torch.randn(3, 4)).sum().backward()
    with pytest.raises(UsageError, match="unwrapped"):
        model(torch.randn(3, 4))
    again = DistributedDataParallel(host, module)
    attempt = host.start()
    again(torch.randn(3, 4)).sum().backward()
    assert attempt.events == ["ready", "fence", "arrived"]


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
def test_a_copy_runs_forward_and_refuses_to_train(duplicate: Any) -> None:
    model, host = wrap(build(), bucket_cap_mb=3)
    host.start()
    model(torch.randn(3, 4)).sum().backward()
    twin: Any = duplicate(model)
    assert type(twin).__name__ == "DistributedDataParallel"
    assert twin.bucket_bytes_cap == 3 << 20
    assert host.reducers == [model.gradient_reducer]
    x = torch.randn(3, 4)
    model.eval(), twin.eval()
    assert torch.equal(twin(x), model(x))
    again = copy.deepcopy(twin)
    assert torch.equal(again(x), model(x))
    twin.train()
    with torch.no_grad():
        twin(x)
    with pytest.raises(UsageError, match="copy"):
        twin(x)
    with pytest.raises(UsageError, match="copy"):
        _ = twin.gradient_reducer
    fresh, host = wrap(twin.module.train())
    attempt = host.start()
    fresh(x).sum().backward()
    assert attempt.events == ["ready", "fence", "arrived"]


def test_join_and_hooks_say_what_is_missing() -> None:
    model, _ = wrap(build())
    for ask in (model.join_hook, model.join, lambda: model.join_process_group):
        with pytest.raises(ConfigError, match="Join needs a model and an optimizer of a Manager, not of a FakeHost"):
            ask()
    assert model.join_device == torch.device("cpu")
    with pytest.raises(UsageError, match="is a copy"):
        copy.deepcopy(model).join_hook()
    with pytest.raises(NotAvailableError, match="participating_rank"):
        _ = model._distributed_rank
    refusals: tuple[Callable[[], Any], ...] = (
        lambda: model.register_comm_hook(None, lambda *_: None),
        lambda: model._register_builtin_comm_hook(None),
        lambda: model._register_buffer_comm_hook(None, None),
        lambda: model._register_fused_optim(torch.optim.SGD),
        lambda: model._update_process_group(None),
    )
    for refuse in refusals:
        with pytest.raises(ConfigError):
            refuse()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", [True, False], ids=["compiled module wrapped", "wrapper compiled"])
def test_compile(inside: bool) -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    compile_: Any = torch.compile
    if inside:
        model, host = wrap(compile_(module, backend=backend), bucket_cap_mb=0.5)
    else:
        wrapper, host = wrap(module)
        model = compile_(wrapper, backend=backend)
    for _ in range(2):
        attempt = host.start()
        model.zero_grad()
        model(x).square().sum().backward()
        assert attempt.events == ["ready", "fence", "arrived"]
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))  # type: ignore[arg-type]
    assert len(compiled) == 1


def test_pure_reduces_one_gradient_at_a_time() -> None:
    class Manager:
        def __init__(self) -> None:
            self.works: list[FakeWork] = []

        def allreduce(self, tensor: Tensor) -> FakeWork:
            self.works.append(FakeWork(tensor, torch.ones_like(tensor), None))
            return self.works[-1]

    manager = Manager()
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[0].bias.requires_grad_(False)
    model = PureDistributedDataParallel(manager, module)
    x = torch.randn(3, 4)
    trained = [p for p in module.parameters() if p.requires_grad]
    expected = torch.autograd.grad(module(x).sum(), trained)
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        assert all(torch.equal(p.grad, g + 1) for p, g in zip(trained, expected, strict=True))  # type: ignore[arg-type]
    assert len(manager.works) == 6
    assert all(work.waited for work in manager.works)
