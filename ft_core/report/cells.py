"""What a timeline draws: coloured cells, at most COLUMNS in a row; members over time; numbers of its axis. Pure.

Invariant: a row of few segments is drawn as it is, however short they are; of many only what takes most of a column.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ft_core.report.story import Segment, State, Story

if TYPE_CHECKING:
    from ft_core.report.account import Account

COLUMNS = 1200
ROUND = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800)
"""Seconds between the numbers of an axis."""
STATES: dict[State, tuple[str, str]] = {
    State.TRAINING: ("#5aa469", "training"),
    State.WAITING: ("#f2b84b", "waiting"),
    State.HEALING: ("#4c8bf5", "healing"),
    State.PAUSED: ("#b39ddb", "paused"),
    State.FROZEN: ("#4dd0e1", "frozen"),
    State.STARTING: ("#d7dde0", "starting"),
    State.RESTARTING: ("#9aa5ab", "restarting"),
    State.ENDING: ("#c9c2b4", "ending"),
    State.LOST: ("#d8434e", "lost steps"),
}
"""Colour and name, in the order in which they are drawn: what must not be covered comes last."""


def cells(account: Account, story: Story) -> list[Segment]:
    """What is drawn of a group, in order."""
    if len(story.segments) <= COLUMNS:
        return story.segments
    width = (account.end - account.begin) / COLUMNS
    columns: list[Counter[State]] = [Counter() for _ in range(COLUMNS)]
    for segment in story.segments:
        first = int((segment.begin - account.begin) / width)
        last = min(COLUMNS - 1, int((segment.end - account.begin) / width))
        for column in range(first, last + 1):
            begin = account.begin + column * width
            inside = min(segment.end, begin + width) - max(segment.begin, begin)
            if inside > 0:
                columns[column][segment.state] += inside  # type: ignore[assignment]
    out: list[Segment] = []
    for column, states in enumerate(columns):
        if not states:
            continue
        begin, state = account.begin + column * width, states.most_common(1)[0][0]
        joined = out and out[-1].state is state and abs(out[-1].end - begin) < width / 2
        out.append(Segment(out.pop().begin if joined else begin, begin + width, state))
    return out


def members_over_time(account: Account) -> list[tuple[float, int]]:
    """(seconds since the begin, members of the quorum) at each change, with both ends."""
    steps = [(0.0, 0), *((q["t"] - account.begin, len(q["members"])) for q in account.quorums)]
    ends = [story.segments[-1].end for story in account.stories if story.segments]
    last = steps[-1][1] if len(steps) > 1 else 0
    return [*steps, (max(ends, default=account.end) - account.begin, last)]


def ticks(span: float) -> list[float]:
    """Where an axis of so many seconds has its numbers: at most eleven, at round instants."""
    step = next((step for step in ROUND if span / step <= 10), span / 10)
    return [number * step for number in range(int(span / step) + 1)]
