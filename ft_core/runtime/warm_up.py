"""The first step of a newcomer, made alone: what takes long only once does not hold up those who train.

How it works. Every member of a quorum waits in its collectives for all others, so a newcomer that compiles, allocates
or starts loader workers in its first step would make everybody wait. One that finds others training therefore makes its
first step outside the quorum: `start_quorum` opens an attempt in which nothing is launched, `should_commit` returns
False without asking anybody, and the second start_quorum asks to join. For the training loop this is a step that was
not committed: nothing has changed, and a plain data loader has spent a batch on it.

Invariants: one warm-up per Manager at most, before its first ask; nothing of it leaves the process. What it changes
is given back: the random generators and the buffers of wrapped modules (gradients are cleared by `zero_grad`, as ever).
Threads: the training thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from ft_core.runtime.random_state import RandomState
from ft_core.runtime.step_attempt import StepAttempt
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from ft_core.data.interface import DataListener
    from ft_core.protocol.rank.rank import Step
    from ft_core.reduction.batch_weights import BatchWeights
    from ft_core.reduction.interface import Carrier
    from ft_core.runtime.session import Session
    from ft_core.runtime.startup import Config

log = logging.getLogger("ft_core")


def is_due(
    *,
    wanted: bool,
    first: bool,
    others_train: bool,
    ranks: int,
    wraps_a_model: bool,
    divides_data: bool,
    has_data: bool,
) -> bool:
    """Whether the step that is about to begin is a warm-up. Pure.

    Args:
        wanted: by the user.
        first: this replica has asked for no quorum yet.
        others_train: the room had a quorum with other living members when this replica's lease was opened.
        ranks: of the replica group. Several meet in collectives of their own within a step, which ranks that warm up
            for differently long would not enter together.
        wraps_a_model: there is a DistributedDataParallel, whose backward knows that nothing is to be reduced.
        divides_data: samples are divided among the participants of a quorum, so there are none without.
        has_data: this replica takes part with data.
    """
    return wanted and first and others_train and ranks == 1 and wraps_a_model and has_data and not divides_data


class WarmUpAttempt(StepAttempt):
    """An attempt without a quorum: nothing is launched in it."""

    def usable(self) -> bool:
        """Return False."""
        self.used = True
        return False


class WarmUp:
    """Mixed into `Manager`."""

    _attempt: StepAttempt | None
    _attempts: int
    _carriers: list[Carrier]
    _config: Config
    _data: DataListener | None
    _session: Session
    _step: Step
    _weights: BatchWeights
    _round: Any
    _shut_down: bool
    _step_open: bool
    _warm_up_wanted = False
    _random_state: RandomState | None = None
    """Of before the warm-up that is under way."""
    _undone = False
    """The warm-up that is under way has come to its vote."""

    if TYPE_CHECKING:

        def _reset_weights(self) -> None: ...

    @property
    def warming_up(self) -> bool:
        """This is a newcomer's first step, outside the quorum: nothing is committed until the next start_quorum."""
        return self._random_state is not None

    @property
    def step_open(self) -> bool:
        """start_quorum was called, and should_commit not yet."""
        return not self._undone if self.warming_up else self._step_open

    def _begin_warm_up(self, room_id: str) -> bool:
        """At a start_quorum: True if the attempt that is open now is a warm-up."""
        if self.warming_up:
            if not self._undone:  # there was no vote
                self._undo_warm_up()
            self._random_state = self._attempt = None
        session = self._session
        due = is_due(
            wanted=self._warm_up_wanted and not (session.draining or session.fatal is not None or self._shut_down),
            first=self._round is None,
            others_train=bool(session.peers) and room_id in (DEFAULT_ROOM, self._config.room),
            ranks=self._config.world_size,
            wraps_a_model=bool(self._carriers),
            divides_data=self._data is not None,
            has_data=not self._step.data.exhausted,
        )
        self._warm_up_wanted = False
        if not due:
            return False
        name = self._step.settings.replica_id
        log.info("%s: others are training: the first step is a warm-up outside the quorum, and not committed", name)
        session.control.progress(self._step.version.step, "warming up", self._step.stable)
        self._random_state = RandomState.take()
        self._attempts += 1
        nowhere = cast("Any", None)  # it has no round of asking
        self._attempt = WarmUpAttempt(self._attempts, session, nowhere, self._weights, self._carriers, rides=False)
        return True

    def _undo_warm_up(self) -> None:
        """At a vote: give back what was changed. There may be more votes before the next start_quorum, which asks."""
        assert self._random_state is not None
        self._random_state.restore()
        for carrier in self._carriers:
            carrier.vetoed()
        self._reset_weights()
        self._undone = True
