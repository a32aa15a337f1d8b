"""How one lighthouse does with many replica groups.   python benchmarks/lighthouse_scale.py [--groups 1000]

Starts a real lighthouse process and simulates the groups' leases from this one, each on a connection of its own
(`lease_streams`: without gRPC, so that this process takes little of the machine). All groups train all the time: each
renews its lease as often as a Manager does, and every renewal brings a newer step and stable version.

- Steady: for --seconds, the lighthouse's share of a core, and the time from a renewal to its acknowledgement.
- Loss: one group's connection is cut while all others ask at once, as survivors of a crash do. Per member, from the cut
  to the last byte of the new quorum. Then it comes back (a new process of the same name), a quorum with it forms, and
  its connection is cut in the next round again.
- Memory: the lighthouse's resident set at its highest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lease_streams import Stream, Streams
from ft_core.protocol.lighthouse.events import Hello, Progress
from ft_core.protocol.pushes import Welcome
from ft_core.protocol.types import Ask, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import LIGHTHOUSE, grpc
from ft_core.settings import DEFAULT_ROOM, TimeBudget

ANSWER_S = 60.0
STEPS_S = 20.0
"""Steps that a group makes per second."""
WARM_S = 1.0


class Group:
    """One simulated replica group."""

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream, self.number = stream, number
        self.starts = 0
        self.replica_id = ""
        self.seq = 0
        self.quorum_id = 0
        self.welcomed = False
        self.answered_at = 0.0
        """When the last answer had arrived; 0: it is awaited."""
        self.renew_at = 0.0


class Job:
    """All groups.

    Args:
        address: of the lighthouse.
        groups: how many.
    """

    def __init__(self, address: str, groups: int) -> None:
        self._streams = Streams(address, f"/{LIGHTHOUSE}/Lease", self._took)
        self.groups = [Group(Stream(n, self._streams), n) for n in range(groups)]
        self.renew_s = self._usual_s = 0.0
        self.acks_ms: list[float] = []
        self.renewals = 0
        self.reasons = self.others = 0
        """Explanations, and other pushes, that arrived."""
        self._last = 0.0

    # ------------------------------------------------------------ what arrives

    def _took(self, stream: Stream, push: memoryview) -> None:
        group = self.groups[stream.number]
        if push[0] == 0x08 and len(push) > 3:  # Push.seq comes first in an answer, and in nothing else
            self._answered(group, push)
            return
        found = codec.pb.Push.FromString(bytes(push))
        kind = found.WhichOneof("body")
        if kind == "ack":
            self.acks_ms.append(1e3 * (time.monotonic() - found.ack.clock_us / 1e6))
            self.renew_s = max(self._usual_s, found.ack.renew_ms / 1e3)
        elif kind == "welcome":
            group.welcomed = True
            welcome = codec.decode_push(bytes(push))
            assert isinstance(welcome, Welcome)
            self._usual_s = min(TimeBudget.derive(60.0).progress_s, welcome.liveness_s / 4)
            self.renew_s = self.renew_s or self._usual_s
        elif kind == "refused":
            raise RuntimeError(found.refused.reason)
        else:
            self.reasons += kind == "reason"
            self.others += kind != "reason"

    def _answered(self, group: Group, push: memoryview) -> None:
        # The head only: decoding as many quorums as there are groups would measure this process.
        seq, at = _varint(push, 1)
        assert push[at] in (0x1A, 0x6A), "an answer carries a quorum, as it is or packed"
        _, at = _varint(push, at + 1)
        assert push[at] == 0x08, "a quorum begins with its id"
        if seq == group.seq and not group.answered_at:
            group.quorum_id, _ = _varint(push, at + 1)
            group.answered_at = time.monotonic()

    # ------------------------------------------------------------ what groups do

    def turn(self, wait_s: float = 0.01) -> None:
        """Renew what is due, then read for a while."""
        now = time.monotonic()
        if self.renew_s:
            for group in self.groups:
                if group.quorum_id and group.renew_at <= now and group.stream.open:
                    group.renew_at = max(now, group.renew_at + self.renew_s)
                    self._renew(group)
        self._streams.turn(wait_s)

    def _renew(self, group: Group) -> None:
        now = time.monotonic()
        self.renewals += 1
        version = Version(int(STEPS_S * now), group.quorum_id)
        group.stream.send(codec.encode_lease(codec.Renewal(now, Progress("", 0, version.step, "step", version))))

    def open(self, group: Group) -> None:
        """A new process of this group opens its lease."""
        group.starts += 1
        group.replica_id = f"trainer-{group.number:04d}:{group.starts:08x}"
        group.seq = group.quorum_id = 0
        group.welcomed = False
        group.stream.connect()
        hello = Hello(
            group.replica_id, group.replica_id.split(":")[0], 0, 7 + group.starts, expected=len(self.groups),
            heal_addresses=(f"http://10.0.{group.number // 250}.{group.number % 250}:34567",),
        )  # fmt: skip
        group.stream.send(codec.encode_hello(hello, DEFAULT_ROOM, "bench"))

    def ask(self, groups: list[Group], *, failed: bool = False) -> None:
        """These ask for a quorum, all at the newest state."""
        newest = max((g.quorum_id for g in groups), default=0)
        version = Version(int(STEPS_S * time.monotonic()), newest) if newest else Version(0, 0)
        for group in groups:
            group.seq += 1
            group.answered_at = 0.0
            host = f"10.0.{group.number // 250}.{group.number % 250}"
            state = version if group.quorum_id else Version(0, 0)
            reason = "a peer failed" if failed else ""
            ask = Ask(
                group.replica_id, group.seq, state, 1, group.quorum_id, failed, reason=reason,
                heal_addresses=(f"http://{host}:34567",), store_address=f"{host}:12345", address=f"{host}:23456",
            )  # fmt: skip
            group.stream.send(codec.encode_lease(ask))

    def until_answered(self, groups: list[Group]) -> list[float]:
        """Wait for everybody's answer; returns when each came."""
        deadline = time.monotonic() + ANSWER_S
        while not all(g.answered_at for g in groups):
            self.turn()
            if time.monotonic() > deadline:
                missing = sum(not g.answered_at for g in groups)
                raise TimeoutError(f"{missing} of {len(groups)} groups had no answer within {ANSWER_S:g} s")
        self._check_streams()
        return [g.answered_at for g in groups]

    def until_welcomed(self, groups: list[Group]) -> None:
        """Wait until these leases are open."""
        self._streams.until(lambda: all(g.welcomed for g in groups), ANSWER_S, "opening the leases")

    def _check_streams(self) -> None:
        if self._streams.lost:
            lost = len(self._streams.lost)
            raise RuntimeError(f"the lighthouse ended {lost} streams: is this machine too busy to answer its pings?")

    def train(self, seconds: float) -> None:
        """All train: renewals, spread evenly over their period."""
        now = time.monotonic()
        for group in self.groups:
            group.renew_at = now + self.renew_s * group.number / len(self.groups)
        while time.monotonic() < now + seconds:
            self.turn()
        self._check_streams()

    @property
    def pings(self) -> int:
        """HTTP/2 pings that the lighthouse sent."""
        return self._streams.pings

    def close(self) -> None:
        """End all connections."""
        for group in self.groups:
            group.stream.close()


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def measure(job: Job, pid: int, rounds: int, seconds: float) -> dict[str, float]:
    """All figures of one lighthouse; {what: value}."""
    everybody = job.groups
    rows: dict[str, float] = {}
    began, used = time.monotonic(), cpu_s(pid)
    for group in everybody:
        job.open(group)
    job.until_welcomed(everybody)
    rows["leases opened, s"] = time.monotonic() - began
    began = time.monotonic()
    job.ask(everybody)
    rows["first quorum of all, s"] = max(job.until_answered(everybody)) - began
    rows["CPU of the lighthouse until then, s"] = cpu_s(pid) - used
    job.train(WARM_S)
    job.acks_ms.clear()
    renewed, pinged = job.renewals, job.pings
    used, began = cpu_s(pid), time.monotonic()
    own = time.process_time()
    job.train(seconds)
    took = time.monotonic() - began
    rows["CPU while all train, share of a core (target 0.3)"] = (cpu_s(pid) - used) / took
    rows["- and of the process that simulates them"] = (time.process_time() - own) / took
    rows["- renewals per second"] = (job.renewals - renewed) / took
    rows["- acknowledgements per second"] = len(job.acks_ms) / took
    rows["- pings per second"] = (job.pings - pinged) / took
    rows["renewal to acknowledgement, p50 ms"] = percentile(job.acks_ms, 0.5)
    rows["renewal to acknowledgement, p99 ms (target 100)"] = percentile(job.acks_ms, 0.99)
    losses: list[float] = []
    worst: list[float] = []
    joins: list[float] = []
    spent: list[float] = []
    for number in range(rounds):
        victim = everybody[(number * 37) % len(everybody)]
        others = [g for g in everybody if g is not victim]
        used, began = cpu_s(pid), time.monotonic()
        victim.stream.close()
        job.ask(others, failed=True)
        arrived = [1e3 * (at - began) for at in job.until_answered(others)]
        spent.append(1e3 * (cpu_s(pid) - used))
        losses += arrived
        worst.append(max(arrived))
        job.open(victim)
        job.until_welcomed([victim])
        began = time.monotonic()
        job.ask(everybody)
        joins.append(1e3 * (max(job.until_answered(everybody)) - began))
    limit = 250 if len(everybody) <= 256 else 1000
    if rounds:
        rows["loss to new quorum, per member, p50 ms"] = percentile(losses, 0.5)
        rows[f"loss to new quorum, per member, p99 ms (target {limit})"] = percentile(losses, 0.99)
        rows["loss to new quorum, last member, worst round ms"] = max(worst)
        rows["- CPU of the lighthouse, p50 ms"] = percentile(spent, 0.5)
        rows["join to new quorum, last member, p50 ms"] = percentile(joins, 0.5)
        rows["join to new quorum, last member, worst round ms"] = max(joins)
        rows["explanations per group and round"] = job.reasons / len(everybody) / rounds / 2
    rows["resident memory at most, MB (target 300)"] = peak_mb(pid)
    return rows


def peak_mb(pid: int) -> float:
    """The highest resident memory of a process so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="a flame graph of the lighthouse, by py-spy")
    arguments = parser.parse_args()
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    readies = []
    for _ in range(3):
        began = time.monotonic()
        process, address = start()
        readies.append(time.monotonic() - began)
        process.terminate()
        process.wait(10)
    process, address = start()
    spy = None
    if arguments.profile:
        spy = subprocess.Popen(
            ["py-spy", "record", "-p", str(process.pid), "-o", str(arguments.profile), "-f", "raw", "-r", "200"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    job = Job(address.removeprefix("http://"), arguments.groups)
    try:
        rows = {"ready after start, s (target 0.5)": sorted(readies)[1]}
        rows |= measure(job, process.pid, arguments.rounds, arguments.seconds)
    finally:
        job.close()
        if spy is not None:
            spy.send_signal(2)
            spy.wait(20)
        process.terminate()
        process.wait(10)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, grpcio {grpc.__version__}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"lighthouse with {arguments.groups} groups, {arguments.rounds} rounds ({machine})")
    for name, value in rows.items():
        print(f"  {name:<64}{value:10.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "groups": arguments.groups, **rows}, indent=1))


def start() -> tuple[subprocess.Popen[str], str]:
    """A lighthouse process and its address, once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ft_core.lighthouse", "--bind", "127.0.0.1:0"],
        cwd=Path(__file__).resolve().parent.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


if __name__ == "__main__":
    main()
