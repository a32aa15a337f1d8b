"""Reads what is known of this host in a second or two: settings, names, limits, versions, GPUs. Decides nothing.

Invariants: nothing is changed here but a file that is made and removed where FT_EVENTS points. torch is imported in a
process of its own, bounded in time, and only where there is an accelerator: a driver that hangs hangs that process.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import hmac
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING

from ft_core.access import Tokens, check_listener, insecure, job_token, own_admin_token
from ft_core.addresses import hosts_of
from ft_core.certificates import Tls
from ft_core.doctor import reach, storage
from ft_core.doctor.facts import TEXT_MAX, Gpu, GpuFacts, HostFacts, Interface
from ft_core.errors import ConfigError
from ft_core.network import advertised_host, is_here, is_loopback
from ft_core.settings import KNOWN_ENVIRONMENT, Environment, TimeBudget

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGES = (
    "ft-training", "torch", "grpcio", "protobuf", "numpy", "lightning", "pytorch-lightning", "accelerate",
    "transformers", "xxhash",
)  # fmt: skip
OTHERS = (
    "OMP_NUM_THREADS", "http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY",
    "ALL_PROXY", "NO_PROXY", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "CUDA_VISIBLE_DEVICES", "REPLICA_GROUP_ID",
    "NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE", "SLURM_JOB_ID", "SLURM_NODEID",
)  # fmt: skip
"""Variables beside FT_ that change what a job does."""
DANGER = "whoever reaches it may read the model, or take the place of a rank"
SECRETS = ("TOKEN", "SECRET", "PASSWORD")
"""A variable with such a word in its name is told by its name alone, and so is a proxy, whose address may hold one."""
SET = "set"
"""In place of a secret."""
GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
TOOL_S, TORCH_S = 5.0, 30.0
SHM = "/dev/shm"
PORT_MAX = 65535
EVENTS_BYTES = 1 << 16
"""What a folder for events has to have room for, at least."""
TORCH = """
import json, torch
nccl = ""
try:
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
except Exception as error:
    nccl = ""
print(json.dumps([torch.version.cuda or "", nccl, torch.cuda.device_count()]))
"""


def collect(env: Mapping[str, str], path: str = "", meeting: str = "") -> HostFacts:
    """Everything that this host alone can know.

    Args:
        env: of the job.
        path: of shared storage; '': none is tried.
        meeting: the host where others are met; what is advertised leads there if no lighthouse is named.
    """
    facts = HostFacts(name=host_name(env), machine=_machine())
    facts.settings = {
        name: _told(name, value) for name, value in sorted(env.items())
        if name.startswith("FT_") or name in OTHERS
    }  # fmt: skip
    _settings(facts, env)
    _names(facts, env, meeting)
    facts.open_door = _door(env, facts.address)
    facts.versions = versions()
    facts.cores = len(os.sched_getaffinity(0))
    facts.files_soft = _files()
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(SHM)
        facts.shm_total_mb, facts.shm_free_mb = usage.total >> 20, usage.free >> 20
    facts.events_error = _events(env.get("FT_EVENTS", ""))
    facts.metrics_error = _listens(env.get("FT_METRICS", ""))
    facts.tls = reach.certificates(env, facts.address)
    facts.lighthouse, *other = reach.lighthouses(env)
    facts.other_lighthouse = other[0] if other else facts.other_lighthouse
    facts.gpus = gpus()
    if path:
        facts.storage = storage.alone(path)
    return facts


def host_name(env: Mapping[str, str]) -> str:
    """How this one is called in findings: by its host's name, and its group's number where there is one."""
    group = env.get("FT_REPLICA_GROUP", "")
    return socket.gethostname() + (f"/{group}" if group else "")


def _machine() -> str:
    """Equal for all containers of a machine with the same network."""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/net")
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {space}"
    return socket.gethostname()


def token_digest(token: str, salt: str) -> str:
    """Tells tokens apart without telling them; '' for none. Slow, so that short ones are not guessed from it."""
    if not token:
        return ""
    bare = token.encode("utf-8", "surrogatepass")  # it may be no text at all, which `_settings` tells
    return hmac.digest(hashlib.pbkdf2_hmac("sha256", bare, salt.encode(), 20_000), b"ft", "sha256").hex()


def _settings(facts: HostFacts, env: Mapping[str, str]) -> None:
    for name in sorted(env):
        if name.startswith("FT_") and name not in KNOWN_ENVIRONMENT:
            facts.unknown[name] = next(iter(difflib.get_close_matches(name, KNOWN_ENVIRONMENT, 1)), "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown variables: they are in `unknown`
            read = Environment.read(env)
        TimeBudget.derive(read.timeout_s or 60.0, quorum_s=read.quorum_s, connect_s=read.connect_s,
                          overrides=read.overrides)  # fmt: skip
    except ConfigError as error:
        facts.errors.append(str(error))
    try:
        Tokens(job_token(env), own_admin_token(env)).check()
    except ConfigError as error:
        facts.errors.append(str(error))
    facts.token = SET if env.get("FT_TOKEN") else ""


def _door(env: Mapping[str, str], address: str) -> str:
    """Why a replica would not listen at the address that it advertises; '': it would, or it stays on this machine."""
    if not env.get("FT_LIGHTHOUSE"):
        return ""
    try:
        check_listener("this host", address, job_token(env), Tls.from_env(env), DANGER, insecure(env))
    except ConfigError as error:
        return str(error)[:TEXT_MAX]
    return ""


def _told(name: str, value: str) -> str:
    secret = any(word in name.upper() for word in SECRETS) or name.lower().endswith("_proxy")
    return SET if secret and value else value[:TEXT_MAX]


def _names(facts: HostFacts, env: Mapping[str, str], meeting: str) -> None:
    """What others connect to, by the rule of the data plane; and what this host takes its own name for."""
    hostname, interface = env.get("FT_HOSTNAME") or None, env.get("FT_INTERFACE") or None
    towards: tuple[str, ...] = (meeting,) if meeting else ()
    what = "meeting"
    with contextlib.suppress(ConfigError):
        if hosts := hosts_of(env.get("FT_LIGHTHOUSE", ""), "FT_LIGHTHOUSE"):
            towards, what = hosts, "lighthouse"
    try:
        facts.address = advertised_host(hostname, interface, *towards)
    except ConfigError as error:
        facts.errors.append(str(error))
    if hostname:
        facts.address_from = f"FT_HOSTNAME={hostname}"
    elif interface:
        facts.address_from = f"FT_INTERFACE={interface}"
    else:
        facts.address_from = f"the route to the {what} ({', '.join(towards)})" if towards else "the default route"
    facts.address_here = not facts.address or is_here(facts.address)
    facts.interfaces = interfaces()
    facts.host_name = socket.gethostname()
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(facts.host_name, None, type=socket.SOCK_STREAM)
        facts.host_resolves = list(dict.fromkeys(str(where[0]) for *_, where in found))


def interfaces() -> list[Interface]:
    """Those with an IPv4 address that others may reach."""
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):
            address = advertised_host(None, name)
            if not is_loopback(address):
                hardware = any(os.path.exists(f"/sys/class/net/{name}/{what}") for what in ("device", "bonding"))
                found.append(Interface(name, address, _states(name, "mtu"), _states(name, "speed"), hardware))
    return found


def _states(interface: str, what: str) -> int:
    """A number that the kernel knows of an interface; 0: none."""
    path = f"/sys/class/net/{interface}/{what}"
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return max(0, int(file.read()))
    return 0


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _files() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def _events(folder: str) -> str:
    """Why events cannot be written there; '': they can, or none are wanted."""
    if not folder:
        return ""
    there = os.path.abspath(folder)
    while not os.path.lexists(there):
        there = os.path.dirname(there)  # the job makes the rest; ft-doctor leaves nothing behind
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(EVENTS_BYTES))  # an empty file finds room on a full disk, too
            file.flush()
            return ""
    except OSError as error:
        return f"{error.strerror}"


def _listens(address: str) -> str:
    """Why nobody can listen there; '': one can, or it is not wanted."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > PORT_MAX:
        return ""  # what has a wrong form is told by who reads the variable
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=_family(host)):
            return ""
    except OSError as error:
        return (error.strerror or str(error))[:TEXT_MAX]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def gpus() -> GpuFacts:
    """NVIDIA's, as their tool and torch see them."""
    facts = GpuFacts()
    if not any(os.path.exists(path) for path in GPU_FILES):
        return facts
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version",
                 "--format=csv,noheader,nounits"]  # fmt: skip
        for row in _run(query, TOOL_S).splitlines():
            name, total, used, facts.driver = (cell.strip() for cell in row.split(","))
            facts.devices.append(Gpu(name, _mb(total), _mb(used)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        facts.error = f"nvidia-smi: {_why(error)}"
    try:
        facts.cuda, facts.nccl, facts.torch_devices = json.loads(_run([sys.executable, "-c", TORCH], TORCH_S))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        facts.error = facts.error or f"torch: {_why(error)}"
    return facts


def _mb(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _run(command: list[str], limit_s: float) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True).stdout


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:g} s"
    said = getattr(error, "stderr", "") or str(error)
    return str(said).strip().splitlines()[-1][:TEXT_MAX] if str(said).strip() else type(error).__name__
