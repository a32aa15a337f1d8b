"""The control plane's public names, for people who build a protocol of their own on it.

`LighthouseServer` and `LighthouseClient` are all that is needed to agree on member lists: call `quorum` whenever the
members may have changed, `heartbeat` in between. `ManagerServer` and `ManagerClient` do the same for groups of several
ranks: each rank calls `ManagerClient.quorum` and `should_commit`, the server speaks for the group.

All of them construct and start at once; `shutdown` is idempotent. Errors: see ft_core.errors.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core.access import asks_nothing, insecure, job_token
from ft_core.certificates import Tls
from ft_core.control.group.server import GroupServer
from ft_core.control.lighthouse.client import LighthouseClient, Quorum, QuorumMember, data_as_text, public_quorum
from ft_core.control.lighthouse.lease_client import LeaseSettings
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.control.link import RankControl
from ft_core.errors import ConfigError, LighthouseError, QuorumTimeoutError
from ft_core.network import is_loopback
from ft_core.protocol.group.ranks import ANY_GROUP
from ft_core.protocol.lighthouse.events import Hello
from ft_core.protocol.pushes import Answer, Refusal
from ft_core.protocol.types import VOID, Ask, Outcome, Verdict, Version
from ft_core.protocol.types import Quorum as PureQuorum
from ft_core.rpc.channel import join_host, reachable_host, split_bind
from ft_core.settings import TimeBudget, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.pushes import Push

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
]


class _Silent:
    """A PushHandler for which only answers and errors matter."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._changed = threading.Condition()
        self._quorums: dict[int, PureQuorum] = {}
        self._latest: PureQuorum | None = None
        self._error: Exception | None = None

    def hello(self) -> Hello:
        """The quorum we are in goes with it, so that a restarted lighthouse can adopt it."""
        if self._latest is None:
            return self._hello
        quorum_id = self._latest.quorum_id
        return Hello(
            self._hello.replica_id, self._hello.name, 0, 0, highest_id=quorum_id, quorum_id=quorum_id,
            members=self._latest.ids, group_world_size=self._hello.group_world_size,
        )  # fmt: skip

    def on_push(self, push: Push) -> None:
        """Ranks ask at every step and the data plane is the caller's: only answers and refusals matter."""
        with self._changed:
            if isinstance(push, Answer):
                self._quorums = {push.seq: push.quorum}
                self._latest = push.quorum
            elif isinstance(push, Refusal):
                self._error = push.error
            self._changed.notify_all()

    def wait(self, seq: int, timeout_s: float) -> PureQuorum | None:
        """The answer to an ask; None if it does not come in time. Raises the error of a Refusal."""
        with self._changed:
            self._changed.wait_for(lambda: seq in self._quorums or self._error is not None, timeout_s)
            if seq not in self._quorums and self._error is not None:
                raise self._error
            return self._quorums.get(seq)


class ManagerServer:
    """Speaks for one group: all its ranks connect to it with `ManagerClient`. The constructor starts it.

    Args:
        replica_id: of the group; unique among the groups.
        lighthouse_addr: host:port or http://host:port; of two lighthouses, both, with a comma between them.
        hostname: what the group's ranks can reach this machine by; '': its name.
        bind: host:port to listen on; port 0 takes any free one. What other machines can reach needs a token, or
            certificates with a CA. None: any port, for other machines only if there is either.
        store_addr: the group's c10d store, handed to the other groups.
        world_size: number of ranks.
        heartbeat_interval: how often the lease is renewed.
        connect_timeout: how long the lighthouse and the ranks may take to appear.
        quorum_retries: accepted for compatibility; asks are presented again until answered.
        token: the job's secret; None: FT_TOKEN.

    Raises:
        ConfigError: an address has a wrong form or the port is taken.
        LighthouseError: the lighthouse did not answer within `connect_timeout`, or refused.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str = "",
        bind: str | None = None,
        store_addr: str = "",
        world_size: int = 1,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        connect_timeout: timedelta = timedelta(seconds=60),
        quorum_retries: int = 0,  # noqa: ARG002
        *,
        token: str | None = None,
    ) -> None:
        token = job_token(os.environ) if token is None else token
        self._tls = Tls.from_env(os.environ)
        stays = (not hostname or is_loopback(hostname)) and asks_nothing(token, self._tls, insecure(os.environ))
        host, port = split_bind(("localhost:0" if stays else "[::]:0") if bind is None else bind, "bind")
        budget = _budget(connect_timeout, heartbeat_interval.total_seconds())
        settings = LeaseSettings(
            address=lighthouse_addr, replica_id=replica_id, budget=budget, setting="lighthouse_addr",
            token=token, tls=self._tls,
        )  # fmt: skip
        handler = _Silent(Hello(replica_id, replica_id, 0, 0, group_world_size=world_size))
        self.store_addr = store_addr
        self._host = hostname or reachable_host(host)
        self._group = GroupServer(settings, handler, world_size=world_size, host=host, port=port, local_rank=None)
        self._group.start()
        try:
            self._group.lease.wait_connected(connect_timeout.total_seconds())
        except BaseException:
            self.shutdown()
            raise

    def __repr__(self) -> str:
        return f"ManagerServer({self.address()}, {self._group!r})"

    def address(self) -> str:
        """http://host:port for `ManagerClient`."""
        return f"http{'s' if self._tls else ''}://{join_host(self._host, self._group.port)}"

    def shutdown(self) -> None:
        """End the group's lease and stop listening. Idempotent."""
        self._group.shutdown(5.0)


class ManagerClient:
    """One rank's link to its `ManagerServer`.

    Args:
        addr: `ManagerServer.address()`.
        connect_timeout: how long the constructor waits for it.
        replica_id, world_size: of the group, as given to the server, which then checks them; '': whatever it serves.
        group_rank: of this rank; None: RANK, else 0.
        store_address, heal_address: handed to the other groups (that of rank 0, one per rank).
        token: the job's secret; None: FT_TOKEN.

    Raises:
        LighthouseError: the server did not answer, or refused this rank.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta = timedelta(seconds=60),
        *,
        replica_id: str = "",
        group_rank: int | None = None,
        world_size: int = 1,
        store_address: str = "",
        heal_address: str = "",
        token: str | None = None,
    ) -> None:
        replica_id = replica_id or ANY_GROUP
        if group_rank is None:
            group_rank = whole_number(os.environ, "RANK", 0)
        self._template = Ask(
            replica_id, 0, group_world_size=world_size, store_address=store_address,
            heal_addresses=(heal_address,) if heal_address else (),
        )  # fmt: skip
        settings = LeaseSettings(
            address=addr, replica_id=replica_id, budget=_budget(connect_timeout, 0.0), setting="addr",
            token=os.environ.get("FT_TOKEN", "") if token is None else token,
        )  # fmt: skip
        self._handler = _Silent(Hello(replica_id, replica_id, 0, 0))
        self._control = RankControl(settings, self._handler, rank=group_rank, world_size=world_size)
        self._rank = group_rank
        self._seq = 0
        self._quorum_id = 0
        self._votes: dict[int, int] = {}
        self._control.start()
        try:
            self._control.wait_connected(connect_timeout.total_seconds())
        except BaseException:
            self._control.shutdown()
            raise

    def __repr__(self) -> str:
        return f"ManagerClient(rank={self._rank}, {self._control!r})"

    def quorum(
        self,
        step: int,
        timeout: timedelta,
        *,
        shrink_only: bool = False,
        failed: bool = False,
        data: str | Mapping[str, Any] | None = None,
    ) -> Quorum:
        """Ask for the next quorum together with the other ranks of the group, and wait for it.

        Args:
            step: this rank's step; ranks that differ are treated as holding no usable state.
            timeout: how long to wait.
            shrink_only: only members of the current quorum may be in the next one.
            failed: the collectives of the current quorum broke under this rank.
            data: free text, or a dict that JSON can hold, handed to the other groups (that of rank 0).

        Raises:
            QuorumTimeoutError: none formed in time; the message carries the reason.
            LighthouseError, ConfigError: refused for good.
        """
        self._seq += 1
        ask = Ask(
            self._template.replica_id, self._seq, Version(step, 0), quorum_id=self._quorum_id, failed=failed,
            group_world_size=self._template.group_world_size, store_address=self._template.store_address,
            heal_addresses=self._template.heal_addresses, shrink_only=shrink_only, data=data_as_text(data),
            fenced=False,  # there is no fence here: that one has entered a quorum says nothing of the others
        )  # fmt: skip
        self._control.ask(ask)
        quorum = self._handler.wait(self._seq, timeout.total_seconds())
        if quorum is None:
            why = self._control.last_reason or "no reason given"
            raise QuorumTimeoutError(f"no quorum within {timeout.total_seconds():g} s: {why}")
        self._quorum_id = quorum.quorum_id
        self._votes = {}
        return public_quorum(quorum)

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """The group's vote on a step: True on every rank if every rank said True, else False on every rank.

        A step may be voted on again: the n-th vote of each rank on it belongs to the n-th of the others.
        """
        if group_rank != self._rank:
            raise ConfigError(f"group_rank={group_rank} votes through the ManagerClient of rank {self._rank}")
        count = self._votes[step] = self._votes.get(step, -1) + 1
        self._votes = {known: n for known, n in self._votes.items() if known >= step - 8}
        attempt = (step << 16) | count
        outcome = Outcome.COMMIT if should_commit else Outcome.VETO
        vote = Verdict(self._quorum_id, attempt, outcome, "" if should_commit else "a rank said no")
        verdict = self._control.vote(vote, timeout.total_seconds())
        if verdict.outcome is Outcome.BROKEN and not should_commit:
            return False
        if verdict.outcome is Outcome.BROKEN:
            raise LighthouseError(f"the group could not agree on step {step}: {verdict.reason}")
        return verdict.outcome is Outcome.COMMIT

    def shutdown(self) -> None:
        """Leave the group. Idempotent."""
        self._control.leave("shut down", finished=False, version=VOID, agreed=False, timeout_s=1.0)
        self._control.shutdown()


def _budget(connect_timeout: timedelta, progress_s: float) -> TimeBudget:
    overrides = {"liveness_s": 5.0}
    if progress_s > 0:
        overrides["progress_s"] = min(progress_s, 2.5)
    return TimeBudget.derive(60.0, connect_s=connect_timeout.total_seconds(), overrides=overrides)
