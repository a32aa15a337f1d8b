"""Where the ft-doctors of a job meet, and how many they are, out of what its launcher says. Pure.

Each launcher sets variables for what it starts: ftrun the group's number and the lighthouse, torchrun the first host,
srun the list of nodes. One ft-doctor per replica group, or per host, takes part; others of the same host have nothing
to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ft_core.addresses import hosts_of
from ft_core.errors import ConfigError
from ft_core.settings import MAX_REPLICAS, parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping

PORT = 29519
"""Where they meet, if nobody names a port."""


@dataclass(frozen=True)
class Place:
    """Where to meet."""

    host: str
    port: int
    hosts: int
    by: str
    """Who says so, for people."""
    at_lighthouse: bool = False
    """The host is the lighthouse's, which may be none of the job's: the lighthouse knows more."""


def place(meet: str | None, hosts: int | None, env: Mapping[str, str]) -> Place | None:
    """Where this one goes; None: it stays alone.

    Args:
        meet: --meet HOST:PORT.
        hosts: --hosts.
        env: the environment.

    Raises:
        ConfigError: the two do not fit together, or what they say is no address.
    """
    if hosts is not None and not 1 <= hosts <= MAX_REPLICAS:
        raise ConfigError(f"--hosts {hosts} must be between 1 and {MAX_REPLICAS}: how many ft-doctors come")
    found = _by_group(env) or _by_torchrun(env) or _by_slurm(env)
    if meet is None and hosts is None:
        return found if found is not None and found.hosts > 1 else None
    if meet is not None:
        text = meet if re.search(r":\d+$", meet) else f"{meet}:{PORT}"
        host, port = parse_address(text, "--meet")
        count = hosts if hosts is not None else found.hosts if found is not None else None
        if count is None:
            raise ConfigError(f"--meet {meet} needs --hosts N: how many ft-doctors come there")
        return Place(host, port, count, "--meet")
    if found is None:
        raise ConfigError(f"--hosts {hosts} needs --meet HOST:PORT: the first host, where they meet")
    assert hosts is not None
    return replace(found, hosts=hosts)


def superfluous(env: Mapping[str, str]) -> str:
    """Why this process has nothing to do, as another one of its group or host does it; '': it has."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        grouped = name == "LOCAL_RANK" or "LOCAL_RANK" not in env
        if grouped and env.get(name, "0").isdecimal() and int(env.get(name, "0")) > 0:
            return f"{name}={env[name]}: the first process of this group or host does it"
    return ""


def _whole(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else 0


def _by_group(env: Mapping[str, str]) -> Place | None:
    """Of ftrun, or by hand: the job's groups meet where its lighthouse is."""
    groups, lighthouse = _whole(env, "FT_NUM_REPLICA_GROUPS"), env.get("FT_LIGHTHOUSE", "")
    if groups < 2 or not lighthouse or not env.get("FT_REPLICA_GROUP"):
        return None
    host = hosts_of(lighthouse, "FT_LIGHTHOUSE")[0]  # of two: the lighthouse that is active is asked before
    hosts = groups * max(1, _whole(env, "GROUP_WORLD_SIZE"))  # a group may span hosts, each with an ftrun
    return Place(host, PORT, hosts, "FT_LIGHTHOUSE and FT_NUM_REPLICA_GROUPS", at_lighthouse=True)


def _by_torchrun(env: Mapping[str, str]) -> Place | None:
    hosts, first = _whole(env, "GROUP_WORLD_SIZE"), env.get("MASTER_ADDR", "")
    if hosts < 2 or not first or env.get("FT_REPLICA_GROUP"):
        return None
    return Place(first, PORT, hosts, "MASTER_ADDR and GROUP_WORLD_SIZE")


def _by_slurm(env: Mapping[str, str]) -> Place | None:
    hosts, nodes = _whole(env, "SLURM_STEP_NUM_NODES"), env.get("SLURM_STEP_NODELIST", "")
    if hosts < 2 or not nodes:
        return None
    return Place(first_node(nodes), PORT, hosts, "SLURM_STEP_NODELIST and SLURM_STEP_NUM_NODES")


def first_node(nodes: str) -> str:
    """The first name of a list as Slurm writes it: node[03-07,9],other."""
    found = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\])?([^,\[]*)", nodes)
    return f"{found[1]}{found[2] or ''}{found[3]}" if found else nodes
