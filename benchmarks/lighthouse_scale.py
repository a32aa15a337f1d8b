"""How one lighthouse does with many replica groups.   python benchmarks/lighthouse_scale.py [--groups 256] [--json
FILE]

Starts a real lighthouse process and simulates the groups' leases from this process, each on a connection of its own.
Every round changes the membership: one group's connection is cut while all others ask at once (as survivors of a crash
do), then it comes back and all ask again. Measured per member: from the change to the answer in hand. Then all train
for STEADY_S: every report brings a newer stable step, four times a second; measured is what the lighthouse needs for it
and how late its acknowledgements are. The simulating process shares the machine with the lighthouse, and its own work
is in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ft_core.protocol.lighthouse.events import Hello, Progress
from ft_core.protocol.pushes import Welcome
from ft_core.protocol.types import VOID, Ask, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import LIGHTHOUSE, channel_options, grpc

ANSWER_S = 30.0
STEADY_S = 8.0


@dataclass
class Figures:
    ready_s: float
    connect_s: float
    first_quorum_s: float
    loss_ms: list[float]
    """Per member and round: from the cut to the new quorum in hand."""
    loss_worst_ms: list[float]
    """Per round: the last member."""
    join_worst_ms: list[float]
    training_cpu: float
    """Share of one core while all train."""
    acks_ms: list[float]
    """Meanwhile, from a report to its acknowledgement."""
    rss_mb: float


class Group:
    """One simulated replica group."""

    def __init__(self, number: int, address: str, progress_s: float) -> None:
        self.replica_id = f"trainer-{number:03d}:x"
        self.address = address
        self.progress_s = progress_s
        self.seq = 0
        self.quorum_id = 0
        self.acks_ms: list[float] = []
        self.answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.tasks: list[asyncio.Task[None]] = []
        self.turn = asyncio.Lock()

    async def connect(self) -> None:
        self.channel = grpc.aio.insecure_channel(self.address, options=channel_options())
        self.call: Any = self.channel.stream_stream(f"/{LIGHTHOUSE}/Lease")()
        hello = Hello(self.replica_id, self.replica_id.split(":")[0], 0, 7, heal_addresses=(f"http://host:{self.seq}",))
        await self._write(codec.encode_hello(hello, "default", "bench"))
        welcome: Any = await self.call.read()
        assert isinstance(codec.decode_push(welcome), Welcome)
        self.tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._renew())]

    def version(self) -> Version:
        """All are at the same step, which advances twenty times a second."""
        return Version(int(20 * time.monotonic()), self.quorum_id)

    async def ask(self, *, failed: bool = False) -> None:
        self.seq += 1
        self.answer = asyncio.get_running_loop().create_future()
        ask = Ask(
            self.replica_id, self.seq, Version(self.seq - 1, 0), 1, self.quorum_id, failed,
            heal_addresses=("http://some-host-name:34567",), store_address="some-host-name:12345",
        )  # fmt: skip
        await self._write(codec.encode_lease(ask))

    async def _write(self, data: bytes) -> None:
        async with self.turn:  # gRPC allows one write at a time
            await self.call.write(data)

    def cut(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.call.cancel()
        self.quorum_id = 0

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.progress_s)
            stable = self.version() if self.quorum_id else VOID
            renewal = codec.Renewal(time.monotonic(), Progress("", 0, stable.step, "step", stable))
            await self._write(codec.encode_lease(renewal))

    async def _listen(self) -> None:
        while True:
            data: Any = await self.call.read()
            # Decoding 256 quorums of 256 members here would measure this process: one look at the id is enough.
            if len(data) > 1000 and self.answer.done():
                continue
            push = codec.pb.Push.FromString(data)
            body = push.WhichOneof("body")
            if body == "ack":
                self.acks_ms.append(1e3 * (time.monotonic() - push.ack.clock_us / 1e6))
            if body == "quorum" and push.seq == self.seq and not self.answer.done():
                self.quorum_id = push.quorum.quorum_id
                self.answer.set_result(time.monotonic())


async def measure(address: str, groups: int, rounds: int, pid: int, ready_s: float) -> Figures:
    """Run the rounds against a lighthouse."""
    bare = address.removeprefix("http://")
    members = [Group(n, bare, 0.25) for n in range(groups)]
    began = time.monotonic()
    await asyncio.gather(*(m.connect() for m in members))
    connect_s = time.monotonic() - began
    began = time.monotonic()
    await everybody(members)
    first_s = time.monotonic() - began
    losses: list[float] = []
    worst: list[float] = []
    joins: list[float] = []
    for number in range(rounds):
        victim = members[(number * 37) % groups]
        others = [m for m in members if m is not victim]
        began = time.monotonic()
        victim.cut()
        arrived = [1e3 * (t - began) for t in await everybody(others, failed=True)]
        losses += arrived
        worst.append(max(arrived))
        await victim.channel.close()
        began = time.monotonic()
        await victim.connect()
        joins.append(1e3 * (max(await everybody(members)) - began))
    for member in members:
        member.acks_ms.clear()
    before, at = cpu_s(pid), time.monotonic()
    await asyncio.sleep(STEADY_S)
    training = (cpu_s(pid) - before) / (time.monotonic() - at)
    acks_ms = [ms for member in members for ms in member.acks_ms]
    rss = rss_mb(pid)
    for member in members:
        member.cut()
    for member in members:
        with contextlib.suppress(Exception):
            await member.channel.close()
    return Figures(ready_s, connect_s, first_s, losses, worst, joins, training, acks_ms, rss)


async def everybody(members: list[Group], *, failed: bool = False) -> list[float]:
    """All ask; returns when each had its answer."""
    await asyncio.gather(*(m.ask(failed=failed) for m in members))
    return await asyncio.wait_for(asyncio.gather(*(m.answer for m in members)), ANSWER_S)


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def cpu_s(pid: int) -> float:
    """CPU time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    readies = []
    for _ in range(4):
        began = time.monotonic()
        process, address = start()
        readies.append(time.monotonic() - began)
        process.terminate()
        process.wait(10)
    process, address = start()
    try:
        ready_s = sorted(readies)[len(readies) // 2]
        figures = asyncio.run(measure(address, arguments.groups, arguments.rounds, process.pid, ready_s))
    finally:
        process.terminate()
        process.wait(10)
    rows = {
        "ready after start, s (target 0.5)": figures.ready_s,
        f"{arguments.groups} leases opened, s": figures.connect_s,
        "first quorum of all, s": figures.first_quorum_s,
        "loss to new quorum, per member, p50 ms": percentile(figures.loss_ms, 0.5),
        "loss to new quorum, per member, p99 ms (target 250)": percentile(figures.loss_ms, 0.99),
        "loss to new quorum, last member, worst round ms": max(figures.loss_worst_ms),
        "join to new quorum, last member, p50 ms": percentile(figures.join_worst_ms, 0.5),
        "join to new quorum, last member, worst round ms": max(figures.join_worst_ms),
        "resident memory, MB (target 150)": figures.rss_mb,
        "CPU while all train, share of a core (target 0.3)": figures.training_cpu,
        "report to acknowledgement, p50 ms": percentile(figures.acks_ms, 0.5),
        "report to acknowledgement, p99 ms (target 50)": percentile(figures.acks_ms, 0.99),
    }
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, grpcio {grpc.__version__}"
    )
    print(f"lighthouse with {arguments.groups} groups, {arguments.rounds} rounds ({machine})")
    for name, value in rows.items():
        print(f"  {name:<58}{value:10.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "groups": arguments.groups, **rows}, indent=1))


def start() -> tuple[subprocess.Popen[str], str]:
    """A lighthouse process and its address, once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ft_core.lighthouse", "--bind", "127.0.0.1:0", "--join-timeout-ms", "5000"],
        cwd=Path(__file__).resolve().parent.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


if __name__ == "__main__":
    main()
