"""`Run`: the Manager of one training run, and when its quorums open, close and are lost.

How it works. A *window* begins where a quorum opens and ends with the vote of an optimizer step; with accumulation it
is several batches long. It opens before a prepared training loader hands out a batch (`before_batch`), so that a
newcomer takes over the position before anything is read; a loop without such a loader opens it in the first forward
that records gradients (`before_forward`). State is collected and loaded there and nowhere else, so never between
forward and backward.

- Every optimizer step after a reduced backward is voted on; further optimizers that step on the same gradients share
  that vote. There may be several votes before the next batch (GANs); they use the quorum that is open.
- If the quorum broke, nothing is communicated before the next window opens: backward accumulates locally, steps are
  vetoed, gradients dropped. The same after everybody agreed to stop.
- In each new quorum all members agree on one position in the data, the furthest: of two survivors one may have vetoed a
  batch that the other had not begun.
- In a group of several ranks each rank reduces with its peers in the other groups; `settle_gradients` then averages
  inside the group.

Invariants: all replicas open windows and vote at the same places of the script. All ranks of a group make the same
calls in the same order; `lost` and `stopped` are equal on them. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from ft_accelerate import sharing, store
from ft_accelerate.data import groups_needed
from ft_accelerate.ending import Ending
from ft_accelerate.kept import Kept
from ft_accelerate.patience import nothing_left, start_patiently
from ft_accelerate.running_out import RunningOut
from ft_accelerate.settling import Settling
from ft_accelerate.succession import Succession
from ft_accelerate.wrapping import WrappedModel
from ft_core import Manager, ProcessGroupGloo
from ft_core.errors import JobFinishedError, UsageError
from ft_core.settings import room_of_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_accelerate.data import Position
    from ft_accelerate.elastic import Elastic
    from ft_accelerate.plugin import FaultTolerancePlugin

log = logging.getLogger("ft_accelerate")
PAUSE_S = 3600.0
"""Announced to the peers for what one replica does for itself: saving, reading through a stream, ending an epoch."""
VOTES_PER_BATCH = 64
"""After so many, a loader that is open but not read (one batch is trained on again and again) opens no windows."""
KEY = "accelerate"
"""Of our state in what donors hand out."""


_current: Succession | None = None
"""Of this process."""


def runs_of_this_process() -> Succession:
    """Begins with the first run."""
    global _current
    _current = _current or Succession()
    return _current


class Run(Ending):
    """One training run of one Accelerator, on one rank.

    Args:
        plugin: the settings.
        ranks: processes of this replica group.
        rank: of this one.
        owner: the Accelerator, which is kept alive while there is a Manager: scripts may keep its models only.
        save: returns all state that must be equal on all replicas.
        load: takes it over; called between two windows only.
        opened: called after each quorum was opened.
        divide: called with the number of groups by which the data is to be divided; False: it cannot be.
    """

    def __init__(
        self,
        plugin: FaultTolerancePlugin,
        ranks: int,
        rank: int,
        owner: weakref.ref[Any],
        save: Callable[[], Any],
        load: Callable[[Any], None],
        opened: Callable[[], None],
        divide: Callable[[int], bool],
    ) -> None:
        self.plugin = plugin
        self.group = plugin.group
        self.address = plugin.address  # once: it reads the environment, and each step would
        self.groups = plugin.groups
        """By how many the data is divided, and the schedules are advanced; equal on all members."""
        self.ranks, self.rank = ranks, rank
        self._functions = load, save
        self._owner = owner
        self._opened = opened
        self._divide = divide
        self._pauses = contextlib.ExitStack()
        self._number = -1
        """How many runs this process has had before: each meets the other groups in a room of its own."""
        self._runs = Succession()
        self._begin()

    def _begin(self) -> None:
        self.manager: Manager | None = None
        self._kept = Kept()
        self._models: list[weakref.ref[WrappedModel]] = []
        self.lost = False
        """The quorum broke in this window: nothing is communicated before the next one."""
        self.aside = False
        """This group does something for itself, as an evaluation: the others need not do the same at the same time."""
        self.stopped = False
        """Everybody has agreed to end the training."""
        self.committed_steps = 0
        self.vetoed_steps = 0
        self.first_step = 0
        """The Manager's step when this run began, on all replicas alike."""
        self._number += 1
        self._open = False
        self._ended = False
        self._why_ended = "end_training() was called"
        self._division_due = False
        """A window was opened, and no epoch has begun in it."""
        self._reading = 0
        """Training loaders that are being read."""
        self._votes = 0
        """Since the window was opened."""
        self._verdict: bool | None = None
        """Of the last vote of this window."""
        self._agreed_in = 0
        """Quorum in which the position was agreed on."""
        self.settling = Settling(self.ranks)
        self.owners_known = False
        """It was looked whether prepared optimizers have the parameters that get gradients."""
        self.after_vote: Callable[[], None] | None = None
        """Set while something waits for what a vote, or the end, shows."""
        self.elastic: Elastic | None = None
        """The data that is divided per step, once it is read for training."""
        self.sharing: sharing.Sharing | None = None
        self.out = RunningOut(self)
        self.left = False
        """This replica has left the others, which go on."""

    def __repr__(self) -> str:
        state = "stopped" if self.stopped else "lost" if self.lost else "open" if self._open else "between steps"
        return f"Run(group {self.group} of {self.groups}, {state}, {self.committed_steps} steps)"

    # ------------------------------------------------------------ set-up

    def start_manager(self) -> Manager:
        """The Manager; made when the first model is prepared, so that evaluation needs no lighthouse.

        Raises:
            SystemExit: (0) the others have finished.
            UsageError: training has ended.
        """
        if self.manager is None:
            if self._ended:
                raise UsageError(f"{self._why_ended}: call free_memory(), which begins another run, before prepare()")
            self._runs = runs_of_this_process()
            self._number = self._runs.begin(self, self._number)
            try:
                self.manager = Manager(
                    pg=ProcessGroupGloo(),
                    use_async_quorum=False,
                    quorum_in_commit=False,
                    warm_up=False,  # a newcomer takes over the others' position before its first batch
                    room_id=self._room,
                    rank=self.rank,
                    world_size=self.ranks,
                    **store.place(self.ranks, self.rank, self.plugin.address),
                    **self.plugin.for_manager(),
                )
            except JobFinishedError as error:
                self._ended = True
                raise nothing_left(error) from error
            if self.ranks > 1:
                torch.distributed.barrier()  # the first rank serves the others: it may not end before they have begun
            self.first_step = self._runs.carry(self.manager, self.group)
            self._kept.owner = self._owner()
            load, save = (functools.partial(self._kept.call, function) for function in self._functions)
            self.manager.register_state_dict_fn(KEY, load, save)
            self.sharing = sharing.of(self)
        return self.manager

    def manager_state(self) -> dict[str, int]:
        """Of the Manager, for a checkpoint: counted from the beginning of this run."""
        state = self.manager.state_dict() if self.manager is not None else {}
        return {**state, "step": state["step"] - self.first_step} if state else {}

    def load_manager_state(self, state: dict[str, int]) -> None:
        """The reverse, before training."""
        manager = self.start_manager()
        if not manager.quorum_id:
            manager.load_state_dict({**state, "step": state["step"] + self.first_step})

    def superseded(self) -> None:
        """Another Accelerator of this process begins a run."""
        if self.manager is not None and not self._ended:
            log.warning("another Accelerator prepares a model: the run of the one before it ends here")
            self._why_ended = "another Accelerator of this process has begun another run"
            self._leave("another run begins", finished=False)

    def wrap(self, module: torch.nn.Module, arguments: dict[str, Any]) -> WrappedModel:
        """A model to be trained. After training has begun this begins another run, for the models from here on.

        Raises:
            ConfigError: an argument of DistributedDataParallel cannot work here.
            UsageError: training has ended.
        """
        if self.manager is not None and self.manager.quorum_id and not self._ended:
            log.warning("a model is prepared after training began: the run of the models before it ends here")
            self.begin_anew()
        if self.ranks > 1:  # as torch's DDP does at its start
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    torch.distributed.broadcast(tensor.data, 0)
        model = WrappedModel(self, module, **arguments)
        self._models.append(weakref.ref(model))
        return model

    # ------------------------------------------------------------ windows

    @property
    def models(self) -> list[WrappedModel]:
        """Those of this run. The owner keeps them alive."""
        return [model for known in self._models if (model := known()) is not None]

    @property
    def training(self) -> bool:
        """The script is in a training loop, as far as one can tell: models are in training mode, gradients recorded."""
        return not self.aside and torch.is_grad_enabled() and any(model.in_training_mode for model in self.models)

    @property
    def silent(self) -> bool:
        """Nothing may be communicated with the other groups before the next window, or the end of what is aside."""
        return self.lost or self.stopped or self._ended or self.aside

    @property
    def ended(self) -> str:
        """Why this run is over; "" while it is not."""
        return self._why_ended if self._ended else ""

    @property
    def quorum(self) -> Manager | None:
        """The Manager, if its quorum can be used for collectives now."""
        manager = self.manager
        return None if manager is None or self.silent or not manager.quorum_id else manager

    @property
    def _room(self) -> str:
        return room_of_run(self._number)

    def before_batch(self, position: Position) -> None:
        """A training loader is about to read the batch at `position`: open the quorum, unless a window is under way."""
        if self.manager is not None and not (self._open or self.stopped or self._ended or self.aside):
            self._start(position)

    def before_forward(self) -> None:
        """A forward that records gradients. This opens a window, unless a loader that is being read will do it."""
        if self._open or self.stopped or self._ended or self.aside:
            return
        if not self._reading:
            self.out.unread()
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

    def busy(self, reason: str) -> None:
        """Tell the peers not to wait for this replica until it opens its next window."""
        if self.manager is not None:
            self._pauses.enter_context(self.manager.pause(reason, PAUSE_S))

    @contextlib.contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """The same, inside."""
        with contextlib.ExitStack() as stack:
            if self.manager is not None and not self._ended:
                stack.enter_context(self.manager.pause(reason, PAUSE_S))
            yield

    @contextlib.contextmanager
    def by_itself(self, reason: str) -> Iterator[None]:
        """The same, and nothing is communicated with the other groups, any of which may be lost meanwhile."""
        before, self.aside = self.aside, True
        try:
            with self.pause(reason):
                yield
        finally:
            self.aside = before

    def _start(self, position: Position | None) -> None:
        manager = self.start_manager()
        self._pauses.close()
        start_patiently(manager, self.address, self._room)
        self.entered(position)

    def entered(self, position: Position | None) -> None:
        """The quorum is there: a window begins. `position`: of the loader that is read, or was."""
        manager = self.start_manager()
        self._open, self.lost, self._verdict, self._votes = True, False, None, 0
        self._division_due = True
        if manager.quorum_id != self._agreed_in:
            self._agree_on(position, manager)
        self._opened()

    def _agree_on(self, position: Position | None, manager: Manager) -> None:
        """The furthest position is everybody's. An error vetoes the step, and the next quorum tries again."""
        code = torch.tensor([0 if position is None else position.code], dtype=torch.int64)
        manager.allreduce(code, reduce_op=ReduceOp.MAX).wait()
        found = int(code) if manager.errored() is None else -1
        if self.ranks > 1:  # each rank has asked on its own ring: all of them know, or none
            inside = torch.tensor([found], device=next(self.models[0].parameters()).device)
            torch.distributed.all_reduce(inside, ReduceOp.MIN)
            found = int(inside)
        if found >= 0:
            self._agreed_in = manager.quorum_id
            if position is not None and found > position.code:
                log.info("%s: goes on at %s, as others do", manager.replica_id, position.moved_to(found))

    def divide(self, groups: int) -> None:
        """From the next epoch on, or for a newcomer from now on: everybody does, or lengths differ."""
        if groups != self.groups and self._divide(groups):
            log.info("the training data is divided among %d replica groups, not %d any more", groups, self.groups)
            self.groups = groups

    def divide_anew(self) -> None:
        """An epoch begins: groups that joined with a higher number than there were are counted from here on."""
        manager = self.quorum
        if manager is not None and self._division_due:
            self._division_due = False
            self.divide(groups_needed(self.groups, manager.members))

    # ------------------------------------------------------------ the vote

    @property
    def unsettled(self) -> bool:
        """Gradients were reduced, or are being reduced, since the last vote."""
        return any(model.carrier.unsettled for model in self.models)

    @property
    def voted(self) -> bool:
        """There was a vote in this window."""
        return self._verdict is not None

    def settle_gradients(self) -> None:
        """Make the reduced gradients final, before they are clipped, unscaled or used: the same on all ranks."""
        if self.manager is not None and not self.silent:
            self.settling.settle(self.manager.current_attempt(), self.models)

    def vote(self) -> bool:
        """Whether the optimizer step that is about to be made is everybody's. False: gradients have been dropped.

        Raises:
            UsageError: the run has ended.
        """
        manager = self.manager
        if manager is None or not self.models:
            return True  # nothing that was prepared is trained across groups
        if self._ended:
            raise UsageError(f"optimizer.step(), but {self._why_ended}: the replicas would part here")
        if self._verdict is None and not self._open and not self.stopped:
            self._start(None)  # a step without a forward in training mode
        self._open = False
        self._votes += 1
        if self._verdict is not None and not self.unsettled:
            return self._verdict  # another optimizer, on gradients that were voted on
        self._verdict = not self.silent and self._ask_all(manager)
        if self._verdict:
            self.committed_steps += 1
            for model in self.models if self.ranks > 1 else ():
                model.share_buffers()
        else:
            self.vetoed_steps += 1
            for model in self.models:
                model.drop_gradients()
        if self.after_vote is not None:
            self.after_vote()
        return self._verdict

    def _ask_all(self, manager: Manager) -> bool:
        for model in self.models:
            if not model.carrier.unsettled:
                model.carrier.flush(with_accumulated=True)
        self.settle_gradients()
        commits = manager.should_commit()
        self.concluded(manager)
        self.out.voted(manager)
        return commits

    def concluded(self, manager: Manager) -> None:
        """An attempt has ended."""
        self._open = False
        self.lost, self.stopped = manager.quorum_lost, manager.stop_agreed
        for model in self.models if self.silent else ():
            model.carrier.before_backward(sync=False)

    def drop_window(self) -> None:
        """No step follows on what was accumulated; one on what was reduced is due, as the others vote on it."""
        self._pauses.close()
        if self._open and self.unsettled:
            self.vote()
        for model in self.models:
            model.drop_gradients()

    def torn(self, error: BaseException) -> None:
        """An optimizer failed after the vote: the others have the new state, this replica may have half of it."""
        if self.manager is not None and not self._ended:
            self.manager.report_torn_state(error)

    # ------------------------------------------------------------ other agreements

    def any_group(self, here: bool) -> bool | None:
        """Whether it is so on any replica; None if that cannot be told now. Everybody asks at the same place."""
        manager = self.quorum
        if manager is None:
            return None
        count = torch.tensor([int(here)], dtype=torch.int64)
        manager.allreduce(count, reduce_op=ReduceOp.SUM).wait()
        return None if manager.errored() is not None else bool(int(count))

    def begin_anew(self) -> None:
        """Another run begins in this process: the models so far are trained no more."""
        if self.manager is not None and not self._ended:
            self._leave("another run begins", finished=False)
        for model in self.models:
            model.unwrap()
        self._begin()
