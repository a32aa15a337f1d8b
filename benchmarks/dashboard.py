"""The dashboard beside many leases: how far it is behind, what it costs, and what browsers do to acknowledgements.

A real lighthouse process has GROUPS simulated groups, whose steps are the time: so every page says how old it is. In
turns nobody watches, ten browsers do, and ten of which one reads nothing. The groups and browsers share the machine
with the lighthouse, and their own work is in the figures: what counts are ratios between the turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import ROOT, Options, Row, median, spread
from benchmarks.lighthouse_scale import STEPS_S, WARM_S, Job, percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS, BROWSERS = 256, 10
TURN_S = 6.0
TURNS = {"nobody watches": 0, "ten browsers": BROWSERS, "ten browsers, and one that reads nothing": BROWSERS + 1}


@contextlib.contextmanager
def lighthouse() -> Iterator[tuple[int, str, str]]:
    """A process: its pid, its address, its dashboard's host:port."""
    command = [sys.executable, "-m", "ft_core.lighthouse", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline(), process.stdout.readline()]
            address, page = (re.search(r"http://(\S+)", line) for line in lines)
            assert address is not None, lines
            assert page is not None, lines
            yield process.pid, address[1], page[1]
        finally:
            process.kill()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def browse(where: str, lags_s: list[float], *, reads: bool) -> None:
    """One browser: notes how old what it shows has become when the next page is there."""
    host, _, port = where.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=4 << 20)
    try:
        writer.write(f"GET /events HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        await writer.drain()
        if not reads:
            await asyncio.Event().wait()
        shown_s = None
        while line := await reader.readline():
            if line.startswith(b"data: "):
                came = time.monotonic()
                if shown_s is not None:
                    lags_s.append(came - shown_s)
                shown_s = json.loads(line[6:])["rooms"][0]["step"] / STEPS_S
    finally:
        writer.close()


async def train(job: Job, seconds: float) -> None:
    """All groups renew, in a thread of their own: browsers read meanwhile."""
    await asyncio.to_thread(job.train, seconds)


async def turns(pid: int, address: str, page: str, runs: int) -> dict[str, dict[str, list[float]]]:
    """The turns, `runs` times each."""
    job = Job(address, GROUPS)
    for group in job.groups:
        job.open(group)
    job.until_welcomed(job.groups)
    job.ask(job.groups)
    job.until_answered(job.groups)
    found: dict[str, dict[str, list[float]]] = {name: {"lag": [], "cpu": [], "ack": []} for name in TURNS}
    for _ in range(runs):
        for name, browsers in TURNS.items():
            lags_s: list[float] = []
            watching = [
                asyncio.ensure_future(browse(page, lags_s, reads=number < BROWSERS)) for number in range(browsers)
            ]
            await train(job, WARM_S)
            lags_s.clear()
            job.acks_ms.clear()
            used, began = cpu_s(pid), time.monotonic()
            await train(job, TURN_S)
            found[name]["cpu"].append((cpu_s(pid) - used) / (time.monotonic() - began))
            found[name]["ack"].append(percentile(job.acks_ms, 0.99))
            found[name]["lag"] += lags_s
            for one in watching:
                one.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
    job.close()
    return found


def measure(options: Options) -> list[Row]:
    """`runs` rounds."""
    with lighthouse() as (pid, address, page):
        found = asyncio.run(turns(pid, address, page, options.runs))
    files = sum(path.stat().st_size for path in (ROOT / "ft_core/dashboard/page").iterdir())
    lags = found["ten browsers"]["lag"]
    rows = [
        Row("dashboard", "the page: HTML, style and scripts", files / 1000, "kB", "<= 100", files <= 100_000),
        Row("dashboard", f"how old a page becomes, {GROUPS} groups and ten browsers (median; p99)", median(lags), "s",
            "<= 1 s", sorted(lags)[int(len(lags) * 0.99)] <= 1.0,
            f"{spread(lags, ' s', 2)}; {sorted(lags)[int(len(lags) * 0.99)]:.2f} s"),
    ]  # fmt: skip
    for name, values in found.items():
        rows += [
            Row("dashboard", f"lighthouse's share of a core, {name}", median(values["cpu"]) * 100, "%",
                detail=spread([v * 100 for v in values["cpu"]], " %"), samples=tuple(values["cpu"])),
            Row("dashboard", f"acknowledgements p99, {name}", median(values["ack"]), "ms",
                detail=spread(values["ack"], " ms"), samples=tuple(values["ack"])),
        ]  # fmt: skip
    return rows
