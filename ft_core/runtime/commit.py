"""How a step ends: vote, load received state, commit or skip. A part of `Manager`.

How it works. `should_commit` takes the fence's verdict (`_agree`), which the ranks of a group agree on, loads state
that arrived meanwhile, and settles it in the step machine. Where the quorum broke it aborts the process groups, and the
next `start_quorum` asks for another one.

Invariants: state is loaded only here and in `start_quorum`. `quorum_lost` is the same on all ranks of a group.
Threads: the training thread.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ft_core.errors import HealError, UsageError
from ft_core.protocol.rank.phases import Heal, Phase
from ft_core.protocol.types import Outcome, Verdict, Version
from ft_core.runtime import notices
from ft_core.runtime.data_port import contributed
from ft_core.runtime.drain_signal import DrainedError
from ft_core.runtime.parity_check import digest

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import timedelta

    from ft_core.protocol.rank.rank import Step
    from ft_core.reduction.interface import Carrier
    from ft_core.runtime.parity_check import ParityCheck
    from ft_core.runtime.quorum_worker import Round
    from ft_core.runtime.random_state import RandomState
    from ft_core.runtime.session import Session
    from ft_core.runtime.startup import Config
    from ft_core.runtime.state_transfer import Healing
    from ft_core.runtime.step_attempt import StepAttempt
    from ft_core.runtime.user_state import LiveState

log = logging.getLogger("ft_core")


class Commit:
    """Mixed into `Manager`."""

    _attempt: StepAttempt | None
    _carriers: list[Carrier]
    _config: Config
    _contributed: Collection[int] | None
    _healing: Healing
    _live: LiveState
    _parity: ParityCheck
    _random_state: RandomState | None
    _riding: bool
    _round: Round | None
    _session: Session
    _shut_down: bool
    _step: Step
    _step_open: bool
    _quorum_lost = _round_over = _round_taken = False

    if TYPE_CHECKING:

        def _reset_weights(self) -> None: ...
        def _pin(self) -> None: ...

        def _new_attempt(self) -> None: ...
        def _tell_data(self, committed: bool) -> None: ...
        def _collect(self) -> dict[str, Any]: ...
        def _volatile(self) -> set[int]: ...
        def _undo_warm_up(self) -> None: ...

    @property
    def replica_id(self) -> str:
        """Name plus the suffix of this start."""
        return self._step.settings.replica_id

    def current_step(self) -> int:
        """Number of the step being worked on: how many were committed on this replica's lineage."""
        step = self._step
        return max(0, step.version.step if step.plan is None else step.base.step)

    @property
    def last_commit_weight(self) -> int:
        """Sum of all weights (`set_batch_weight`; 1 without) in the commit that made the state this replica holds.

        That is what its gradients were divided by. Equal states have equal ones, on all members: a replica that was
        healed has been told the donor's. 0 before the first commit, and after a checkpoint was loaded until the next.
        In a group of several ranks, each of which has a ring, it is that of rank 0's ring, on all ranks.
        """
        return self._step.commit_weight

    def require_all_contributions(self) -> None:
        """From the first step on: a step commits only if the share of every planned participant is in it.

        Otherwise everybody skips the step alike. On all replica groups or on none: compared before a quorum is formed.
        A participant is planned to contribute unless it is known to be behind. One whose heal failed costs the others
        a step: it is not counted on again before it is healed, because a bad member cannot hold the others (R11). So a
        step is whole with respect to its participants; who they are changes with the membership.

        Raises:
            UsageError: after the first start_quorum.
        """
        if self._step.plan is not None or self._round is not None:
            raise UsageError("require_all_contributions after the first start_quorum: call it before")
        self._step.require_whole_steps()

    @property
    def quorum_lost(self) -> bool:
        """The last should_commit found the quorum broken: nothing can be communicated before the next start_quorum.

        The same on all ranks of the group.
        """
        return self._quorum_lost

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the attempt. True: every member applies it, step the optimizer now. False: skip the step.

        A committed step is undone only if all who saw its fence complete are lost before the next one completes, while
        a member that did not see it goes on. `Manager.stable_step` tells which step is held by every member.
        Call on every rank, after backward and before anything changes parameters. State received from a peer is loaded
        here, before it returns. A quorum that broke (`quorum_lost`) is formed anew by the next start_quorum. False
        without asking anybody in a newcomer's warm-up (`warming_up`).

        Args:
            timeout: how long all that has to be agreed may take: what was launched and not waited for, the fence, the
                votes of the group's ranks. Default: the Manager's. A quorum that start_quorum has asked for, and that
                is waited for here, is bounded by `quorum_timeout`.

        Raises:
            UsageError: start_quorum was not called.
            QuorumTimeoutError, RefusedError, JobFinishedError: the quorum that start_quorum asked for could not be had.
            RuntimeError: more than max_retries attempts in a row were not committed.
        """
        if self._random_state is not None:
            self._undo_warm_up()
            return False
        try:
            return self._conclude(timeout)
        finally:
            self._tell_data(committed=False)  # if it raised, or nobody was asked

    def _conclude(self, timeout: timedelta | None) -> bool:
        self._pin()
        attempt, round_ = self._attempt, self._round
        if attempt is None or round_ is None:
            raise UsageError("should_commit before start_quorum")
        self._step_open = False
        if self._asks_no_more(round_):
            self._quorum_lost = True
            return False
        session, step = self._session, self._step
        limit_s = timeout.total_seconds() if timeout is not None else self._config.budget.timeout_s
        session.limit(limit_s if timeout is not None else None)
        try:
            verdict = self._agree(attempt, limit_s)
        finally:
            session.limit(None)
        round_.check()
        rounds = step.data.passes
        if verdict.outcome is not Outcome.BROKEN and step.heal is Heal.READY:
            self._apply_heal()
        if verdict.outcome is Outcome.COMMIT:
            self._rescale(attempt)
        self._healing.close()
        with session.lock:
            places = len(step.participants)
            commit = step.settle(verdict)
            buffers = commit and not step.data.source_lost  # where their source was out of data all keep theirs
            if commit:
                self._contributed = contributed(places, verdict.missing)
            again = step.phase is Phase.BROKEN
            gave_up = step.gave_up()
        if session.parted:
            session.tell_parted()
        for carrier in self._carriers:
            carrier.committed() if buffers else carrier.vetoed()
        self._tell_data(commit)
        self._reset_weights()
        self._round_over, self._round_taken = step.data.passes != rounds, False
        session.report_progress()
        if gave_up:
            raise RuntimeError(f"{gave_up}; last reason: {verdict.reason or session.error}")
        if not commit and verdict.reason and not verdict.stop and not verdict.exhausted:
            session.tell_not_committed(self.current_step(), verdict)
        self._quorum_lost = verdict.outcome is Outcome.BROKEN
        if again and not self._shut_down and not session.draining:
            session.lanes.abort()  # the others may be waiting for this rank in a collective
        self._new_attempt()
        return commit

    def _asks_no_more(self, round_: Round) -> bool:
        """There is no quorum for this attempt because this replica drains: the next start_quorum ends it."""
        if self._session.draining:
            round_.wait_configured()
        given_up = isinstance(round_.error, DrainedError)
        for carrier in self._carriers if given_up else ():
            carrier.vetoed()
        return given_up

    def _agree(self, attempt: StepAttempt, limit_s: float) -> Verdict:
        """The verdict of this attempt: of my ring, then of all ranks of my group."""
        session, step = self._session, self._step
        if session.works:  # before the fence: what they report can still veto for everybody
            late = session.works.wait_futures(time.monotonic() + limit_s)
            if late is not None:
                attempt.report(late)
        if self._carriers:
            for carrier in self._carriers:
                carrier.flush()
        if not self._riding:
            attempt.own_fence()
        with session.lock:
            if step.plan is None:  # the round failed before there was a quorum
                return Verdict(0, 0, Outcome.BROKEN, str(session.error or "there was no quorum"))
            if step.phase is not Phase.FENCED:
                step.break_(str(session.error or "the fence was never launched"))
        if session.works:
            self._end_works()
        self._check_parity()
        with session.lock:
            verdict = step.vote()
        if self._config.world_size > 1:
            verdict = session.control.vote(verdict, limit_s)
            if verdict.outcome is Outcome.BROKEN:
                session.lanes.abort()
        return verdict

    def _end_works(self) -> None:
        """Wait for the user's collectives: what the step is made of is final before the vote, or the step is broken.

        After the fence, because a collective that a peer did not launch shows there, and would last until a timeout.
        """
        session, step = self._session, self._step
        if step.broken:
            session.lanes.abort()  # they could wait for a peer; the tensors are the script's again when this returns
        else:
            session.expect()
        session.works.wait()
        session.watchdog.disarm()

    def _check_parity(self) -> None:
        """Every parity_check_every commits, and when the fence shows a difference, compare digests before the vote."""
        session, step = self._session, self._step
        verdict = step.verdict
        due = step.states_differ or self._parity.due(step.base.step)
        if not due or step.plan is None or verdict is None or verdict.outcome is not Outcome.COMMIT:
            return
        try:
            mine = None if step.behind else digest(self._collect(), self._volatile())
            session.expect()
            found = self._parity.compare(mine, step.plan, session.lanes)
            session.watchdog.disarm()
        except Exception as error:  # noqa: BLE001 - the comparison is a collective: its failure breaks the quorum
            session.fail(error)
            return
        if step.states_differ and self._parity.tires(step.base.step, found):
            step.tolerate()
        if not found.differing:
            return
        log.error("step %d is not committed: %s", step.base.step, found.text)
        with session.lock:
            step.states_apart(verdict, found.text, mine=found.mine)

    def _rescale(self, attempt: StepAttempt) -> None:
        """R10: gradients whose fence did not ride with them, and what the user averaged."""
        assert attempt.verdict is not None
        weight = attempt.verdict.weight  # of this rank's ring
        attempt.rescale(weight)
        attempt.rescale_averaged(weight)

    def _apply_heal(self) -> None:
        """Training thread: load the received state. A failure here leaves the state VOID and the quorum broken."""
        round_, step = self._round, self._step
        if round_ is None or round_.received is None or step.heal is not Heal.READY:
            return
        received = round_.received
        try:
            with self._session.lock:
                step.tear()
            self._live.apply(received.state["user"])
            for carrier in self._carriers:
                carrier.state_loaded()
        except Exception as error:
            self._session.fail(HealError(f"loading the received state failed: {type(error).__name__}: {error}"))
            raise
        with self._session.lock:
            told = received.state["manager"]
            ended = Version(told["round_step"], told["round_epoch"]) if told["round_step"] >= 0 else None
            step.heal_applied(ended, int(told["batches_committed"]), int(told["commit_weight"]))
        round_.received = round_.in_place = None
        took = f"{received.bytes / 1e6:.1f} MB in {received.seconds:.3f} s from {len(received.donors)} donors"
        text = f"{self.replica_id}: healed to step {step.version.step}: {took}"
        notices.say(text, quiet=step.version.step <= 0 or self._config.rank > 0)
