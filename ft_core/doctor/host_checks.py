"""What one host's facts mean. Pure.

Each check takes the facts of one host and yields findings; `check` makes them all. What only several hosts together
show is in `job_checks`.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ft_core.backends import DEVICE_OF, TorchBuild, Wish, choose
from ft_core.doctor.findings import Finding, note, ok, problem, warning
from ft_core.doctor.lighthouse_checks import lighthouse
from ft_core.errors import ConfigError
from ft_core.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ft_core.doctor.facts import HostFacts, Interface

MANY_CORES = 8
"""From so many on, torch's threads of several workers get in each other's way."""
FILES_MIN = 1024
FILES_PER_GROUP, FILES_BESIDE = 8, 256
"""Sockets and files that a process holds for every other replica group, and whatever else it opens."""
STORAGE_MIN_MB = 1024
SHM_MIN_MB, SHM_FREE_MIN_MB = 1024, 256
EXPIRES_SOON_DAYS = 7.0
FASTER = 2
"""An interface of so many times the speed is worth a note."""
GPU_USED_MB = 1024
"""Memory of a GPU that is taken before the job begins."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
ENDS_OF_SERVICES = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT", "_TCP", "_PROTO", "_ADDR")
"""How the variables end that Kubernetes makes for every Service."""


def check(facts: HostFacts) -> list[Finding]:
    """Everything that can be said of this host alone."""
    return [
        finding
        for one in (
            settings,
            groups,
            names,
            limits,
            proxies,
            versions,
            watching,
            certificates,
            lighthouse,
            gpus,
            storage,
        )
        for finding in one(facts)
    ]


def settings(facts: HostFacts) -> Iterator[Finding]:
    """FT_ variables: spelt as we know them, with values that can work."""
    for name, meant in facts.unknown.items():
        if name.endswith(ENDS_OF_SERVICES):
            yield note(
                "settings",
                facts.name,
                f"{name} is not one of this project's: Kubernetes makes such for a Service called ft-...",
                "set enableServiceLinks: false in the pod's spec",
            )
        else:
            yield warning(
                "settings",
                facts.name,
                f"{name} is not a variable that anybody reads: what it should set is not set",
                f"write {meant}" if meant else "take it out",
            )
    for error in facts.errors:
        yield problem("settings", facts.name, error, "give it a value that can work")
    if facts.open_door:
        yield problem("token", facts.name, facts.open_door, "choose one of these; FT_TOKEN is the simplest")
    if not facts.unknown and not facts.errors:
        count = sum(name.startswith("FT_") for name in facts.settings)
        yield ok("settings", facts.name, f"{count} FT_ variables, all known")


def groups(facts: HostFacts) -> Iterator[Finding]:
    """The number of this group, how many there are, and how many a quorum needs."""
    group, total, least = (
        facts.number(name) for name in ("FT_REPLICA_GROUP", "FT_NUM_REPLICA_GROUPS", "FT_MIN_REPLICAS")
    )
    if least is not None and total is not None and least > total:
        yield problem(
            "groups",
            facts.name,
            f"FT_MIN_REPLICAS={least} and FT_NUM_REPLICA_GROUPS={total}: a quorum needs "
            "more groups than there are, so none ever forms",
            f"set FT_MIN_REPLICAS to {total} or less",
        )
    if group is not None and total is not None and not 0 <= group < total:
        yield problem(
            "groups",
            facts.name,
            f"FT_REPLICA_GROUP={group} and FT_NUM_REPLICA_GROUPS={total}: groups are numbered from 0 to {total - 1}",
            "number the groups from 0, or correct how many there are",
        )


def loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def names(facts: HostFacts) -> Iterator[Finding]:
    """What others connect to."""
    own = facts.host_resolves
    if own and all(loopback(one) for one in own):
        yield note(
            "names",
            facts.name,
            f"this host takes its own name {facts.host_name!r} for {', '.join(own)}, which "
            "is its loopback address (Debian's /etc/hosts does that): we never advertise the name, but "
            "MASTER_ADDR and other tools may",
            "use addresses, or names that a name server knows, in FT_HOSTNAME, FT_LIGHTHOUSE and MASTER_ADDR",
        )
    elif not own:
        yield note(
            "names",
            facts.name,
            f"the name of this host, {facts.host_name!r}, cannot be resolved here: a group that spans hosts (--nnodes) "
            "does not start then, as torch's agent looks it up",
            "write it into /etc/hosts; use addresses in FT_HOSTNAME, FT_LIGHTHOUSE and MASTER_ADDR",
        )
    if not facts.address:
        return
    if not facts.address_here:
        yield warning(
            "interface",
            facts.name,
            f"others are to connect to {facts.address} (by {facts.address_from}), "
            "which is not an address of this machine: that works only through a tunnel or NAT, and not for "
            "gradients",
            "set FT_HOSTNAME to an address of this machine, or FT_INTERFACE",
        )
    else:
        alone = ", so only this machine reaches it" if loopback(facts.address) else ""
        used = described(facts.interface())
        yield ok("interface", facts.name, f"others connect to {facts.address}{used}, by {facts.address_from}{alone}")
        yield from _faster(facts)


def described(one: Interface) -> str:
    """An interface in brackets; '': it is not known."""
    if not one.name:
        return ""
    speed = f", {one.speed_mbit} Mbit/s" if one.speed_mbit else ""
    return f" ({one.name}{speed}, MTU {one.mtu})"


def _faster(facts: HostFacts) -> Iterator[Finding]:
    used = facts.interface()
    others = [one for one in facts.interfaces if one.hardware and one.speed_mbit >= FASTER * used.speed_mbit > 0]
    if others:
        best = max(others, key=lambda one: one.speed_mbit)
        yield note(
            "interface",
            facts.name,
            f"others connect to {facts.address}{described(used)}, and this host has {best.address}{described(best)}",
            f"set FT_INTERFACE={best.name} on all hosts if they are connected by it",
        )


def limits(facts: HostFacts) -> Iterator[Finding]:
    """Open files, shared memory, threads."""
    others = facts.number("FT_NUM_REPLICA_GROUPS") or 0
    need = max(FILES_MIN, FILES_BESIDE + FILES_PER_GROUP * others)
    if facts.files_soft < need:
        yield warning(
            "limits",
            facts.name,
            f"a process may open {facts.files_soft} files, and this job may need {need}: "
            "sockets to the other groups, DataLoader workers, checkpoints",
            "raise it where the job is started: ulimit -n 65536 (systemd: LimitNOFILE, docker: --ulimit)",
        )
    else:
        yield ok("limits", facts.name, f"{facts.files_soft} open files")
    if facts.shm_total_mb < 0:
        yield warning(
            "shared memory",
            facts.name,
            "there is no /dev/shm: DataLoader workers and the witness need it",
            "mount a tmpfs there",
        )
    elif facts.shm_total_mb < SHM_MIN_MB or facts.shm_free_mb < SHM_FREE_MIN_MB:
        yield warning(
            "shared memory",
            facts.name,
            f"/dev/shm has {facts.shm_total_mb} MB, of which {facts.shm_free_mb} MB "
            "are free: a DataLoader worker that finds none dies of a bus error",
            "make it bigger: docker --shm-size 8g; in Kubernetes an emptyDir with medium Memory; or remove "
            "what old jobs have left there",
        )
    else:
        yield ok("shared memory", facts.name, f"/dev/shm has {facts.shm_total_mb} MB, {facts.shm_free_mb} MB are free")
    if facts.cores >= MANY_CORES and not facts.settings.get("OMP_NUM_THREADS"):
        yield note(
            "threads",
            facts.name,
            f"OMP_NUM_THREADS is not set: every worker takes {facts.cores} threads, also where several share the host",
            "set it to cores divided by workers (ftrun sets 1 where several workers share a host)",
        )


def proxies(facts: HostFacts) -> Iterator[Finding]:
    """HTTP proxies of the environment."""
    found = [name for name in PROXIES if facts.settings.get(name)]
    if found:
        yield note(
            "proxies",
            facts.name,
            f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} set: this project's "
            "connections go around proxies, but other users of gRPC and of HTTP (loggers, data) go through them",
            "name the job's hosts in no_proxy if other tools talk to them",
        )


def versions(facts: HostFacts) -> Iterator[Finding]:
    """What is installed."""
    if "torch" not in facts.versions:
        yield problem(
            "versions",
            facts.name,
            "torch is not installed for this Python",
            "pip install torch, with the version that the other hosts have",
        )
    else:
        yield ok("versions", facts.name, ", ".join(f"{name} {version}" for name, version in facts.versions.items()))


def watching(facts: HostFacts) -> Iterator[Finding]:
    """Where events and metrics go."""
    folder = facts.settings.get("FT_EVENTS", "")
    if facts.events_error:
        yield warning(
            "events",
            facts.name,
            f"FT_EVENTS={folder} cannot be written ({facts.events_error}): the job trains, "
            "and nobody will know what happened",
            "name a folder that this user may write",
        )
    if facts.metrics_error:
        yield warning(
            "metrics",
            facts.name,
            f"FT_METRICS={facts.settings.get('FT_METRICS', '')} cannot be listened on ({facts.metrics_error}): the job "
            "trains, and nobody can ask it for metrics",
            "end who has that port (ss -ltnp), or name another one, or an address of this host",
        )


def certificates(facts: HostFacts) -> Iterator[Finding]:
    """TLS, as far as this host can tell."""
    tls = facts.tls
    if not tls.configured:
        return
    if tls.error:
        yield problem(
            "certificates", facts.name, tls.error, "correct FT_TLS_CERT, FT_TLS_KEY and FT_TLS_CA on this host"
        )
        return
    if tls.covers:
        yield problem(
            "certificates",
            facts.name,
            f"the certificate FT_TLS_CERT is not made for {facts.address}, which the others connect to: {tls.covers}",
            "make it with that address (subjectAltName), or set FT_HOSTNAME to a name that it has",
        )
    if tls.soon or tls.days_left < EXPIRES_SOON_DAYS:
        yield warning(
            "certificates",
            facts.name,
            f"the certificate expires in {tls.days_left:.1f} days: from then on no replica can come back",
            "renew it before then; a job that runs reads it when the file is replaced",
        )
    elif not tls.covers:
        yield ok("certificates", facts.name, f"valid for {facts.address} and {tls.days_left:.0f} more days")


def gpus(facts: HostFacts) -> Iterator[Finding]:
    """Accelerators, as far as there are any."""
    seen = facts.gpus
    cuda_torch = "+cu" in facts.versions.get("torch", "") or bool(seen.cuda)
    wanted = facts.settings.get("FT_BACKEND", "") or AUTO
    if not seen.devices and not seen.error:
        if DEVICE_OF.get(wanted) == "cuda":
            yield _backend(facts, wanted)
        else:
            yield ok("GPUs", facts.name, "none on this host: it trains on CPUs, over Gloo")
        return
    if seen.error:
        yield problem(
            "GPUs",
            facts.name,
            f"the GPUs of this host do not answer: {seen.error}",
            "see nvidia-smi and dmesg on that host; a reboot, or another driver, may be needed",
        )
        return
    names_ = ", ".join(sorted({gpu.name for gpu in seen.devices}))
    told = f"{len(seen.devices)} ({names_}), driver {seen.driver}"
    if not cuda_torch:
        yield warning(
            "GPUs",
            facts.name,
            f"{told}, but this torch is built without CUDA: it trains on CPUs",
            "install torch's CUDA build if the GPUs are to be used",
        )
    elif not seen.torch_devices and facts.settings.get("CUDA_VISIBLE_DEVICES") != "":
        yield problem(
            "GPUs",
            facts.name,
            f"{told}, but torch (CUDA {seen.cuda}) can use none of them",
            f"the driver has to support CUDA {seen.cuda}; see python -c 'import torch; torch.cuda.init()'",
        )
    else:
        yield ok("GPUs", facts.name, f"{told}, torch for CUDA {seen.cuda} uses {seen.torch_devices}, NCCL {seen.nccl}")
        yield _backend(facts, wanted)
    busy = [str(i) for i, gpu in enumerate(seen.devices) if gpu.used_mb > GPU_USED_MB]
    if busy:
        yield warning(
            "GPUs",
            facts.name,
            f"memory of GPU {', '.join(busy)} is taken already (more than {GPU_USED_MB} MB)",
            "see nvidia-smi for who has it: an earlier job may have left processes",
        )


def _backend(facts: HostFacts, wanted: str) -> Finding:
    """What carries the gradients of a model on this host's GPUs, by the rule that the job itself asks."""
    seen, visible = facts.gpus, facts.settings.get("CUDA_VISIBLE_DEVICES")
    build = TorchBuild(
        facts.versions.get("torch", ""), seen.cuda, bool(seen.nccl), seen.torch_devices, visible,
    )  # fmt: skip
    wish = Wish(wanted, "" if wanted == AUTO else f"FT_BACKEND={wanted}", "train on {device}")
    try:
        carries = choose(wish, ["cuda" if seen.torch_devices else "cpu"], build)
    except ConfigError as error:
        return problem("gradients", facts.name, str(error), "set FT_BACKEND to one that works here, or leave it out")
    how = "through host memory, which is slow" if carries == "gloo" and seen.torch_devices else "between replicas"
    return ok("gradients", facts.name, f"those on this host's devices travel over {carries} {how}")


def storage(facts: HostFacts) -> Iterator[Finding]:
    """The path of --storage."""
    seen = facts.storage
    if not seen.path:
        return
    if seen.error:
        yield problem(
            "storage",
            facts.name,
            f"{seen.path} cannot be written: {seen.error}",
            "mount it there, or let this user write; checkpoints would be lost",
        )
    elif seen.free_mb < STORAGE_MIN_MB:
        yield warning("storage", facts.name, f"{seen.path} has {seen.free_mb} MB left", "make room for checkpoints")
    else:
        yield ok("storage", facts.name, f"{seen.path} can be written, {seen.free_mb} MB are free")
