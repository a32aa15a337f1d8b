"""Which gradient lies where: the plan of the flat buckets, and its digest.

Everything here is a pure function of what the module looks like (names, shapes, dtypes, strides, requires_grad) and of
the bucket settings, never of the order in which gradients arrived, of the process or of the device's number. So all
replicas have the same plan, and so has a newcomer; the digest shows whether they do.

Parameters are taken in reverse order of `module.parameters()`, since gradients arrive in about that order. Each pair of
dtype and device has an open bucket; it is closed by the parameter that reaches its cap. Buckets are ordered by their
last parameter, so that in the usual case bucket i is complete before bucket i + 1.

The tail lies at the end of the last bucket if that is float32, else in a bucket of its own:

    | gradients ... | fence slots | users of each parameter | float32 buffers | other buffers as 16-bit pieces |

In a replica group of several ranks a plan has two more (`plan_inside`): of what its ranks sum among themselves first,
and of what each of them then sums with its peers in the other groups.

Invariants: every trained parameter is in exactly one bucket; the tail is in the last bucket; offsets and sizes are in
elements of the bucket's dtype (a complex gradient is planned as two real elements).
Threads: none; all values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PIECE_BYTES = 2
"""A float32 holds every 16-bit integer exactly, and x + 0 too: bit patterns travel as such pieces."""
STAGING_ALIGNMENT_BYTES = 16
"""So that any dtype can be viewed in the staging area."""
TAIL_DTYPE = "float32"
SHARD_ALIGNMENT = 16
"""Elements: a shard's length is a multiple of it."""
WEIGHT_DIGITS, WEIGHT_DIGIT = 5, 1 << 7
"""How a weight is written into the sum: so that the sums of 100,000 of these digits are exact in float32."""

_REAL_OF = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer. `strides`: None if contiguous; `device` counts devices in order of appearance."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize_bytes: int
    strides: tuple[int, ...] | None = None
    device: int = 0
    trained: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        strides = "" if self.strides is None else f" strides {list(self.strides)}"
        return f"{self.name} {self.dtype} {list(self.shape)}{strides}{'' if self.trained else ' frozen'}"


@dataclass(frozen=True)
class BucketSettings:
    """How gradients are cut into buckets, and what travels with them.

    `caps_bytes`: one cap per bucket of a dtype, the last one for all further. `find_unused`: the tail has an element
    per trained parameter, which counts the members that used it.
    """

    caps_bytes: tuple[int, ...] = (1 << 20, 25 << 20)
    find_unused: bool = False
    broadcast_buffers: bool = True


@dataclass(frozen=True)
class Member:
    """Where one gradient lies in its bucket. `parameter` indexes `BucketPlan.trained`."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class PlannedBucket:
    """One flat tensor. `gradients` elements hold gradients, the rest of `numel` is the tail."""

    dtype: str
    device: int
    members: tuple[Member, ...]
    gradients: int
    numel: int


@dataclass(frozen=True)
class TailPlan:
    """Where the parts of the tail lie in the last bucket, in float32 elements."""

    fence: int
    fence_slots: int
    used: int
    used_numel: int
    buffers: tuple[tuple[int, int], ...]
    """(index into `BucketPlan.buffers`, offset in the bucket) of each float32 buffer."""
    pieces: int
    pieces_numel: int
    staged: tuple[tuple[int, int], ...]
    """(index into `BucketPlan.buffers`, offset in bytes in the staging area) of each other buffer."""
    end: int


@dataclass(frozen=True)
class BucketPlan:
    """The plan for one module. Build it with `plan_buckets`."""

    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    settings: BucketSettings
    buckets: tuple[PlannedBucket, ...]
    tail: TailPlan
    averages_over_ranks: ClassVar[bool] = False
    """The gradients are means over the ranks of a group, whatever these weigh; so their weights must be equal."""

    @cached_property
    def trained(self) -> tuple[TensorSpec, ...]:
        """The parameters that get gradients, in module order."""
        return tuple(spec for spec in self.parameters if spec.trained)

    @property
    def names(self) -> list[str]:
        """Names of all parameters, in module order."""
        return [spec.name for spec in self.parameters]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all parameters, in module order."""
        return [spec.shape for spec in self.parameters]

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of all parameters, in module order, as 'float32'."""
        return [spec.dtype for spec in self.parameters]

    def describe(self) -> list[str]:
        """One line per parameter ('name dtype shape'), then per synced buffer, then the settings."""
        lines = [str(spec) for spec in self.parameters]
        lines += [f"buffer {spec}" for spec in self.buffers]
        lines.append(f"settings {self.settings}")
        return lines

    @cached_property
    def digest(self) -> int:
        """64 bits (unsigned) that are equal where the plans are, in every process and on every machine."""
        text = "\n".join([*self.describe(), repr(self.buckets), repr(self.tail)])
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass
class _Open:
    """A bucket that is being filled."""

    dtype: str
    device: int
    members: list[Member]
    filled: int = 0
    filled_bytes: int = 0
    last_seen: int = 0


def plan_buckets(
    parameters: Iterable[TensorSpec], buffers: Iterable[TensorSpec], settings: BucketSettings, fence_slots: int
) -> BucketPlan:
    """Plan the buckets; see the head of this file for the rules."""
    all_parameters = tuple(parameters)
    synced = tuple(buffers) if settings.broadcast_buffers else ()
    trained = [spec for spec in all_parameters if spec.trained]
    buckets = _fill_buckets(trained, settings.caps_bytes)
    if not buckets or buckets[-1].dtype != TAIL_DTYPE:
        buckets.append(PlannedBucket(TAIL_DTYPE, buckets[0].device if buckets else 0, (), 0, 0))
    last = buckets[-1]
    tail = _plan_tail(last.gradients, len(trained) if settings.find_unused else 0, synced, fence_slots)
    buckets[-1] = PlannedBucket(last.dtype, last.device, last.members, last.gradients, tail.end)
    return BucketPlan(all_parameters, synced, settings, tuple(buckets), tail)


@dataclass(frozen=True)
class ShardedPlan(BucketPlan):
    """The plan of replica groups that reduce in shards: its digest keeps groups out of the room that do not."""

    ranks: int = 1

    def describe(self) -> list[str]:
        """The lines of a plan, and how it is cut."""
        return [*super().describe(), f"reduced in {self.ranks} shards, one per rank of a group"]


@dataclass(frozen=True)
class InsidePlans:
    """Where things lie in a replica group of several ranks.

    `summed`: the gradients in as many equal shards as there are ranks; in the last bucket the users of each parameter
    follow them (`TailPlan.used`), then the weight of what is in the sum, in digits (`TailPlan.pieces`). Its `fence` is
    empty. `crossing`: one shard of each bucket; in the last one the fence and the buffers follow it.
    """

    summed: BucketPlan
    crossing: BucketPlan


def plan_inside(plan: ShardedPlan) -> InsidePlans:
    """Cut `plan` into a shard per rank."""
    summed, crossing, used_numel, ranks = [], [], plan.tail.used_numel, plan.ranks
    for bucket in plan.buckets:
        last = bucket is plan.buckets[-1]
        numel = bucket.gradients + (used_numel + WEIGHT_DIGITS if last else 0)
        shard = -(-numel // (ranks * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT
        summed.append(PlannedBucket(bucket.dtype, bucket.device, bucket.members, bucket.gradients, shard * ranks))
        crossing.append(PlannedBucket(bucket.dtype, bucket.device, (), shard, shard))
    gradients, shard = plan.buckets[-1].gradients, crossing[-1].numel
    pieces = gradients + used_numel
    tail = TailPlan(gradients, 0, gradients, used_numel, (), pieces, 0, (), pieces + WEIGHT_DIGITS)
    beside = _plan_tail(shard, 0, plan.buffers, plan.tail.fence_slots)
    crossing[-1] = PlannedBucket(TAIL_DTYPE, crossing[-1].device, (), shard, beside.end)
    return InsidePlans(
        BucketPlan(plan.parameters, plan.buffers, plan.settings, tuple(summed), tail),
        BucketPlan(plan.parameters, plan.buffers, plan.settings, tuple(crossing), beside),
    )


def _fill_buckets(trained: Sequence[TensorSpec], caps_bytes: tuple[int, ...]) -> list[PlannedBucket]:
    opened: dict[tuple[str, int], _Open] = {}
    closed_count: dict[tuple[str, int], int] = {}
    closed: list[_Open] = []
    for position, index in enumerate(reversed(range(len(trained)))):
        spec = trained[index]
        key = (spec.dtype, spec.device)
        bucket = opened.get(key)
        if bucket is None:
            bucket = opened[key] = _Open(_REAL_OF.get(spec.dtype, spec.dtype), spec.device, [])
        numel = spec.numel * (2 if spec.dtype in _REAL_OF else 1)
        bucket.members.append(Member(index, bucket.filled, numel))
        bucket.filled += numel
        bucket.filled_bytes += spec.numel * spec.itemsize_bytes
        bucket.last_seen = position
        count = closed_count.get(key, 0)
        if bucket.filled_bytes >= caps_bytes[min(count, len(caps_bytes) - 1)]:
            closed.append(opened.pop(key))
            closed_count[key] = count + 1
    closed += opened.values()
    closed.sort(key=lambda bucket: bucket.last_seen)
    return [PlannedBucket(b.dtype, b.device, tuple(b.members), b.filled, b.filled) for b in closed]


def _plan_tail(start: int, used_numel: int, buffers: Sequence[TensorSpec], fence_slots: int) -> TailPlan:
    used = start + fence_slots
    offset = used + used_numel
    direct: list[tuple[int, int]] = []
    staged: list[tuple[int, int]] = []
    staged_bytes = 0
    for index, spec in enumerate(buffers):
        if spec.dtype == TAIL_DTYPE:
            direct.append((index, offset))
            offset += spec.numel
        else:
            staged.append((index, staged_bytes))
            size = spec.numel * spec.itemsize_bytes
            staged_bytes += -(-size // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES
    pieces_numel = staged_bytes // PIECE_BYTES
    return TailPlan(
        fence=start,
        fence_slots=fence_slots,
        used=used,
        used_numel=used_numel,
        buffers=tuple(direct),
        pieces=offset,
        pieces_numel=pieces_numel,
        staged=tuple(staged),
        end=offset + pieces_numel,
    )
