"""What a replica does that has no data left while others have: a part of `Manager`.

How it works. It takes part in further attempts with weight zero, so nobody waits for it, until the fence says that the
round of data is over (`rank.Step.judge`). If somebody applies the commits here it stays equal to the others, and can
give its state to whoever joins; if not, it trails: its version stays what it really holds, and before the round ends
all ask for one quorum in which it is healed. Instead, it may leave, or end the round for everybody.

Invariants: the flags of a member without data are up only inside one attempt. Who ends a round does so in one fence
with all others, and holds their state then; a heal that fails holds nobody (R11).
Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ft_core.errors import FaultToleranceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.data.interface import DataListener
    from ft_core.manager import Manager
    from ft_core.protocol.rank.rank import Step
    from ft_core.runtime.session import Session
    from ft_core.runtime.startup import Config


class RoundEnds(FaultToleranceError):
    """The reason of a veto: a replica is out of data, ends the round for all, and has nobody to apply one more step."""


class Exhaustion:
    """Mixed into `Manager`."""

    _config: Config
    _data: DataListener | None
    _session: Session
    _step: Step
    _round_over: bool
    _round_taken: bool

    @property
    def all_exhausted(self) -> bool:
        """The last should_commit found the round of data over: all are out of it, or one of them ends it for all.

        The same on all members. Stays until the next should_commit, which is in the next round.
        """
        return self._round_over

    @property
    def everyone_out(self) -> bool:
        """The last fence said that every member is out of data by itself."""
        return self._step.data.everyone_out

    def run_out(self, apply: Callable[[], object] | None = None) -> None:
        """This replica has no data left in this round (epoch): do what `on_exhausted` says. Call between two steps.

        "shadow": take part with weight zero until all are out of data. "stop_all": the same for one step, which is the
        last of the round for all; the others see `all_exhausted` after it, and must end their loop. "leave": leave the
        quorum at once, for good, with the state of the last commit.

        Args:
            apply: called after every commit that others make meanwhile; does what the training loop does after
                should_commit returned True (clipping, optimizer.step, scheduler.step). It keeps this replica equal to
                the others, and able to give its state to those who heal. None: nothing is applied, and before the
                round ends this replica is healed by the others; should they all be lost, its older state is left.

        Raises:
            QuorumTimeoutError, RefusedError, JobFinishedError: no quorum could be had.
            SystemExit: (0) this replica was asked to drain and has left.
        """
        if self._config.on_exhausted == "leave":
            cast("Manager", self).leave("out of data")
            return
        ends = self._config.on_exhausted == "stop_all"
        while not self._step.departure.stop_agreed and not self.shadow_step(apply, ends=ends):
            pass

    def shadow_step(
        self,
        apply: Callable[[], object] | None = None,
        *,
        ends: bool = False,
        opened: Callable[[], object] | None = None,
    ) -> bool:
        """One attempt without data. Returns True if the round is over: at once, if another replica has ended it.

        Args:
            apply: as in `run_out`.
            ends: end the round for all with this attempt. If nobody applies it here, nobody does.
            opened: called when the quorum is there: makes the collectives that the others make at that point.

        Raises:
            As `run_out`.
        """
        if self._data is not None:
            raise UsageError(
                "run_out(), or torch's Join, with an elastic loader: all run out of its data in the same step; "
                "one that takes part without data would lose its share of the samples; leave it out"
            )
        if self._round_over and not self._round_taken:
            self._round_taken = True
            return True
        manager = cast("Manager", self)
        step, fresh, rounds = self._step, self._step.plan is None, self._step.data.passes
        step.data.run_out(applies=apply is not None, ends=ends)
        try:
            manager.start_quorum()
            if fresh:
                rounds = step.data.passes  # those that ended before this replica was there
            elif step.data.passes != rounds:
                self._round_over = self._round_taken = True
                return True
            if opened is not None:
                opened()
            if ends and apply is None:
                manager.report_error(RoundEnds("a replica is out of data and ends the round for all"))
            commit = manager.should_commit()
        finally:
            step.data.ran_out()
        if commit:
            assert apply is not None
            try:
                apply()
            except BaseException as error:
                manager.report_torn_state(error)
                raise
        self._round_taken = self._round_over
        return self._round_over
