"""What a replica does that has no data left while others have (uneven inputs).

How it works. It takes part in further attempts with weight zero, so nobody waits for it, until the fence says that the
pass over the data has ended (`commit_rule`). If somebody applies the commits here it stays equal to the others, and can
give its state to whoever joins; if not, its version stays what it really holds, and before the pass ends all ask for
one quorum in which it is healed. Instead, it may leave, or end the pass for everybody.

Invariants: the flags of a member without data are up only inside one attempt. Who ends a pass does so in one fence
with all others, and holds their state then; a heal that fails holds nobody (R11).
Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import CollectiveError, FaultToleranceError, UsageError
from ft_core.protocol.rank import events as on

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.runtime.steps import Steps


class PassEnds(FaultToleranceError):
    """The reason of a veto: a replica is out of data, ends the pass for all, and has nobody to apply one more step."""


class UnevenEnd:
    """A rank's attempts without data.

    Args:
        start, vote: the Manager's start_quorum and should_commit.
    """

    def __init__(self, steps: Steps, start: Callable[[], None], vote: Callable[[], bool]) -> None:
        self._steps, self._start, self._vote = steps, start, vote

    def __repr__(self) -> str:
        return f"UnevenEnd({self._steps.rank.data!r})"

    def shadow_step(
        self, apply: Callable[[], object] | None, *, ends: bool, opened: Callable[[], object] | None
    ) -> bool:
        """One attempt without data. Returns True if the pass is over: at once, if another replica has ended it.

        Args:
            apply: called if the others commit; None: nothing is applied here.
            ends: end the pass for all with this attempt. If nobody applies it here, nobody does.
            opened: called when the quorum is there: makes the collectives that the others make at that point.

        Raises:
            As `Manager.run_out`.
        """
        steps, shell, data = self._steps, self._steps.shell, self._steps.rank.data
        if steps.data is not None:
            raise UsageError(
                "run_out(), or torch's Join, with an elastic loader: all run out of its data in the same step; "
                "one that takes part without data would lose its share of the samples; leave it out"
            )
        if steps.pass_over and not steps.pass_over_told:
            steps.pass_over_told = True
            return True
        fresh, passes = steps.rank.plan is None, data.passes
        shell.dispatch(on.DataEnded(applies=apply is not None, ends=ends))
        try:
            self._start()
            if fresh:
                passes = data.passes  # those that ended before this replica was there
            elif data.passes != passes:
                steps.pass_over = steps.pass_over_told = True
                return True
            if opened is not None:
                opened()
            if ends and apply is None:
                shell.report(PassEnds("a replica is out of data and ends the data pass for all"))
            commit = self._vote()
        finally:
            shell.dispatch(on.DataBack())
        if commit:
            assert apply is not None
            try:
                apply()
            except BaseException as error:
                self.torn(error)
                raise
        steps.pass_over_told = steps.pass_over
        return steps.pass_over

    def run_out(self, apply: Callable[[], object] | None, *, ends: bool) -> None:
        """Attempts without data until the pass is over, or all members stop. `ends`: it is over with the first one."""
        departure = self._steps.rank.departure
        while not departure.stop_agreed and not self.shadow_step(apply, ends=ends, opened=None):
            pass

    def torn(self, error: BaseException) -> None:
        """The optimizer raised after a commit: this state is neither old nor new and must be healed (R13)."""
        shell = self._steps.shell
        shell.dispatch(on.StateTorn())
        shell.fail(error if isinstance(error, Exception) else CollectiveError(str(error)))
