"""`SharedLoop`: a loop over evaluation data of which each replica group reads a part; all get every result, in order.

How it works. The batches that one group alone would read are the *pieces*, divided in turn: step s of the loop has the
pieces s * parts to s * parts + parts - 1, one of each group, as Accelerate divides them among processes. Each call of
`gather_for_metrics` in the loop's body is a result of the piece under way; it is exchanged with the other groups at
once, and the call returns what the whole step has. In the last step there may be fewer pieces than groups: groups
without one do the last piece as well, so that they have a call that returns the others' results.

A group whose result does not come is *lost* to this loop: its piece of this step and all of its later ones are put on
the agenda here. Survivors may lose it at different calls, or lose each other: each counts for itself what it has.

Results are returned in the order of the data, whatever was lost: what follows a missing piece is held back (`_Line`)
until that has been done. So where a loss shows, one call of each place in the body may return nothing.

Invariant: over all calls of one place in the body each piece is returned exactly once. Threads: the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ft_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ft_core.loop.shared_work import Division


class Padding(NamedTuple):
    """The arguments of one call of `pad_across_processes`."""

    dim: int
    value: float
    first: bool


class _Line:
    """Results of one place in the loop's body, put into the order of the pieces."""

    def __init__(self) -> None:
        self._step = -1
        self._next = 0
        self._waiting: dict[int, Any] = {}

    def enter(self, step: int, first: int) -> None:
        """The body is in this step, whose first piece is `first`."""
        if step != self._step:
            self._step, self._next = step, first

    def put(self, piece: int, value: Any) -> None:
        """A result; one that came before is no news."""
        if piece >= self._next:
            self._waiting.setdefault(piece, value)

    def take(self, first: int) -> list[Any]:
        """All that can be returned now. What was missing before the step's `first` piece does not come any more."""
        taken = [self._waiting.pop(piece) for piece in sorted(self._waiting) if piece < first]
        while self._next in self._waiting:
            taken.append(self._waiting.pop(self._next))
            self._next += 1
        return taken


class SharedLoop:
    """One loop over evaluation data that the groups share.

    Args:
        division: of this loop's data; cut into `pieces`.
        pieces: how many there are.
        missing: parts that are known to be missing, before anything was done.
    """

    def __init__(self, division: Division, pieces: int, missing: Iterable[int] = ()) -> None:
        self._division = division
        self.pieces = pieces
        self.lost = set(missing)
        """Parts that are done here."""
        self.agenda = self._rest(0)
        """Pieces that are still to be done here, in order."""
        self.piece = -1
        """The piece whose body is under way."""
        self.done = 0
        """Pieces that were begun here."""
        self.calls = 0
        """Results so far, of all pieces."""
        self.paddings: list[Padding] = []
        """Paddings in the body under way."""
        self._place = 0
        self._lines: list[_Line] = []
        self._since = time.monotonic()

    def __repr__(self) -> str:
        return f"SharedLoop(piece {self.piece} of {self.pieces}, {len(self.agenda)} more here, {self._division!r})"

    @property
    def parts(self) -> int:
        """Among how many the data is divided."""
        return self._division.parts

    @property
    def steps(self) -> int:
        """How many the loop has."""
        return -(-self.pieces // self._division.parts)

    @property
    def last_piece(self) -> bool:
        """The piece under way is the last one of the data, wherever the loop is."""
        return self.piece == self.pieces - 1

    def _own(self, step: int) -> int:
        """The piece that this group does in a step though nobody is lost."""
        return min(step * self._division.parts + self._division.part, self.pieces - 1)

    def _rest(self, step: int) -> list[int]:
        """The pieces that this group does from that step on, in such an order that each call can return something.

        The others' results come with the own piece, so that is done as soon as no lost group's piece is before all.
        """
        agenda: list[int] = []
        for t in range(step, self.steps):
            first, own = t * self._division.parts, self._own(t)
            pieces = [first + part for part in sorted(self.lost)]
            theirs = [piece for piece in pieces if piece < self.pieces and piece != own]
            leading = [piece for number, piece in enumerate(theirs) if piece == first + number]
            agenda += [*leading, own, *theirs[len(leading) :]]
        return agenda

    def begin(self) -> int:
        """The next piece of the agenda is under way. Returns it."""
        self.piece = self.agenda.pop(0)
        self.done += 1
        self._place = 0
        self.paddings.clear()
        return self.piece

    def result(self, value: Any) -> list[Any]:
        """A result of the piece under way: exchange it.

        Args:
            value: of this group's; what a state dict may hold, on the CPU.

        Returns:
            what is to be returned for it, in the order of the data: results of pieces, perhaps none.
        """
        place, self._place, self.calls = self._place, self._place + 1, self.calls + 1
        if place == len(self._lines):
            self._lines.append(_Line())
        line, parts = self._lines[place], self._division.parts
        step = self.piece // parts
        line.enter(step, step * parts)
        line.put(self.piece, value)
        if self.piece == self._own(step):
            for piece, other in self._exchange(step, place, value).items():
                line.put(piece, other)
        return line.take(step * parts)

    def _exchange(self, step: int, place: int, value: Any) -> dict[int, Any]:
        """The other groups' results of this step, by piece."""
        division = self._division
        others = {p: step * division.parts + p for p in range(division.parts) if p not in self.lost}
        among = [p for p, piece in others.items() if piece < self.pieces and piece != self.piece]
        took_s = time.monotonic() - self._since
        awaited = step + 1 == self.steps and self.piece == step * division.parts + division.part
        found = division.exchange(f"{step}.{place}", value, took_s, among=among, lost=self.lost, more=not awaited)
        self._since = time.monotonic()
        self._lose([part for part in among if part not in found], step)
        return {others[part]: other for part, other in found.items()}

    def _lose(self, parts: Collection[int], step: int) -> None:
        if not parts:
            return
        first = step * self._division.parts
        missing = {first + part for part in parts} | {p for p in self.agenda if p < first + self._division.parts}
        self.lost.update(parts)
        self.agenda = [*sorted(missing), *self._rest(step + 1)]


def joined(values: Sequence[Any], like: Any, paddings: Sequence[Padding], objects: bool = False) -> Any:
    """Results of several pieces behind each other, as `gather` joins those of processes.

    Args:
        values: of the pieces, in order, of one structure; may be none.
        like: what this group would return alone: its structure, types and devices.
        paddings: what the body said to `pad_across_processes`.
        objects: they are lists of things, not tensors.

    Raises:
        UsageError: tensors of different sizes, and nobody said how to pad them.
    """
    if objects:
        if isinstance(like, np.ndarray):
            return np.concatenate([like[:0], *values])
        return [item for value in values for item in value]
    if isinstance(like, torch.Tensor):
        return _joined_tensors(values, like, paddings)
    if isinstance(like, Mapping):
        kind: Any = type(like)
        return kind({name: joined([v[name] for v in values], part, paddings) for name, part in like.items()})
    parts = [joined([value[i] for value in values], part, paddings) for i, part in enumerate(like)]
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def _joined_tensors(values: Sequence[Any], like: torch.Tensor, paddings: Sequence[Padding]) -> torch.Tensor:
    tensors = [value.to(like.device) for value in values]
    if not tensors:
        return like.reshape(1)[:0] if like.dim() == 0 else like[:0]
    tensors = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        tensors = list(_padded(tensors, paddings))
    return torch.cat(tensors)


def _padded(tensors: Sequence[torch.Tensor], paddings: Sequence[Padding]) -> Iterator[torch.Tensor]:
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    dims = {len(shape) for shape in shapes}
    known = {p.dim % len(shapes[0]): p for p in paddings if -len(shapes[0]) <= p.dim < len(shapes[0])}
    longest = [max(sizes) for sizes in zip(*shapes, strict=len(dims) > 1)] if len(dims) == 1 else []
    uneven = [d for d in range(1, len(longest)) if len({shape[d] for shape in shapes}) > 1]
    if len(dims) > 1 or any(d not in known for d in uneven):
        raise UsageError(
            f"gather_for_metrics() of tensors of different sizes in a shared evaluation ({shapes[0]} in one replica "
            f"group, {shapes[-1]} in another): call accelerator.pad_across_processes(tensor, dim=...) before, in the "
            "loop, or leave out share_evaluation=True"
        )
    for tensor in tensors:
        padded = tensor
        for d in uneven:
            room = list(padded.shape)
            room[d] = longest[d] - room[d]
            fill = padded.new_zeros(room) + known[d].value
            padded = torch.cat([fill, padded] if known[d].first else [padded, fill.to(padded.dtype)], dim=d)
        yield padded
