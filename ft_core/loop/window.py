"""`StepWindow`: when the quorums of a training run open, close and are lost, and whether its steps are everybody's.

How it works. A *window* begins where a quorum opens and ends with the vote of an optimizer step; with accumulation it
is several batches long. It opens before a batch is read (`before_batch`), so that a newcomer takes over the position
before anything is read; a loop that does not say where that is opens it in the first forward that records gradients
(`before_forward`). State is collected and loaded there and nowhere else, so never between forward and backward.

- Every optimizer step after a reduced backward is voted on; further optimizers that step on the same gradients share
  that vote. There may be several votes before the next batch (GANs); they use the quorum that is open.
- If the quorum broke, nothing is communicated before the next window opens: backward accumulates locally, steps are
  vetoed, gradients dropped. The same after everybody agreed to stop.
- In each new quorum all members go on at one position in the data, the furthest of those that hold the newest state: of
  two survivors one may have vetoed a batch that the other had not begun. Each sends its own with its ask, and gets
  the others' with the quorum: no collective is needed, so a step that a death finds open can go on there (R19).
- In a group of several ranks gradients are averaged over all ranks of all groups when backward returns
  (`group_model`); a ring that broke shows in the vote of its rank, which is that of the group.

Invariants: all replicas open windows and vote at the same places of the script. All ranks of a group make the same
calls in the same order; `lost` and `stopped` are equal on them. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed import ReduceOp

from ft_core.errors import JobFinishedError, UsageError
from ft_core.loop.inside_group import InsideGroup
from ft_core.loop.quorum_wait import patiently
from ft_core.loop.runs import PassedOverError, nothing_left

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterator

    from ft_core.loop.division import Division
    from ft_core.loop.position import Position
    from ft_core.loop.replica_group import ReplicaGroup
    from ft_core.loop.trained_model import TrainedModel
    from ft_core.manager import Manager

T = TypeVar("T")
log = logging.getLogger("ft_core")
PAUSE_S = 3600.0
"""Announced to the peers for what one replica does for itself: saving, reading through a stream, ending an epoch."""
VOTES_PER_BATCH = 64
"""After so many, a loader that is open but not read (one batch is trained on again and again) opens no windows."""


class StepWindow:
    """The windows of one run after the other, on one rank.

    Args:
        place: of this process.
        start_manager: makes the run's Manager, if there is none yet.
        opened: called after each quorum was opened.
        division: of the training data.
    """

    def __init__(
        self, place: ReplicaGroup, start_manager: Callable[[], Manager], opened: Callable[[], None], division: Division
    ) -> None:
        self.place = place
        self.group, self.ranks, self.rank, self.address = place.number, place.ranks, place.rank, place.lighthouse
        self.start_manager = start_manager
        self._opened = opened
        self.division = division
        self._pauses = contextlib.ExitStack()
        self.on_unread: Callable[[], None] = _nothing
        """Called before a window opens outside of the loops over prepared loaders."""
        self.on_finished: Callable[[JobFinishedError], BaseException] = nothing_left
        """Called if the others have finished this run, with the lighthouse's word for it; returns what is raised."""
        self.on_vote: Callable[[Manager, bool], None] = _ignore
        """Called after each vote that all took part in, with what it said."""
        self.after_vote: Callable[[], None] | None = None
        """Set while something waits for what a vote, or the end, shows."""
        self.begin()

    def begin(self) -> None:
        """Forget the last run: another one begins."""
        self.manager: Manager | None = None
        self.inside = InsideGroup(self.ranks)
        self._models: list[weakref.ref[TrainedModel]] = []
        self.lost = False
        """The quorum broke in this window: nothing is communicated before the next one."""
        self.aside = False
        """This group does something for itself, as an evaluation: the others need not do the same at the same time."""
        self.stopped = False
        """Everybody has agreed to end the training."""
        self.ended = ""
        """Why this run is over; "" while it is not."""
        self.left = False
        """This replica has left the others, which go on."""
        self.opened_by_hand = False
        """The script says where its batches begin (`before_batch`): no window opens in a forward after a vote."""
        self.committed_steps = 0
        self.vetoed_steps = 0
        self._open = False
        self._reading = 0
        """Training loaders that are being read."""
        self._votes = 0
        """Votes since the window was opened."""
        self._verdict: bool | None = None
        """The last verdict of this window."""
        self._met_in = 0
        """Quorum in which the position was compared with the others'."""
        self._touched = False
        """A backward ran since the last vote, whose gradients may not have been reduced."""
        self.after_vote = None

    def __repr__(self) -> str:
        state = "stopped" if self.stopped else "lost" if self.lost else "open" if self._open else "between steps"
        return f"StepWindow(group {self.group} of {self.groups}, {state}, {self.committed_steps} steps)"

    @property
    def groups(self) -> int:
        """By how many groups the data is divided, and the schedules are advanced; equal on all members."""
        return self.division.groups

    # ------------------------------------------------------------ what can be done now

    @property
    def models(self) -> list[TrainedModel]:
        """The models that this run trains. The Accelerator keeps them alive."""
        return [model for known in self._models if (model := known()) is not None]

    def trains(self, model: weakref.ref[TrainedModel]) -> None:
        """Count a model among those of this run."""
        self._models.append(model)

    @property
    def training(self) -> bool:
        """The script is in a training loop, as far as one can tell: models are in training mode, gradients recorded."""
        return not self.aside and torch.is_grad_enabled() and any(m.in_training_mode for m in self.models)

    @property
    def silent(self) -> bool:
        """Nothing may be communicated with the other groups before the next window, or the end of what is aside."""
        return self.lost or self.stopped or bool(self.ended) or self.aside

    @property
    def quorum(self) -> Manager | None:
        """The Manager, if its quorum can be used for collectives now."""
        manager = self.manager
        return None if manager is None or self.silent or not manager.quorum_id else manager

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        return next(iter(self.models[0].parameters())).device

    # ------------------------------------------------------------ windows

    def before_batch(self, position: Position | None) -> None:
        """A training loader is about to read the batch at `position`: open the quorum, unless a window is under way.

        Args:
            position: moved to where all go on, if that is elsewhere. None: it follows from the state.
        """
        if self.manager is not None and not (self._open or self.stopped or self.ended or self.aside):
            self._start(position)

    def before_forward(self) -> None:
        """A forward that records gradients. This opens a window, unless a loader that is being read will do it."""
        if self._open or self.stopped or self.ended or self.aside:
            return
        if self.opened_by_hand and self._verdict is not None:
            return
        if not self._reading:
            self.on_unread()
        if self._verdict is None or not self._reading or self._votes > VOTES_PER_BATCH:
            self._start(None)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, a training loader is being read: windows open between its batches."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    def open(self, position: Position | None) -> None:
        """Open a window, whatever is under way. Raises as `wait_for`."""
        self._start(position)

    def _start(self, position: Position | None) -> None:
        manager = self.start_manager()
        self.end_pauses()
        self.trains_on(position)
        with contextlib.suppress(PassedOverError):  # then `stopped` says what there is to know
            self.wait_for(manager.start_quorum)
            self.entered(position)

    def trains_on(self, position: Position | None) -> None:
        """Before a quorum is started: where this replica is in its data; None: there is no loader to say it of."""
        self.start_manager().hooks.trains_on(None if position is None else position.code)

    def wait_for(self, start: Callable[[], T]) -> T:
        """Call what starts a quorum, for as long as the others are paused. Returns what it returns.

        Raises:
            QuorumTimeoutError: and nobody is paused.
            SystemExit: (0) the others have finished, or this replica was asked to drain.
            PassedOverError: they have finished this run, and are in a later one.
        """
        manager = self.start_manager()
        try:
            return patiently(manager, self.address, start)
        except JobFinishedError as error:
            manager.shutdown(wait=False)
            self.stopped = True
            raise self.on_finished(error) from error

    def entered(self, position: Position | None) -> None:
        """The quorum is there: a window begins. `position`: of the loader that is read, or was."""
        self._open, self.lost, self._verdict, self._votes = True, False, None, 0
        self._touched = False
        self.division.due = True
        self.go_on_at(position)
        self._opened()

    def go_through(self, *, taking_part: bool) -> None:
        """Another batch in the quorum that is open. Not `taking_part`: the others have it behind them, and wait."""
        self._open, self.lost, self._verdict = True, not taking_part, None

    def applies(self) -> None:
        """The next optimizer step is one that the others have committed without this replica's part."""
        self._open, self._touched, self._verdict = False, False, True

    def go_on_at(self, position: Position | None) -> None:
        """In a new quorum go on where all do; who was healed goes back to there, too.

        Args:
            position: of the loader that is read, or was; moved to the others'. None: there is no such loader.
        """
        manager = self.start_manager()
        quorum_id, furthest = manager.hooks.meeting
        if quorum_id == self._met_in:
            return
        self._met_in = quorum_id
        if position is not None and furthest is not None and furthest != position.code:
            log.info("%s: goes on at %s, as others do", manager.replica_id, position.moved_to(furthest))

    def epoch_begins(self) -> None:
        """Divide the data anew, if groups have joined."""
        self.division.epoch_begins(self.quorum)

    # ------------------------------------------------------------ pauses

    def busy(self, reason: str) -> None:
        """Announce to the peers that they need not wait for this replica until it opens its next window."""
        if self.manager is not None:
            self._pauses.enter_context(self.manager.pause(reason, PAUSE_S))

    def end_pauses(self) -> None:
        """This replica takes part again."""
        self._pauses.close()

    @contextlib.contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Inside, the peers need not wait for this replica."""
        with contextlib.ExitStack() as stack:
            if self.manager is not None and not self.ended:
                stack.enter_context(self.manager.pause(reason, PAUSE_S))
            yield

    @contextlib.contextmanager
    def by_itself(self, reason: str) -> Iterator[None]:
        """Inside, the peers need not wait, and nothing is communicated with them: any of them may be lost meanwhile."""
        before, self.aside = self.aside, True
        try:
            with self.pause(reason):
                yield
        finally:
            self.aside = before

    # ------------------------------------------------------------ the vote

    @property
    def unsettled(self) -> bool:
        """Gradients were reduced, or are being reduced, since the last vote."""
        return any(model.gradient_reducer.unsettled for model in self.models)

    @property
    def is_open(self) -> bool:
        """A quorum was opened for the step that is under way, and nothing was voted on."""
        return self._open

    @property
    def voted(self) -> bool:
        """There was a vote in this window."""
        return self._verdict is not None

    def backward_runs(self) -> None:
        """A backward begins: an optimizer step after it is about other gradients than the last vote."""
        self._touched = True

    def settle_gradients(self) -> None:
        """Make the reduced gradients final, before they are clipped, unscaled or used: the same on all ranks."""
        if self.manager is not None and not self.silent:
            self.inside.settle(self.manager.hooks.current_attempt(), self.models)

    def vote(self) -> bool:
        """Whether the optimizer step that is about to be made is everybody's. False: gradients have been dropped.

        Raises:
            UsageError: the run has ended.
        """
        manager = self.manager
        if manager is None or not self.models:
            return not self.stopped  # nothing that was prepared is trained across groups; or the run is passed over
        if self.ended:
            raise UsageError(f"optimizer.step(), but {self.ended}: the replicas would part here")
        if self._verdict is None and not self._open and not self.stopped:
            self._start(None)  # a step without a forward in training mode
        self._open = False
        self._votes += 1
        if self._verdict is not None and not (self.unsettled or self._touched):
            return self._verdict  # another optimizer, on gradients that were voted on
        self._touched = False
        self._verdict = not self.silent and self._ask_all(manager)
        if self._verdict:
            self.committed_steps += 1
            self.inside.share_buffers(self.models)
        else:
            self.vetoed_steps += 1
            self.drop_gradients()
        if self.after_vote is not None:
            self.after_vote()
        return self._verdict

    def _ask_all(self, manager: Manager) -> bool:
        for model in self.models:
            if not model.gradient_reducer.unsettled:
                model.gradient_reducer.flush(with_accumulated=True)
        self.settle_gradients()
        commits = manager.should_commit()
        self.concluded(manager)
        self.on_vote(manager, commits)
        return commits

    def concluded(self, manager: Manager) -> None:
        """Note what an attempt has shown, which has ended."""
        self._open = False
        self.lost, self.stopped = manager.quorum_lost, manager.stop_agreed
        for model in self.models if self.silent else ():
            model.gradient_reducer.before_backward(sync=False)

    def drop_gradients(self) -> None:
        """The step is not made."""
        for model in self.models:
            for parameter in model.parameters():
                parameter.grad = None

    def close(self) -> None:
        """A backward that no step follows any more is voted on all the same, as the others do."""
        self.end_pauses()
        if self._open and self.unsettled:
            self.vote()

    def torn(self, error: BaseException) -> None:
        """An optimizer failed after the vote: the others have the new state, this replica may have half of it."""
        if self.manager is not None and not self.ended:
            self.manager.hooks.report_torn_state(error)

    # ------------------------------------------------------------ other agreements

    def any_group(self, here: bool) -> bool | None:
        """Whether it is so on any replica; None if that cannot be known now. Everybody asks at the same place."""
        manager = self.quorum
        if manager is None:
            return None
        count = torch.tensor([int(here)], dtype=torch.int64)
        manager.allreduce(count, reduce_op=ReduceOp.SUM).wait()
        return None if manager.errored() is not None else bool(int(count))


def _nothing() -> None:
    """The default: nobody waits for it."""


def _ignore(_: Manager, __: bool) -> None:
    """The default: nobody waits for it."""
