"""The order in which one epoch visits a dataset: a permutation that is a function, the same on every machine.

How it works. Up to SMALL samples, every index gets a keyed 62-bit hash and the order is that of the hashes: half a
megabyte at most. A longer order is never written out: a number x is split as x = left * width + right, both sides near
the square root of the length; a round adds a keyed hash of one side to the other, modulo that side's size, which can be
undone and is therefore one to one (a generalized Feistel network: Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002). left * width may exceed the length by less than two rows: a result outside is sent through the
network again until it is inside ("cycle walking"), which is rare, and keeps the map one to one.

Everything is integer arithmetic below 2**63 with a hash of our own: no generator of any library is involved. A reader's
ranges in successive steps lie a `stride` apart, so a miss computes those of the next steps along with the first one,
and nothing of what other readers read.

Threads: one at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sized
from typing import TYPE_CHECKING

import torch

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["EpochOrder", "length_of"]

SMALL = 1 << 16
"""Up to here the order is written out; tiny sets also give a network's rounds too few values to mix with."""
ROUNDS = 8
AHEAD = 4096
"""Indices computed at a time, and kept."""
MAX_LENGTH = 1 << 62
_MASK = (1 << 32) - 1


class EpochOrder:
    """Which dataset index stands at which position of one epoch.

    Args:
        length: number of samples, from 1 to 2**62.
        seed: any integer; the same on all replicas.
        epoch: number of the epoch; each has an order of its own.
        shuffle: False: position i is index i.
    """

    def __init__(self, length: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        assert 1 <= length <= MAX_LENGTH
        self.length, self.seed, self.epoch, self.shuffle = length, seed, epoch, shuffle
        self._width = math.isqrt(length - 1) + 1
        self._rows = -(-length // self._width)
        self._keys = _round_keys(length, seed, epoch)
        self._whole: Tensor | None = None
        self._ready: dict[tuple[int, int], list[int]] = {}

    def __repr__(self) -> str:
        return f"EpochOrder({self.length} samples, seed={self.seed}, epoch={self.epoch}, shuffle={self.shuffle})"

    def indices(self, ranges: Iterable[tuple[int, int]], stride: int = 0) -> list[int]:
        """Dataset indices at the positions of some half-open ranges, in their order.

        Args:
            ranges: of positions.
            stride: the same ranges are likely to be asked for again this many positions later; 0: unknown.
        """
        out: list[int] = []
        for start, stop in ranges:
            assert 0 <= start <= stop <= self.length
            if not self.shuffle:
                out += range(start, stop)
            elif self.length <= SMALL:
                out += self._written_out()[start:stop].tolist()
            else:
                out += self._ready.pop((start, stop), []) or self._compute(start, stop, stride)
        return out

    def at(self, positions: Tensor) -> Tensor:
        """Dataset indices at `positions` (int64, any shape, each from 0 to length - 1)."""
        if not self.shuffle:
            return positions.clone()
        if self.length <= SMALL:
            return self._written_out()[positions]
        out = self._once(positions)
        while bool((outside := out >= self.length).any()):
            out[outside] = self._once(out[outside])
        return out

    def _written_out(self) -> Tensor:
        if self._whole is None:
            x = torch.arange(self.length)
            hashes = (_hash(x, self._keys[0]) << 30) | (_hash(x, self._keys[1]) >> 2)
            self._whole = torch.argsort(hashes, stable=True)
        return self._whole

    def _compute(self, start: int, stop: int, stride: int) -> list[int]:
        size = stop - start
        steps = min(AHEAD // size, (self.length - stop) // stride + 1) if size and stride >= size else 1
        firsts = start + stride * torch.arange(max(1, steps))
        found = self.at(firsts[:, None] + torch.arange(size)).tolist()
        if len(self._ready) * size >= AHEAD:
            self._ready.clear()
        for number in range(1, len(found)):
            self._ready[start + number * stride, stop + number * stride] = found[number]
        first: list[int] = found[0]
        return first

    def _once(self, x: Tensor) -> Tensor:
        left, right = x // self._width, x % self._width
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _hash(left, key)) % self._width
            else:
                left = (left + _hash(right, key)) % self._rows
        return left * self._width + right


def _hash(x: Tensor, key: tuple[int, int]) -> Tensor:
    """32 well mixed bits of x (below 2**32) and the key; products stay below 2**63."""
    h = (x ^ key[0]).bitwise_and_(_MASK)
    h.mul_(0x45D9F3B5).bitwise_and_(_MASK)
    h.bitwise_xor_(h >> 16).add_(key[1]).bitwise_and_(_MASK)
    h.mul_(0x2C1B3C6D).bitwise_and_(_MASK)
    h.bitwise_xor_(h >> 15).mul_(0x297A2D39).bitwise_and_(_MASK)
    return h.bitwise_xor_(h >> 16)


def _round_keys(length: int, seed: int, epoch: int) -> tuple[tuple[int, int], ...]:
    text = f"ft_core.data.order 1 {length} {seed} {epoch} ".encode()
    raw = [hashlib.blake2b(text + str(number).encode(), digest_size=8).digest() for number in range(ROUNDS)]
    return tuple((int.from_bytes(word[:4], "little"), int.from_bytes(word[4:], "little")) for word in raw)


def length_of(dataset: Sized | int) -> int:
    """Samples in a dataset, or that number itself.

    Raises:
        ConfigError: it has no length, or one that no epoch can have.
    """
    if isinstance(dataset, bool) or not isinstance(dataset, int | Sized):
        raise ConfigError(
            f"{type(dataset).__name__} has no length: the elastic sampler needs a map-style dataset, or an "
            "ft_core.data.IndexedStream with samples_per_epoch"
        )
    length = dataset if isinstance(dataset, int) else len(dataset)
    if not 1 <= length <= MAX_LENGTH:
        raise ConfigError(f"the dataset has {length} samples: must be from 1 to {MAX_LENGTH}")
    return length
