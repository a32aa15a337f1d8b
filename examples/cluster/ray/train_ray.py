"""Fault-tolerant training on Ray: one actor per replica group, each running `ftrun --replica I` for its group.

    python examples/cluster/ray/train_ray.py --replicas 4 examples/ddp/train.py --steps 1000

How it works. The driver holds the lighthouse (an embedded LighthouseServer), or is told where one is that runs outside
of Ray, or two of which one stands by (--lighthouse), and starts one `ReplicaGroup` actor per group. An actor runs ftrun
as a child and waits for it. There are three rings of repair, and in none of them do the other groups stop training:

1. a worker dies: the ftrun inside the actor restarts it (and the actor restarts an ftrun that was killed);
2. the actor or its node dies: Ray starts the actor again elsewhere (max_restarts) and calls `run` again
   (max_task_retries);
3. a group that gave up (ftrun ended with a status above 0) is reported; the job goes on while --min-replicas hold.

A killed actor takes its workers with it: ftrun is told to die with it (PR_SET_PDEATHSIG), and ftrun's keeper ends the
workers of a killed ftrun. PR_SET_PDEATHSIG follows the thread that forked, so ftrun is started on the actor's main
thread, where `run` executes.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import os
import secrets
import signal
import subprocess
import sys
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # the groups say alike things
import ray

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.settings import parse_address

PR_SET_PDEATHSIG = 1
MAX_KILLED = 20
"""So often one actor starts an ftrun again that a signal ended (the kernel, out of memory, for example)."""


def die_with_parent(parent: int) -> None:
    """Runs in the child between fork and exec: SIGKILL it when `parent` dies, and now if it is dead already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def ftrun_command(replica: int, replicas: int, min_replicas: int, lighthouse: str, rest: list[str]) -> list[str]:
    """The ftrun that runs one group; `rest` is the script and its arguments, ftrun's own options before it."""
    options = [
        "--replica", str(replica), "--num-replicas", str(replicas), "--min-replicas", str(min_replicas),
        "--lighthouse", lighthouse,
    ]  # fmt: skip
    return [sys.executable, "-m", "ft_core.launch", *options, *rest]


class ReplicaGroup:
    """The actor: one replica group on whatever node Ray finds for it."""

    def __init__(self, command: list[str], token: str, folder: str) -> None:
        self.command, self.token, self.folder = command, token, folder

    def run(self) -> int:
        """Run ftrun to its end; its exit status. Ray calls this again on a restarted actor."""
        environ = dict(os.environ, FT_TOKEN=self.token)
        hook = functools.partial(die_with_parent, os.getpid())
        for _ in range(MAX_KILLED):
            status = subprocess.Popen(self.command, cwd=self.folder, env=environ, preexec_fn=hook).wait()
            if status >= 0:
                return status
            print(f"ftrun was ended by {signal.Signals(-status).name}; starting it again", flush=True)
        return 1


def main() -> int:
    """Run the whole job. Returns 0 if enough groups finished."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2, help="replica groups, one actor each (default 2)")
    parser.add_argument("--min-replicas", type=int, default=1, help="smallest quorum (default 1)")
    parser.add_argument("--address", help="of a running Ray cluster ('auto'); default: start Ray here")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of one group (default 1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of one group (default 0)")
    parser.add_argument("--bind", default="0.0.0.0:0", help="where the lighthouse listens (default: any free port)")
    parser.add_argument(
        "--lighthouse", metavar="HOST:PORT[,HOST:PORT]",
        help="one that runs already, or two of which one stands by (FT_TOKEN is theirs); default: the driver's own",
    )  # fmt: skip
    parser.add_argument("ftrun", nargs=argparse.REMAINDER, help="[options of ftrun] script [arguments]")
    args = parser.parse_args()
    if not args.ftrun:
        parser.error("name a training script")

    here: dict[str, Any] = {} if args.address else {
        "num_cpus": math.ceil(args.replicas * args.cpus), "include_dashboard": False
    }  # fmt: skip
    ray.init(address=args.address, **here)
    lighthouse: LighthouseServer | None = None
    token, address = os.environ.get("FT_TOKEN", ""), args.lighthouse
    if not address:
        token = secrets.token_hex(16)
        lighthouse = LighthouseServer(args.bind, args.min_replicas, token=token)
        # The driver's node as Ray's other nodes know it: an IP, never a host name.
        port = parse_address(lighthouse.address(), "lighthouse")[1]
        address = f"{ray.util.get_node_ip_address()}:{port}"
    print(f"lighthouse: {address}", flush=True)

    actor = ray.remote(num_cpus=args.cpus, num_gpus=args.gpus, max_restarts=-1, max_task_retries=-1)(ReplicaGroup)
    groups = []
    for replica in range(args.replicas):
        command = ftrun_command(replica, args.replicas, args.min_replicas, address, args.ftrun)
        groups.append(actor.options(name=f"replica-{replica}").remote(command, token, os.getcwd()))
    running = {group.run.remote(): replica for replica, group in enumerate(groups)}
    finished = 0
    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        replica = running.pop(done)
        status = ray.get(done)
        finished += status == 0
        print(f"replica-{replica}: ftrun ended with status {status}", flush=True)
    if lighthouse is not None:
        lighthouse.shutdown()
    ray.shutdown()
    return 0 if finished >= args.min_replicas else 1


if __name__ == "__main__":
    sys.exit(main())
