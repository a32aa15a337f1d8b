"""The signature of a model: what has to be equal in all groups of a room, so that collectives are aligned (R4). Pure.

How it works. A replica group describes itself in lines, and a hash over all of them travels with each ask. First come
the settings that decide who participates, what a sum is divided by or which collectives run, one to a line
(`setting_lines`); then one line per parameter and buffer of each wrapped model and one with its bucket settings; last
the elastic data, if there are any. The lines only serve to name the first difference: the hash decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SETTING = "Manager: "
"""How the line about a setting begins."""
DATA = "data: "
"""How the line about elastic data begins; it is the last one."""
BUCKETS = "settings "
"""How the line about a model's bucket settings begins."""
DATA_ADVICE = "give all replica groups the same dataset, seed and batch settings"
ADVICE = "start every replica group with the same model and the same DistributedDataParallel settings"
NOT_KNOWN = "not set"


@dataclass(frozen=True, slots=True)
class RoomSignature:
    """The signature of a room's model: its digest, one line per parameter (may be empty), and who brought it."""

    digest: int
    lines: tuple[str, ...]
    holder: str


def setting_lines(settings: Mapping[str, object]) -> tuple[str, ...]:
    """The lines about settings, by the names under which users gave them."""
    return tuple(f"{SETTING}{name}={value}" for name, value in settings.items())


def settings_in(lines: Iterable[str]) -> dict[str, str]:
    """The settings that such lines name; the inverse of `setting_lines`."""
    named = (line.removeprefix(SETTING).partition("=") for line in lines if line.startswith(SETTING))
    return {name: value for name, _, value in named}


def first_differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """(name, our value, their value) of the first setting that differs; None: none does."""
    for name in [*ours, *theirs]:
        mine, other = ours.get(name, NOT_KNOWN), theirs.get(name, NOT_KNOWN)
        if mine != other:
            return name, mine, other
    return None


def difference(replica_id: str, ours: tuple[str, ...], room: RoomSignature) -> str:
    """Name the first setting or parameter in which a newcomer differs from the room, or how its data do."""
    found = first_differing(settings_in(ours), settings_in(room.lines)) if ours and room.lines else None
    if found is not None:
        name, mine, theirs = found
        return (
            f"{replica_id} runs with {name}={mine}, and {room.holder} with {name}={theirs}: give all replica groups "
            f"the same {name}"
        )
    if ours[-1:] != room.lines[-1:] and all(lines[-1:] and lines[-1].startswith(DATA) for lines in (ours, room.lines)):
        mine, theirs = ours[-1].removeprefix(DATA), room.lines[-1].removeprefix(DATA)
        return f"{replica_id} reads other data than {room.holder}: {mine} here and {theirs} there; {DATA_ADVICE}"
    return f"{replica_id} has another model than {room.holder}: {_first_difference(ours, room.lines)}; {ADVICE}"


def _first_difference(ours: tuple[str, ...], lines: tuple[str, ...]) -> str:
    ours, lines = (tuple(line for line in both if not line.startswith(SETTING)) for both in (ours, lines))
    for index, (mine, theirs) in enumerate(zip(ours, lines, strict=False)):
        if mine == theirs:
            continue
        if mine.startswith(BUCKETS) and theirs.startswith(BUCKETS):
            mine, theirs = mine.removeprefix(BUCKETS), theirs.removeprefix(BUCKETS)
            return (
                "the bucket settings (bucket_cap_mb, broadcast_buffers, find_unused_parameters) are "
                f"{mine} here and {theirs} there"
            )
        return f"parameter {index} is '{mine}' here and '{theirs}' there"
    if len(ours) != len(lines):
        longer = ours if len(ours) > len(lines) else lines
        extra = longer[min(len(lines), len(ours))]
        counts = f"{len(ours)} parameters here, {len(lines)} there"
        return f"{counts}; the first extra one is '{extra}'"
    return "the bucket settings differ (bucket_cap_mb, broadcast_buffers, find_unused_parameters)"
