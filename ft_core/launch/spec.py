"""What is to be run: the command line and the environment, resolved and checked. Values only."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_core.launch.restart_policy import RestartSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.launch.chaos_schedule import ChaosSettings

OUT, ERR = 1, 2
"""Streams of a worker, as torchrun numbers them in --tee and --redirects."""
CONNECT_S, QUORUM_S = "300", "900"
"""How long a worker waits for the lighthouse, and for a quorum: as long as groups with trained state may be missing."""

ALONE = (
    "one replica group: nothing survives its loss but the script's own checkpoints. Two or more survive (ftrun "
    "--replicas 2, Lightning: devices=2, ft-accelerate launch --ft_replicas 2)"
)


@dataclass(frozen=True)
class Script:
    """What a worker runs."""

    path: str
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False

    def command(self) -> list[str]:
        """The worker's command line."""
        if self.no_python:
            return [self.path, *self.args]
        return [sys.executable, "-u", *(["-m"] if self.module else []), self.path, *self.args]

    def __str__(self) -> str:
        return f"-m {self.path}" if self.module else self.path


@dataclass(frozen=True)
class Streams:
    """Which streams (OUT | ERR) of each local rank go where. `default` for ranks that are not named."""

    default: int = 0
    ranks: Mapping[int, int] = field(default_factory=dict)

    def of(self, local_rank: int) -> int:
        """Bits of that rank."""
        return self.ranks.get(local_rank, self.default)


@dataclass(frozen=True)
class JobSpec:
    """One run of ftrun. Durations in seconds."""

    script: Script
    run_id: str
    name: str = "replica"
    first: int = 0
    """Number of the first local group."""
    groups: int = 1
    max_groups: int = 1
    """How many local groups `ftrun resize` may go up to."""
    total: int = 0
    """Groups of the whole job; 0: not known here, a part of a job that was started without --num-replicas."""
    whole_job: bool = True
    """All groups of the job run here."""
    min_replicas: int = 1
    from_scratch: bool = False
    """If all state is lost after commits, the job may begin again at step 0."""
    success: str = "all"
    """Which groups have to finish for status 0: `exit_status.SUCCESS`."""
    nproc: int = 1
    lighthouse: str = ""
    """host:port; '': an embedded one."""
    lighthouse_bind: str = "127.0.0.1:0"
    http: str = ""
    """Where an embedded one has its dashboard: host:port, 'auto', or '': nowhere."""
    token: str = field(default="", repr=False)
    made_token: bool = False
    """It is one that ftrun has made: nobody else can send it."""
    admin_token: str = field(default="", repr=False)
    """What the lighthouse takes orders to drain and kill with; '': the token."""
    insecure: bool = False
    """Everybody on the network is trusted: the workers may listen for other machines without a token."""
    host: str = "127.0.0.1"
    """What the workers advertise."""
    timeout_s: float | None = None
    stall_s: float = 60.0
    """How long a group may be missing before it is taken for hung: the workers' timeout."""
    connect_s: float = 60.0
    """How long a lighthouse that was named may take to answer at the start."""
    nodes: int = 1
    """Hosts that one group spans, at most."""
    min_nodes: int = 1
    """Hosts that have to be there for the group to start; fewer than `nodes`: hosts may come and go."""
    rdzv_endpoint: str = ""
    restarts: RestartSettings = field(default_factory=RestartSettings)
    monitor_s: float = 0.1
    log_dir: str = ""
    tee: Streams = field(default_factory=Streams)
    redirects: Streams = field(default_factory=Streams)
    gpus: tuple[str | None, ...] = ()
    """CUDA_VISIBLE_DEVICES per local group; None: untouched."""
    standby: int = 0
    drain_s: float = 30.0
    chaos: ChaosSettings | None = None
    events: str = ""
    """Folder of the event files; '': none are written."""
    metrics: str = ""
    """HOST:PORT of ftrun's metrics; '': none are served. Group N serves at PORT + 1 + N."""
    metrics_setting: str = "--metrics"
    """What named it."""

    def announcement(self, lighthouse: str) -> list[str]:
        """What is about to run, in a line or two."""
        count = f"{self.groups} replica group{'s' if self.groups > 1 else ''}"
        workers = f" of {self.nproc} workers" if self.nproc > 1 else ""
        where = lighthouse if self.lighthouse else f"{lighthouse} (embedded)"
        logs = f", logs in {self.log_dir}/{self.run_id}" if self.log_dir else ""
        events = f", events in {self.events}" if self.events else ""
        first = f"{self.script}: {count}{workers}, lighthouse {where}, run id {self.run_id}{logs}{events}"
        return [first, ALONE] if self.whole_job and self.max_groups == 1 else [first]

    def metrics_of(self, number: int) -> str:
        """FT_METRICS of a group: ports follow ftrun's own, by the number of the group; port 0 stays 0."""
        host, _, port = self.metrics.rpartition(":")
        return f"{host}:{int(port) + 1 + number if int(port) else 0}" if self.metrics else ""

    def group_name(self, number: int) -> str:
        """FT_REPLICA_ID of a group."""
        return f"{self.name}-{number}"

    def visible_devices(self, number: int) -> str | None:
        """CUDA_VISIBLE_DEVICES of a group; None: untouched."""
        index = number - self.first
        return self.gpus[index] if index < len(self.gpus) else None

    def threads(self, environ: Mapping[str, str]) -> dict[str, str]:
        """OMP_NUM_THREADS=1 where several workers share this host and the user set nothing, as torchrun does."""
        alone = self.nproc * self.max_groups == 1
        return {} if alone or "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": "1"}

    def patience(self, environ: Mapping[str, str]) -> dict[str, str]:
        """FT_CONNECT_S and FT_QUORUM_S, where the user set nothing.

        A group that starts late must cost the others no restart: there is no first quorum without it. And a lighthouse
        on another machine may be started again, which must cost no group its state. A worker that gives up loses it;
        one whose group is lost is ended by ftrun anyway.
        """
        quorum = {} if {"FT_QUORUM_S", "TORCHFT_QUORUM_TIMEOUT_SEC"} & environ.keys() else {"FT_QUORUM_S": QUORUM_S}
        if not self.lighthouse or {"FT_CONNECT_S", "TORCHFT_CONNECT_TIMEOUT_SEC"} & environ.keys():
            return quorum
        return {"FT_CONNECT_S": CONNECT_S, **quorum}

    def environment(self, number: int, lighthouse: str, total: int) -> dict[str, str]:
        """FT_* and devices of one group's workers."""
        env = {
            "FT_LIGHTHOUSE": lighthouse,
            "FT_REPLICA_ID": self.group_name(number),
            "FT_REPLICA_GROUP": str(number),
            "REPLICA_GROUP_ID": str(number),  # what scripts written for the reference implementation shard by
            "FT_MIN_REPLICAS": str(self.min_replicas),
            "FT_HOSTNAME": self.host,
            "TORCHELASTIC_MAX_RESTARTS": str(self.restarts.max_restarts),
            "FT_EVENTS": self.events,
            "FT_ADMIN_TOKEN": "",  # who trains does not order others to end
            "FT_METRICS": self.metrics_of(number),
        }
        if total:
            env["FT_NUM_REPLICA_GROUPS"] = env["NUM_REPLICA_GROUPS"] = str(total)
        if self.from_scratch:
            env["FT_FROM_SCRATCH"] = "1"
        if self.token:
            env["FT_TOKEN"] = self.token
            env["FT_MADE_TOKEN"] = "1" if self.made_token else ""
        if self.insecure:
            env["FT_INSECURE"] = "1"
        if self.timeout_s is not None:
            env["FT_TIMEOUT_S"] = f"{self.timeout_s:g}"
        devices = self.visible_devices(number)
        if devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = devices
        return env
