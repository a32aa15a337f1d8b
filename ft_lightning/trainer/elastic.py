"""Elastic training data under the Trainer: ft_core's `ElasticDataLoader`, whose steps and lengths Lightning follows.

How it works. While the Trainer prepares its loaders, the user's DataLoader is exchanged for an elastic one
(`prepare`; with `elastic_data=True`), or a user's ElasticDataLoader is taken as it is. From then on:
- The strategy opens a quorum before a batch is fetched, and right after it the loader's step (`opened`): that fixes
  who reads what. Nothing is read ahead.
- How many batches an epoch has follows from what is left of it and from who is there, so Lightning is given it anew
  before each batch (`announce`) and after each vote (`settled`): a vetoed last batch is not the last.
- Lightning steps the optimizer where the loader says so, and does not divide losses: their weights are exact
  (`_compat.position.follow_micro_batches`).
- All replicas make equally many micro-batches per step (`equal_micro_steps`), as Lightning counts batches, and the
  counts have to be equal where state is handed over.
- A replica that has to pass over batches (`adoption`) gets the first micro-batch of the step that waits for it, as
  often as it takes, and trains on it only after that.

The cursor heals with the Manager's state and is saved beside Lightning's own, under `KEY`.

Threads: the training thread.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from ft_core.data import ElasticDataLoader
from ft_core.errors import ConfigError, FaultToleranceError
from ft_core.loop.elastic import Elasticity, Words
from ft_lightning._compat import callbacks as _callbacks
from ft_lightning._compat import position as _position
from ft_lightning.trainer.sharding import TRAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core import Manager
    from ft_lightning.arguments import DataArguments

log = logging.getLogger("ft_lightning")
KEY = "ft_data"
"""The key of the cursor in a checkpoint."""
WORDS = Words("accumulate_grad_batches", "trainer.global_rank", "trainer.world_size")


class LeftEpoch(FaultToleranceError):
    """The reason of a veto: the loop left its epoch in the middle of a step."""


class ElasticData:
    """Elastic training data of one strategy.

    Args:
        arguments: the strategy's.
        seed_worker: Lightning's function for worker processes, called with (worker id, rank).
        min_replicas: the smallest quorum; None: FT_MIN_REPLICAS, else 1.
    """

    def __init__(self, arguments: DataArguments, seed_worker: Callable[..., None], min_replicas: int | None) -> None:
        self._arguments, self._min_replicas = arguments, min_replicas
        self._seed_worker = seed_worker
        self.loader: ElasticDataLoader | None = None
        """None: the training data is not elastic."""
        self._trainer: Any = None
        self._accumulate = 1
        """The user's `Trainer(accumulate_grad_batches)`."""
        self._found: Mapping[str, Any] | None = None
        self._epoch = 0
        """Epoch of the step that was opened last."""

    def __repr__(self) -> str:
        return f"ElasticData({self.loader!r})"

    @property
    def active(self) -> bool:
        """The training data is elastic."""
        return self.loader is not None

    @property
    def _sampler(self) -> Any:
        assert self.loader is not None
        return self.loader.sampler

    # ------------------------------------------------------------ set-up and end

    def prepare(self, trainer: Any, loader: Any, stage: str, group: int, groups: int, manager: Manager | None) -> Any:
        """Before Lightning gives a loader its sampler. Returns the loader to use.

        Args:
            trainer: whose loader it is.
            loader: as the user made it.
            stage: "train", "val", ...
            group: number of this replica group.
            groups: how many there are when the job is complete.
            manager: of this run, if it is there already.

        Raises:
            ConfigError: it cannot be made elastic, or something of the Trainer does not go with it.
        """
        if stage != TRAIN:
            return loader
        own = isinstance(loader, ElasticDataLoader)
        if self.loader is not None and loader is not self.loader:
            raise ConfigError(
                "elastic data: several training loaders, or one that is made anew; one dataset is divided per fit. "
                "Combine the datasets in one (torch.utils.data.StackDataset, ConcatDataset), and leave "
                "reload_dataloaders_every_n_epochs out"
            )
        if not own and not self._arguments.elastic_data:
            return loader
        self._check(trainer)
        ranks, rank = trainer.world_size, trainer.global_rank
        wanted = self._arguments
        elasticity = Elasticity(
            WORDS, rank, ranks, trainer.accumulate_grad_batches, wanted.global_batch_size, wanted.max_micro_steps,
            self._min_replicas, int(os.environ.get("PL_GLOBAL_SEED", "0")),
        )  # fmt: skip
        if not own:
            loader = self._convert(loader, elasticity, group * ranks + rank)
        elasticity.check_own(loader)
        loader.sampler.equal_micro_steps = True
        loader.sampler.expect(groups)
        self.loader, self._trainer, self._accumulate = loader, trainer, trainer.accumulate_grad_batches
        # Only for those who ask how many steps there will be.
        trainer.accumulate_grad_batches = loader.sampler.batching.micro_steps(groups * ranks)
        if manager is not None:
            loader.attach(manager)
        return loader

    def _convert(self, loader: Any, elasticity: Elasticity, number: int) -> ElasticDataLoader:
        seeds = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))
        if isinstance(loader, DataLoader) and loader.num_workers and seeds and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(self._seed_worker, rank=number)
        return elasticity.make(loader)

    def _check(self, trainer: Any) -> None:
        """Refuse settings of the Trainer that elastic data does not go with. Raises ConfigError."""
        if trainer.reload_dataloaders_every_n_epochs:
            raise ConfigError(
                f"elastic data: reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs} would "
                "exchange the dataset whose samples are counted; leave it out"
            )
        if not trainer.lightning_module.automatic_optimization:
            raise ConfigError(
                "elastic data: automatic_optimization=False: which votes decide about a batch's samples is only known "
                "with automatic optimization; use that, or leave elastic data off"
            )
        if _callbacks.schedules_accumulation(trainer):
            raise ConfigError(
                "elastic data: GradientAccumulationScheduler would change a step's micro-batches; pass "
                "Trainer(accumulate_grad_batches=) or global_batch_size= instead"
            )

    def found(self, checkpoint: Mapping[str, Any]) -> None:
        """`fit` starts from this checkpoint."""
        self._found = checkpoint.get(KEY)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the cursor to a Lightning checkpoint, beside what a plain Trainer reads."""
        if self.loader is None:
            return
        _position.forget_loaders(checkpoint)
        if self._trainer is not None and self._trainer.state.fn == "fit":
            checkpoint[KEY] = self.loader.state_dict()

    def begin(self, manager: Manager) -> None:
        """Loaders and checkpoint are there, no batch was fetched.

        Raises:
            ConfigError: something in this run does not go with elastic data.
        """
        trainer, loader = self._trainer, self.loader
        if loader is None:
            return
        _position.check_single_loader(trainer)
        loader.attach(manager)
        if self._found is not None:
            loader.load_state_dict(self._found)
        elif _position.epoch_and_batch(trainer)[1]:
            log.warning("the checkpoint does not say which samples of its epoch were trained on: it begins anew")
        done = _position.epoch_and_batch(trainer)[1]
        over = _position.was_last(trainer) and not loader.sampler.cursor.steps
        total = done if over else max(done + 1, _position.limited(trainer, done + loader.batches_left))
        _position.tell_length(trainer, total)
        _position.follow_micro_batches(trainer, lambda: self._sampler.first_micro_batch, self._steps)

    def end(self) -> None:
        """The run is over: the Trainer is as before."""
        if self._trainer is not None:
            _position.no_longer_follow(self._trainer)
            self._trainer.accumulate_grad_batches = self._accumulate
        if self.loader is not None:
            self.loader.close()
        self.loader = self._trainer = self._found = None

    def _steps(self) -> bool:
        return bool(self._sampler.last_micro_batch)

    # ------------------------------------------------------------ a batch

    @property
    def left_step(self) -> bool:
        """The loop has left its epoch in the middle of a step, which is still open."""
        return self.loader is not None and self._sampler.half_left

    def before_quorum(self) -> None:
        """Between two steps: the cursor that newcomers get is that of the epoch that Lightning is in.

        Raises:
            StopIteration: of this epoch nothing is left.
        """
        if self.loader is not None and not self._sampler.start_epoch():
            raise StopIteration

    def opened(self, *, passing: bool) -> None:
        """The quorum of the next step is there, and the state that came with it."""
        if self.loader is not None:
            self._sampler.passing = passing
            self._sampler.open_step()
            self._epoch = self.loader.epoch

    def announce(self, agreed: tuple[int, int]) -> None:
        """Right before a batch is fetched: how long the epoch is.

        Args:
            agreed: position (epoch, batch) of the furthest member; this replica passes over what is before it.
        """
        if self.loader is None:
            return
        epoch, done = _position.epoch_and_batch(self._trainer)
        if not self._sampler.passing:
            total = done + self.loader.batches_left
        elif agreed[0] == epoch:
            total = agreed[1] + self.loader.batches_left
        else:
            total = done + 1  # the others are in the next epoch
        # Not the last, so far: who came in late may have more behind it than a whole epoch has now.
        _position.tell_length(self._trainer, max(done + 1, _position.limited(self._trainer, total)), last=False)

    def settled(self) -> None:
        """After each vote, before anybody asks whether this was the epoch's last batch."""
        if self.loader is None or self._sampler.passing:
            return
        done = _position.epoch_and_batch(self._trainer)[1]
        over = self.loader.epoch != self._epoch
        total = done if over else _position.limited(self._trainer, done + self.loader.batches_left)
        _position.tell_length(self._trainer, max(done, total), last=total <= done)

    @property
    def loss_factor(self) -> float:
        """The factor of a loss before averages inside the group (`ElasticSampler.loss_factor`)."""
        return 1.0 if self.loader is None else self._sampler.loss_factor
