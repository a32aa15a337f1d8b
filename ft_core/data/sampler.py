"""`ElasticSampler`: hands out every sample of an epoch exactly once, whoever is there and whatever fails.

How it works. A `Cursor` holds what committed steps have taken; it is registered with the Manager, so it heals with the
model and stands still when a step is vetoed. `open_step` opens an attempt, asks the Manager who takes part, and
computes the step from (cursor, batching, readers): every replica computes the same without a message. `committed`
moves the cursor by recomputing that step from the cursor as it is then, because a replica that healed meanwhile has
got another one. Dataset indices come from `EpochOrder`.

As an iterable it is a batch sampler of this rank: one list of indices per micro-batch, until the epoch is committed.
It decides at the last moment, so `DataLoader(batch_sampler=...)` works with `num_workers=0`; prefetching workers need
`ElasticDataLoader`.

Invariants: the cursor changes only in `committed`, by loaded state and by `set_epoch`; an epoch's order follows from
(seed, epoch, length) alone. Threads: the training thread.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from ft_core.data.cursor import Cursor, Ranges
from ft_core.data.epoch_order import EpochOrder, length_of
from ft_core.data.open_step import OpenStep, Reader
from ft_core.data.seeded_dataset import EpochIndices
from ft_core.data.step_division import Batching, MicroBatch, StepPlan, plan_step
from ft_core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sized

    from ft_core.data.interface import DataManager

__all__ = ["ElasticSampler", "OpenStep", "Reader"]

STATE_KEY = "ft_core.data"
ORDERS_KEPT = 2
"""The epoch that is trained on and the one that is prefetched."""


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler over all ranks of all replica groups that are there; each sample exactly once per epoch.

    Args:
        dataset: a map-style dataset with a length, or that length.
        batch_size: samples in one micro-batch at most.
        manager: the `Manager`, before its first start_quorum; None: `attach` it later.
        shuffle: a new order in each epoch; False: the dataset's.
        seed: of the orders; the same on all replicas.
        global_batch_size: samples of one optimizer step, whatever the membership. See `Batching`.
        accumulation_steps: micro-batches per optimizer step, without `global_batch_size`.
        max_micro_steps, min_readers, fixed_micro_batches: see `Batching`.
        group_rank: this process' rank inside its replica group, if its ranks read different samples.
        num_replicas: how many ranks of one replica group read different samples.

    Raises:
        ConfigError: a value cannot work; the message names it.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        manager: DataManager | None = None,
        shuffle: bool = True,
        seed: int = 0,
        global_batch_size: int | None = None,
        accumulation_steps: int = 1,
        max_micro_steps: int | None = None,
        min_readers: int = 1,
        fixed_micro_batches: bool = False,
        group_rank: int = 0,
        num_replicas: int = 1,
    ) -> None:
        self.batching = Batching(
            batch_size, global_batch_size, accumulation_steps, max_micro_steps, min_readers, fixed_micro_batches
        )
        if not 0 <= group_rank < num_replicas:
            raise ConfigError(f"group_rank={group_rank}: must be from 0 on and below num_replicas={num_replicas}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed must be an int, got {seed!r}")
        self.dataset = dataset
        self.shuffle, self.seed = shuffle, seed
        self.group_rank, self.num_replicas = group_rank, num_replicas
        self.cursor = Cursor(length_of(dataset))
        self._orders: dict[int, EpochOrder] = {}
        self._manager: DataManager | None = None
        self._owner = ""
        self._open: OpenStep | None = None
        self._current: MicroBatch | None = None
        self._reader = Reader(None, 1)
        self._wanted: int | None = None
        self._loop = object()
        """The loop that began last."""
        self.equal_micro_steps = False
        """Each reader gets as many micro-batches per step as the busiest, fillers if need be. For hosts that count
        batches, and for groups of several ranks; all replicas alike. A group's ranks then all weigh what the group
        weighs, and multiply their losses by `loss_factor`: their gradients are averaged without weights."""
        self.passing = False
        """What is handed out is not trained on: the open step's first micro-batch, as often as it is asked for."""
        self._watcher: Callable[[OpenStep, MicroBatch], None] | None = None
        if manager is not None:
            self.attach(manager)

    def __repr__(self) -> str:
        c = self.cursor
        place = f"reader {self._reader.number} of {self._reader.readers}"
        return f"ElasticSampler(epoch {c.epoch}, {c.length - c.left} of {c.length} samples committed, {place})"

    # ------------------------------------------------------------ what a training loop looks at

    @property
    def epoch(self) -> int:
        """Epoch of the next step. A newcomer takes over that of the others with its first batch."""
        return self.cursor.epoch

    @property
    def last_micro_batch(self) -> bool:
        """The batch handed out last is the last one of its step: reduce gradients and step the optimizer now."""
        return self._current is None or self._current.last

    @property
    def first_micro_batch(self) -> bool:
        """The batch handed out last is the first one of its step."""
        return self._open is None or self._open.handed_out <= 1

    @property
    def half_read(self) -> bool:
        """The training loop has got a part of the open step, or all of it, and there was no vote on it."""
        return self._open is not None and self._open.handed_out > 0

    @property
    def half_left(self) -> bool:
        """The training loop has left an epoch (`set_epoch`) in the middle of a step, which is to be vetoed."""
        return self.half_read and self._wanted is not None

    @property
    def loss_factor(self) -> float:
        """What this rank's loss is multiplied with before its group's gradients are averaged; 1.0 for equal shares."""
        step = self._open
        if step is None or not step.weights or self.passing or not step.weights[step.handed_out - 1]:
            return 1.0
        return self.weight * self.num_replicas / step.weights[step.handed_out - 1]

    @property
    def weight(self) -> int:
        """Samples of the current micro-batch that count; 0 for a filler."""
        return self._current.weight if self._current is not None else 0

    @property
    def step_samples(self) -> int:
        """Samples of the step over all replicas (as far as a replica knows that is behind and heals in it)."""
        return self._open.plan.samples if self._open is not None else 0

    @property
    def plan(self) -> StepPlan | None:
        """The step that is open; None between two steps."""
        return self._open.plan if self._open is not None else None

    @property
    def ends_epoch(self) -> bool:
        """The batch handed out last is the last one of its epoch, if its step commits."""
        plan = self.plan
        return plan is not None and self.last_micro_batch and plan.after().epoch != plan.cursor.epoch

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch that nothing disturbs, at the membership of the last step."""
        reader = self._reader
        number = 0 if reader.number is None or self.equal_micro_steps else reader.number
        return self.batching.epoch_batches(self.cursor.length, reader.readers, number)

    @property
    def batches_left(self) -> int:
        """Micro-batches that this rank is still to be handed in this epoch, if nothing changes.

        Between two steps, before the next is opened: with the membership of the last one.
        """
        reader, left = self._reader, self.cursor.left
        if self.equal_micro_steps:
            batches = self.batching.epoch_batches(left, reader.readers)
        elif reader.number is None:  # one filler in each step
            batches = -(-left // self.batching.step_size(reader.readers))
        else:
            batches = self.batching.epoch_batches(left, reader.readers, reader.number)
        return batches - (self._open.handed_out if self._open is not None else 0)

    def expect(self, groups: int) -> None:
        """Before the first step: how many replica groups there will be, for `len`."""
        if self._reader.number is None:
            self._reader = Reader(None, max(1, groups) * self.num_replicas)

    # ------------------------------------------------------------ the Manager's side

    def attach(self, manager: DataManager) -> None:
        """Follow this Manager's quorums and commits.

        Raises:
            ConfigError: the sampler is attached already.
        """
        if self._manager is manager:
            return
        if self._manager is not None:
            raise ConfigError("this ElasticSampler is attached to a Manager already: one sampler, one Manager")
        manager.hooks.attach_data(self)
        manager.register_state_dict_fn(STATE_KEY, self.adopt, self.state_dict)
        self._manager = manager

    def claim(self, owner: str) -> None:
        """Somebody iterates now: two loops would take each other's samples. Raises ConfigError for the second."""
        if self._owner and self._owner != owner:
            raise ConfigError(f"this ElasticSampler is used by {self._owner} already: give each loader its own")
        self._owner = owner

    def watch(self, watcher: Callable[[OpenStep, MicroBatch], None] | None) -> None:
        """Tell it of each micro-batch right before the loop gets it; None: no more. ConfigError for a second one."""
        if watcher is not None and self._watcher is not None:
            raise ConfigError("this ElasticSampler is watched already: one FixedOrderDataParallel per loader")
        self._watcher = watcher

    def describe(self) -> str:
        """What has to be equal on all replicas, in one line."""
        b = self.batching
        return (
            f"data: {self.cursor.length} samples, seed {self.seed}, shuffle {self.shuffle}, batch_size {b.batch_size}, "
            f"global_batch_size {b.global_batch_size}, accumulation_steps {b.accumulation_steps}, "
            f"fixed_micro_batches {b.fixed_micro_batches}, {self.num_replicas} readers per group"
        )

    def committed(self, contributed: Collection[int] | None = None) -> None:
        """The open step was committed. `contributed`: places of the groups whose samples are in it; None: all."""
        step = self._open
        assert step is not None, "a commit without an open step"
        readers = None
        if contributed is not None:
            per_group = self.num_replicas
            readers = {place * per_group + rank for place in contributed for rank in range(per_group)}
        # A replica that healed since the step was opened has got another cursor: that of the version it healed to.
        plan = step.plan if step.plan.cursor is self.cursor else replace(step.plan, cursor=self.cursor)
        self.cursor = plan.after(readers)
        self._open = None

    def vetoed(self) -> None:
        """The open step was not committed: its samples are handed out again."""
        self._open = None

    def state_dict(self) -> dict[str, Any]:
        """The position: equal on all replicas at equal versions. Plain numbers and strings."""
        c = self.cursor
        return {
            "describe": self.describe(), "epoch": c.epoch, "taken": c.taken, "steps": c.steps, "length": c.length,
            "seed": self.seed, "shuffle": self.shuffle, "returned": list(itertools.chain.from_iterable(c.returned)),
        }  # fmt: skip

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Take over the position of a running replica.

        Raises:
            ConfigError: its data or its batching is not the same as ours.
        """
        if state["describe"] != self.describe():
            raise ConfigError(
                f"this replica's data differs from that of the others. Here: {self.describe()}. There: "
                f"{state['describe']}. Start all replicas with the same dataset and arguments"
            )
        self.load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written; batch sizes may differ from those of that run.

        Raises:
            ConfigError: the dataset's length, the seed or `shuffle` differ, so the rest of the epoch is not the same.
        """
        for name, mine in (("length", self.cursor.length), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != mine:
                raise ConfigError(f"the data's state was saved with {name}={state[name]}, here it is {name}={mine}")
        flat = [int(number) for number in state["returned"]]
        returned: Ranges = tuple(zip(flat[::2], flat[1::2], strict=True))
        cursor = Cursor(self.cursor.length, int(state["epoch"]), int(state["taken"]), returned, int(state["steps"]))
        if not cursor.sound:
            raise ConfigError(f"the data's state is damaged: {dict(state)}")
        self.cursor = cursor

    # ------------------------------------------------------------ steps

    def set_epoch(self, epoch: int) -> None:
        """The next loop is over this epoch; nothing if it is behind us already (a newcomer's first loops).

        What is left of an epoch that the loop before broke off is dropped, on all replicas if all break off at the same
        step.
        """
        if epoch < 0:
            raise ConfigError(f"set_epoch({epoch}): must be a number from 0 on")
        self._wanted = epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs until `count` have been trained on: `for epoch in sampler.epochs(10): for batch in loader: ...`.

        Opens the first step of each before it yields, so that a newcomer gets the number of the epoch that the others
        are in.
        """
        while self.cursor.epoch < count:
            self.open_step()
            epoch = self.cursor.epoch
            if epoch >= count:
                return
            yield epoch
            if self.cursor.epoch == epoch:  # the loop was left early, or never begun: drop the rest
                self.skip_to(epoch + 1)

    def skip_to(self, epoch: int) -> None:
        """Drop what is left of the epochs before this one. On all replicas after the same step."""
        self._open = None
        self.cursor = self.cursor.at_epoch(epoch)

    def start_epoch(self) -> bool:
        """Do now what `set_epoch` asked for. False: that epoch is behind us.

        The next loop does it by itself. A host that opens quorums before it asks for a batch calls it before that: what
        a newcomer gets is the cursor as it is then.
        """
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted > self.cursor.epoch:
            self._open = None
            self.cursor = self.cursor.at_epoch(wanted)
        return wanted is None or wanted >= self.cursor.epoch

    def steps(self) -> Iterator[OpenStep]:
        """Open one step after the other until the epoch is committed. Each is to be voted on before the next.

        Raises:
            UsageError: another loop has begun meanwhile.
        """
        self._loop = mine = object()
        if self.half_read:
            self._open = None  # the loop before was left in the middle of a step
        if not self.start_epoch():
            return
        step = self.open_step()
        epoch = self.cursor.epoch  # a newcomer has got that of the others with its heal
        while True:
            yield step
            if self._loop is not mine:
                raise UsageError(
                    "a second loop over this elastic sampler has begun before this one ended: they would take each "
                    "other's samples; give each loop its own loader, and each loader its own sampler"
                )
            if self.cursor.epoch != epoch:
                return
            step = self.open_step()
            if self.cursor.epoch != epoch:  # it fell behind and was healed past the end: the step is the next loop's
                return

    def open_step(self) -> OpenStep:
        """Open an attempt and divide its samples; the open one if the training loop has got nothing of it yet.

        Raises:
            UsageError: the last step was not voted on, or no Manager is attached.
            ConfigError: too few readers for the global batch.
        """
        manager = self._manager
        if manager is None:
            raise UsageError("the elastic sampler has no Manager: pass manager=..., or call attach(manager) first")
        if self._open is not None:
            if not self._open.handed_out:
                return self._open
            raise UsageError(
                "the next batch was asked for before the step was voted on: call optimizer.step() (or "
                "manager.should_commit()) once after each batch whose last_micro_batch is True. To accumulate, pass "
                "accumulation_steps=... or global_batch_size=...; DataLoader workers read ahead, so with num_workers > "
                "0 use ElasticDataLoader instead of DataLoader(batch_sampler=ElasticSampler(...))"
            )
        self._check_length()
        manager.start_quorum()
        groups, place = manager.num_participants(), manager.participating_rank()
        number = None if place is None else place * self.num_replicas + self.group_rank
        # A quorum in which nobody participates cannot commit either; its members still need something to run on.
        self._reader = reader = Reader(number, max(1, groups) * self.num_replicas)
        plan = plan_step(self.cursor, self.batching, reader.readers)
        self._open = step = OpenStep(plan, reader, self._micro_batches(plan, number))
        if self.num_replicas > 1 and self.equal_micro_steps and number is not None:
            group = range(number - self.group_rank, number - self.group_rank + self.num_replicas)
            each = [self._micro_batches(plan, rank) for rank in group]
            step.weights = tuple(sum(m.weight for m in together) for together in zip(*each, strict=True))
        return step

    def _micro_batches(self, plan: StepPlan, number: int | None) -> tuple[MicroBatch, ...]:
        """The micro-batches of one reader."""
        own = plan.of(number)
        if not self.equal_micro_steps:
            return own
        lacking = len(plan.batching.cuts(plan.samples, plan.readers, 0)) - len(own)
        if not lacking:
            return own
        fillers = plan.of(None) * lacking
        return (*(replace(m, last=False) for m in (*own, *fillers[:-1])), fillers[-1])

    def hand_out(self, micro_batch: MicroBatch) -> None:
        """The training loop gets this micro-batch of the open step now: weigh it."""
        assert self._open is not None
        assert self._manager is not None
        assert self._open.micro_batches[self._open.handed_out] is micro_batch
        if self.passing:
            self._current = replace(micro_batch, last=True)
            return
        if self._watcher is not None:
            self._watcher(self._open, micro_batch)
        self._open.handed_out += 1
        self._current = micro_batch
        weights = self._open.weights
        self._manager.hooks.weigh(weights[self._open.handed_out - 1] if weights else micro_batch.weight)

    def forecast(self, step: OpenStep, number: int) -> Iterator[MicroBatch]:
        """What this rank will be handed out after micro-batch `number` of `step` if nothing changes. Without end."""
        yield from step.micro_batches[number + 1 :]
        plan = step.plan
        while True:
            plan = replace(plan, cursor=plan.after())
            yield from self._micro_batches(plan, step.reader.number)

    def indices(self, micro_batch: MicroBatch) -> list[int]:
        """Dataset indices of a micro-batch; they know their epoch (`SeededDataset`)."""
        stride = self.batching.step_size(self._reader.readers)
        return EpochIndices(micro_batch.epoch, self._order(micro_batch.epoch).indices(micro_batch.ranges, stride))

    def __iter__(self) -> Iterator[list[int]]:
        self.claim("a DataLoader, or a loop over the sampler itself")
        for step in self.steps():
            while not step.complete:
                micro_batch = step.micro_batches[step.handed_out]
                self.hand_out(micro_batch)
                yield self.indices(micro_batch)

    def _order(self, epoch: int) -> EpochOrder:
        order = self._orders.pop(epoch, None) or EpochOrder(self.cursor.length, self.seed, epoch, shuffle=self.shuffle)
        self._orders[epoch] = order  # the newest last
        if len(self._orders) > ORDERS_KEPT:
            del self._orders[next(iter(self._orders))]
        return order

    def _check_length(self) -> None:
        length = length_of(self.dataset)
        if length != self.cursor.length:
            raise ConfigError(
                f"the dataset has {length} samples now, and had {self.cursor.length} when the sampler was made: which "
                "samples an epoch still lacks cannot be told any more; make a new sampler for another dataset"
            )
