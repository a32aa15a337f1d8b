"""Data that is read forward, made addressable by position: what exactly-once needs of a stream.

Which samples a dead replica had taken can only be told if a sample has a name; in a stream that is its position. An
`IndexedStream` reads given positions. `ReplayedStream` makes one of any reproducible iterable: it reads forward and
skips what other replicas read, or opens the iterable anew where seeking is cheaper.

Threads: whoever fetches: the training thread, or a worker process with a copy of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.data import Dataset

from ft_core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["IndexedStream", "ReplayedStream"]

T_co = TypeVar("T_co", covariant=True)


class IndexedStream(Dataset[T_co], ABC):
    """A dataset whose samples are read by position, with or without an end."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Number of samples, the same on all replicas; None: no end."""

    @abstractmethod
    def read(self, positions: Sequence[int]) -> list[T_co]:
        """Samples at these positions (each from 0 on), in that order. The same on every replica, at any time."""

    def __getitem__(self, position: int) -> T_co:
        return self.read([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[T_co]:
        return self.read(positions)


class ReplayedStream(IndexedStream[T_co], Generic[T_co]):
    """An iterable that yields the same samples each time it is opened.

    Read it with `shuffle=False`: a position behind the last one means opening the iterable anew.

    Args:
        open_at: called with a position p, returns an iterator over the samples from number p on. Must be reproducible,
            and picklable if the workers are spawned.
        length: number of samples; None: no end.
        max_skip: samples that may be read and dropped to get forward; further ahead, the iterable is opened anew. None:
            no limit, for an `open_at` that itself can only skip.

    Raises:
        ConfigError: a negative `max_skip`, or a length below 1.
    """

    def __init__(
        self, open_at: Callable[[int], Iterator[T_co]], length: int | None = None, max_skip: int | None = None
    ) -> None:
        if length is not None and length < 1:
            raise ConfigError(f"length={length}: must be at least 1, or None for a stream without end")
        if max_skip is not None and max_skip < 0:
            raise ConfigError(f"max_skip={max_skip}: must be 0 or more, or None for no limit")
        self._open_at, self._length, self._max_skip = open_at, length, max_skip
        self._iterator: Iterator[T_co] | None = None
        self._next = 0

    def __repr__(self) -> str:
        return f"ReplayedStream(length={self._length}, at position {self._next})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}  # an open iterator cannot be sent to a worker

    @property
    def length(self) -> int | None:
        """The length that was given."""
        return self._length

    def read(self, positions: Sequence[int]) -> list[T_co]:
        """Samples at these positions.

        Raises:
            UsageError: the stream ended before the length that was given for it, or one without end ended.
        """
        return [self._sample(position) for position in positions]

    def _sample(self, position: int) -> T_co:
        gap = position - self._next
        if self._iterator is None or gap < 0 or (self._max_skip is not None and gap > self._max_skip):
            self._iterator, self._next = iter(self._open_at(position)), position
        try:
            while self._next < position:
                next(self._iterator)
                self._next += 1
            sample = next(self._iterator)
        except Exception as error:
            self._iterator = None  # whatever it raised, it may not go on after that
            if not isinstance(error, StopIteration):
                raise
            end = f"length={self._length}" if self._length is not None else "no end"
            raise UsageError(f"the stream ended before position {position}, and was said to have {end}") from None
        self._next += 1
        return sample
