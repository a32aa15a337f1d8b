"""What of a replica's state others may receive, and when it is looked at. A part of `Manager`.

How it works. At the boundary a quorum is asked for at, the training thread collects the whole state once: containers
copied, tensors referenced. The quorum worker offers that view to the members that heal. The first time, before any
training, it is also looked through for what cannot be sent. Later what fails in collecting or sending it concerns
receivers only.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.protocol.types import VOID

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.rank.rank import Step
    from ft_core.reduction.interface import Carrier
    from ft_core.runtime.startup import Config
    from ft_core.runtime.state_transfer import Healing
    from ft_core.runtime.user_state import LiveState


class StateViews:
    """Mixed into `Manager`."""

    _carriers: list[Carrier]
    _config: Config
    _healing: Healing
    _live: LiveState
    _step: Step

    if TYPE_CHECKING:

        def state_dict(self) -> dict[str, int]: ...  # noqa: D102 - Manager's

    def _view(self, first: bool) -> Callable[[], dict[str, Any]]:
        """Collect the state now, for whoever calls the result.

        `first`: nothing was trained yet. What the user's functions raise, and what cannot be sent (`EncodingError`,
        naming the key path), is raised here. Later it is raised by the result, because a donor does not end for a join.
        """
        try:
            state = self._whole_state()
        except Exception as error:
            if first:
                raise
            failed = error

            def fail() -> dict[str, Any]:
                raise failed

            return fail
        if first:
            self._healing.check(state)
        return lambda: state

    def _collect(self) -> dict[str, Any]:
        return self._live.collect(self._volatile(), self._config.budget.timeout_s)

    def _whole_state(self) -> dict[str, Any]:
        """What a healing replica receives."""
        ended = self._step.data.ended_at or VOID
        told = {"round_step": ended.step, "round_epoch": ended.epoch, "commit_weight": self._step.commit_weight}
        return {"user": self._collect(), "manager": self.state_dict() | told}

    def _volatile(self) -> set[int]:
        """Storages that forward changes. Asked for anew each time: modules may replace their buffers."""
        return set().union(*(c.buffer_storages() for c in self._carriers))
