"""Training data over all groups: who reads what, from which batch on, and with which random numbers.

How it works. While the Trainer prepares a loader, `Sharding` knows for which stage: a training loader's sampler divides
the data among all ranks of all groups, an evaluation loader's among the ranks of its group. The division is by the
*maximum* number of groups, so that shards do not move when one fails; a group that joins with a higher number than that
gets its own part when the next epoch begins. `Unseen` counts what groups that were away have left unread.

Order. With Lightning's distributed sampler the order follows from seed, epoch and rank, so a restarted group goes on
exactly where it would have been. A sampler of the user's that Lightning divides (weighted, subset, ...) draws from
torch's global generator, which differs from replica to replica after a restart: `Replayable` seeds it by epoch. With
`use_distributed_sampler=False` nothing of all this is touched: the order is the user's affair.

IterableDataset. Nobody but the dataset can divide it, so `use_distributed_sampler` (the default) is refused in a job of
several ranks. A newcomer starts such a loader anew, reads as many batches as the others have behind them, and throws
them away; peers wait meanwhile, as for a pause. If it ends earlier there than on the others, that replica begins its
next epoch earlier; nobody hangs. `torchdata.StatefulDataLoader` is opened by the donor's `state_dict` instead.

Elastic data, which is divided anew with each change of membership, is none of this: see `elastic`.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from ft_core.errors import ConfigError
from ft_core.loop.sampling import ReplayableSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

log = logging.getLogger("ft_lightning")
TRAIN = "train"


class Sharding:
    """Numbers of this rank among all readers of the training data; what is done to each loader.

    Args:
        group: number of this replica group.
        groups: how many there are when the job is complete.
        seed_worker: Lightning's function for worker processes, called with (worker id, rank).
    """

    def __init__(self, group: int, groups: int, seed_worker: Callable[..., None]) -> None:
        self.number = group
        self.group = group
        """Whose part of the data is read here: `number`, unless that joined after the data was divided."""
        self.groups = groups
        self._seed_worker = seed_worker
        self.stage = ""
        """Stage of the loader that the Trainer prepares just now, "" outside."""
        self._last = ""
        self._own_sampler = False
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"Sharding(group {self.group} of {self.groups})"

    def divide(self, groups: int) -> None:
        """From the next loader on, divide the data by another number of groups: everybody does, or lengths differ."""
        log.info("the training data is divided among %d replica groups from here on (%d before)", groups, self.groups)
        self.groups, self.group = groups, self.number % groups
        if self.number >= groups:
            log.info("group %d reads what group %d reads until the epoch ends", self.number, self.group)

    def kwargs(self, inside: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
        """`num_replicas` and `rank` for a sampler.

        Args:
            inside: those inside the group.
            training: the Trainer is in its training stage; counts only while no loader is being prepared.
        """
        if not (self.stage == TRAIN if self.stage else training):
            return dict(inside)
        ranks = inside["num_replicas"]
        return {"num_replicas": ranks * self.groups, "rank": self.group * ranks + inside["rank"]}

    @contextlib.contextmanager
    def preparing(self, loader: object, stage: str, *, divides: bool, ranks: int) -> Iterator[None]:
        """Around the injection of a sampler.

        Args:
            loader: as the user made it.
            stage: "train", "val", ...
            divides: `Trainer(use_distributed_sampler)`.
            ranks: of this group.

        Raises:
            ConfigError: an IterableDataset that nobody divides.
        """
        self._own_sampler = isinstance(getattr(loader, "sampler", None), DistributedSampler)
        readers = self.groups * ranks
        iterable = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        if iterable and stage == TRAIN and readers > 1 and divides:
            raise ConfigError(
                f"train_dataloader has an IterableDataset, which only itself can divide among the {readers} ranks of "
                "this job: let it read trainer.strategy.distributed_sampler_kwargs (rank, num_replicas) and pass "
                "Trainer(use_distributed_sampler=False)"
            )
        self.stage = self._last = stage
        try:
            yield
        finally:
            self.stage = ""

    def prepared(self, loader: Any, inside: Mapping[str, Any]) -> Any:
        """Right after `preparing`: seeds and warnings. Returns the loader."""
        if self._last != TRAIN:
            return loader
        shard = self.kwargs(inside, training=True)
        if not isinstance(loader, DataLoader):
            return loader
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(self._seed_worker, rank=shard["rank"])  # Lightning's: the rank in the group
        if shard["num_replicas"] > 1:
            self._check(loader, shard)
        return loader

    def _check(self, loader: DataLoader[Any], shard: Mapping[str, int]) -> None:
        sampler = loader.sampler
        if isinstance(loader.dataset, IterableDataset):
            return
        if not isinstance(sampler, DistributedSampler):
            if self.groups > 1 and not isinstance(getattr(loader.batch_sampler, "sampler", None), DistributedSampler):
                self._warn(
                    "the training data is not divided among the replica groups (use_distributed_sampler=False): unless "
                    f"your sampler does that, each of the {self.groups} groups reads all of it"
                )
        elif not self._own_sampler:
            inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
            if isinstance(inner, Sampler) and not hasattr(inner, "set_epoch"):
                sampler.dataset._sampler = Replayable(inner, sampler.seed)  # type: ignore[attr-defined]
        elif (sampler.num_replicas, sampler.rank) != (shard["num_replicas"], shard["rank"]):
            self._warn(
                f"your DistributedSampler is rank {sampler.rank} of {sampler.num_replicas}: it divides the training "
                f"data only inside the replica group. To divide it among all {self.groups} groups, leave it out, or "
                "pass DistributedSampler(dataset, **trainer.strategy.distributed_sampler_kwargs)"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


class Replayable(ReplayableSampler):
    """A sampler that draws the same order everywhere, and has the attributes of the user's inside it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)


class Unseen:
    """How much of an epoch's data belonged to groups that were away."""

    def __init__(self) -> None:
        self.shares = 0
        self.read = 0

    def __repr__(self) -> str:
        return f"Unseen({self.shares - self.read} of {self.shares})"

    def count(self, participants: int, groups: int) -> None:
        """One batch of every group; those of `participants` are read."""
        self.shares += max(groups, participants)
        self.read += participants

    def epoch_ended(self, epoch: int) -> str:
        """A warning about what was missed, "" for nothing; counts from zero again."""
        missed, shares = self.shares - self.read, self.shares
        self.shares = self.read = 0
        if not missed:
            return ""
        return (
            f"epoch {epoch}: {100 * missed / shares:.1f} % of the training data was not read: it is divided among all "
            "replica groups, and some of them were away"
        )
