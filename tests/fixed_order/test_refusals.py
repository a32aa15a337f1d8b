"""What cannot work is refused when the module is wrapped, or when it changes; the message says what to do."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ft_core.data import ElasticDataLoader, ElasticSampler
from ft_core.data.seeded_dataset import EpochIndices, SeededDataset
from ft_core.errors import ConfigError, UsageError
from ft_core.fixed_order import FixedOrderDataParallel, FixedOrderPlan
from tests.fixed_order.host import Host, loader_on, wrap
from tests.fixed_order.reference import CLASSES, FEATURES, Points


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def test_the_loader_must_cut_steps_the_same_way_always() -> None:
    host = Host()
    with pytest.raises(ConfigError, match="fixed_micro_batches=True"):
        wrap(linear(), host, fixed_micro_batches=False)
    with pytest.raises(ConfigError, match=r"needs an ElasticDataLoader .* got DataLoader"):
        FixedOrderDataParallel(host.manager, linear(), DataLoader(Points(4)))  # type: ignore[arg-type]
    assert host.reducers == []


def test_a_sampler_will_do() -> None:
    host = Host()
    sampler = ElasticSampler(40, 2, global_batch_size=8, fixed_micro_batches=True)
    FixedOrderDataParallel(host.manager, linear(), sampler)
    assert host.listeners == [sampler]


def test_the_loader_belongs_to_one_manager_and_one_module() -> None:
    _, host, loader = wrap(linear())
    with pytest.raises(ConfigError, match="one sampler, one Manager"):
        FixedOrderDataParallel(Host().manager, linear(), loader)
    with pytest.raises(ConfigError, match="one FixedOrderDataParallel per loader"):
        FixedOrderDataParallel(host.manager, linear(), loader)
    assert len(host.reducers) == 1


def test_groups_of_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="replica group of 2 ranks"):
        wrap(linear(), Host(ranks=2))
    with pytest.raises(ConfigError, match="replica group of 3 ranks"):
        wrap(linear(), num_replicas=3)


def test_deterministic_algorithms_are_demanded() -> None:
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ConfigError, match="use_deterministic_algorithms"):
        wrap(linear())
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(ConfigError, match="without warn_only"):
        wrap(linear())


def test_flushing_denormals_is_refused() -> None:
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(ConfigError, match="set_flush_denormal"):
            wrap(linear())
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_running_statistics_are_refused(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match="running statistics are kept by 1"):
        wrap(nn.Sequential(linear(), module))
    model, _, _ = wrap(nn.Sequential(linear(), module.eval()))
    model.train()
    with pytest.raises(UsageError, match="running statistics are kept by 1"):
        model(torch.zeros(2, FEATURES))


def test_other_modules_that_cannot_be_reduced_are_refused() -> None:
    with pytest.raises(ConfigError, match="sparse"):
        wrap(nn.Embedding(3, 3, sparse=True))
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        wrap(linear().requires_grad_(False))


def test_settings_may_not_change_afterwards() -> None:
    model, _, loader = wrap(linear())
    x, _y = next(iter(loader))
    torch.set_num_threads(2)
    with pytest.raises(UsageError, match="now it is '2 threads"):
        model(x)
    torch.set_num_threads(1)
    model(x)


def test_parameters_may_be_frozen_and_not_unfrozen() -> None:
    module: Any = nn.Sequential(linear(), nn.Linear(CLASSES, 1))
    module[0].bias.requires_grad_(False)
    model, _, loader = wrap(module)
    x, _y = next(iter(loader))
    module[1].bias.requires_grad_(False)
    model(x)
    module[0].bias.requires_grad_()
    with pytest.raises(UsageError, match="unfrozen"):
        model(x)
    module[0].bias.requires_grad_(False)
    module[0].bias = None
    model(x)
    module[0].bias = nn.Parameter(torch.zeros_like(module[0].weight[:, 0]))
    with pytest.raises(UsageError, match=r"0\.bias is trained and was not in the module"):
        model(x)


def test_replicas_that_compute_otherwise_have_another_layout() -> None:
    model, host, _ = wrap(linear())
    plan = host.reducers[0].plan
    assert isinstance(plan, FixedOrderPlan)
    assert f"torch {torch.__version__}, cpu: " in plan.describe()[-1]
    assert "1 threads" in plan.describe()[-1]
    torch.set_num_threads(2)
    _, other, _ = wrap(model.module)
    assert other.reducers[0].plan.digest != plan.digest


def test_copies_are_refused() -> None:
    model, _, _ = wrap(linear())
    with pytest.raises(UsageError, match=r"copy \.module"):
        pickle.dumps(model)


def test_no_sync_is_accepted_and_not_needed() -> None:
    model, _, loader = wrap(linear())
    x, _y = next(iter(loader))
    with model.no_sync():
        model(x).sum().backward()


def test_a_seeded_dataset_is_read_through_an_elastic_loader() -> None:
    data = SeededDataset(Points(8, noise=1.0), seed=3)
    assert (len(data), repr(data)) == (8, "SeededDataset(Points, seed=3)")
    with pytest.raises(UsageError, match="epoch"):
        data[0]
    with pytest.raises(UsageError, match="ElasticDataLoader"):
        next(iter(DataLoader(data)))
    host = Host()
    loader = ElasticDataLoader(data, 4, manager=host)
    seen = []
    for _ in loader.epochs(2):
        for x, _y in loader:
            seen.append(x)
            host.end()
    assert not torch.equal(seen[0], seen[2])  # another epoch
    again = ElasticDataLoader(data, 8, manager=Host())
    assert torch.equal(next(iter(again))[0], torch.cat(seen[:2]))  # whatever the batches


def test_a_seeded_dataset_leaves_the_generators_alone() -> None:
    indices = EpochIndices(7, [1, 2])
    before = torch.get_rng_state(), random.getstate()
    assert len(SeededDataset(Points(8, noise=1.0)).__getitems__(indices)) == 2
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert pickle.loads(pickle.dumps(indices)).epoch == 7


def test_a_plain_loader_keeps_working() -> None:
    """Indices that know their epoch are still a list."""
    x, _y = next(iter(loader_on(Host())))
    assert x.shape == (2, FEATURES)
