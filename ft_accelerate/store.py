"""The c10d store of a replica group: through it the ranks of the group, and the groups of a quorum, find each other.

How it works. Under an elastic agent (ftrun, torchrun, `accelerate launch` with several processes) there is one at
MASTER_ADDR and MASTER_PORT. A process that nobody launched has none that others could reach, nor have those of
`debug_launcher`, which meet in a file: the group's first rank opens one and sends the others its address.

Threads: the training thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from ft_core.addresses import hosts_of
from ft_core.network import advertised_host
from ft_core.process_group import open_store
from ft_core.settings import Environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_kept: dict[tuple[int, str], TCPStore] = {}
"""By process id and host: the store of all runs of this process, as an agent's is. Closed at its end. A store per run
would cost nine descriptors each."""


def place(ranks: int, rank: int, lighthouse: str) -> dict[str, Any]:
    """`store_addr` and `store_port` for the Manager; nothing where its own defaults are right.

    Args:
        ranks: processes of this group.
        rank: of this one.
        lighthouse: host:port, or two of them; others reach this machine where packets to there leave it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return {}
    sent: list[Any] = [None]
    if rank == 0:
        env = Environment.read(os.environ)
        host = advertised_host(env.hostname, env.interface, *(hosts_of(lighthouse, "lighthouse") or ("localhost",)))
        mine = os.getpid(), host  # a forked child has its parent's dictionary
        if mine not in _kept:
            _kept[mine] = open_store(host)
        sent = [(host, int(_kept[mine].port))]
    if ranks > 1:
        torch.distributed.broadcast_object_list(sent, 0)
    address, port = sent[0]
    return {"store_addr": address, "store_port": port}
