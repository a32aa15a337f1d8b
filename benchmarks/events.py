"""What the job's events cost the thread that trains: per step, per event, and while the disk takes nothing.

A real `Rank` makes steps alone, without a network, and `RankEvents` is told of each, as `Steps._settle` does it; the
same without a log is subtracted. An event is one `emit`, at a rate that the writer can follow. For the last figure the
folder is a file, so that no write succeeds. Steps and emits are timed in blocks, by the CPU time of the thread, which
other load of the machine changes least; the figure is the median block.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import TYPE_CHECKING

from benchmarks.common import Options, Row, median, spread
from ft_core.events.event_log import QUEUE_MAX, SILENT, EventLog, Events
from ft_core.events.schema import REPLICA
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.formation import Wish
from ft_core.protocol.rank.rank import Rank
from ft_core.protocol.rank.settings import RankSettings
from ft_core.protocol.types import Ask, Member, Quorum, Version
from ft_core.runtime.rank_events import RankEvents

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, BLOCKS = 2000, 20
EMITS = 500
LIMIT_US = 20.0


def alone() -> Rank:
    """A rank in a quorum of its own."""
    rank = Rank(RankSettings("a"), lineage=1, now=0.0)
    (send,) = rank.handle(on.QuorumWanted(Wish(Ask("", 0), "room", 30.0, prefetch=False, hands_over=False)), 0.0)
    assert isinstance(send, do.SendAsk)
    rank.handle(on.QuorumAnswered(send.ask.seq, Quorum(1, (Member("a", Version(0, 0), 1),))), 0.0)
    rank.handle(on.GroupsUp(1), 0.0)
    return rank


def steps(log: Events) -> list[float]:
    """Seconds per step of each block: the machine's part, and the events'."""
    rank = alone()
    events = RankEvents(rank)
    events._log = log
    took = []
    for _ in range(BLOCKS):
        began = time.thread_time()
        for _ in range(STEPS):
            now = time.monotonic()
            rank.opened(now, pinned=False)
            rank.may_launch(now)
            rank.count(rank.ballot(now), now)
            verdict = rank.own_vote()
            commit, _ = rank.settle(verdict)
            events.settled(verdict, time.monotonic(), commit=commit)
        took.append((time.thread_time() - began) / STEPS)
    return took


def emits(log: Events) -> list[float]:
    """Seconds per event of each block, without the writer's time."""
    took = []
    for _ in range(BLOCKS):
        began = time.thread_time()
        for _ in range(EMITS):
            log.emit("waiting", reason="2 of 3 groups are here; waiting for the others")
        took.append((time.thread_time() - began) / EMITS)
        time.sleep(0.05)  # the writer's turn
    return took


def with_log(folder: pathlib.Path, call: Callable[[Events], list[float]]) -> list[float]:
    """What `call` measures with a log in a folder."""
    log = EventLog(str(folder), REPLICA, "replica-0")
    log.start()
    try:
        return call(log)
    finally:
        log.close()


def measure(options: Options) -> list[Row]:
    """`runs` repetitions of each."""
    found: dict[str, list[float]] = {"step": [], "emit": [], "full": []}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "file").write_text("")
        for _ in range(options.runs):
            bare = median(steps(SILENT))
            found["step"].append(median(with_log(folder / "events", steps)) - bare)
            found["emit"].append(median(with_log(folder / "events", emits)))
            found["full"].append(median(with_log(folder / "file" / "events", steps)) - bare)

    def row(key: str, what: str) -> Row:
        us = [value * 1e6 for value in found[key]]
        return Row("events", what, median(us), "us", f"<= {LIMIT_US:g}", median(us) <= LIMIT_US, spread(us, " us"),
                   tuple(us))  # fmt: skip

    return [
        row("step", f"a step with events, beyond one without ({STEPS * BLOCKS} steps)"),
        row("full", "the same while no event can be written"),
        row("emit", f"one event (at most {QUEUE_MAX} wait to be written)"),
    ]
