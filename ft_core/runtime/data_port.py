"""The Manager's side of elastic data (`ft_core.data`): samples are divided per attempt, and told what became of it.

How it works. A sampler that is attached divides the samples of a step when its attempt is opened, by who takes part. So
the attempt stays the one they were divided for until the vote, and the vote's outcome is told before state can be
collected or loaded again: the sampler's cursor is part of it.

Invariants: between `start_quorum` and `should_commit` the attempt does not change once data is attached; each vote is
told exactly once, also one that raised. What all replicas must divide alike is compared before a quorum is formed.
Threads: the training thread.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError, UsageError
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import timedelta

    from ft_core.data.interface import DataListener
    from ft_core.protocol.rank.rank import Step
    from ft_core.reduction.interface import Carrier
    from ft_core.runtime.parity_check import ParityCheck
    from ft_core.runtime.session import Session
    from ft_core.runtime.step_attempt import StepAttempt


def contributed(places: int, missing: Collection[int]) -> Collection[int] | None:
    """Places among the participants whose share is in the sum, as `DataListener.committed` is told: None: all."""
    return frozenset(range(places)).difference(missing) if missing else None


class DataPort:
    """Mixed into `Manager`."""

    _attempt: StepAttempt | None
    _carriers: list[Carrier]
    _parity: ParityCheck
    _session: Session
    _step: Step
    _data: DataListener | None = None
    _contributed: Collection[int] | None = None
    """Of the attempt that was committed last."""
    _divided = False
    """Samples were divided for the attempt that is open."""

    if TYPE_CHECKING:

        def _start_quorum(
            self, room_id: str, allow_heal: bool, shrink_only: bool, timeout: timedelta | None
        ) -> None: ...
        def _begin_warm_up(self, room_id: str) -> bool: ...

    def attach_data(self, listener: DataListener) -> None:
        """Announce a sampler: called by `ft_core.data`.

        Raises:
            UsageError: after the first start_quorum.
            ConfigError: there is one already.
        """
        if self._data is not None:
            raise ConfigError("this Manager has an elastic sampler already: one dataset is divided per Manager")
        if self._step.plan is not None:
            raise UsageError("an elastic sampler was attached after the first start_quorum: make it before")
        self._data = listener

    def start_quorum(
        self,
        room_id: str = DEFAULT_ROOM,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Open the next attempt; call before forward. Returns at once while the quorum in force is still good.

        The first one of a newcomer may open a warm-up, which belongs to no quorum (`ft_core.runtime.warm_up`).

        Args:
            room_id: independent quorum namespace, by default this Manager's own; changing it leaves the present one.
            allow_heal: False: members that are behind wait instead of healing. The same on all replicas.
            shrink_only: the next quorum takes nobody in.
            timeout: bound on forming a quorum, default quorum_timeout.

        Raises:
            QuorumTimeoutError: no quorum in time (only here if quorums are synchronous, or on the first call).
            RefusedError, JobFinishedError: the lighthouse does not want this replica.
            SystemExit: (0) this replica was asked to drain and has left (`exit_on_drain`).
        """
        death = self._session.death
        if death.holder != get_ident():
            death.hold()  # of the thread that trains
        if self._divided or self._begin_warm_up(room_id):
            return
        self._start_quorum(room_id, allow_heal, shrink_only, timeout)
        self._divided = self._data is not None
        self._step.sampled(self._parity.sample(self._step.version.step, self._carriers))
        self._session.opened(None if self._divided else self._attempt)

    def _tell_data(self, committed: bool) -> None:
        """What became of the attempt."""
        if self._data is None or not self._divided:
            return
        self._divided = False
        self._data.committed(self._contributed) if committed else self._data.vetoed()
