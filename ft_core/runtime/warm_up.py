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
from typing import TYPE_CHECKING

from ft_core.runtime.random_state import RandomState
from ft_core.runtime.step_attempt import StepAttempt

if TYPE_CHECKING:
    from ft_core.runtime.steps import Steps

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
    """The warm-up of one rank, if it makes one. `wanted`: by the user."""

    def __init__(self, steps: Steps, *, wanted: bool) -> None:
        self._steps, self._wanted = steps, wanted
        self._random_state: RandomState | None = None
        """Of before the warm-up that is under way."""
        self.undone = False
        """The warm-up that is under way has come to its vote."""

    def __repr__(self) -> str:
        return f"WarmUp({'under way' if self.under_way else 'not under way'})"

    @property
    def under_way(self) -> bool:
        """This is a newcomer's first step, outside the quorum."""
        return self._random_state is not None

    def begin(self, *, own_room: bool) -> bool:
        """At a start_quorum: True if the attempt that is open now is a warm-up. `own_room`: of this Manager."""
        steps, shell, rank = self._steps, self._steps.shell, self._steps.rank
        if self.under_way:
            if not self.undone:  # there was no vote
                self.undo()
            self._random_state = steps.attempt = None
        due = is_due(
            wanted=self._wanted and not (rank.draining or rank.refused is not None or rank.closed),
            first=rank.wish is None,
            others_train=bool(shell.peers) and own_room,
            ranks=steps.config.world_size,
            wraps_a_model=bool(steps.reducers),
            divides_data=steps.data is not None,
            has_data=not rank.data.exhausted,
        )
        self._wanted = False
        if not due:
            return False
        name = rank.settings.replica_id
        log.info("%s: others are training: the first step is a warm-up outside the quorum, and not committed", name)
        shell.control.progress(rank.held.version.step, "warming up", rank.held.stable)
        self._random_state = RandomState.take()
        steps.attempt = WarmUpAttempt(0, shell, steps.weights, steps.reducers, rides=False)
        return True

    def undo(self) -> None:
        """At a vote: give back what was changed. There may be more votes before the next start_quorum, which asks."""
        assert self._random_state is not None
        self._random_state.restore()
        for reducer in self._steps.reducers:
            reducer.vetoed()
        self._steps.reset_weights()
        self.undone = True
