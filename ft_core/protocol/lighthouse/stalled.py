"""Members of a quorum that has ended, that live and are late for the next one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import Note
from ft_core.protocol.lighthouse.quorum_rule import due
from ft_core.protocol.lighthouse.reasons import late

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.view import View


def note_stalled(view: View, records: Mapping[str, Record]) -> tuple[list[Note], list[float]]:
    """Mark those that are late, until they ask. Returns a line for each new one, and when the others will be."""
    notes: list[Note] = []
    times: list[float] = []
    for replica_id, at in due(view).items():
        record = records[replica_id]
        if view.now < at:
            times.append(at)
        elif not record.stalled:
            record.stalled = late(view, view.seen[replica_id])
            notes.append(Note(record.stalled))
    return notes, times
