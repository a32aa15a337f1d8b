"""`Sharing`: evaluation data divided among the replica groups, on request (`share_evaluation=True`).

How it works. A prepared loader that is iterated for evaluation asks `Sharing.batches` for its batches. It draws the
loader's order once, and the groups exchange a digest of it: only those that have the same order share
(`SharedLoop`); each of the others evaluates everything, as all do without `share_evaluation`. While the loop is under
way, `gather_for_metrics`, `gather` and `pad_across_processes` of the Accelerator (`SharedResults`) mean all groups.

`end_of_dataloader` is true in the last body of this group, which may come later than was known when it began;
`gather_for_metrics` cuts off the doubles of the last batch of the data, whichever body that is.

Invariants: one shared loop at a time; all ranks of a group go through it together. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply, send_to_device

from ft_accelerate import _compat
from ft_accelerate.shared_loop import Padding, SharedLoop, joined
from ft_core.errors import UsageError
from ft_core.loop.sampling import order_of, reading
from ft_core.loop.shared_work import SharedWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ft_core import Manager
    from ft_core.loop.window import StepWindow

Base: Any = object
log = logging.getLogger("ft_accelerate")


class Sharing:
    """The evaluation that the groups of a run share.

    Args:
        window: of the run.
    """

    def __init__(self, window: StepWindow) -> None:
        self._window = window
        self._work: SharedWork | None = None
        self.end()

    def begin(self, manager: Manager) -> None:
        """A run has its Manager; the other groups may ask from now on: before the first quorum."""
        self._work = SharedWork(manager, self._agree)
        self._work.serve()

    def end(self) -> None:
        """The run is over: nothing is shared until the next one begins."""
        self._work = None
        self.loop: SharedLoop | None = None
        """The loop that is under way."""
        self.loader: Any = None
        """The loader that it reads."""
        self.inside = False
        """A call of `gather_for_metrics` is under way, which calls others."""
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"Sharing({self.loop!r})"

    @property
    def in_body(self) -> bool:
        """The body of a shared loop runs."""
        return self.loop is not None and not self.inside and not self._window.training

    def _agree(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """The least and the greatest of each number among the processes of this group."""
        if self._window.ranks == 1:
            return list(numbers), list(numbers)
        both = torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.int64, device=self._window.device)
        if len(numbers):
            torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MIN)
        found = both.tolist()
        return found[: len(numbers)], [-n for n in found[len(numbers) :]]

    # ------------------------------------------------------------ results

    @contextlib.contextmanager
    def as_last_piece(self) -> Iterator[None]:
        """Inside, Accelerate's own gathering means this group, and cuts the data's last batch, where it is that."""
        assert self.loop is not None
        self.inside, self.loader.end_of_dataloader = True, self.loop.last_piece
        try:
            yield
        finally:
            self.inside, self.loader.end_of_dataloader = False, not self.loop.agenda

    def result(self, value: Any, *, objects: bool) -> Any:
        """The values of all groups for this group's one. `objects`: it is a list of things, no tensors."""
        loop = self.loop
        assert loop is not None
        values = loop.result(recursively_apply(_kept, value))
        self.loader.end_of_dataloader = not loop.agenda  # a loss shows here
        return joined(values, value, loop.paddings, objects)

    # ------------------------------------------------------------ reading

    def batches(self, loader: _compat.DataLoaderShard, first: int, whole: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches that a loader hands out for evaluation.

        Args:
            loader: read for evaluation.
            first: batches at its beginning that are skipped.
            whole: iterates over all of it.

        Raises:
            UsageError: another loader is being read so.
        """
        work = self._work
        if work is None:
            yield from whole()
            return
        why = self._why_not(loader)
        if why:
            self._warn(f"evaluation data is not shared, so each replica group evaluates all of it: {why}")
            yield from whole()
            return
        if self.loop is not None:
            raise UsageError(
                "share_evaluation=True, and a second evaluation loader is read while the first is: their batches would "
                "not belong together. Finish one loop before the next one (an iterator that is kept counts as open), "
                "or leave out share_evaluation=True"
            )
        if loader.rng_types is not None:
            _compat.synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
        loader.set_epoch(loader.iteration)
        order = list(order_of(loader.base_dataloader))[first:]
        yield from self._read(loader, order, self._shared_loop(work, loader, order))

    def _why_not(self, loader: _compat.DataLoaderShard) -> str:
        window, base = self._window, loader.base_dataloader
        if not _compat.can_skip(base):
            stream = isinstance(base.dataset, _compat.IterableDataset)
            return "it is an IterableDataset" if stream else f"a {type(base).__name__} cannot be read by index"
        if not hasattr(order_of(base), "__len__"):
            return f"its {type(order_of(base)).__name__} has no length, and may never end"
        if window.ended:
            return "training is over"
        if window.manager is None or not window.manager.quorum_id:
            return "training has not begun, so there is no quorum yet"
        return ""

    def _shared_loop(self, work: SharedWork, loader: _compat.DataLoaderShard, order: Sequence[Any]) -> SharedLoop:
        """Find those who are at the same place, with the same order."""
        division = work.divide(f"evaluation of a {type(loader.dataset).__name__}", len(order))
        mine = _digest(order)
        digests = division.exchange("order", mine, 0.0)  # to those with another order nothing follows: each waits here
        asked = sorted(digests)
        _, differ = self._agree([int(digests[part] != mine) for part in asked])
        if any(differ):
            self._warn(
                "evaluation data is not shared with replica groups that read it in another order, so each evaluates "
                "all of it: shuffle=False for evaluation gives all of them the same order"
            )
        same = {part for part, other in zip(asked, differ, strict=True) if not other}
        return SharedLoop(division, len(order), set(range(division.parts)) - same - {division.part})

    def _read(self, loader: _compat.DataLoaderShard, order: Sequence[Any], loop: SharedLoop) -> Iterator[Any]:
        base = loader.base_dataloader
        loader.begin()
        if loop.parts > 1:
            self.loop, self.loader = loop, loader
        try:
            while loop.agenda:
                agenda = loop.agenda
                with reading(base, [order[piece] for piece in agenda]):
                    source = iter(base)
                for batch in source:
                    loop.begin()
                    loader.end_of_dataloader = not loop.agenda
                    placed = loader.device is not None
                    yield send_to_device(batch, loader.device, non_blocking=loader._non_blocking) if placed else batch
                    if loop.agenda is not agenda:
                        break  # somebody was lost
            loader.iteration += 1
            if loop.parts > 1 and not loop.calls:
                self._warn(
                    "share_evaluation=True, and a loop over evaluation data gathered nothing: what it computed is of "
                    "this replica group's part only. Call gather_for_metrics() in the loop, for each batch"
                )
        finally:
            self.loop = self.loader = None
            loader.end()

    def _warn(self, text: str) -> None:
        """Warn, once of each text."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is now, on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def _digest(order: Sequence[Any]) -> str:
    hashed = hashlib.blake2b(digest_size=12)
    for indices in order:
        hashed.update(repr(indices).encode() + b";")
    return hashed.hexdigest()


class SharedResults(Base):  # type: ignore[misc]
    """The part of the Accelerator that gathers results; mixed in, in front of Accelerate's."""

    if TYPE_CHECKING:

        @property
        def _evaluation(self) -> Sharing | None:
            """The evaluation that the groups share; None: they do not."""

    @property
    def _sharing(self) -> Sharing | None:
        """The shared evaluation, where the body of its loop runs."""
        sharing = self._evaluation
        return sharing if sharing is not None and sharing.in_body else None

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of this group, in a shared evaluation of all groups."""
        sharing = self._sharing
        if sharing is None:
            return super().gather(tensor)
        return sharing.result(super().gather(tensor), objects=False)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of this group, in a shared evaluation of all groups, in the order of the data.

        Raises:
            UsageError: tensors of different sizes, and nobody said how to pad them.
        """
        sharing = self._sharing
        if sharing is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        with sharing.as_last_piece():
            value = super().gather_for_metrics(input_data, use_gather_object)
        return sharing.result(value, objects=use_gather_object or not _all_tensors(input_data))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors; in a shared evaluation `gather_for_metrics` pads the other groups' in the same way."""
        sharing = self._sharing
        if sharing is not None and sharing.loop is not None:
            sharing.loop.paddings.append(Padding(dim, pad_index, pad_first))
        return super().pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)


def _all_tensors(data: Any) -> bool:
    """Whether Accelerate would gather it as tensors, not as objects."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
