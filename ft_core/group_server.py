"""In-group agreement for groups of several ranks (SKELETON: signatures are final, bodies follow)."""

from __future__ import annotations

from typing import Protocol

from ft_core.client import LeaseHandler, LeaseSettings
from ft_core.quorum import Ask, Version
from ft_core.step import Verdict


class Control(Protocol):
    """One rank's view of the control plane, the same for all ranks of a group. Answers come through its LeaseHandler.

    On ranks > 0 only these handler methods are called: on_quorum, on_reason, on_change_pending, on_member_lost, on_paused,
    on_superseded, on_refused, on_drain, on_kill (hello and on_welcome only on group rank 0).
    """

    @property
    def last_ack(self) -> float:
        """time.monotonic() of the newest message acknowledged by the lighthouse, seen from this rank; -inf before."""

    @property
    def connected(self) -> bool:
        """This rank's way to the lighthouse is open (for ranks > 0: to group rank 0)."""

    @property
    def last_reason(self) -> str:
        """Why there is no quorum or no connection; '' if neither."""

    def start(self) -> None: ...
    def wait_connected(self, timeout_s: float) -> None: ...
    def ask(self, ask: Ask, room: str | None = None) -> None: ...
    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict: ...
    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None: ...
    def leave(self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float) -> bool: ...
    def break_group(self, quorum_id: int, reason: str) -> None: ...
    def shutdown(self, timeout_s: float = 5.0) -> None: ...


class LocalControl:
    """group_world_size == 1."""

    def __init__(self, settings: LeaseSettings, handler: LeaseHandler) -> None: ...


class LeaderControl:
    """Group rank 0 of several: owns the LeaseClient and the group server. `address` ("host:port") is for the c10d store."""

    address: str
    """Valid as soon as the constructor returns (the port is bound there)."""

    def __init__(
        self, settings: LeaseSettings, handler: LeaseHandler, *, world_size: int, hostname: str = "", port: int = 0
    ) -> None: ...


class RankControl:
    """Group rank > 0. `settings.address` is the LeaderControl's `address`."""

    def __init__(self, settings: LeaseSettings, handler: LeaseHandler, *, rank: int, world_size: int) -> None: ...
