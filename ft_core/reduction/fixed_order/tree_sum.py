"""A sum whose additions do not depend on who computes which of them. Pure.

How it works. The terms of a sum have numbers 0 ... count - 1 and are added along a binary tree over the numbers: all of
them are split at the largest power of two below `count`, each half likewise. So (((0 + 1) + (2 + 3)) + (4 + 5)) + ...
is computed by whoever has the terms; a member with the terms 2 and 3 adds these two, and another one adds the rest to
their sum. Floating point additions are then the same ones, with the same rounding, however terms are dealt out.

A `Node` of the tree is the sum of the numbers [index << level, (index + 1) << level), as far as these exist.
`OrderedSum` takes nodes in rising order and adds what can be added: of k neighbouring terms at most 2 * log2(k) + 2
nodes are left. A running sum from left to right would be as fixed, but only one member at a time could go on with it,
or every single term would have to be sent.

Invariant: a node's value follows from its terms and `count` alone. Threads: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Node", "OrderedSum", "covers", "in_pairs"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """A place in the tree; a single term is on level 0, where `index` is its number."""

    level: int
    index: int

    @property
    def start(self) -> int:
        """The first number below it."""
        return self.index << self.level

    @property
    def stop(self) -> int:
        """Where the numbers below it end (exclusive); they need not all exist."""
        return (self.index + 1) << self.level

    @property
    def parent(self) -> Node:
        """The sum of this node and its sibling."""
        return Node(self.level + 1, self.index >> 1)


class OrderedSum(Generic[T]):
    """Adds neighbours as they come.

    Args:
        add: returns left + right, for example into left's memory; both are not used otherwise afterwards.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.parts: list[tuple[Node, T]] = []
        """What could not be added any further, in rising order."""

    def __repr__(self) -> str:
        return f"OrderedSum({', '.join(f'{node.start}..{node.stop - 1}' for node, _ in self.parts)})"

    def push(self, node: Node, term: T) -> None:
        """The next node; it lies behind all before it."""
        assert not self.parts or self.parts[-1][0].stop <= node.start, f"{node} after {self!r}"
        self.parts.append((node, term))
        self._merge()

    def close(self, count: int) -> None:
        """There are no terms from `count` on: a node whose sibling does not exist is its parent."""
        while self.parts:
            node, term = self.parts[-1]
            if node.index % 2 or node.stop < count or not node.start:
                return
            self.parts[-1] = (node.parent, term)
            self._merge()

    def clear(self) -> list[T]:
        """Forget everything. Returns what was there."""
        terms = [term for _, term in self.parts]
        self.parts.clear()
        return terms

    def _merge(self) -> None:
        while len(self.parts) > 1:
            (left, first), (right, second) = self.parts[-2:]
            if left.level != right.level or left.index % 2 or right.index != left.index + 1:
                return
            self.parts[-2:] = [(left.parent, self._add(first, second))]


def in_pairs(nodes: Sequence[Node], count: int) -> list[tuple[Node, tuple[Node, ...]]]:
    """Put siblings together: (their parent, both) or (a node, itself alone), in rising order.

    The sum of two is the same whoever adds them, and in which order: one addition can be left to others.
    """
    rest = list(nodes)
    if rest:  # the last one stands for its parent as long as there is no sibling
        last: OrderedSum[Node] = OrderedSum(lambda left, _right: left)
        last.push(rest[-1], rest[-1])
        last.close(count)
        rest[-1] = last.parts[0][0]
    out: list[tuple[Node, tuple[Node, ...]]] = []
    for node, given in zip(rest, nodes, strict=True):
        before = out[-1] if out else None
        if before is not None and len(before[1]) == 1 and before[0].parent == node.parent:
            out[-1] = (node.parent, (*before[1], given))
        else:
            out.append((node, (given,)))
    return out


def covers(nodes: Iterable[Node], count: int) -> bool:
    """Whether these nodes, in rising order, contain each of the numbers 0 ... count - 1 once."""
    reached = 0
    for node in nodes:
        if node.start != reached:
            return False
        reached = node.stop
    return reached >= count > 0
