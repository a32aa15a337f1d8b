"""What of a replica's state others may receive, and when it is looked at; and how a received one is loaded.

How it works. At the boundary a quorum is asked for at, the training thread collects the whole state once: containers
copied, tensors referenced. The quorum worker offers that view to the members that heal. The first time, before any
training, it is also looked through for what cannot be sent. Later what fails in collecting or sending it concerns
receivers only.

Invariant: state is collected and loaded between two steps only. Threads: the training thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ft_core.errors import HealError, UsageError
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank import saved_progress
from ft_core.protocol.rank.phases import Heal
from ft_core.protocol.types import VOID, Version
from ft_core.runtime import notices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ft_core.reduction.interface import GradientReducer
    from ft_core.runtime.shell import RankShell
    from ft_core.runtime.user_state import LiveState


class StateViews:
    """The state of one rank, to give and to take."""

    def __init__(
        self, shell: RankShell, live: LiveState, reducers: Sequence[GradientReducer], timeout_s: float
    ) -> None:
        self._shell, self._live, self._reducers, self._timeout_s = shell, live, reducers, timeout_s

    def __repr__(self) -> str:
        return f"StateViews({self._live!r})"

    def progress(self) -> dict[str, int]:
        """What a checkpoint must hold besides the user's state: step, batches_committed, and the version's identity."""
        with self._shell.lock:
            held = self._shell.rank.held
            return {
                "step": held.version.step, "batches_committed": held.batches_committed,
                "quorum_id": held.version.quorum_id, "lineage": held.lineage,
            }  # fmt: skip

    def restore(self, saved: Mapping[str, int]) -> None:
        """As `Manager.load_state_dict`."""
        rank = self._shell.rank
        version, lineage, batches = saved_progress.read(saved, rank.held.lineage, time.time())
        if rank.plan is not None:
            raise UsageError("Manager.load_state_dict after the first start_quorum: load the checkpoint before it")
        self._shell.dispatch(on.Restored(version, lineage, batches))

    def view(self, *, first: bool) -> Callable[[], dict[str, Any]]:
        """Collect the state now, for whoever calls the result.

        `first`: nothing was trained yet. What the user's functions raise, and what cannot be sent (`EncodingError`,
        naming the key path), is raised here. Later it is raised by the result, because a donor does not end for a join.
        """
        try:
            state = self.whole(checked=first and self._shell.rank.settings.group_world_size > 1)
        except Exception as error:
            if first:
                raise
            failed = error

            def fail() -> dict[str, Any]:
                raise failed

            return fail
        self._shell.transfer.mark(state)
        if first:
            self._shell.transfer.check(state)
        return lambda: state

    def users(self, *, checked: bool = False) -> dict[str, Any]:
        """What the user's functions return. `checked`: refuse functions that communicate inside the group."""
        return self._live.collect(self.volatile(), self._timeout_s, checked=checked)

    def compared(self) -> tuple[dict[str, Any], set[int]]:
        """What the user's functions return, with no tensor copied, and `volatile`, which knows them by storage."""
        return self._live.collect((), self._timeout_s), self.volatile()

    def whole(self, *, checked: bool = False) -> dict[str, Any]:
        """What a healing replica receives. `checked`: as `users`."""
        rank = self._shell.rank
        ended = rank.data.ended_at or VOID
        told = {"pass_step": ended.step, "pass_quorum_id": ended.quorum_id, "commit_weight": rank.held.commit_weight}
        return {"user": self.users(checked=checked), "manager": self.progress() | told}

    def volatile(self) -> set[int]:
        """Storages that forward changes. Asked for anew each time: modules may replace their buffers."""
        return set().union(*(c.buffer_storages() for c in self._reducers))

    def apply_received(self) -> None:
        """Load the state that was received. A failure here leaves the state VOID and the quorum broken."""
        shell, rank = self._shell, self._shell.rank
        received = shell.received
        if received is None or rank.attempt.heal is not Heal.READY:
            return
        shell.dispatch(on.StateTorn())
        try:
            self._live.apply(received.state["user"])
            for reducer in self._reducers:
                reducer.state_loaded()
        except Exception as error:
            shell.fail(HealError(f"loading the received state failed: {type(error).__name__}: {error}"))
            raise
        told = received.state["manager"]
        ended = Version(told["pass_step"], told["pass_quorum_id"]) if told["pass_step"] >= 0 else None
        shell.dispatch(on.StateApplied(ended, int(told["batches_committed"]), int(told["commit_weight"])))
        shell.received = None
        took = f"{received.bytes / 1e6:.1f} MB in {received.seconds:.3f} s from {len(received.donors)} donors"
        text = f"{rank.settings.replica_id}: healed to step {rank.held.version.step}: {took}"
        notices.say(text, quiet=rank.held.version.step <= 0 or rank.settings.group_rank > 0)
