"""What the hosts of a job saw of each other: addresses, connections, clocks, bandwidth, storage. Pure.

Who reaches whom is a matrix, told by its rows and columns: a host that nobody reaches is one finding, and not one per
other host.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from ft_core.doctor.findings import EVERYWHERE, note, ok, problem, warning
from ft_core.doctor.host_checks import described, loopback
from ft_core.doctor.job_facts import differing, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ft_core.doctor.facts import Interface
    from ft_core.doctor.findings import Finding
    from ft_core.doctor.job_facts import JobFacts

CLOCKS_S = 0.5
"""Clocks that differ by more make the order of events doubtful."""
SLOW_BYTES_S = 50e6
"""Gradients of 1 GB take 20 s at this rate."""
SLOWER = 3.0
"""A link this many times slower than the usual one is worth a look."""
LATE_S = 1.0
"""A file that others see so late is worth a note."""


def addresses(job: JobFacts) -> Iterator[Finding]:
    """What each advertises."""
    if job.machines() < 2:
        return
    own = [index for index, facts in job.hosts.items() if loopback(facts.address)]
    if own:
        shown = job.hosts[own[0]]
        yield problem(
            "interface",
            job.names(own),
            f"it advertises {shown.address} (by {shown.address_from}), which leads every other machine to itself",
            "set FT_INTERFACE or FT_HOSTNAME there to what the others reach, and FT_LIGHTHOUSE to no loopback address",
        )
    by_address: dict[str, list[int]] = {}
    for index, facts in job.hosts.items():
        if facts.address and not loopback(facts.address):
            by_address.setdefault(facts.address, []).append(index)
    for address, indexes in by_address.items():
        if len({job.hosts[index].machine for index in indexes}) > 1:
            yield problem(
                "interface",
                job.names(indexes),
                f"these machines all advertise {address}",
                "set FT_INTERFACE or FT_HOSTNAME to an address that only one of them has (not docker0's, for example)",
            )
    odd, by_mtu = differing(job, lambda facts: str(facts.interface().mtu or ""))
    if odd and "" not in by_mtu:
        yield warning(
            "interface",
            job.names(odd),
            f"the MTU differs: {told(job, by_mtu)}. Big packets may be lost without a word",
            "set one MTU on all of them",
        )


def reach(job: JobFacts) -> Iterator[Finding]:
    """Who reaches whom, both ways."""
    bad = {
        (one, other): probe.error
        for one, row in job.reach.items()
        for other, probe in row.items()
        if probe.error and one in job.hosts and other in job.hosts
    }
    if not bad:
        if len(job.reach) > 1:
            trips = [probe.seconds for row in job.reach.values() for probe in row.values()]
            slowest = f", within {max(trips) * 1e3:.0f} ms" if trips else ""
            yield ok("connections", EVERYWHERE, f"each reaches each other one, both ways{slowest}")
        return
    deaf, mute = _rows(job, bad)
    for other in deaf:
        facts = job.hosts[other]
        if loopback(facts.address) and job.machines() > 1:
            continue  # `addresses` says why
        why = Counter(error for (_, there), error in bad.items() if there == other).most_common(1)[0][0]
        yield problem(
            "connections",
            facts.name,
            f"no other host reaches {facts.address} there (advertised by {facts.address_from}): {why}",
            "set FT_INTERFACE or FT_HOSTNAME on that host to what the others can reach, and open its ports to them",
        )
    for one in mute:
        why = Counter(error for (here, _), error in bad.items() if here == one).most_common(1)[0][0]
        yield problem(
            "connections",
            job.hosts[one].name,
            f"it reaches no other host: {why}",
            "see its routes and its firewall, for connections that it opens",
        )
    for (one, other), error in sorted(bad.items()):
        if other not in deaf and one not in mute:
            back = "; the other way works" if (other, one) not in bad else "; neither does the other way"
            yield problem(
                "connections",
                job.names([one, other]),
                f"{job.names([one])} does not reach {job.names([other])} at {job.hosts[other].address}: {error}{back}",
                "open all ports between the hosts of the job, in both directions",
            )


def routes(job: JobFacts) -> Iterator[Finding]:
    """Whether each host sends by the interface at which it is reached."""
    for index, facts in job.hosts.items():
        used = _from(job, index)
        if facts.interface().name and used.name and used != facts.interface():
            yield note(
                "interface",
                facts.name,
                f"it connects to the others from {used.address}{described(used)}, and they to "
                f"{facts.address}{described(facts.interface())}: the two directions take different interfaces",
                "nothing, if both are fast; else correct its routes, or name the other with FT_INTERFACE",
            )


def _rows(job: JobFacts, bad: Mapping[tuple[int, int], str]) -> tuple[set[int], set[int]]:
    """Whom nobody reaches; and who reaches nobody else."""
    indexes = set(job.reach) & set(job.hosts)
    deaf = {i for i in indexes if len(indexes) > 1 and all((j, i) in bad for j in indexes - {i})}
    mute = {i for i in indexes if len(indexes) > 2 and all((i, j) in bad for j in indexes - {i})}
    return deaf, mute - (deaf if len(deaf) == len(indexes) else set())


def clocks(job: JobFacts) -> Iterator[Finding]:
    """Whether they agree."""
    if len(job.clocks) < 2:
        return
    usual = statistics.median_low([offset for offset, _ in job.clocks.values()])
    off = {
        index: offset - usual for index, (offset, wrong) in job.clocks.items() if abs(offset - usual) - wrong > CLOCKS_S
    }
    for index, by in sorted(off.items()):
        yield warning(
            "clock",
            job.names([index]),
            f"its clock is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} the others': training does not mind, "
            "but events of several hosts are put into a wrong order, and certificates may not hold yet, or any more",
            "let NTP or chrony set it (timedatectl; chronyc tracking)",
        )
    if not off:
        widest = max(abs(offset - usual) + wrong for offset, wrong in job.clocks.values())
        yield ok("clock", EVERYWHERE, f"within {widest * 1e3:.1f} ms of each other")


def rates(job: JobFacts) -> Iterator[Finding]:
    """How fast each sends to the next one, while all do."""
    if job.rates_skipped:
        yield note("bandwidth", EVERYWHERE, f"not measured: {job.rates_skipped}", "run ft-doctor before a job")
    measured = {index: rate for index, (rate, why) in job.rates.items() if not why}
    for index, (_, why) in job.rates.items():
        if why:
            yield warning(
                "bandwidth",
                job.names([index]),
                f"it could not send to the next host: {why}",
                "see the connections above",
            )
    if not measured:
        return
    usual = statistics.median(measured.values())
    for index, rate in measured.items():
        facts = job.hosts[index]
        if rate < SLOW_BYTES_S or rate < usual / SLOWER:
            yield warning(
                "bandwidth",
                facts.name,
                f"it sends to the next host at {rate / 1e6:.0f} MB/s{described(_from(job, index))}, usual is "
                f"{usual / 1e6:.0f}: 1 GB of gradients takes {1e9 / max(rate, 1.0):.0f} s, and all wait for it",
                "see which interface that is (FT_INTERFACE names a faster one), and its cable or neighbours",
            )
    if all(rate >= SLOW_BYTES_S and rate >= usual / SLOWER for rate in measured.values()):
        used = sorted({name for index in measured if (name := _from(job, index).name)})
        over = f", over {' and '.join(used)}" if used else ""
        slowest, fastest = min(measured.values()), max(measured.values())
        yield ok(
            "bandwidth",
            EVERYWHERE,
            f"{slowest / 1e6:.0f} to {fastest / 1e6:.0f} MB/s from each to the next, all at the same time{over}",
        )


def _from(job: JobFacts, index: int) -> Interface:
    """The interface by which a host connects to others; without a name: it is not known."""
    facts = job.hosts[index]
    sent = [probe.local for probe in job.reach.get(index, {}).values() if not probe.error and probe.local]
    return facts.interface(Counter(sent).most_common(1)[0][0]) if sent else facts.interface()


def storage(job: JobFacts) -> Iterator[Finding]:
    """Whether the path of --storage is one for all."""
    if not job.stored:
        return
    odd, by_path = differing(job, lambda facts: facts.storage.path)
    if odd:
        yield warning(
            "storage", job.names(odd), f"--storage differs: {told(job, by_path)}", "give all hosts the same path"
        )
    lonely = [index for index, seen in job.stored.items() if seen.missing]
    if lonely:
        yield problem(
            "storage",
            job.names(lonely),
            f"files that {job.names({other for index in lonely for other in job.stored[index].missing})} wrote below "
            f"{_path(job)} are not seen there: it is not the same storage",
            "mount the shared file system on all hosts; a checkpoint on one of them is not found by the others",
        )
    torn = {other for seen in job.stored.values() for other in seen.torn}
    if torn:
        yield warning(
            "storage",
            job.names(torn),
            f"files below {_path(job)} that were replaced there were seen half written, or not at all for a moment: "
            "renames are not atomic on this file system",
            "load no checkpoint while another host may write it, or keep checkpoints elsewhere",
        )
    for index, seen in job.stored.items():
        if seen.error:
            yield problem(
                "storage", job.names([index]), f"{_path(job)}: {seen.error}", "see that file system on that host"
            )
    late = {index: seen.late_s for index, seen in job.stored.items() if seen.late_s > LATE_S and not seen.missing}
    if late:
        yield note(
            "storage",
            job.names(late),
            f"new files are seen up to {max(late.values()):.1f} s late",
            "nothing, for checkpoints; do not use it for anything that has to be fast",
        )
    if not lonely and not torn and not late and not any(seen.error for seen in job.stored.values()):
        yield ok("storage", EVERYWHERE, f"{_path(job)} is the same on all hosts, and renames are atomic")


def _path(job: JobFacts) -> str:
    return next((facts.storage.path for facts in job.hosts.values() if facts.storage.path), "the path")
