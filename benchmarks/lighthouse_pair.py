"""Two lighthouses: the active one is killed, and a replica 1 s later: the survivors' gap, beside that of a kill alone.

Three replicas train under a pair. In turn a replica is killed while both lighthouses live (the baseline), or 1 s after
a `kill -9` of the active one. The gap is that of `kill`: the longest interval between two commits of a survivor around
the kill, less its median step before. Afterwards the lighthouse and the replica are started again. The A/A row is the
same figure for windows as long, just before each kill.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from benchmarks.common import Child, Job, Options, Row, median, spread

BETWEEN_S = 1.0
"""From the kill of the lighthouse to that of the replica."""
TRAINERS = 3
LIMIT_MS = 100.0


@dataclass
class Kill:
    """What one kill did to the survivors. Seconds."""

    alone: bool
    """Both lighthouses live."""
    gap: float = 0.0
    quiet: float = 0.0
    taken_over: float = 0.0
    """Longest interval beyond normal after the kill of the lighthouse."""


class Pair(Job):
    """A job under two lighthouses."""

    def __init__(self, options: Options) -> None:
        super().__init__("pair", options)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.other_port: int = probe.getsockname()[1]
        self.ports = (self.port, self.other_port)
        self.lighthouses: list[Child] = []
        self.trainer_env = {"FT_LIGHTHOUSE": ",".join(f"127.0.0.1:{port}" for port in self.ports)}

    def begin(self, index: int) -> Child:
        """Start one of the two lighthouses."""
        here, there = (f"127.0.0.1:{self.ports[i]}" for i in (index, 1 - index))
        return self.start("lighthouse", ["ft_core.lighthouse", "--bind", here, "--peer", there, "--http", "off"])

    def active(self) -> int:
        """Which of the two serves, by what they have logged last."""
        said = [child.log.read_text(errors="replace") for child in self.lighthouses]
        serves = [text.rfind("serves now") > text.rfind("stands by") for text in said]
        living = [child.process.poll() is None for child in self.lighthouses]
        found = [i for i in range(2) if serves[i] and living[i]]
        return found[0] if len(found) == 1 else -1


def one(job: Pair, number: int, *, alone: bool) -> Kill:
    """Kill replica number % 3, after the active lighthouse or by itself; everything is back at the end."""
    kill, group = Kill(alone), number % TRAINERS
    job.wait_settled(TRAINERS, steps=300)
    job.wait(lambda: job.active() >= 0, "one lighthouse to serve")
    index = job.active()
    if not alone:
        down, _ = job.kill(job.lighthouses[index])
        time.sleep(BETWEEN_S)
        kill.taken_over = max(c.read().beyond_normal(down, down + BETWEEN_S) for c in job.trainers.values())
    at, _ = job.kill(job.trainers[group])
    end = job.wait_went_on(at, participants=TRAINERS - 1)
    kill.gap = max(c.beyond_normal(at, end) for c in job.trainers.values())
    kill.quiet = max(c.beyond_normal(at - (end - at) - 0.005, at - 0.005) for c in job.trainers.values())
    if not alone:
        job.lighthouses[index] = job.begin(index)
    job.start_trainer(group)
    return kill


def measure(options: Options) -> list[Row]:
    """`runs` pairs of kills in one job, in turn."""
    with Pair(options) as job:
        job.lighthouses = [job.begin(0), job.begin(1)]
        for group in range(TRAINERS):
            job.start_trainer(group)
        kills = [one(job, number, alone=number % 2 == 0) for number in range(2 * options.runs)]
        job.wait_settled(TRAINERS, steps=100)
        digests = job.finish()
    quiet = [k.quiet * 1e3 for k in kills]
    alone = [k.gap * 1e3 for k in kills if k.alone]
    after = [k.gap * 1e3 for k in kills if not k.alone]
    taken = [k.taken_over * 1e3 for k in kills if not k.alone]
    return [
        Row("lighthouse_pair", "A/A: longest step beyond normal, just before", median(quiet), "ms",
            samples=tuple(quiet)),
        Row("lighthouse_pair", "gap: a replica is killed, both lighthouses live", median(alone), "ms",
            detail=spread(alone, " ms"), samples=tuple(alone)),
        Row("lighthouse_pair", f"gap: a replica is killed {BETWEEN_S:g} s after the active lighthouse", median(after),
            "ms", f"<= {LIMIT_MS:g} ms", median(after) <= LIMIT_MS, spread(after, " ms"), tuple(after)),
        Row("lighthouse_pair", "longest step beyond normal in the second after the active lighthouse was killed",
            median(taken), "ms", detail=spread(taken, " ms"), samples=tuple(taken)),
        Row("lighthouse_pair", "different digests at the end", str(len(digests)), "", "1", len(digests) == 1),
    ]  # fmt: skip
