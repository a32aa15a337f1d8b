"""The order of additions: written out, for every way to deal out the terms."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.data.step_division import Batching
from ft_core.reduction.fixed_order.tree_sum import Node, OrderedSum, covers, in_pairs
from tests.fixed_order.reference import in_order


class Term(str):
    """Addition writes down what was added."""

    __slots__ = ()

    def __add__(self, other: str) -> Term:
        return Term(f"({self}{other})")


def part(first: int, last: int, count: int) -> list[tuple[Node, Term]]:
    """What a member with these numbers has in the end."""
    mine: OrderedSum[Term] = OrderedSum(lambda left, right: left + right)
    for number in range(first, last):
        mine.push(Node(0, number), Term(f"[{number}]"))
    mine.close(count)
    return mine.parts


@given(st.data())
def test_the_sum_does_not_depend_on_who_adds(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 70))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))
    edges = [0, *cuts, count]
    parts = [part(first, last, count) for first, last in itertools.pairwise(edges)]
    together = [node for nodes in parts for node in nodes]
    assert covers([node for node, _ in together], count)
    total: OrderedSum[Term] = OrderedSum(lambda left, right: left + right)
    for node, term in together:
        total.push(node, term)
    total.close(count)
    ((_, result),) = total.parts
    paired: OrderedSum[Term] = OrderedSum(lambda left, right: left + right)
    terms = dict(together)
    pairs = in_pairs([node for node, _ in together], count)
    for node, both in pairs:
        first, *second = [terms[one] for one in both]
        paired.push(node, first + second[0] if second else first)
    paired.close(count)
    assert [term for _, term in paired.parts] == [result]
    assert len(pairs) <= len(together) - (
        len(together) > 1
    )  # the last addition has two operands, and so has some other
    assert result == in_order([Term(f"[{number}]") for number in range(count)])


def test_written_out() -> None:
    assert in_order([Term(c) for c in "abcdefg"]) == "(((ab)(cd))((ef)g))"


@given(st.integers(0, 60), st.integers(1, 60), st.integers(0, 10))
def test_few_nodes_are_left(first: int, length: int, behind: int) -> None:
    nodes = part(first, first + length, first + length + behind)
    assert len(nodes) <= 2 * math.log2(length) + 2
    assert nodes[0][0].start == first


@pytest.mark.parametrize("missing", range(4))
def test_a_gap_is_seen(missing: int) -> None:
    nodes = [Node(1, 0), Node(0, 2), Node(0, 3), Node(2, 1)]
    assert covers(nodes, 8)
    assert covers(nodes, 5)
    assert not covers(nodes, 9)
    assert not covers([node for index, node in enumerate(nodes) if index != missing], 8)


def test_nothing_covers_nothing() -> None:
    assert not covers([], 0)
    assert repr(OrderedSum[int](max)) == "OrderedSum()"


@pytest.mark.parametrize(
    ("count", "members", "rows"), [(8, 1, 1), (8, 2, 1), (12, 3, 2), (16, 4, 2), (32, 8, 4), (8, 3, 3), (12, 2, 3)]
)
def test_what_is_sent_as_the_documentation_says(count: int, members: int, rows: int) -> None:
    """A row is as large as the gradients."""
    batching = Batching(1, count, fixed_micro_batches=True)
    shares = [batching.share(count, members, member) for member in range(members)]
    nodes = [node for first, last in shares for node, _ in part(first, last, count)]
    assert len(in_pairs(nodes, count)) == rows
