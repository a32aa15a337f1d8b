"""`ElasticSampler`: what a training loop sees of it, checkpoints, epochs, and mistakes it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, Dataset

from ft_core.data import ElasticSampler
from ft_core.errors import ConfigError, UsageError
from tests.data.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Iterator


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def batches(sampler: ElasticSampler, manager: Membership) -> Iterator[list[int]]:
    """A training loop that commits every step."""
    for batch in sampler:
        yield batch
        if sampler.last_micro_batch:
            manager.vote()


def test_all_readers_together_read_everything_once() -> None:
    managers = [Membership(groups=3, place=place) for place in range(3)]
    samplers = [ElasticSampler(24, 2, manager=m, shuffle=True) for m in managers]
    seen = [list(batches(s, m)) for s, m in zip(samplers, managers, strict=True)]
    assert sorted(i for parts in seen for batch in parts for i in batch) == list(range(24))
    assert [len(parts) for parts in seen] == [len(s) for s in samplers] == [4, 4, 4]
    assert all(s.epoch == 1 for s in samplers)


def test_a_vetoed_step_comes_again_and_a_change_divides_what_is_left() -> None:
    manager = Membership(groups=2, place=1)
    sampler = ElasticSampler(10, 2, manager=manager, shuffle=False)
    loop = iter(sampler)
    assert next(loop) == [2, 3]
    manager.vote(commit=False)
    assert next(loop) == [2, 3]
    manager.vote()
    manager.groups, manager.place = 3, 0
    assert next(loop) == [4, 5]
    manager.vote(commit=False)
    manager.groups = 1
    assert next(loop) == [4, 5]
    manager.vote()
    assert next(loop) == [6, 7]
    manager.vote()
    assert next(loop) == [8, 9]
    manager.vote()
    assert list(loop) == []
    assert manager.quorums == 6


def test_micro_batches_and_weights() -> None:
    manager = Membership(groups=2)
    sampler = ElasticSampler(10, 2, manager=manager, shuffle=False, global_batch_size=10)
    seen = []
    for batch in sampler:
        seen.append((batch, sampler.weight, sampler.last_micro_batch, manager.weight))
        assert sampler.step_samples == 10
        if sampler.last_micro_batch:
            manager.vote()
    assert seen == [([0, 1], 2, False, 2), ([2, 3], 2, False, 4), ([4], 1, True, 5)]


def test_who_does_not_take_part_gets_fillers() -> None:
    manager = Membership(groups=2, place=None)
    sampler = ElasticSampler(10, 2, manager=manager, shuffle=False)
    loop = iter(sampler)
    assert next(loop) == [0, 1]
    assert (sampler.weight, manager.weight, sampler.last_micro_batch) == (0, 0, True)
    manager.vote()
    assert next(loop) == [4, 5]


def test_ranks_of_a_group_read_parts_of_its_share() -> None:
    seen = []
    for place in range(2):
        for rank in range(2):
            manager = Membership(groups=2, place=place)
            sampler = ElasticSampler(9, 2, manager=manager, shuffle=False, group_rank=rank, num_replicas=2)
            seen.append([batch if sampler.weight else [] for batch in batches(sampler, manager)])
    assert seen == [[[0, 1], [8]], [[2, 3], []], [[4, 5], []], [[6, 7], []]]


def test_the_samples_of_a_group_whose_gradient_is_missing_come_again() -> None:
    manager = Membership(groups=2)
    sampler = ElasticSampler(8, 1, manager=manager, shuffle=False, num_replicas=2)
    loop = iter(sampler)
    assert next(loop) == [0]
    sampler.committed({0})  # the other group's 2 and 3 are not in it
    assert next(loop) == [2]
    manager.vote()
    assert sampler.state_dict()["returned"] == []
    assert sampler.state_dict()["taken"] == 6


def test_a_sample_order_per_epoch_the_same_for_all() -> None:
    manager = Membership()
    sampler = ElasticSampler(Numbers(30), 30, manager=manager, seed=4)
    epochs = [next(batches(sampler, manager)) for _ in sampler.epochs(1)]
    assert sorted(epochs[0]) == list(range(30))
    again = ElasticSampler(30, 30, manager=Membership(groups=1), seed=4)
    assert next(iter(again)) == epochs[0]
    again.vetoed()
    again.set_epoch(1)
    assert next(iter(again)) != epochs[0]


def test_epochs_and_a_newcomer_that_lands_in_the_third() -> None:
    manager = Membership()
    sampler = ElasticSampler(4, 2, manager=manager)
    donor = ElasticSampler(4, 2, manager=Membership())
    donor.set_epoch(2)
    next(iter(donor))
    donor.committed()
    manager.on_quorum = lambda: sampler.adopt(donor.state_dict()) if sampler.epoch == 0 else None
    assert [(epoch, len(list(batches(sampler, manager)))) for epoch in sampler.epochs(4)] == [(2, 1), (3, 2)]


def test_set_epoch_skips_what_is_behind() -> None:
    manager = Membership()
    sampler = ElasticSampler(4, 2, manager=manager)
    counts = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        if epoch == 0:
            sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "taken": 2, "steps": 1})
            sampler.set_epoch(2)
        counts.append(len(list(batches(sampler, manager))))
    assert counts == [1, 0, 0, 2]


def test_an_epoch_that_was_left_early_is_over() -> None:
    manager = Membership()
    sampler = ElasticSampler(6, 2, manager=manager)
    for _ in sampler.epochs(2):
        next(batches(sampler, manager))
    assert sampler.epoch == 2
    assert manager.quorums == 2


def test_a_checkpoint_in_the_middle_of_an_epoch() -> None:
    manager = Membership()
    sampler = ElasticSampler(12, 3, manager=manager, seed=1)
    loop = batches(sampler, manager)
    seen = [next(loop), next(loop)]
    next(loop)  # the second is committed, the third not
    state = sampler.state_dict()
    other = Membership(groups=1)
    resumed = ElasticSampler(12, 4, manager=other, seed=1)
    resumed.load_state_dict(state)
    seen += list(batches(resumed, other))
    assert sorted(i for batch in seen for i in batch) == list(range(12))


def test_under_a_plain_data_loader_without_workers() -> None:
    manager = Membership()
    sampler = ElasticSampler(Numbers(7), 3, manager=manager, shuffle=False)
    seen = []
    for batch in DataLoader(Numbers(7), batch_sampler=sampler):
        seen.append(batch.tolist())
        manager.vote(commit=len(seen) != 1)
    assert seen == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [6]]


def test_a_batch_before_the_vote_is_a_mistake() -> None:
    sampler = ElasticSampler(10, 2, manager=Membership())
    loop = iter(sampler)
    next(loop)
    with pytest.raises(UsageError, match=r"before the step was voted on.*last_micro_batch.*ElasticDataLoader"):
        next(loop)


def test_no_manager() -> None:
    with pytest.raises(UsageError, match="has no Manager: pass manager"):
        next(iter(ElasticSampler(10, 2)))


def test_given_twice() -> None:
    sampler = ElasticSampler(10, 2, manager=Membership())
    with pytest.raises(ConfigError, match="attached to a Manager already"):
        sampler.attach(Membership())
    sampler.claim("one loader")
    with pytest.raises(ConfigError, match="used by one loader already: give each loader its own"):
        next(iter(sampler))


def test_a_dataset_that_changes_its_length() -> None:
    dataset, manager = Numbers(4), Membership()
    sampler = ElasticSampler(dataset, 2, manager=manager)
    assert len(list(batches(sampler, manager))) == 2
    dataset.length = 5
    with pytest.raises(ConfigError, match="has 5 samples now, and had 4"):
        next(iter(sampler))


def test_a_dataset_that_changes_its_length_in_mid_epoch() -> None:
    dataset, manager = Numbers(4), Membership()
    loop = iter(ElasticSampler(dataset, 2, manager=manager))
    next(loop)
    manager.vote()
    dataset.length = 3
    with pytest.raises(ConfigError, match="has 3 samples now, and had 4"):
        next(loop)


def test_two_loops_at_once() -> None:
    manager = Membership()
    sampler = ElasticSampler(8, 2, manager=manager)
    first = iter(sampler)
    next(first)
    manager.vote()
    next(iter(sampler))
    manager.vote()
    with pytest.raises(UsageError, match="a second loop over this elastic sampler has begun"):
        next(first)


@pytest.mark.parametrize("other", [ElasticSampler(11, 2), ElasticSampler(10, 2, seed=1), ElasticSampler(10, 3)])
def test_a_donor_with_other_data(other: ElasticSampler) -> None:
    with pytest.raises(ConfigError, match=r"differs from that of the others. Here: data: 10 samples.* There: data: 1"):
        ElasticSampler(10, 2).adopt(other.state_dict())


@pytest.mark.parametrize("change", [{"length": 9}, {"seed": 3}, {"shuffle": False}])
def test_a_checkpoint_of_other_data(change: dict[str, Any]) -> None:
    sampler = ElasticSampler(10, 2)
    with pytest.raises(ConfigError, match=f"saved with {next(iter(change))}="):
        sampler.load_state_dict(sampler.state_dict() | change)


@pytest.mark.parametrize("change", [{"taken": 11}, {"taken": 10}, {"epoch": -1}, {"returned": [3, 2]}, {"taken": -1}])
def test_a_damaged_checkpoint(change: dict[str, Any]) -> None:
    sampler = ElasticSampler(10, 2)
    with pytest.raises(ConfigError, match="damaged"):
        sampler.load_state_dict(sampler.state_dict() | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": 0}, "has 0 samples"),
        ({"dataset": True}, "bool has no length"),
        ({"dataset": iter([1])}, "has no length.*IndexedStream"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": 1.5}, "seed must be an int"),
        ({"group_rank": 2, "num_replicas": 2}, "group_rank=2: must be from 0 on and below num_replicas=2"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticSampler(**({"dataset": 10, "batch_size": 2} | arguments))


def test_a_negative_epoch() -> None:
    with pytest.raises(ConfigError, match=r"set_epoch\(-1\)"):
        ElasticSampler(10, 2).set_epoch(-1)


def test_repr() -> None:
    manager = Membership(groups=2, place=1)
    sampler = ElasticSampler(10, 2, manager=manager)
    next(batches(sampler, manager))
    sampler.committed()
    assert repr(sampler) == "ElasticSampler(epoch 0, 4 of 10 samples committed, reader 1 of 2)"
