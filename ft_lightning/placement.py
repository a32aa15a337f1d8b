"""Where a strategy's process stands: under a launcher, a child of our own launcher, or neither; and its devices.

How it works. There are three cases, told apart by the environment when the strategy is constructed:
- under a launcher (ftrun, torchrun, or FT_LIGHTHOUSE set by hand), `devices` and `num_nodes` describe this replica
  group, rank by rank;
- nothing of that: `devices` says how many replica groups of one device `fit` is to start on this machine (`launcher`);
- in such a group's process, which runs the same script, `devices` is the same number, and the process keeps the one
  device that has its group's number.
Lightning's own choice of a cluster environment (SLURM, LSF, MPI) is never used: what is said there is about the whole
allocation, and a replica group is a part of it.

Invariants: `parallel_devices` holds one device per rank of this group on this machine. Threads: none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ft_core.addresses import hosts_of
from ft_core.errors import ConfigError
from ft_core.network import advertised_host
from ft_core.process_group import ByDevice, open_store
from ft_core.settings import Environment
from ft_lightning import _compat
from ft_lightning.names import NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch._C._distributed_c10d import TCPStore

    from ft_lightning.arguments import Arguments

BY_DEVICE = ByDevice("write accelerator='gpu' for a model on GPUs, accelerator='cpu' for one on CPUs")
"""Makes the process group of the gradients, by the device that Lightning puts the model on."""
CHILD = "FTRUN_LIGHTNING"
"""In the environment of the processes that our own launcher starts: '<run id>:<groups>'."""


@dataclass(frozen=True)
class Place:
    """The place of this process in its group and the job, as the environment has it."""

    launched: bool
    """This process is a rank of a replica group already."""
    groups: int = 0
    """In a process of our own launcher: how many groups it has started; else 0."""
    group: int = 0
    total: int = 1
    """The number of groups in the job."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0


def look(environ: Mapping[str, str], lighthouse: str | None = None) -> Place:
    """Read the environment; `lighthouse`: one that the user named in the strategy's arguments.

    Raises:
        ConfigError: a variable is not a number.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if not (run_id or lighthouse or environ.get("FT_LIGHTHOUSE") or environ.get("TORCHFT_LIGHTHOUSE")):
        return Place(False)
    mine, _, groups = environ.get(CHILD, "").rpartition(":")
    size = _whole(environ, "WORLD_SIZE", 1)
    return Place(
        launched=True, groups=int(groups) if mine and mine == run_id else 0,
        group=_whole(environ, "FT_REPLICA_GROUP", 0), total=_whole(environ, "FT_NUM_REPLICA_GROUPS", 1),
        rank=_whole(environ, "RANK", 0), local_rank=_whole(environ, "LOCAL_RANK", 0), world_size=size,
        local_world_size=_whole(environ, "LOCAL_WORLD_SIZE", size),
        node=_whole(environ, "GROUP_RANK", _whole(environ, "NODE_RANK", 0)),
    )  # fmt: skip


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment must be a whole number")
    return int(text)


def keep(devices: Sequence[Any] | None, place: Place) -> list[Any] | None:
    """Choose from the devices that Lightning found those of this process's group."""
    if not devices or (place.launched and not place.groups):
        return None if devices is None else list(devices)
    return [devices[place.group % len(devices)]]


def check(place: Place, devices: int, nodes: int, host: str) -> None:
    """Under a launcher the numbers must be the group's.

    Args:
        place: of this process.
        devices: per node, as the user wrote them.
        nodes: likewise.
        host: "Trainer" or "Fabric", for the message.

    Raises:
        ConfigError: they are not; says what to write instead.
    """
    if not place.launched or place.groups:
        return
    rule = f"under a launcher, {host}(devices=, num_nodes=) describe one replica group"
    if devices != place.local_world_size:
        raise ConfigError(
            f"devices={devices}, but this replica group has {_count(place.local_world_size, 'process')} on this "
            f"machine (LOCAL_WORLD_SIZE): {rule}; write devices={place.local_world_size}, or start {devices} "
            f"per group (ftrun --nproc-per-replica {devices}, torchrun --nproc-per-node {devices})"
        )
    if nodes * devices != place.world_size:
        raise ConfigError(
            f"num_nodes={nodes} with devices={devices}, but this replica group has "
            f"{_count(place.world_size, 'process')} (WORLD_SIZE): {rule}; write num_nodes={place.world_size // devices}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"


STORES: list[TCPStore] = []
"""Stores of this process, kept: Lightning leaves the port in MASTER_PORT, where later Trainers find it."""


class GroupEnvironment:
    """Lightning's ClusterEnvironment for one replica group; `environment` mixes it with the class of one tree.

    A lone process that nobody launched is a group of one, whatever RANK and the like say.
    """

    def __init__(self, place: Place, lighthouse: str | None = None) -> None:
        super().__init__()
        self._place = place
        self._lighthouse = lighthouse
        self._store: TCPStore | None = None

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning is to start no process."""
        return True

    @property
    def main_address(self) -> str:
        """The address of the group's store. The other groups are sent it, so it must lead here from there."""
        if self._place.launched and "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if not self._place.launched:
            return "127.0.0.1"
        env = Environment.read(os.environ)
        address = self._lighthouse or env.lighthouse
        towards = hosts_of(address or "", "lighthouse (FT_LIGHTHOUSE)") or ("localhost",)
        return advertised_host(env.hostname, env.interface, *towards)

    @property
    def main_port(self) -> int:
        """The port of the group's store; a free one where none is given."""
        if self._place.launched and "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        if self._store is None:
            # Opened here and kept: a port that is only known to be free may be somebody's by the time torch listens.
            self._store = open_store(self.main_address)
            STORES.append(self._store)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # init_process_group connects to it
        return int(self._store.port)

    @staticmethod
    def detect() -> bool:
        """Never chosen by Lightning itself."""
        return False

    def world_size(self) -> int:
        """The number of ranks of the group."""
        return self._place.world_size

    def set_world_size(self, size: int) -> None:
        """Ignored: the launcher decides."""

    def global_rank(self) -> int:
        """The number of this rank in its group."""
        return self._place.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the launcher decides."""

    def local_rank(self) -> int:
        """The number of this rank among the group's ranks on this machine."""
        return self._place.local_rank

    def node_rank(self) -> int:
        """The number of this machine in the group."""
        return self._place.node


def environment(tree: str, place: Place, lighthouse: str | None) -> Any:
    """A GroupEnvironment that is a ClusterEnvironment of `tree`'s Fabric."""
    base = _compat.part(_compat.fabric_of(tree), "plugins.environments.ClusterEnvironment")
    made = {"__module__": __name__, "__reduce__": lambda _: (environment, (tree, place, lighthouse))}
    return type("GroupEnvironment", (GroupEnvironment, base), made)(place, lighthouse)


class Placed:
    """The part of a strategy of either kind that knows its place. Set `_tree` on the class."""

    _tree = ""
    _name = NAME
    """Lightning's name for the strategy."""
    _arguments: Arguments
    """The constructor's; set before `super().__init__()`."""
    _place: Place | None = None
    _environment: Any = None
    _all_devices: list[Any] | None = None

    @property
    def place(self) -> Place:
        """The place of this process; the same for the strategy's whole life."""
        if self._place is None:
            self._place = look(os.environ, self._arguments.lighthouse)
        return self._place

    @property
    def replica_group(self) -> int:
        """Number of this replica group in the job."""
        return self.place.group

    @property
    def num_replica_groups(self) -> int:
        """Groups of the job, as it was started."""
        return self.place.total

    @property
    def parallel_devices(self) -> list[Any] | None:
        """One per rank of this group on this machine."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[Any] | None) -> None:
        self._all_devices = None if devices is None else list(devices)
        self._parallel_devices = keep(devices, self.place)

    @property
    def wanted_devices(self) -> int:
        """The number of devices that the user asked for: ranks of this group under a launcher, else replica groups."""
        return len(self._all_devices or ())

    @property
    def cluster_environment(self) -> Any:
        """The environment of the replica group, whatever Lightning would choose."""
        if self._environment is None:
            self._environment = environment(self._tree, self.place, self._arguments.lighthouse)
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, value: Any) -> None:
        if value is not None and value is not self._environment:
            raise ConfigError(
                f"cluster_environment={type(value).__name__} cannot be used with strategy={self._name!r}: a "
                "replica group's processes are started by ftrun, torchrun or the Trainer itself"
            )
