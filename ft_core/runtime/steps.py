"""The training thread's part of a step: an attempt is opened, and ended by a vote.

How it works. `open` is what start_quorum does: the machine says whether this rank stays in its quorum, which sends
nothing, or needs another one; then the state at this boundary is collected, for those who heal from it, and the quorum
is asked for. `conclude` is what should_commit does: it sees that every ballot is in, takes the verdict that the ranks
of the group agree on (`agree`), loads state that arrived meanwhile, and settles it. A quorum that broke is left to the
next `open`.

Invariants: state is collected and loaded here only, so between two steps; `quorum_lost` is the same on all ranks of a
group. Threads: the training thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.errors import UsageError
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.commit_rule import contributed
from ft_core.protocol.rank.departure import DrainedError
from ft_core.protocol.rank.formation import Wish
from ft_core.protocol.rank.phases import Go, Heal, MustAsk, Phase
from ft_core.protocol.types import Outcome, Verdict, Version
from ft_core.reduction.batch_weights import BatchWeights, refuse_unequal
from ft_core.runtime import identity
from ft_core.runtime.config import FENCES
from ft_core.runtime.drain_signal import EXIT_S
from ft_core.runtime.lease_wait import wait_for_a_lease
from ft_core.runtime.parity_check import digest
from ft_core.runtime.step_attempt import StepAttempt

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import timedelta

    from ft_core.data.interface import DataListener
    from ft_core.reduction.interface import GradientReducer
    from ft_core.runtime.config import Config
    from ft_core.runtime.parity_check import ParityCheck
    from ft_core.runtime.shell import RankShell
    from ft_core.runtime.state_views import StateViews

log = logging.getLogger("ft_core")


class Steps:
    """The attempts of one rank.

    Args:
        views: its state, to give and to take.
        reducers: reducers of its models, registered before the first `open`.
        store_address: where the process groups of a quorum may meet.
    """

    def __init__(
        self, config: Config, shell: RankShell, views: StateViews, reducers: list[GradientReducer], parity: ParityCheck,
        *, store_address: str, use_async_quorum: bool,
    ) -> None:  # fmt: skip
        self.config, self.shell, self.rank, self.views = config, shell, shell.rank, views
        self.reducers = reducers
        self.weights = BatchWeights()
        self.attempt: StepAttempt | None = None
        self.data: DataListener | None = None
        """The elastic sampler, if there is one."""
        self.divided = False
        """Samples were divided for the attempt that is open."""
        self.says_positions = False
        """The script says with each ask where it is in its data."""
        self.stays = False
        """The attempts that are opened stay in their quorums, and none goes on in the next one (R19)."""
        self.is_open = False
        """start_quorum was called, and should_commit not yet."""
        self.room = config.room
        self.rides = False
        """The ballot rides on the last bucket of the one model there is; known from the first quorum on.

        Not with fence="cpu": then ballots go over `control`, after this member's device has finished."""
        self.quorum_lost = False
        """The last `conclude` found the quorum broken."""
        self.next_quorum = False
        """It was agreed in the last one that a new quorum comes next."""
        self.pass_over = self.pass_over_told = False
        """It found the pass over the data over; a replica without data was told so."""
        self._attempts = 0
        self._contributed: Collection[int] | None = None
        """Of the attempt that was committed last."""
        self._allow_heal, self._shrink_only = True, False
        self._store_address, self._use_async = store_address, use_async_quorum
        self._parity = parity
        self._raised: Exception | None = None
        """The failure to form a quorum that the script was told last."""

    def __repr__(self) -> str:
        return f"Steps({self.attempt!r}, {'open' if self.is_open else 'between two steps'})"

    # ------------------------------------------------------------ start_quorum

    def open(self, room_id: str, allow_heal: bool, shrink_only: bool, timeout: timedelta | None) -> None:
        """Open the next attempt. Raises DrainedError: this rank is to leave instead."""
        shell, rank = self.shell, self.rank
        if rank.refused is not None:
            raise rank.refused
        self.is_open = True
        for reducer in self.reducers:
            reducer.step_opens()
        if rank.forming and self._joins_what_forms():
            return
        self._tell_failure()
        with shell.lock:
            rank.ended()
            if rank.phase in (Phase.REDUCING, Phase.COUNTED):  # should_commit was skipped
                self.reset_weights()
            decision = rank.boundary()
        if isinstance(decision, Go) and room_id != self.room:
            decision = MustAsk(f"changing to room {room_id}", failed=False)
        asks = isinstance(decision, MustAsk)
        if rank.draining and (self.config.world_size == 1 or rank.departure.drain_agreed or asks):
            raise DrainedError("this replica drains")
        if shell.transfer.snapshot_wanted:
            shell.transfer.offer_live(self.views.whole)
        if isinstance(decision, MustAsk):
            self.room, self._allow_heal, self._shrink_only = room_id, allow_heal, shrink_only
            self.ask(decision, timeout)
        elif rank.attempt.awaits_lease and not rank.broken:
            wait_for_a_lease(shell)
            self.open(room_id, allow_heal, shrink_only, timeout)
            return
        if asks or self.attempt is None or self.attempt.used:  # else it is the one that should_commit opened
            self.new_attempt()
        if asks or rank.attempt.heal is not Heal.NONE:
            self._settle_in()

    def opened(self) -> None:
        """The attempt is open: from now on it may go on in the next quorum, unless samples were divided for it."""
        rank = self.rank
        self.divided = self.data is not None
        sample = self._parity.sample(rank.held.version.step, self.reducers)
        with self.shell.lock:
            rank.sampled(sample)
            rank.opened(time.monotonic(), pinned=self.divided or self.stays)

    def _joins_what_forms(self) -> bool:
        """The attempt that begins belongs to a quorum that an earlier one has asked for."""
        shell, rank = self.shell, self.rank
        with shell.lock:
            rank.pin()
        if rank.draining and not shell.wait_formed(EXIT_S):
            raise DrainedError("this replica drains")
        if not rank.forming:
            return False
        self.new_attempt()
        self._settle_in()
        return True

    def _tell_failure(self) -> None:
        """Raise why the last wait for a quorum ended without one, if the script does not know yet."""
        failure = self.rank.failure
        if failure is not None and failure is not self._raised and not self.rank.draining:
            self._raised = failure
            raise failure

    def check(self) -> None:
        """Raise why there is no quorum, if it is so."""
        if self.rank.failure is not None:
            self._raised = self.rank.failure
            raise self.rank.failure

    def wait_quorum(self) -> None:
        """Block until the process groups of this attempt are usable. Raises what kept them from becoming so."""
        rank = self.rank
        with self.shell.lock:
            rank.pin()
        if rank.wish is None:
            raise UsageError("wait_quorum before start_quorum")
        self.shell.wait_formed()
        if not isinstance(rank.failure, DrainedError):
            self.check()

    def ask(self, why: MustAsk, timeout: timedelta | None, *, hands_over: bool = False) -> None:
        """Ask for the next quorum, with a view of the state at this boundary."""
        shell, rank, config = self.shell, self.rank, self.config
        if shell.works:  # should_commit was skipped
            self._end_works(abort=rank.broken)
        fresh = rank.wish is None
        if fresh:
            self.serve(self.reducers)
        signature, lines = self.describe()
        if fresh:
            self.rides = len(self.reducers) == 1 and self.config.fence == FENCES[0]
            with shell.lock:
                rank.describe(signature)
        version = rank.held.version
        view = self.views.view(first=fresh) if version >= Version(0, 0) else None
        timeout_s = timeout.total_seconds() if timeout is not None else config.budget.quorum_s
        wish = Wish(
            identity.ask_template(
                config, shell.transfer.address, self._store_address, allow_heal=self._allow_heal,
                shrink_only=self._shrink_only, heals_first=fresh or not self._use_async or version.step <= 0,
                lines=lines if fresh else (),
            ),
            self.room, timeout_s * (1 + config.quorum_retries), prefetch=fresh, hands_over=hands_over,
        )  # fmt: skip
        worthless = fresh and version.step <= 0
        shell.ask(wish, why, view, view() if worthless and view is not None else None)

    def _settle_in(self) -> None:
        """A first or a synchronous quorum: wait for it, and load received state before forward if the plan says so.

        Copying and receiving in place end a little later than what they were for does, where a member was lost or this
        replica was refused: the script computes with no tensor that may still be written to (R7). Who drains computes
        nothing more, and waits for the worker when it shuts down.
        """
        shell, rank = self.shell, self.rank
        if rank.wish is None or not rank.wish.template.heals_before_forward:
            return
        shell.wait_formed()
        shell.worker.outlast_writes(lambda: rank.draining)
        if isinstance(rank.failure, DrainedError):
            raise rank.failure
        self.check()
        if rank.plan is not None and rank.plan.heals:  # also late, if its last heal failed
            shell.wait_received()
            shell.worker.outlast_writes(lambda: rank.draining)
            if not isinstance(rank.failure, DrainedError):
                self.check()
            self.views.apply_received()
        if rank.draining and self.config.world_size == 1:
            raise DrainedError("this replica drains")

    def new_attempt(self) -> StepAttempt:
        """Make an attempt of the quorum that stands, or forms."""
        self._attempts += 1
        self.attempt = StepAttempt(self._attempts, self.shell, self.weights, self.reducers, rides=self.rides)
        return self.attempt

    def serve(self, reducers: Sequence[GradientReducer]) -> None:
        """Have a process group for the gradients of all of these. Raises as `Communicators.serve`."""
        devices = dict.fromkeys(parameter.device for reducer in reducers for parameter in reducer.parameters)
        self.shell.communicators.serve(list(devices))

    def describe(self) -> tuple[int, tuple[str, ...]]:
        """What has to be equal on all replicas: its digest, and in lines."""
        return identity.describe(
            self.config,
            self.rank,
            self.shell.communicators.backend,
            self.reducers,
            self.data,
            says_positions=self.says_positions,
        )

    # ------------------------------------------------------------ should_commit

    def conclude(self, timeout: timedelta | None) -> bool:
        """End the attempt. True: every member applies it."""
        shell, rank, attempt = self.shell, self.rank, self.attempt
        with shell.lock:
            rank.ended()
        if attempt is None:
            raise UsageError("should_commit before start_quorum")
        self.is_open = False
        if self._gave_up_for_drain():
            self.quorum_lost = True
            return False
        limit_s = timeout.total_seconds() if timeout is not None else self.config.budget.timeout_s
        shell.limits.limit(limit_s if timeout is not None else None)
        began = time.monotonic()
        try:
            verdict = self.agree(attempt, limit_s)
        finally:
            shell.limits.limit(None)
        voted_s = time.monotonic() - began
        if not rank.failed_inside:  # else the step is lost, and the next start_quorum says why
            self.check()
        if verdict.outcome is not Outcome.BROKEN:
            self.views.apply_received()
        if verdict.outcome is Outcome.COMMIT:
            assert attempt.verdict is not None
            weight = attempt.verdict.weight  # of this rank's ring
            attempt.rescale(weight)  # R10: what the gradients were divided by, and what the user averaged
            attempt.rescale_averaged(weight)
        commit = self._settle(verdict, voted_s)
        self.new_attempt()
        return commit

    def _settle(self, verdict: Verdict, voted_s: float) -> bool:
        shell, rank = self.shell, self.rank
        shell.transfer.close()
        with shell.lock:
            places, passes = len(rank.attempt.participants), rank.data.passes
            commit, actions = rank.settle(verdict)
            buffers = commit and not rank.data.source_lost
            if commit:
                self._contributed = contributed(places, verdict.missing)
            gave_up = rank.gave_up()
            shell.events.settled(verdict, time.monotonic(), commit=commit, voted_s=voted_s)
        for reducer in self.reducers:
            # Where the buffers' source was out of data all keep theirs.
            reducer.committed() if buffers else reducer.vetoed()
        self.tell_data(commit)
        self.reset_weights()
        self.pass_over, self.pass_over_told = rank.data.passes != passes, False
        shell.report_progress()
        self.quorum_lost, self.next_quorum = verdict.outcome is Outcome.BROKEN, verdict.change
        if gave_up:
            raise RuntimeError(f"{gave_up}; last reason: {verdict.reason or rank.error}")
        if not commit and verdict.reason and not verdict.stop and not verdict.exhausted:
            shell.tell_not_committed(max(0, rank.attempt.base.step), verdict)
        if actions and not rank.closed:
            shell.perform(actions)
        return commit

    def _gave_up_for_drain(self) -> bool:
        """There is no quorum for this attempt because this replica drains: the next start_quorum ends it."""
        if self.rank.draining:
            self.shell.wait_formed()
        given_up = isinstance(self.rank.failure, DrainedError)
        for reducer in self.reducers if given_up else ():
            reducer.vetoed()
        return given_up

    def agree(self, attempt: StepAttempt, limit_s: float) -> Verdict:
        """The verdict of this attempt: of my ring, then of all ranks of my group."""
        shell, rank = self.shell, self.rank
        if shell.works:  # before the fence: what they report can still veto for everybody
            late = shell.works.wait_futures(time.monotonic() + limit_s)
            if late is not None:
                shell.report(late)
        for reducer in self.reducers:
            reducer.flush()
        if not self.rides:
            attempt.own_fence()
        if shell.works:
            self._end_works(abort=rank.phase is not Phase.COUNTED)
        self._check_parity()
        with shell.lock:
            verdict = rank.own_vote()
        if self.config.world_size > 1:
            if verdict.outcome is Outcome.COMMIT and any(one.plan.averages_over_ranks for one in self.reducers):
                verdict = replace(verdict, own_weight=1 if self.weights.total is None else self.weights.total)
            verdict = shell.control.vote(verdict, limit_s)
            if verdict.outcome is Outcome.BROKEN:
                shell.communicators.abort()
            elif verdict.own_weights:
                refuse_unequal(verdict.own_weights)
        return verdict

    def _end_works(self, *, abort: bool) -> None:
        """Wait for the user's collectives: what the step is made of is final before the vote, or the step is broken.

        After the fence, because a collective that a peer did not launch shows there, and would last until a timeout.
        """
        shell = self.shell
        if abort:
            # They could wait for a peer; the tensors are the script's again when this returns.
            shell.communicators.abort()
            shell.works.forget_devices()
        else:
            shell.limits.expect()
        shell.works.wait()
        shell.works.outlast_devices(lambda: self.rank.error if self.rank.broken else None)
        shell.limits.disarm()

    def _check_parity(self) -> None:
        """Every parity_check_every commits, and when the fence shows a difference, compare digests before the vote."""
        shell, mine = self.shell, self.rank.attempt
        verdict, plan, step = mine.verdict, mine.plan, mine.base.step
        due = mine.states_differ or self._parity.due(step)
        if not due or plan is None or verdict is None or verdict.outcome is not Outcome.COMMIT:
            return
        try:
            own = None if mine.behind else digest(*self.views.compared())
            shell.limits.expect()
            found = self._parity.compare(own, plan, shell.communicators)
            shell.limits.disarm()
        except Exception as error:  # noqa: BLE001 - the comparison is a collective: its failure breaks the quorum
            shell.fail(error)
            return
        if mine.states_differ and self._parity.tires(step, found):
            shell.dispatch(on.DifferenceTolerated())
        if found.differing:
            log.error("step %d is not committed: %s", step, found.text)
            shell.dispatch(on.StatesDiffer(verdict, found.text, found.mine))

    # ------------------------------------------------------------ what belongs to a step

    def tell_data(self, committed: bool) -> None:
        """What became of the attempt; each is told once."""
        if self.data is None or not self.divided:
            return
        self.divided = False
        self.data.committed(self._contributed) if committed else self.data.vetoed()

    def weigh_batch(self, weight: int) -> None:
        """As `Manager.set_batch_weight`."""
        if self.data is not None:
            raise UsageError(
                f"set_batch_weight({weight!r}) with an elastic loader: it weighs each micro-batch by its samples, and "
                "weights add up; leave it out"
            )
        self.weigh(weight)

    def weigh(self, weight: int) -> None:
        """Add the weight of a micro-batch to this replica's gradient. Raises as `Manager.set_batch_weight`."""
        if self.attempt is not None and self.attempt.averaged:
            raise UsageError(
                "set_batch_weight after an allreduce of the same step: that average used the weights known then; set "
                "all weights of a step before its first allreduce (or use reduce_op=SUM for what needs no weights)"
            )
        total = self.weights.add(weight)
        with self.shell.lock:
            self.rank.weigh(total)

    def reset_weights(self) -> None:
        """The attempt is over: the next one has no weights yet."""
        if self.weights.total is not None:
            self.weights.reset()
            with self.shell.lock:
                self.rank.weigh(None)
