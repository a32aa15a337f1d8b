"""`share_evaluation=True`: evaluation and prediction data are divided among the replica groups.

How it works. When a loop's run begins, the members of the quorum divide it (`loop.shared_work`): of every n batches
of a loader each group reads one. When a loader's batches are done, a group gets what the others' batches have added to
the metrics, and evaluates those parts itself that nobody has (their group was lost). Then everything is merged in the
order of the parts, so metrics are those of the whole loader, and have the same bits on all groups. Predictions are put
together in the loader's order.

The order in which a loader reads has to be the same on all groups: a digest of it is a part of what is divided, so
groups that disagree evaluate everything themselves.

`validate`, `test` and `predict` have no quorum of a training run: `Alone` opens one for each, with nothing in it that
could be lost. The sanity check before training is not divided.

Invariants: without a quorum, or where something cannot be divided, each group does it all, with one warning; loaders
and loops are as they were after each run. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from ft_core.loop.sampling import can_skip, reading
from ft_core.loop.shared_work import SharedWork
from ft_lightning._compat import evaluation as compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ft_core import Manager

    OpenQuorum = Callable[[str, Callable[[Manager], None]], Manager | None]
    from ft_core.loop.shared_work import Division

log = logging.getLogger("ft_lightning")


class PartOfBatches:
    """In a loader's place of its batch sampler (or sampler, without batching): every `parts`-th of its first `limit`.

    `batches`: the sampler's, where it reads in the order of the data; else a list of what it gave once, as it may give
    something else the next time.
    """

    def __init__(self, loader: DataLoader[Any], limit: int) -> None:
        sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        inner = getattr(sampler, "_batch_sampler", sampler)
        plain = type(inner) is SequentialSampler or (
            type(inner) is BatchSampler and type(inner.sampler) is SequentialSampler
        )
        self.limit = min(limit, len(loader))
        self.part, self.parts = 0, 1
        if plain:
            self.batches = inner
            layout = repr((len(loader.dataset), loader.batch_size, loader.drop_last))  # type: ignore[arg-type]
        else:
            self.batches = list(itertools.islice(inner, self.limit))
            layout = repr(self.batches)
        self.digest = hashlib.blake2b(layout.encode(), digest_size=12).hexdigest()

    def __repr__(self) -> str:
        return f"PartOfBatches({self.part} of {self.parts}, {len(self)} batches)"

    def __len__(self) -> int:
        return len(range(self.part, self.limit, self.parts))

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batches, self.part, self.limit, self.parts)


class _Run:
    """One run of a loop, divided."""

    def __init__(self, loop: Any, division: Division, orders: Sequence[PartOfBatches | None]) -> None:
        self._loop = loop
        self._division = division
        self._orders = orders
        self._next = 0
        self._began = time.monotonic()
        self._held: Any = None

    def __repr__(self) -> str:
        return f"_Run({self._division!r})"

    def begin(self) -> None:
        """Each loader reads this group's part."""
        lengths: list[float] = [0] * len(self._orders)
        for index, order in enumerate(self._orders):
            if order is not None:
                mine = self._division.of(order.limit)
                order.part, order.parts = mine.part, mine.parts
                lengths[index] = len(order)
        compat.set_lengths(self._loop, lengths)

    def begin_loader(self) -> None:
        """Unless that was the last: metrics are to hold what the batches of the next loader add."""
        self._began = time.monotonic()
        if any(order is not None for order in self._orders[self._next :]):
            self._held = compat.states(self._loop)
            compat.clear(self._loop)

    def end_loader(self) -> None:
        """Get what the others have, evaluate what nobody has, and merge."""
        index, order = self._pass_on()
        own = compat.states(self._loop)
        found = self._exchange(index, order, own)
        for part in self._missing(order, found):
            compat.clear(self._loop)
            self._evaluate(index, order, part)
            found[part] = compat.states(self._loop)
        merged = compat.merge(self._loop, [self._held, *(found[part] for part in range(order.parts))])
        compat.clear(self._loop)
        compat.load(self._loop, merged)

    def end_predictions(self) -> None:
        """Exchange what `predict_step` returned, as `end_loader` does with metrics."""
        for index, order in enumerate(self._orders):
            if order is None:
                continue
            outputs, where = compat.predictions(self._loop, index), compat.indices(self._loop, index)
            found = self._exchange(index, order, [list(outputs), list(where)])
            for part in self._missing(order, found):
                outputs.clear()
                where.clear()
                self._evaluate(index, order, part)
                found[part] = [list(outputs), list(where)]
            for kept, which in ((outputs, 0), (where, 1)):
                columns = [found[part][which] for part in range(order.parts)]
                kept[:] = [row for rows in itertools.zip_longest(*columns, fillvalue=_NONE) for row in rows
                           if row is not _NONE]  # fmt: skip

    def _pass_on(self) -> tuple[int, PartOfBatches]:
        """The loader that has ended; loaders without batches are passed over, as the loop does."""
        while (order := self._orders[self._next]) is None:
            self._next += 1
        self._next += 1
        return self._next - 1, order

    def _exchange(self, index: int, order: PartOfBatches, own: Any) -> dict[int, Any]:
        took_s = time.monotonic() - self._began
        mine = self._division.of(order.limit)
        return {**mine.exchange(str(index), own, took_s), order.part: own}

    def _missing(self, order: PartOfBatches, found: dict[int, Any]) -> list[int]:
        return [part for part in range(order.parts) if part not in found]

    def _evaluate(self, index: int, order: PartOfBatches, part: int) -> None:
        mine, order.part = order.part, part
        try:
            for number, batch in enumerate(compat.loaders(self._loop)[index]):
                compat.evaluate_batch(self._loop, batch, number, index)
        finally:
            order.part = mine


@contextlib.contextmanager
def _reading(loader: DataLoader[Any], order: PartOfBatches) -> Iterator[None]:
    """Inside, `loader` reads what `order` gives; what Lightning put around its batch sampler stays there (indices)."""
    around: Any = loader.batch_sampler
    if not hasattr(around, "_batch_sampler"):
        with reading(loader, order):
            yield
        return
    inner, around._batch_sampler = around._batch_sampler, order
    try:
        yield
    finally:
        around._batch_sampler = inner


_NONE = object()


class SharedEvaluation:
    """The shared evaluation of one strategy.

    Args:
        trainer: whose loops are divided.
        ranks: of the replica group.
        open_quorum: for a run outside of `fit`, named by its stage: a Manager in a quorum, which this run ends; None:
            there is none. It calls its second argument with the Manager before the quorum is there.
    """

    def __init__(self, trainer: Any, ranks: int, open_quorum: OpenQuorum) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._open_quorum = open_quorum
        self._work: SharedWork | None = None
        """The work of the training run's Manager."""
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"SharedEvaluation({self._work!r})"

    # ------------------------------------------------------------ set-up and end

    def train_with(self, manager: Manager) -> None:
        """`fit` begins; before its first quorum."""
        self._work = self._new_work(manager)

    def begin(self) -> None:
        """Put our steps around the Trainer's evaluation loops."""
        for loop in compat.evaluation_loops(self._trainer):
            compat.around_runs(loop, partial(self._run, loop, predicts=False))
        loop = compat.prediction_loop(self._trainer)
        compat.around_runs(loop, partial(self._run, loop, predicts=True))

    def end(self) -> None:
        """Leave the loops as Lightning made them."""
        self._work = None
        for loop in (*compat.evaluation_loops(self._trainer), compat.prediction_loop(self._trainer)):
            compat.as_it_was(loop)

    def _new_work(self, manager: Manager) -> SharedWork:
        work = SharedWork(manager, self._agree if self._ranks > 1 else None)
        work.serve()
        return work

    def _agree(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Least and greatest among the group's ranks."""
        both = torch.tensor([*numbers, *(-n for n in numbers)], device=self._trainer.strategy.root_device)
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MIN)
        found = both.tolist()
        return found[: len(numbers)], [-n for n in found[len(numbers) :]]

    # ------------------------------------------------------------ a run

    def _run(self, loop: Any, run: Callable[[], Any], *, predicts: bool) -> Any:
        trainer = self._trainer
        if trainer.sanity_checking or (trainer.state.fn == "fit" and trainer.strategy.passes_over):
            return run()
        with contextlib.ExitStack() as stack:
            work = self._work
            if trainer.state.fn != "fit":
                made: list[SharedWork] = []
                manager = self._open_quorum(trainer.state.fn.value, lambda new: made.append(self._new_work(new)))
                if manager is None:
                    return run()
                stack.callback(manager.shutdown)
                work = made[0]
            if work is None:
                return run()
            compat.before_reset(loop, lambda: self._divide(loop, work, stack, predicts=predicts))
            stack.callback(self._restore, loop)
            return run()

    def _restore(self, loop: Any) -> None:
        around = vars(loop).get("run")
        compat.as_it_was(loop)
        if around is not None:
            loop.run = around

    def _divide(self, loop: Any, work: SharedWork, stack: contextlib.ExitStack, *, predicts: bool) -> None:
        lengths = compat.lengths(loop)
        why = compat.unsuited(loop) or self._unsuited(loop, lengths)
        if why:
            self._warn(f"share_evaluation: each replica group reads all {loop.trainer.state.stage.value} data: {why}")
        compat.set_epoch(loop)
        orders = [] if why else [
            PartOfBatches(loader, int(length)) if length else None
            for loader, length in zip(compat.loaders(loop), lengths, strict=True)
        ]  # fmt: skip
        limits = [0] * len(lengths) if why else [0 if order is None else order.limit for order in orders]
        what = " ".join([str(loop.trainer.state.stage), why, *(o.digest for o in orders if o is not None)])
        division = work.divide(what, max(limits, default=0), limits)
        if why or division.parts == 1:
            return
        for loader, order in zip(compat.loaders(loop), orders, strict=True):
            if order is not None:
                stack.enter_context(_reading(loader, order))
        stack.callback(compat.set_lengths, loop, lengths)
        run = _Run(loop, division, orders)
        run.begin()
        if predicts:
            compat.at_end_of_predictions(loop, run.end_predictions)
        else:
            compat.before_batches(loop, run.begin_loader)
            compat.at_end_of_loader(loop, run.end_loader, run.begin_loader)

    def _unsuited(self, loop: Any, lengths: Sequence[float]) -> str:
        if len({id(loader) for loader in compat.loaders(loop)}) < len(lengths):
            return "one DataLoader is there twice, and reads one part at a time; make it two"
        for loader, length in zip(compat.loaders(loop), lengths, strict=True):
            if length and (not can_skip(loader) or length == float("inf")):
                kind = "an IterableDataset" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"
                return f"{kind} cannot be opened at any batch; pass a DataLoader over a map-style dataset"
        return ""

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)
