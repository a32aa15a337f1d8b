"""Rendezvous of one replica group: its own c10d store on this host, or torch's c10d rendezvous if it spans hosts.

How it works. A group on one host needs no agreement with anybody: `SoloRendezvous` opens a new TCPStore for every start
of the group and hands it to the workers (MASTER_ADDR, MASTER_PORT). New, because torch's `init_process_group` writes
addresses under the same keys at every start, and would find those of the dead. The store lives in ftrun, so the death
of any worker leaves it standing. A group with `--nnodes` above 1 uses torch's DynamicRendezvousHandler at
`--rdzv-endpoint`: there a host that joins or comes back restarts the group on all its hosts (the membership change of
torch's agents), and with `--nnodes MIN:MAX` so does one that is lost. torch would wait until the workers notice that.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ft_core.process_group import open_store

STORE_S = 60.0
"""How long an operation on the group's store may wait."""
BEAT_S = 2
"""How often a host says at the rendezvous that it is there."""
BEATS = 3
"""So many without a word, and a host is lost: a group whose hosts may come and go starts again without it."""
LOOK_S = 0.1
"""How often a host that waits for the others looks whether it still shall."""


class Stopped(Exception):
    """The group was told to stop while it waited for its next start."""


class SoloRendezvous(RendezvousHandler):
    """Rendezvous of a group whose workers are all children of this agent."""

    def __init__(self, run_id: str, host: str) -> None:
        self._run_id = run_id
        self._host = host
        self._store: TCPStore | None = None
        self._round = 0

    def __repr__(self) -> str:
        return f"SoloRendezvous({self._run_id}, round {self._round})"

    @property
    def use_agent_store(self) -> bool:
        """The workers use the agent's store: it outlives them."""
        return True

    def get_backend(self) -> str:
        """Name of this rendezvous."""
        return "solo"

    def next_rendezvous(self) -> RendezvousInfo:
        """The next start of the group: rank 0 of 1, at once."""
        self._store = open_store(self._host, timedelta(seconds=STORE_S))
        self._round += 1
        place = RendezvousStoreInfo(self._host, self._store.port)
        return RendezvousInfo(PrefixStore("ftrun", self._store), 0, 1, place)

    def is_closed(self) -> bool:
        """Never: the agent decides when it is over."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


class HostsRendezvous(RendezvousHandler):
    """torch's rendezvous of a group that spans hosts, which can be given up while the other hosts have not come.

    torch waits for them for up to an hour, and for the first host's store in C++: so it waits on a thread of its own,
    which is left behind when `stop` is set. It is a daemon's, and ftrun ends then.
    """

    def __init__(self, parameters: RendezvousParameters, stop: threading.Event) -> None:
        self._parameters = parameters
        self._stop = stop
        self._inner: RendezvousHandler | None = None
        self._hosts = 0
        """In this start of the group."""

    def __repr__(self) -> str:
        return f"HostsRendezvous({self._parameters.run_id} at {self._parameters.endpoint})"

    @property
    def use_agent_store(self) -> bool:
        """Whether torch's own rendezvous uses the agent's store."""
        return self._inner is not None and bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        """Name of this rendezvous."""
        return self._parameters.backend

    def next_rendezvous(self) -> RendezvousInfo:
        """The next start of the group, once all hosts are there. Raises Stopped if that is not wanted any more."""
        answer: queue.SimpleQueue[RendezvousInfo | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._join, args=(answer,), name="ftrun-rendezvous", daemon=True).start()
        while not self._stop.is_set():
            with contextlib.suppress(queue.Empty):
                found = answer.get(timeout=LOOK_S)
                if isinstance(found, BaseException):
                    raise found
                self._hosts = found.world_size
                return found
        raise Stopped

    def _join(self, answer: queue.SimpleQueue[RendezvousInfo | BaseException]) -> None:
        try:
            if self._inner is None:
                self._inner = get_rendezvous_handler(self._parameters)
            # torch tells the hosts of a later round nothing of its store, so one that is new waits for ever (2.13), and
            # keeps the store, in which the next start would find the addresses of the dead.
            vars(self._inner).update(_bootstrap_store_info=None, _shared_tcp_store_server=None)
            answer.put(self._inner.next_rendezvous())
        except BaseException as error:  # noqa: BLE001 - the group's thread raises it
            answer.put(error)

    def is_closed(self) -> bool:
        """Whether torch's own rendezvous is closed."""
        return self._inner is not None and bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """No host comes back."""
        if self._inner is not None:
            self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Hosts that want to come (back), and those that are lost if it goes on without them."""
        if self._inner is None:
            return 0
        waiting = int(self._inner.num_nodes_waiting())
        if self._parameters.min_nodes == self._parameters.max_nodes:
            return waiting
        there = len(vars(self._inner)["_state_holder"].state.participants)  # torch drops the silent ones
        return waiting + max(0, self._hosts - there)

    def get_run_id(self) -> str:
        """The group's id."""
        return str(self._parameters.run_id)

    def shutdown(self) -> bool:
        """Tell the other hosts that it is over."""
        return self._inner is None or bool(self._inner.shutdown())


def rendezvous(
    run_id: str, host: str, nodes: tuple[int, int], endpoint: str, stop: threading.Event
) -> RendezvousHandler:
    """The rendezvous of a group on this host, or of one on (least, most) `nodes` that meet at `endpoint`."""
    least, most = nodes
    if most == 1:
        return SoloRendezvous(run_id, host)
    parameters = RendezvousParameters(
        "c10d", endpoint, run_id, least, most, local_addr=host, join_timeout=3600, last_call_timeout=1,
        keep_alive_interval=BEAT_S, keep_alive_max_attempt=BEATS,
    )  # fmt: skip
    return HostsRendezvous(parameters, stop)


def attempt_key(store: Store, group_rank: int) -> str:
    """A random word that all hosts of this start of the group share: workers keep their own starts apart by it."""
    key = "ftrun/attempt"
    if group_rank == 0:
        store.set(key, secrets.token_hex(8))
    return str(store.get(key).decode())
