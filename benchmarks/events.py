"""What the job's events and metrics cost: the thread that trains per step, per event, and while the disk takes nothing.

A real `Rank` makes steps alone, without a network, all of which it commits, and `RankEvents` is told of each, as
`Steps._settle` does it; the same without a log is subtracted. An event is one `emit`, at a rate that the writer can
follow. For the last figure the folder is a file, so that no write succeeds. With metrics events go to both. Steps and
emits are timed in blocks, by the CPU time of the thread, which other load of the machine changes least; the figure is
the median block. A scrape is the CPU time of the whole process, of which no other thread does anything; of these a
process answers ACCEPTS_MAX a second at most.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
import urllib.request
from typing import TYPE_CHECKING

from benchmarks.common import Options, Row, median, spread
from ft_core.events.event_log import QUEUE_MAX, SILENT, EventLog, Events
from ft_core.events.schema import REPLICA
from ft_core.metrics.exposition import Page
from ft_core.metrics.metrics import Metrics, beside
from ft_core.metrics.server import ACCEPTS_MAX, MetricsServer
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
SCRAPES = 30
LIMIT_US = 20.0
SCRAPE_LIMIT_US = 5000.0
"""At ACCEPTS_MAX a second: a twentieth of a core."""


def alone() -> Rank:
    """A rank in a quorum of its own."""
    rank = Rank(RankSettings("a"), lineage=1, now=0.0)
    (send,) = rank.handle(on.QuorumWanted(Wish(Ask("", 0), "room", 30.0, prefetch=False, hands_over=False)), 0.0)
    assert isinstance(send, do.SendAsk)
    rank.handle(on.QuorumAnswered(send.ask.seq, Quorum(1, (Member("a", Version(0, 0), 1),))), 0.0)
    rank.handle(on.GroupsUp(1), 0.0)
    rank.acknowledged(time.monotonic())
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
            assert commit, verdict.reason
        took.append((time.thread_time() - began) / STEPS)
    return took


def emits(log: Events) -> list[float]:
    """Seconds per event of each block, without the writer's time."""
    took = []
    for _ in range(BLOCKS):
        began = time.thread_time()
        for _ in range(EMITS):
            log.emit("pause_ended", reason="validation of the whole data set", seconds_s=12.5)
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


def with_metrics(folder: pathlib.Path, call: Callable[[Events], list[float]]) -> list[float]:
    """The same with metrics beside the log, which are counted as in a job."""
    metrics = Metrics(REPLICA, {"replica": "replica-0"})
    server = MetricsServer(Page([metrics]), "127.0.0.1:0", "replica-0", "FT_METRICS")
    server.start(must_bind=True)
    try:
        return with_log(folder, lambda log: call(beside(log, metrics)))
    finally:
        server.close()


def scrapes() -> list[float]:
    """CPU seconds of each scrape of a replica's page, reading it included."""
    metrics = Metrics(REPLICA, {"replica": "replica-0"})
    server = MetricsServer(Page([metrics]), "127.0.0.1:0", "replica-0", "FT_METRICS")
    server.start(must_bind=True)
    took = []
    try:
        for _ in range(SCRAPES):
            began = time.process_time()
            with urllib.request.urlopen(server.url, timeout=10) as answer:
                answer.read()
            took.append(time.process_time() - began)
    finally:
        server.close()
    return took


def measure(options: Options) -> list[Row]:
    """`runs` repetitions of each."""
    found: dict[str, list[float]] = {"step": [], "emit": [], "full": [], "counted": [], "both": [], "scrape": []}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "file").write_text("")
        for _ in range(options.runs):
            bare = median(steps(SILENT))
            found["step"].append(median(with_log(folder / "events", steps)) - bare)
            found["emit"].append(median(with_log(folder / "events", emits)))
            found["full"].append(median(with_log(folder / "file" / "events", steps)) - bare)
            found["counted"].append(median(with_metrics(folder / "events", steps)) - bare)
            found["both"].append(median(with_metrics(folder / "events", emits)))
            found["scrape"].append(median(scrapes()))

    def row(key: str, what: str, limit_us: float = LIMIT_US) -> Row:
        us = [value * 1e6 for value in found[key]]
        return Row("events", what, median(us), "us", f"<= {limit_us:g}", median(us) <= limit_us, spread(us, " us"),
                   tuple(us))  # fmt: skip

    return [
        row("step", f"a step with events, beyond one without ({STEPS * BLOCKS} steps)"),
        row("full", "the same while no event can be written"),
        row("emit", f"one event (at most {QUEUE_MAX} wait to be written)"),
        row("counted", "a step with events and metrics, beyond one without"),
        row("both", "one event that is counted, too"),
        row("scrape", f"one scrape, of which {ACCEPTS_MAX} a second are answered", SCRAPE_LIMIT_US),
    ]
