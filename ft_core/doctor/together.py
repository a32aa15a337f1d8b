"""Several hosts look at the job that they are to run: the shell around meeting, links and storage.

How it works. The host that the meeting's address belongs to holds the meeting, and all go there, it too. Where the
address is the lighthouse's, which may be no host of the job, the lighthouse is asked who holds it (`directory`). In
each round every host reports something and learns what all have reported: its facts; whom it reaches; how fast it
sends; what it sees of the others' files. In the end all have the same `JobFacts`, so all print the same findings.

Invariants: it ends, whatever the others do: every wait has a limit. A job that runs at the lighthouse is not disturbed:
then the bandwidth is not measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import time
from collections import Counter
from typing import TYPE_CHECKING

from ft_core.doctor import links, storage
from ft_core.doctor.directory import COMES, KNOWN, LATE_S, OFFERED, Directory, Entry
from ft_core.doctor.facts import TEXT_MAX, HostFacts, Probe, Seen, as_json, from_json, index_of, number_of
from ft_core.doctor.findings import by_level, problem
from ft_core.doctor.host import collect, token_digest
from ft_core.doctor.host_checks import check as check_host
from ft_core.doctor.job_checks import check
from ft_core.doctor.job_facts import JobFacts
from ft_core.doctor.meeting import Meeting
from ft_core.doctor.member import Member
from ft_core.errors import ConfigError, FaultToleranceError
from ft_core.network import is_here, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core.doctor.findings import Finding
    from ft_core.doctor.launchers import Place


@dataclasses.dataclass(frozen=True)
class Options:
    """What is tried."""

    wait_s: float = 60.0
    """How long the others may take to come."""
    storage: str = ""
    bandwidth: bool = True


@dataclasses.dataclass
class Result:
    """What came of it."""

    index: int
    """Of this host in the meeting; 0: the first that came."""
    findings: list[Finding]
    """Of all hosts."""
    first: str = ""
    """The name of the first host that was there to the end, for who has to choose one that prints; '': it is this."""


def together(
    place: Place, options: Options, env: Mapping[str, str], clock: Callable[[], float] = time.time
) -> Result:  # fmt: skip
    """Meet the others and look. Raises ConfigError or LighthouseError if there is no meeting."""
    facts = collect(env, options.storage, place.host)
    with contextlib.ExitStack() as stack:
        try:
            member = _join(place, options, facts, env, clock, stack)
            job = _look(member, facts, options, env, place, stack)
        except FaultToleranceError as error:
            findings = [problem("meeting", facts.name, str(error), "see that they start within --wait seconds")]
            return Result(-1, by_level([*findings, *check_host(facts)]))
        first = min(set(job.hosts) - set(job.left), default=member.index)
        return Result(member.index, check(job), "" if first == member.index else job.hosts[first].name)


def _join(
    place: Place, options: Options, facts: HostFacts, env: Mapping[str, str], clock: Callable[[], float],
    stack: contextlib.ExitStack,
) -> Member:  # fmt: skip
    """Become a member of the meeting, which this host may have to hold."""
    meeting = _hold(place, options) if is_here(place.host) else None
    where = place.host, place.port
    if place.at_lighthouse and any(one.release for one in facts.lighthouses):
        with contextlib.suppress(FaultToleranceError):  # it has gone since: then we meet on its host
            where, meeting = _look_up(place, options, facts, env, meeting, stack)
    if meeting is not None:
        stack.callback(meeting.close)
    member = Member(*where, options.wait_s, clock)
    stack.callback(member.close)
    member.join()
    return member


def _look_up(
    place: Place, options: Options, facts: HostFacts, env: Mapping[str, str], meeting: Meeting | None,
    stack: contextlib.ExitStack,
) -> tuple[tuple[str, int], Meeting | None]:  # fmt: skip
    """Where the others meet, by the lighthouse; and the meeting, if it is here."""
    kind, made = KNOWN, meeting
    if made is None:
        reachable = facts.address and (not is_loopback(facts.address) or is_loopback(place.host))
        kind, made = OFFERED if reachable else COMES, _meeting(place, options, 0)
        made.start()
    try:
        own = facts.address or place.host, made.port
        directory = Directory(facts.lighthouse_addresses, env, Entry(kind, *own))
        stack.callback(directory.close)
        directory.start()
        where = directory.find(place.hosts, options.wait_s)
    except BaseException:
        if made is not meeting:
            made.close()
        raise
    if where == own:
        return where, made
    made.close()
    return where, None


def _hold(place: Place, options: Options) -> Meeting | None:
    """The meeting where everybody looks for it, which is here; None: another one holds it."""
    meeting = _meeting(place, options, place.port)
    try:
        meeting.start()
    except OSError as error:
        meeting.close()
        if error.errno == errno.EADDRINUSE:
            return None  # another group's ft-doctor on this host; or something else, which joining shows
        raise ConfigError(f"{place.by}: port {place.port} cannot be opened here ({error.strerror})") from None
    return meeting


def _meeting(place: Place, options: Options, port: int) -> Meeting:
    return Meeting(port, place.hosts, options.wait_s + (LATE_S if place.at_lighthouse else 0.0))


def _look(
    member: Member, facts: HostFacts, options: Options, env: Mapping[str, str], place: Place,
    stack: contextlib.ExitStack,
) -> JobFacts:  # fmt: skip
    job = JobFacts(place.hosts)
    listener = links.Listener(member.index, member.nonce)
    stack.callback(listener.close)
    facts.ports = [listener.start()]
    facts.token = token_digest(env.get("FT_TOKEN", ""), member.nonce)
    job.hosts = {index: from_json(found) for index, found in member.round("facts", as_json(facts)).items()}
    _name_apart(job.hosts)
    for index, found in member.round("clocks", list(member.offset())).items():
        if index in job.hosts and isinstance(found, list) and len(found) == 2:
            job.clocks[index] = number_of(found[0]), number_of(found[1])
    mine = links.probe_all(job.hosts, member.index, member.nonce)
    shown = {str(index): dataclasses.asdict(one) for index, one in mine.items()}
    for index, row in member.round("reach", shown).items():
        if index in job.hosts and isinstance(row, dict):
            job.reach[index] = {index_of(other): Probe.from_json(one) for other, one in row.items()}
    _measure(member, options, job)
    _store(member, options, job)
    stayed = member.round("end", None)
    job.left = sorted(set(job.hosts) - set(stayed))
    return job


def _measure(member: Member, options: Options, job: JobFacts) -> None:
    running = max(one.members for facts in job.hosts.values() for one in (facts.lighthouse, facts.other_lighthouse))
    if not options.bandwidth:
        job.rates_skipped = "--no-bandwidth"
    elif running:
        job.rates_skipped = f"a job of {running} members runs at this lighthouse, and is not to be disturbed"
    ring = sorted(job.hosts)
    if len(ring) < 2 or member.index not in ring:
        return
    rate, why = 0.0, ""
    if not job.rates_skipped:
        following = ring[(ring.index(member.index) + 1) % len(ring)]
        rate, why = links.transfer(job.hosts[following], member.nonce)
    for index, found in member.round("rates", [rate, why, job.rates_skipped]).items():
        if index in job.hosts and isinstance(found, list) and len(found) == 3 and not found[2]:
            job.rates[index] = number_of(found[0]), str(found[1])[:TEXT_MAX]


def _store(member: Member, options: Options, job: JobFacts) -> None:
    """All take part in these rounds, with a path or without one."""
    path = options.storage
    folder = storage.folder_of(path, member.nonce)
    try:
        error = storage.begin(folder, member.index) if path else ""
        wrote = {
            index for index, found in member.round("written", [path, error]).items()
            if isinstance(found, list) and found and found[0] and not found[-1]
        }  # fmt: skip
        seen = Seen(error=error)
        if path and not error:
            seen = storage.look(folder, member.index, wrote - {member.index})
        for index, found in member.round("seen", dataclasses.asdict(seen) if path else None).items():
            if index in job.hosts and found is not None:
                job.stored[index] = Seen.from_json(found)
    finally:
        if path:
            storage.end(folder)


def _name_apart(hosts: Mapping[int, HostFacts]) -> None:
    """Hosts of the same name are called by their addresses, too."""
    counts = Counter(facts.name for facts in hosts.values())
    pairs = Counter((facts.name, facts.address) for facts in hosts.values())
    for index, facts in hosts.items():
        if counts[facts.name] > 1:
            apart = f"#{index}" if pairs[facts.name, facts.address] > 1 else f" {facts.address}"
            facts.name += apart
