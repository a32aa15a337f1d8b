"""What one host's facts of the lighthouse mean, or of both of two. Pure.

Of two, one is to be active and one to stand by. What keeps a host from the active one is a problem; what keeps it from
the other is a warning, because the job runs until it is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.doctor.findings import Finding, Level, note, ok, problem, warning
from ft_core.doctor.greetings import is_grpc, kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ft_core.doctor.facts import HostFacts, LighthouseFacts

PAIR = "start each ft-lighthouse with --peer and the address of the other (docs/high-availability.md)"


def lighthouse(facts: HostFacts) -> Iterator[Finding]:
    """Whether the lighthouse is there, and lets this host in; of two, whether one does and the other stands by."""
    known = facts.lighthouses
    if len(known) < 2:
        yield from _one(facts, facts.lighthouse)
        return
    active = [one.address for one in known if one.release]
    for one in known:
        for finding in _one(facts, one):
            spare = active and finding.level is Level.PROBLEM and one.address not in active
            text = f"{finding.text}: should {active[0]} end, this host would be cut off" if spare else finding.text
            yield replace(finding, level=Level.WARNING if spare else finding.level, text=text)
    if len(active) > 1:
        yield problem(
            "lighthouse",
            facts.name,
            f"{' and '.join(active)} are both active: they do not stand by for each other, and groups that cannot "
            "reach the first train apart from the others",
            PAIR,
        )
    elif all(one.stands_by for one in known):
        names = " and ".join(one.address for one in known)
        yield problem(
            "lighthouse", facts.name, f"{names} both stand by: neither takes a job", f"see their logs; {PAIR}"
        )


def _one(facts: HostFacts, seen: LighthouseFacts) -> Iterator[Finding]:
    where = seen.address
    if not where:
        yield note(
            "lighthouse",
            facts.name,
            "FT_LIGHTHOUSE is not set: ftrun embeds one, for groups on this machine only",
            "for several machines set it on all of them, or give ftrun --lighthouse",
        )
    elif seen.error:
        yield problem("lighthouse", facts.name, seen.error, "write FT_LIGHTHOUSE=host:port")
    elif seen.connect:
        yield problem("lighthouse", facts.name, f"FT_LIGHTHOUSE={where}: {seen.connect}", _connect_advice(seen.connect))
    elif not seen.tls and not is_grpc(seen.greeting):
        yield problem(
            "lighthouse",
            facts.name,
            f"FT_LIGHTHOUSE={where}: {kind(seen.greeting)} answers there, no lighthouse",
            "correct host and port; ft-lighthouse prints where it listens",
        )
    elif seen.stands_by and len(facts.lighthouses) > 1:
        yield ok("lighthouse", facts.name, f"{where} stands by")
    elif seen.stands_by:
        yield problem(
            "lighthouse",
            facts.name,
            f"FT_LIGHTHOUSE={where}: it stands by for another one, and takes no job while that one is active",
            "name both, with a comma between them: FT_LIGHTHOUSE=host:port,host:port",
        )
    elif seen.call:
        check = "token" if "FT_TOKEN" in seen.call else "TLS" if _of_tls(seen.call) else "lighthouse"
        yield problem(check, facts.name, f"the lighthouse {where} refuses this host: {seen.call}", _call_advice(check))
    else:
        yield from _answered(facts, seen)


def _answered(facts: HostFacts, seen: LighthouseFacts) -> Iterator[Finding]:
    ours = facts.versions.get("ft-training", "")
    if seen.closed:
        yield warning(
            "lighthouse",
            facts.name,
            f"the lighthouse {seen.address} lets no new job in: {seen.closed}",
            "start another lighthouse",
        )
    elif ours and seen.release and ours != seen.release:
        yield warning(
            "lighthouse",
            facts.name,
            f"the lighthouse {seen.address} has release {seen.release}, this host {ours}",
            "install the same release of ft-training everywhere",
        )
    else:
        runs = f", a job of {seen.members} members runs there" if seen.members else ""
        secure = "with TLS" if seen.tls else "without TLS"
        yield ok("lighthouse", facts.name, f"{seen.address} answers in {seen.round_trip_s * 1e3:.1f} ms {secure}{runs}")


def _of_tls(why: str) -> bool:
    return "FT_TLS" in why or "certificate" in why or " TLS" in why


def _connect_advice(why: str) -> str:
    if "resolved" in why:
        return "correct the name, or write an address"
    if "refused" in why.lower():
        return "start ft-lighthouse there; if it runs, it listens on its own machine only (--bind '[::]:29510')"
    return "open the port in the firewall between here and there, and see that the host is up"


def _call_advice(check: str) -> str:
    return {
        "token": "set FT_TOKEN to the same value as for the lighthouse",
        "TLS": "set FT_TLS_CERT, FT_TLS_KEY and FT_TLS_CA alike on this host and for the lighthouse",
    }.get(check, "see that it is a lighthouse of this release, and its log")
