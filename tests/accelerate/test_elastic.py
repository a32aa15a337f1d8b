"""Elastic data under the Accelerator, in one group: what is committed, averaged, saved, and refused."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator
from ft_accelerate.elastic.loader import ElasticGroupLoader
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.data import ElasticDataLoader
from ft_core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
LENGTH = 23
running: list[Any] = []
"""Accelerators whose training is to be ended."""


@pytest.fixture(autouse=True)
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=50)
    settings = {
        "FT_LIGHTHOUSE": server.address().removeprefix("http://"), "FT_HOSTNAME": "127.0.0.1", "FT_REPLICA_GROUP": "0",
        "FT_NUM_REPLICA_GROUPS": "1", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield
    while running:
        running.pop().end_training()
    server.shutdown()
    forget()


def forget() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def data(length: int = LENGTH) -> TensorDataset:
    numbers = torch.arange(length)
    return TensorDataset(numbers, torch.stack([numbers % 7, numbers % 5], 1) / 10.0)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


class Setup:
    """A small model on elastic data."""

    def __init__(
        self, loader: Any = None, plugin: dict[str, Any] | None = None, batch_size: int = 3, **options: Any
    ) -> None:
        self.accelerator: Any = FaultTolerantAccelerator(
            fault_tolerance_plugin=FaultTolerancePlugin(**(plugin or {"elastic_data": True})), **options
        )
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loader = loader if loader is not None else DataLoader(data(), batch_size, shuffle=True)
        self.loader, self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            loader, model, optimizer, scheduler
        )
        running.append(self.accelerator)
        self.committed: list[int] = []
        self.sizes: list[int] = []
        self.ends: list[bool] = []

    def step(self, batch: Any, held: list[int], clip: float | None = None) -> bool:
        """One batch of a loop with accumulate(); True if a step was committed with it."""
        ids, x = batch
        held += ids.tolist()
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward((self.model(x) - x.sum(1, keepdim=True)).square().mean())
            if self.accelerator.sync_gradients and clip is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        if not self.accelerator.sync_gradients:
            return False
        self.ends.append(self.accelerator.gradient_state.end_of_dataloader)
        skipped = self.accelerator.optimizer_step_was_skipped
        if not skipped:
            self.committed += held
            self.sizes.append(len(held))
        held.clear()
        return not skipped

    def train(self, batches: int | None = None, clip: float | None = None) -> None:
        held: list[int] = []
        for batch in itertools.islice(self.loader, batches):
            self.step(batch, held, clip)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


def test_a_vetoed_batch_comes_again_in_the_same_epoch() -> None:
    s = Setup()
    assert isinstance(s.loader, ElasticGroupLoader)
    assert len(s.loader) == 8
    left = []
    for number, batch in enumerate(s.loader):
        left.append(s.loader.batches_left)
        if number in (2, 8):
            s.accelerator.manager.report_error(RuntimeError("injected"))
        assert s.step(batch, []) == (number not in (2, 8))
    assert sorted(s.committed) == list(range(LENGTH))
    assert s.sizes == [3] * 7 + [2]
    assert left == [7, 6, 5, 5, 4, 3, 2, 1, 0, 0]
    assert s.ends == [False] * 8 + [True, True]  # the last batch of the epoch was vetoed, and came again
    assert s.scheduler.get_last_lr()[0] == pytest.approx(0.1 * 0.9**8)
    assert s.accelerator.committed_steps == 8
    assert not s.accelerator.gradient_state.in_dataloader
    s.accelerator.end_training()


@pytest.mark.parametrize(
    ("plugin", "options", "sizes"),
    [
        ({}, {"gradient_accumulation_steps": 3}, [9, 9, 5]),
        ({"global_batch_size": 10, "max_micro_steps": 4}, {}, [10, 10, 3]),
    ],
)
def test_accumulation_is_one_process_on_the_whole_batch(
    plugin: dict[str, Any], options: dict[str, Any], sizes: list[int]
) -> None:
    """Also with clipping, a schedule, and the last micro-batch and the last step shorter than the others."""
    s = Setup(plugin={"elastic_data": True, **plugin}, **options)
    for _ in range(2):
        s.train(clip=0.2)
    assert s.sizes == sizes * 2
    assert all(sorted(s.committed[i : i + LENGTH]) == list(range(LENGTH)) for i in (0, LENGTH))
    assert s.committed[:LENGTH] != s.committed[LENGTH:]
    model, everything = net(), data().tensors[1]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    rates, batches, epoch = [], iter(s.committed), 0
    for size in s.sizes:
        x = everything[list(itertools.islice(batches, size))]
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**epoch
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        unit = 9 if options else 3
        rates.append(size)
        inside = sum(rates) % LENGTH or LENGTH
        epoch = (len(rates) - 1) // len(sizes) * -(-LENGTH // unit) + -(-inside // unit)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(s.weights, expected, rtol=1e-5, atol=1e-7)
    assert s.accelerator.gradient_accumulation_steps == options.get("gradient_accumulation_steps", 1)
    s.accelerator.end_training()


def test_a_step_without_accumulate_is_refused() -> None:
    s = Setup(plugin={"elastic_data": True, "global_batch_size": 6})
    _, x = next(iter(s.loader))
    s.accelerator.backward(s.model(x).mean())
    with pytest.raises(UsageError, match=r"with accelerator.accumulate\(model\)"):
        s.optimizer.step()


def test_epochs_go_on_and_evaluation_reads_everything() -> None:
    s = Setup()
    seen, evaluated = [], []
    rest = s.accelerator.prepare(DataLoader(data(), 10))
    for epoch in s.accelerator.epochs(3):
        seen.append(epoch)
        s.model.train()
        held: list[int] = []
        for number, batch in enumerate(s.loader):
            s.step(batch, held)
            if epoch == 1 and number == 1:
                break  # what is left of this epoch is dropped
        s.model.eval()
        with torch.no_grad():
            evaluated.append(sorted(i for ids, _ in rest for i in s.accelerator.gather_for_metrics(ids).tolist()))
            assert len(rest) == 3
            assert len([*s.loader]) == 8
    assert seen == [0, 1, 2]
    assert evaluated == [list(range(LENGTH))] * 3
    assert len(s.committed) == 2 * LENGTH + 6
    assert s.loader.epoch == 3
    s.accelerator.end_training()


def test_an_epoch_that_was_asked_for_and_is_behind_is_empty() -> None:
    s = Setup()
    s.loader.set_epoch(2)
    s.train()
    order = list(s.committed)
    s.loader.set_epoch(1)
    s.train()
    assert s.committed == order
    s.loader.set_epoch(3)
    s.train()
    assert len(s.committed) == 2 * LENGTH
    s.accelerator.end_training()


@pytest.mark.parametrize("own", [False, True])
def test_save_and_load_in_the_middle_of_an_epoch(own: bool, tmp_path: pathlib.Path) -> None:
    """The rest of the epoch, with another batch size."""

    def loader(batch_size: int) -> Any:
        if own:
            return ElasticDataLoader(data(), batch_size, shuffle=True)
        return DataLoader(data(), batch_size, shuffle=True)

    plugin = {} if own else {"elastic_data": True}
    s = Setup(loader(3), plugin)
    s.train()
    s.train(3)
    s.accelerator.save_state(str(tmp_path / "state"))
    done = s.committed[LENGTH:]
    s.accelerator.end_training()
    running.clear()
    forget()
    other = Setup(loader(2), plugin)
    other.accelerator.load_state(str(tmp_path / "state"))
    assert other.accelerator.committed_steps == 11
    assert list(itertools.islice(other.accelerator.epochs(3), 1)) == [1]
    for batch in other.accelerator.skip_first_batches(other.loader, 3):  # which load_state has done
        other.step(batch, [])
    assert sorted(done + other.committed) == list(range(LENGTH))
    assert other.sizes == [2] * 7
    assert other.loader.epoch == 2
    other.accelerator.end_training()


def test_learning_rates_follow_the_batch() -> None:
    rates: list[float] = []
    s = Setup(plugin={"elastic_data": True, "lr_scaling": "linear", "reference_batch_size": 6})
    s.optimizer.optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    held: list[int] = []
    for batch in s.loader:
        before = s.scheduler.get_last_lr()[0]
        s.step(batch, held)
        assert rates[-1] == pytest.approx(before * s.sizes[-1] / 6)
    assert len(rates) == 8
    s.accelerator.end_training()


def test_several_models_are_clipped_as_one_process_would() -> None:
    s = Setup(batch_size=5)
    other = s.accelerator.prepare(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        other.weight.fill_(2.0)
    _, x = next(iter(s.loader))
    s.accelerator.backward((s.model(x).detach() + other(x)).mean())
    expected = x.mean(0).norm()
    norm = s.accelerator.clip_grad_norm_(other.parameters(), 0.01)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    s.accelerator._run.window.vote()
    torch.testing.assert_close(other.weight.grad.norm(), torch.tensor(0.01), rtol=1e-4, atol=0)


# ---------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"global_batch_size": 8}, "global_batch_size=8 has no effect without elastic_data"),
        ({"elastic_data": True, "max_micro_steps": 8}, "max_micro_steps=8 has no effect without global_batch_size"),
        ({"lr_scaling": "linear"}, "lr_scaling='linear' has no effect without reference_batch_size"),
        ({"reference_batch_size": 4}, "reference_batch_size=4 has no effect without lr_scaling"),
        ({"lr_scaling": "lienar", "reference_batch_size": 4}, "did you mean 'linear'"),
        ({"on_exhausted": "stop-all"}, "must be one of shadow, leave, stop_all; did you mean 'stop_all'"),
        ({"elastic_data": True, "global_batch_size": 0}, "global_batch_size=0 must be a whole number, 1 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FaultTolerancePlugin(**fields)


@pytest.mark.parametrize(
    ("plugin", "options", "text"),
    [
        ({"global_batch_size": 8}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 with global_b"),
        ({}, {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, "dispatch_batches=True cannot"),
        ({}, {"dataloader_config": DataLoaderConfiguration(split_batches=True)}, "split_batches=True cannot be used"),
        ({}, {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}, "save_state keeps the"),
        (
            {}, {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)},
            "sync_each_batch=True cannot be used with elastic data",
        ),
    ],
)  # fmt: skip
def test_settings_that_contradict_it_are_refused(plugin: dict[str, Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Setup(plugin={"elastic_data": True, **plugin}, **options)


def test_a_policy_for_running_out_changes_nothing_as_all_run_out_together() -> None:
    uneven = DataLoaderConfiguration(even_batches=False)
    s = Setup(plugin={"on_exhausted": "leave", "elastic_data": True}, dataloader_config=uneven)
    s.train()
    assert sorted(s.committed) == list(range(LENGTH))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0))


def test_a_loader_is_looked_at_when_it_is_read_for_training() -> None:
    s = Setup(DataLoader(Stream(), 2))
    with torch.no_grad():
        s.model.eval()
        assert len([*s.loader]) == 3
    s.model.train()
    with pytest.raises(ConfigError, match="Stream is an IterableDataset"):
        next(iter(s.loader))


def test_one_loader_is_trained_on() -> None:
    s = Setup()
    other = s.accelerator.prepare(DataLoader(data(), 2))
    s.train(2)
    with pytest.raises(ConfigError, match="two elastic loaders are read for training"):
        next(iter(other))
    with pytest.raises(UsageError, match="no sample of an epoch is skipped"):
        next(iter(s.accelerator.skip_first_batches(s.loader, 2)))
    s.accelerator.end_training()
    with pytest.raises(UsageError, match=r"end_training\(\) was called"):
        s.train(1)


def test_a_loader_of_the_users_own_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=2.*accumulation_steps=1"):
        Setup(ElasticDataLoader(data(), 2), {}, gradient_accumulation_steps=2)
    forget()
    with pytest.raises(ConfigError, match=r"group_rank=1, num_replicas=2.*on rank 0 of a replica group of 1"):
        Setup(ElasticDataLoader(data(), 2, group_rank=1, num_replicas=2), {})


def test_without_fault_tolerance_it_is_a_plain_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FT_LIGHTHOUSE")
    monkeypatch.delenv("FT_REPLICA_GROUP")
    accelerator = FaultTolerantAccelerator(cpu=True)
    loader = accelerator.prepare(ElasticDataLoader(data(), 4, shuffle=True))
    assert sorted(i for ids, _ in loader for i in ids.tolist()) == list(range(LENGTH))
