"""Fetches micro-batches through a torch DataLoader, ahead of time where it has workers, and re-plans without a restart.

How it works. The DataLoader gets an endless batch sampler, `Feed`: whenever it wants one more list of indices, the feed
gives it the next micro-batch of a forecast ("nothing changes"). The DataLoader answers in the order of the requests, so
`Feed.issued` is what comes next. While the forecast holds, `get` finds what it wants at the front of that queue and
workers keep running. When it does not (a veto, a change of membership, a heal), the feed is pointed at the new
forecast; what workers have fetched already is received, and put aside if the new forecast soon contains it, or dropped.

What a micro-batch holds is its `key` (epoch and positions), so what was put aside is right whatever happened since.

Invariants: `issued` mirrors the requests that the DataLoader has not answered; at most `ahead` batches are put aside.
Threads: the training thread; workers are the DataLoader's.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.utils.data import DataLoader

    from ft_core.data.cursor import Ranges
    from ft_core.data.step_division import MicroBatch

    Key = tuple[int, Ranges]

log = logging.getLogger("ft_core")


class Feed:
    """The DataLoader's batch sampler: the lists of indices of a forecast that may be exchanged at any time."""

    def __init__(self, indices: Callable[[MicroBatch], list[int]]) -> None:
        self._indices = indices
        self._source: Iterator[MicroBatch] = iter(())
        self.issued: deque[Key] = deque()
        """Requests that the DataLoader has not answered, oldest first."""

    def __repr__(self) -> str:
        return f"Feed({len(self.issued)} requests under way)"

    def follow(self, source: Iterator[MicroBatch]) -> None:
        """From the next request on."""
        self._source = source

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> list[int]:
        micro_batch = next(self._source)
        indices = self._indices(micro_batch)
        self.issued.append(micro_batch.key)
        return indices


class Pipeline:
    """Batches by micro-batch.

    Args:
        make_loader: makes the DataLoader around a batch sampler.
        indices: the dataset indices of a micro-batch.
    """

    def __init__(
        self, make_loader: Callable[[Iterable[list[int]]], DataLoader[Any]], indices: Callable[[MicroBatch], list[int]]
    ) -> None:
        self._feed = Feed(indices)
        self.loader = make_loader(self._feed)
        self.ahead = self.loader.num_workers * (self.loader.prefetch_factor or 0)
        """Batches that the workers fetch in advance; as many may be put aside besides."""
        self._batches: Iterator[Any] | None = None
        self._aside: dict[Key, Any] = {}
        self.replans = 0
        """How often the forecast did not hold."""

    def __repr__(self) -> str:
        there = len(self._feed.issued) + len(self._aside)
        return f"Pipeline(workers={self.loader.num_workers}, {there} batches ahead, replans={self.replans})"

    def get(self, wanted: MicroBatch, forecast: Callable[[], Iterator[MicroBatch]]) -> Any:
        """The batch of a micro-batch; raises what the dataset raised.

        Args:
            wanted: which.
            forecast: what will be wanted after it if nothing changes.
        """
        key, issued = wanted.key, self._feed.issued
        if not self.ahead and not issued:  # nobody works ahead: there is nothing to forecast, and no time to lose
            self._feed.follow(iter((wanted,)))
            if self._batches is None:
                self._batches = iter(self.loader)
            return self._receive()
        if key in self._aside:
            return self._aside.pop(key)
        keep: frozenset[Key] = frozenset()
        if not issued or issued[0] != key:
            keep = self._replan(wanted, forecast)
        if self._batches is None:
            self._batches = iter(self.loader)
        while issued and issued[0] != key:
            self._clear_the_way(keep)
        return self._receive()

    def close(self) -> None:
        """End the workers and forget what they fetched. The next `get` starts new ones."""
        batches, self._batches = self._batches, None
        self._feed.issued.clear()
        self._aside.clear()
        # torch ends workers when the iterator is collected. An exception out of it keeps it alive (traceback), and
        # collected as part of a cycle it waits five seconds per worker.
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _replan(self, wanted: MicroBatch, forecast: Callable[[], Iterator[MicroBatch]]) -> frozenset[Key]:
        """Point the feed at `wanted` and what follows. Returns what is under way or at hand and worth keeping."""
        here = {*self._feed.issued, *self._aside}
        keep: frozenset[Key] = frozenset()
        if here:
            self.replans += 1
            keep = frozenset(m.key for m in itertools.islice(forecast(), self.ahead)) & here
            self._aside = {key: batch for key, batch in self._aside.items() if key in keep}
        # A filler may come again and again (a member that does not take part): only its first occurrence is at hand.
        left = set(keep)

        def lacking() -> Iterator[MicroBatch]:
            if wanted.key not in self._feed.issued:
                yield wanted
            for micro_batch in forecast():
                if micro_batch.key in left:
                    left.discard(micro_batch.key)
                else:
                    yield micro_batch

        self._feed.follow(lacking())
        return keep

    def _clear_the_way(self, keep: frozenset[Key]) -> None:
        """Receive the oldest request, which is not the one that is wanted now."""
        oldest = self._feed.issued[0]
        if oldest in keep:
            self._aside[oldest] = self._receive()
            return
        under_way = len(self._feed.issued)
        try:
            self._receive()
        except Exception as error:
            if len(self._feed.issued) < under_way:
                raise  # the DataLoader itself failed: it did not take another request
            log.warning("prefetched samples that are another replica's now could not be read: %s", error)

    def _receive(self) -> Any:
        """The answer to the oldest request. Without workers the DataLoader takes that request only now."""
        assert self._batches is not None
        try:
            return next(self._batches)
        finally:
            if self._feed.issued:
                self._feed.issued.popleft()
