"""Brings the nodes of all members (partial sums of gradients) to all members, and adds them up in the tree's order.

How it works. First a *header* is summed: an integer per micro-batch is the node that starts there, another holds
the bits of its loss, and one per parameter shows whether anybody used it. So every member knows the nodes of all, also
one whose own idea of the step is an old one because it heals meanwhile. Then each node gets a row in an exchange
buffer, into which its owner writes its gradients and everybody else what leaves a sum unchanged; the sum over the
members is everybody's copy. This is done in chunks, of which EXCHANGE_BUFFERS are under way; a chunk that arrived is
summed along the tree into the result.

On CPU, float32 and float64 are summed as such, and two siblings share a row: x + y has one rounding, the same in
whatever order they and the others' -0.0 are added. So for two replicas this is one allreduce of the gradients, as in
any data parallelism. Other dtypes, which a backend may round in its own way, travel as integers, a row for each node.

Traffic: one allreduce of the size of the gradients per row. The cheapest that needs nothing but sums, for few replicas.

Invariants: what is launched, and how large it is, follows from the header and the plan alone, so it is the same on
all members. No buffer is written while a collective may use it: every work launched is waited for.
Threads: one at a time (those of `reducer`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ft_core.reduction.fixed_order.tree_sum import Node, OrderedSum, covers, in_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ft_core.reduction.flat_buckets import FlatGradients
    from ft_core.reduction.interface import PendingWork, ReductionAttempt

__all__ = ["Chunk", "Header", "NodeExchange", "Told"]

EXCHANGE_BYTES = 32 << 20
"""About the size of all exchange buffers together."""
EXCHANGE_BUFFERS = 2
"""One is on its way while the next is packed."""
ROW_ALIGNMENT_BYTES = 16
"""So that any dtype can be viewed in a row."""
WORD_BYTES = 4
Rows = list[tuple[Node, tuple[Node, ...]]]
SUMMED_ALIKE = (torch.float32, torch.float64)
"""Dtypes whose addition is the same in torch and in a backend for the CPU."""


class Header:
    """One member's description of its nodes; all zeros if it contributes nothing.

    Args:
        size: micro-batches in a step at most.
        parameters: how many.
    """

    def __init__(self, size: int, parameters: int) -> None:
        self.size, self.parameters = size, parameters
        self.numbers = [0] * (2 * size + parameters + 3)

    def fill(self, nodes: Sequence[tuple[Node, float]], used: Sequence[int], losses: int, count: int) -> None:
        """This member contributes.

        Args:
            nodes: with the loss of each.
            used: 1 for each parameter that got a gradient.
            losses: how many micro-batches recorded one.
            count: micro-batches of the step.
        """
        starts, bits = [0] * self.size, [0] * self.size
        for node, loss in nodes:
            starts[node.start] = node.level + 1
            bits[node.start] = struct.unpack("<q", struct.pack("<d", loss))[0]
        self.numbers = [*starts, *bits, *used, losses, 1, count]


class Told:
    """The contents of the summed header."""

    def __init__(self, numbers: Sequence[int], header: Header) -> None:
        size = header.size
        starts, bits = numbers[:size], numbers[size : 2 * size]
        self.used = numbers[2 * size : 2 * size + header.parameters]
        """How many members used each parameter."""
        recorded, contributors, counts = numbers[-3:]
        self.nodes = [Node(level - 1, start >> (level - 1)) for start, level in enumerate(starts) if level > 0]
        self.count = counts // max(1, contributors)
        alike = self.count * contributors == counts
        self.complete = alike and covers(self.nodes, self.count)
        """Each micro-batch of the step is in one node."""
        self.alone: Rows = [(node, (node,)) for node in self.nodes]
        """One row per node: (what the row is in the tree, the nodes that are written into it)."""
        self.in_pairs: Rows = in_pairs(self.nodes, self.count)
        """Siblings share a row."""
        self.loss: float | None = None
        """The loss of the step; None: no micro-batch recorded one."""
        if self.complete and recorded:
            total: OrderedSum[float] = OrderedSum(lambda left, right: left + right)
            for node in self.nodes:
                total.push(node, struct.unpack("<d", struct.pack("<q", bits[node.start]))[0])
            total.close(self.count)
            self.loss = total.parts[0][1]
        self.lack = (
            "micro-batches of this step are missing, since a participant contributed nothing (it failed, or could not "
            "heal): the step is done again"
        )
        if not alike:
            self.lack = "the participants divided this step into different numbers of micro-batches"


@dataclass(slots=True)
class Chunk:
    """Elements `first` to `last` of bucket `bucket`, under way."""

    bucket: int
    first: int
    last: int
    rows: Tensor
    """[rows, elements] in the bucket's dtype; a view of an exchange buffer."""
    work: PendingWork


class Works:
    """What was launched and not waited for."""

    def __init__(self) -> None:
        self._open: list[PendingWork] = []

    def __repr__(self) -> str:
        return f"Works({len(self._open)} open)"

    def add(self, work: PendingWork | None) -> PendingWork | None:
        """A work was launched; None: it could not be. Returns it."""
        if work is not None:
            self._open.append(work)
        return work

    def wait(self, work: PendingWork) -> None:
        """Until it has ended. Raises what it failed with."""
        self._open.remove(work)
        work.wait()

    def outlast(self) -> None:
        """Until all have ended, however they do: the attempt is broken already, and knows why."""
        while self._open:
            work = self._open.pop()
            try:
                work.wait()
            except Exception:  # noqa: BLE001 (only its end matters)
                continue


class NodeExchange:
    """Brings nodes together in `result`, whose plan they share. `device`: of all of them."""

    def __init__(self, result: FlatGradients, device: torch.device) -> None:
        self.works = Works()
        self._result, self._device = result, device
        self._buffers = [torch.zeros(0, dtype=torch.int32, device=device) for _ in range(EXCHANGE_BUFFERS)]

    def __repr__(self) -> str:
        return f"NodeExchange({sum(b.numel() for b in self._buffers) * WORD_BYTES >> 20} MiB, {self.works!r})"

    def tell(self, attempt: ReductionAttempt, header: Header) -> Told | None:
        """Sum the headers of all members; None: the attempt is broken."""
        numbers, memory = torch.tensor(header.numbers), self._result.buckets[-1].device
        if not memory.immediate:
            on_host, numbers = numbers, torch.empty_like(numbers, device=self._device)
            memory.put(on_host, numbers)
        work = self.works.add(attempt.launch(numbers))
        if work is None:
            return None
        self.works.wait(work)
        return Told(attempt.read(numbers).tolist(), header)

    def send(self, attempt: ReductionAttempt, told: Told, mine: Mapping[Node, FlatGradients]) -> list[Chunk] | None:
        """Bring the nodes of all to all. Returns the chunks that `add_up` has not seen yet; None: the attempt broke."""
        pending: list[Chunk] = []
        for turn, (bucket, first, last) in enumerate(self._plan(told)):
            if len(pending) == EXCHANGE_BUFFERS:
                self.add_up(pending.pop(0), told)
            given = [[mine[node] for node in nodes if node in mine] for _, nodes in self._rows(bucket, told)]
            rows, whole = self._pack(turn % EXCHANGE_BUFFERS, bucket, first, last, given)
            work = self.works.add(attempt.launch(whole))
            if work is None:
                return None
            pending.append(Chunk(bucket, first, last, rows, work))
        return pending

    def add_up(self, chunk: Chunk, told: Told) -> None:
        """Wait for a chunk and sum its rows into the result."""
        self.works.wait(chunk.work)
        total: OrderedSum[Tensor] = OrderedSum(lambda left, right: left.add_(right))
        for (node, _), row in zip(self._rows(chunk.bucket, told), chunk.rows, strict=True):
            total.push(node, row)
        total.close(told.count)
        ((_, row),) = total.parts
        self._result.buckets[chunk.bucket].gradients[chunk.first : chunk.last].copy_(row)

    def _summed_alike(self, bucket: int) -> bool:
        return self._device.type == "cpu" and self._result.buckets[bucket].flat.dtype in SUMMED_ALIKE

    def _rows(self, bucket: int, told: Told) -> Rows:
        return told.in_pairs if self._summed_alike(bucket) else told.alone

    def _plan(self, told: Told) -> list[tuple[int, int, int]]:
        """(bucket, first element, last element) of every chunk."""
        chunks = []
        for number, bucket in enumerate(self._result.buckets):
            row_bytes = EXCHANGE_BYTES // EXCHANGE_BUFFERS // len(self._rows(number, told))
            length = bucket.gradients.numel()
            step = max(1, row_bytes // bucket.flat.element_size())
            chunks += [(number, low, min(length, low + step)) for low in range(0, length, step)]
        return chunks

    def _pack(
        self, turn: int, bucket: int, first: int, last: int, given: Sequence[Sequence[FlatGradients]]
    ) -> tuple[Tensor, Tensor]:
        """Fill an exchange buffer with what is mine, and zeros elsewhere. Returns (its rows, what is to be summed)."""
        dtype = self._result.buckets[bucket].flat.dtype
        row_bytes = -(-(last - first) * dtype.itemsize // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
        size = row_bytes // WORD_BYTES * len(given)
        if self._buffers[turn].numel() < size:
            self._buffers[turn] = torch.zeros(size, dtype=torch.int32, device=self._device)
        words = self._buffers[turn][:size]
        typed = words.view(dtype)
        alike = self._summed_alike(bucket)
        if alike:
            typed.fill_(-0.0)
        else:
            words.zero_()
        rows = typed.view(len(given), row_bytes // dtype.itemsize)[:, : last - first]
        for row, nodes in zip(rows, given, strict=True):
            for node in nodes:  # at most one: siblings that I both have are added already
                row.copy_(node.buckets[bucket].gradients[first:last])
        return rows, typed if alike else words
