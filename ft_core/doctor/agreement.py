"""What has to be the same on all hosts of a job, or different on each. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.doctor.findings import EVERYWHERE, ok, problem, warning
from ft_core.doctor.host_checks import loopback
from ft_core.doctor.job_facts import differing, odd_ones, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core.doctor.facts import HostFacts
    from ft_core.doctor.findings import Finding
    from ft_core.doctor.job_facts import JobFacts

SAME_VERSION = ("ft-training", "torch")
NEAR_VERSION = ("grpcio", "protobuf", "numpy", "lightning", "pytorch-lightning", "accelerate", "transformers")
MUST_BE_EQUAL = {
    "FT_NUM_REPLICA_GROUPS": "how many groups the job has",
    "FT_FROM_SCRATCH": "whether it may begin again",
    "FT_FENCE": "where ballots travel",
    "WORLD_SIZE": "how many ranks a group has",
}
SHOULD_BE_EQUAL = (
    "FT_MIN_REPLICAS", "FT_TIMEOUT_S", "FT_LIVENESS_S", "FT_GRACE_S", "FT_JOIN_S", "FT_CONNECT_S", "FT_QUORUM_S",
    "FT_HEAL_S", "FT_AUTONOMY_S", "FT_ORPHAN_S", "FT_BACKEND",
)  # fmt: skip
MUST_DIFFER = ("FT_REPLICA_GROUP", "FT_REPLICA_ID")


def present(job: JobFacts) -> Iterator[Finding]:
    """Whether all have come."""
    came = len(job.hosts)
    if came < job.expected:
        yield problem(
            "hosts",
            "-",
            f"{came} of {job.expected} have come: {', '.join(facts.name for facts in job.hosts.values())}",
            "see on the others whether ft-doctor runs there, and whether they reach this one's port",
        )
    else:
        machines = job.machines()
        yield ok("hosts", EVERYWHERE, f"{came} have come, on {machines} machine{'s' if machines > 1 else ''}")
    if job.left:
        yield problem(
            "hosts",
            job.names(job.left),
            "its ft-doctor went, or fell silent, before the end: what it had not told by then is missing here",
            "see what became of it there: ended by somebody, out of memory, cut off",
        )


def versions(job: JobFacts) -> Iterator[Finding]:
    """The same software everywhere."""
    fine = True
    for name in (*SAME_VERSION, "python", *NEAR_VERSION):
        odd, by_value = differing(job, lambda facts, name=name: _version(facts, name))  # type: ignore[misc]
        if not odd:
            continue
        fine = False
        text = f"{name} differs: {told(job, by_value)}"
        if name in SAME_VERSION:
            yield problem(
                "versions",
                job.names(odd),
                f"{text}. Replicas would not compute the same",
                "install one version everywhere",
            )
        else:
            yield warning("versions", job.names(odd), text, "install one version everywhere")
    if fine and len(job.hosts) > 1:
        yield ok("versions", EVERYWHERE, "the same on all")


def _version(facts: HostFacts, name: str) -> str:
    """For Python, without the last part: patch releases work together."""
    version = facts.versions.get(name, "")
    return ".".join(version.split(".")[:2]) if name == "python" else version


def settings(job: JobFacts) -> Iterator[Finding]:
    """Variables that have to be, or should be, the same everywhere."""
    for name, what in MUST_BE_EQUAL.items():
        odd, by_value = differing(job, lambda facts, name=name: facts.settings.get(name, ""))  # type: ignore[misc]
        if odd:
            yield problem(
                "settings",
                job.names(odd),
                f"{name} ({what}) differs: {told(job, by_value)}",
                f"set {name} to the same value on all hosts",
            )
    for name in SHOULD_BE_EQUAL:
        odd, by_value = differing(job, lambda facts, name=name: facts.settings.get(name, ""))  # type: ignore[misc]
        if odd:
            yield warning(
                "settings",
                job.names(odd),
                f"{name} differs: {told(job, by_value)}",
                f"set {name} to the same value on all hosts, unless that is meant",
            )
    yield from _lighthouse(job)


def _lighthouse(job: JobFacts) -> Iterator[Finding]:
    odd, by_value = differing(job, lambda facts: facts.lighthouse_addresses)
    missing = by_value.get("", [])
    if missing and len(by_value) > 1:
        yield problem(
            "lighthouse",
            job.names(missing),
            f"FT_LIGHTHOUSE is not set there: {told(job, by_value)}",
            "set it to the same address on all hosts",
        )
    elif odd:
        yield warning(
            "lighthouse",
            job.names(odd),
            f"FT_LIGHTHOUSE differs: {told(job, by_value)}. If that is not one lighthouse under several names, the "
            "groups will never meet",
            "set it to the same address on all hosts",
        )
    own = {
        index: facts
        for index, facts in job.hosts.items()
        if (found := [one for seen in facts.lighthouses for one in seen.resolves]) and all(map(loopback, found))
    }
    if len({facts.machine for facts in own.values()}) > 1:
        shown = next(iter(own.values()))
        yield problem(
            "lighthouse",
            job.names(own),
            f"FT_LIGHTHOUSE={shown.lighthouse_addresses} leads each of these hosts to itself "
            f"({', '.join(dict.fromkeys(one for seen in shown.lighthouses for one in seen.resolves))})",
            "name the lighthouse by an address, or by a name that leads there from everywhere (see /etc/hosts)",
        )


def numbers(job: JobFacts) -> Iterator[Finding]:
    """Each group once."""
    for name in MUST_DIFFER:
        by_value: dict[str, list[int]] = {}
        for index, facts in job.hosts.items():
            if value := facts.settings.get(name, ""):
                by_value.setdefault(value, []).append(index)
        for value, indexes in by_value.items():
            ranks = {job.hosts[index].settings.get("GROUP_RANK", "0") for index in indexes}
            if len(indexes) > 1 and len(ranks) < len(indexes):  # a group may span hosts: they have numbers in it
                yield problem(
                    "groups",
                    job.names(indexes),
                    f"{name}={value} on {len(indexes)} hosts: they would take each other for the same group",
                    "give every group its own number",
                )


def secrets(job: JobFacts) -> Iterator[Finding]:
    """The token and the certificates."""
    odd, by_value = differing(job, lambda facts: facts.token)
    without = by_value.get("", [])
    if odd and without:
        yield problem(
            "token",
            job.names(without),
            "FT_TOKEN is not set there, and it is on the others: they would refuse each other",
            "set FT_TOKEN to the same value on all hosts and for the lighthouse",
        )
    others = odd_ones({value: indexes for value, indexes in by_value.items() if value})
    if others:
        yield problem(
            "token",
            job.names(others),
            "FT_TOKEN has another value there than on the others: they would refuse each other",
            "set FT_TOKEN to the same value on all hosts and for the lighthouse",
        )
    doors = any(facts.open_door for facts in job.hosts.values())  # each host says that itself
    mutual = all(facts.tls.mutual for facts in job.hosts.values())
    if without and not odd and not doors and not mutual and job.machines() > 1:
        yield warning(
            "token",
            EVERYWHERE,
            "FT_TOKEN is not set: whoever reaches a host may read the model, stop the job or take it over",
            "set FT_TOKEN to the same random value on all hosts and for the lighthouse",
        )
    odd, by_tls = differing(job, lambda facts: "TLS" if facts.tls.configured else "")
    if odd:
        yield problem(
            "TLS",
            job.names(by_tls[""]),
            "FT_TLS_* are not set there, and they are on the others: no connection between them works",
            "set FT_TLS_CERT, FT_TLS_KEY and FT_TLS_CA on all hosts, or on none",
        )
        return
    odd, _ = differing(job, lambda facts: facts.tls.trusts)
    if odd:
        yield problem(
            "TLS",
            job.names(odd),
            "FT_TLS_CA there is another file than on the others: certificates would not be trusted",
            "copy the same CA to all hosts",
        )


def gpus(job: JobFacts) -> Iterator[Finding]:
    """The same accelerators everywhere."""
    what: dict[str, Callable[[HostFacts], str]] = {
        "the number of GPUs": lambda facts: str(len(facts.gpus.devices)),
        "the kind of GPU": lambda facts: ", ".join(sorted({gpu.name for gpu in facts.gpus.devices})),
        "NVIDIA's driver": lambda facts: facts.gpus.driver,
        "torch's CUDA": lambda facts: facts.gpus.cuda,
        "NCCL": lambda facts: facts.gpus.nccl,
    }
    for name, value in what.items():
        odd, by_value = differing(job, value)
        if odd:
            yield warning(
                "GPUs",
                job.names(odd),
                f"{name} differs: {told(job, by_value)}. Everybody waits for the slowest, and NCCL may not start",
                "take hosts of one kind, or make them alike",
            )
