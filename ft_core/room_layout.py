"""R4: a room trains one model; what is known of it, and the sentence that names the first difference. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DATA = "data: "
"""How the line about elastic data begins; it is the last one."""
WHOLE_STEPS = "every step has the contributions of all its participants"
"""The first line, where that is required."""
DATA_ADVICE = "give all replica groups the same dataset, seed and batch settings"
ADVICE = "start every replica group with the same model and the same DistributedDataParallel settings"


@dataclass(frozen=True, slots=True)
class RoomLayout:
    """The layout of a room's model: its digest, one line per parameter (may be empty), and who brought it."""

    digest: int
    lines: tuple[str, ...]
    holder: str


def difference(replica_id: str, ours: tuple[str, ...], room: RoomLayout) -> str:
    """Name the first parameter in which a newcomer's model differs from the room's; or how its data or rules do."""
    whole = WHOLE_STEPS in ours
    if whole != (WHOLE_STEPS in room.lines) and room.lines:
        here, there = ("has", "has not") if whole else ("has not", "has")
        return (
            f"{replica_id} {here} called Manager.require_all_contributions, and {room.holder} {there}: call it in all "
            "replica groups or in none"
        )
    if ours[-1:] != room.lines[-1:] and all(lines[-1:] and lines[-1].startswith(DATA) for lines in (ours, room.lines)):
        mine, theirs = ours[-1].removeprefix(DATA), room.lines[-1].removeprefix(DATA)
        return f"{replica_id} reads other data than {room.holder}: {mine} here and {theirs} there; {DATA_ADVICE}"
    return f"{replica_id} has another model than {room.holder}: {_first_difference(ours, room.lines)}; {ADVICE}"


def _first_difference(ours: tuple[str, ...], lines: tuple[str, ...]) -> str:
    ours, lines = (tuple(line for line in both if line != WHOLE_STEPS) for both in (ours, lines))
    for index, (mine, theirs) in enumerate(zip(ours, lines, strict=False)):
        if mine != theirs:
            return f"parameter {index} is '{mine}' here and '{theirs}' there"
    if len(ours) != len(lines):
        longer = ours if len(ours) > len(lines) else lines
        extra = longer[min(len(lines), len(ours))]
        counts = f"{len(ours)} parameters here, {len(lines)} there"
        return f"{counts}; the first extra one is '{extra}'"
    return "the bucket settings differ (bucket_cap_mb, broadcast_buffers, find_unused_parameters)"
