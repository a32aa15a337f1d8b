"""`Checkpoints`: the hooks of the strategy that concern writing, resuming, and ending together.

How it works. `Checkpoints` is mixed into the strategy; each hook is a line or two that asks `LeaderFiles` (who writes),
`Resume` (the Manager's state in checkpoints) or `stopping` (the end). The strategy calls `_begin`, `_opened`,
`_voted`, `_load` and `_finish` at the points that they name.

Threads: the training thread.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from torch.distributed import ReduceOp

from ft_core import Manager
from ft_core.errors import UsageError
from ft_core.loop.runs import RUNS, PassedOverError, Words
from ft_core.loop.stopping import stop_together
from ft_core.settings import DEFAULT_ROOM
from ft_lightning import _compat, stopping
from ft_lightning._compat import writers
from ft_lightning.trainer.leader_files import LeaderFiles
from ft_lightning.trainer.resume import Resume

if TYPE_CHECKING:
    from torch import Tensor

    from ft_core.errors import JobFinishedError
    from ft_core.loop.window import StepWindow
    from ft_lightning.trainer.elastic import ElasticData
    from ft_lightning.trainer.uneven import TrainerUnevenEnd

WORDS = Words("call of fit", "start the job again, with fit(ckpt_path=...) to go on from a checkpoint")


class Checkpoints:
    """The part of the strategy that writes, resumes and ends; mixed in."""

    manager: Manager | None
    _tree: str
    _trainer: Any
    _arguments: Any
    _takeover: Any
    window: StepWindow | None
    elastic: ElasticData
    uneven: TrainerUnevenEnd
    """The end of this replica's loader, which may come before the others'; while `fit` runs."""
    _leadership: LeaderFiles | None = None
    _resume: Resume | None = None
    first_step = 0
    """The Manager's step when this call of `fit` began: more than 0 in a second call, and after resuming."""
    _passed = False
    """This call of `fit` is passed over."""

    # ------------------------------------------------------------ who writes

    @property
    def leader(self) -> LeaderFiles:
        """The part that knows who writes."""
        if self._leadership is None:
            self._leadership = LeaderFiles(self)
        return self._leadership

    @property
    def resume(self) -> Resume:
        """The checkpoint that `fit` starts from."""
        if self._resume is None:
            self._resume = Resume()
        return self._resume

    @property
    def _trains(self) -> bool:
        """This is a `fit` with the other replicas: not the Tuner's, which each group runs for itself."""
        trainer = self._trainer
        return trainer is not None and trainer.state.fn == "fit" and not _compat.tunes(trainer)

    @property
    def is_global_zero(self) -> bool:
        """This process writes: rank 0 of the first participant of the quorum."""
        return self.leader.leads

    @property
    def lighthouse_address(self) -> str:
        """Where the lighthouse listens; '' if nobody said."""
        named = self._arguments.lighthouse if self._arguments is not None else None
        return str(named or os.environ.get("FT_LIGHTHOUSE") or os.environ.get("TORCHFT_LIGHTHOUSE") or "")

    @property
    def first_room(self) -> str:
        """Room of this process's first run; later ones count on from it."""
        arguments = self._arguments.for_manager() if self._arguments is not None else {}
        return str(arguments.get("room_id", DEFAULT_ROOM))

    def set_world_ranks(self) -> None:
        """Lightning sets `rank_zero_only` to the rank inside the group here."""
        super().set_world_ranks()  # type: ignore[misc]
        self.leader.without_quorum()

    def setup_environment(self) -> None:
        """Before anything is written by a run."""
        self.resume.reset()
        if self._trains:
            self.leader.start(self._trainer)
        if self._trainer is not None:
            writers.progress_for_logs(self._tree, self._trainer)
        super().setup_environment()  # type: ignore[misc]
        if self._trainer is not None and _compat.tunes(self._trainer):
            self.leader.tunes()

    # ------------------------------------------------------------ called by the strategy

    def _new_manager(self, **arguments: Any) -> Manager:
        """A Manager for this run.

        Raises:
            SystemExit: (0) the job is finished.
            RunLostError: it is not, but everybody who made the later run has died.
            Exception: ends `fit`: the run has ended, and the others are in a later one.
        """

        def make(room: str) -> Manager:
            return Manager(**{**arguments, "room_id": room})

        try:
            return RUNS.join(make, self.lighthouse_address, self.first_room, WORDS)
        except PassedOverError as error:
            raise self._pass_over() from error

    def _finished(self, error: JobFinishedError) -> BaseException:
        """The others have finished this run while this replica was in it. Returns what `_new_manager` raises."""
        fate = RUNS.missed(error, self.lighthouse_address, self.first_room, WORDS, trained=True)
        return self._pass_over() if isinstance(fate, PassedOverError) else fate

    def _pass_over(self) -> BaseException:
        self._passed = True
        return _compat.end_of_fit(self._tree)

    def _begin(self, manager: Manager) -> None:
        """The Manager was just constructed, the callbacks are set up."""
        assert self.window is not None
        self.leader.attach(manager, self.window, manager.shutdown)
        self.resume.into(manager)
        this: Any = self
        carried = RUNS.carried(this.replica_group)
        if carried and not self.resume.given:
            manager.load_state_dict(carried)
        self.first_step = manager.current_step()

    def _opened(self) -> None:
        """Do what follows from a quorum; after each window was opened."""
        assert self.manager is not None
        self.resume.check(self.manager)
        self._takeover.opened(self.manager)
        self.leader.opened()

    def _voted(self, manager: Manager, _: bool) -> None:
        """After each should_commit, before the optimizer steps."""
        self.leader.voted(manager)
        self.uneven.voted()
        stopping.stop_as_agreed(manager, self._trainer)

    def _finish(self) -> None:
        """At the end of training: nobody leaves before all know, and before the last checkpoint is there."""
        assert self.manager is not None
        for logger in self._trainer.loggers:
            logger.save()
        assert self.window is not None
        if not self.uneven.left:
            with self._takeover.ending():
                voted = functools.partial(self.leader.voted, self.manager)
                stop_together(self.manager, functools.partial(self.window.entered, None), voted)
            if self.manager.stop_agreed:
                self.leader.publish()  # before the others, which know the end as well, look for it
            RUNS.members = self.manager.num_participants() if self.manager.quorum_id else None
        state = self.manager.state_dict()
        self.manager.leave("finished", finished=True)
        self.leader.publish()
        if self.manager.stop_agreed:
            self.leader.ended_together()
        RUNS.over(state)

    def _end_passed(self) -> None:
        """At the end of a call of `fit` that was passed over."""
        if self._passed:
            self._passed = False
            RUNS.over({})

    # ------------------------------------------------------------ Lightning's hooks

    def on_train_start(self) -> None:
        """Lightning has installed its own handler of SIGTERM by now."""
        super().on_train_start()  # type: ignore[misc]
        if self.manager is not None:
            stopping.drains_alone()
            self.elastic.begin(self.manager)
            self.uneven.check(self._trainer.lightning_module)

    def on_exception(self, exception: BaseException) -> None:
        """The others go on without this replica at once."""
        super().on_exception(exception)  # type: ignore[misc]
        if self.manager is not None:
            stopping.leave_on(self.manager, exception)
            self.leader.publish()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The leader writes, and the file is in its place once all replicas are known to hold its step.

        That is after the next step, at the end of `fit`, or at once where there is one replica. After `fit` each group
        writes it, so it is there when this returns, as under DDPStrategy.
        """
        self.resume.save(checkpoint, self.manager)
        self.elastic.save(checkpoint)
        self._write(checkpoint, filepath, storage_options)

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        # Lightning's own function asks who is global zero; that this group writes is decided by then.
        io: Any = self.checkpoint_io  # type: ignore[attr-defined]
        self.leader.saving(filepath, lambda path: io.save_checkpoint(checkpoint, path, storage_options=storage_options))

    def _write_now(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def remove_checkpoint(self, filepath: Any) -> None:
        """The leader removes, after what was saved before is in its place."""
        remove = super().remove_checkpoint  # type: ignore[misc]
        self.leader.removing(filepath, lambda: remove(filepath))

    def load_checkpoint(self, checkpoint_path: Any, **kwargs: Any) -> dict[str, Any]:
        """In `fit`: a replica that lacks the file takes the state of one that has it."""
        self.leader.publish(everything=True)
        if not self._trains:
            return self._read(checkpoint_path, **kwargs)
        checkpoint = self.resume.load(self._tree, checkpoint_path, lambda: self._read(checkpoint_path, **kwargs))
        self.elastic.found(checkpoint)
        return checkpoint

    def _read(self, checkpoint_path: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(super().load_checkpoint(checkpoint_path, **kwargs))  # type: ignore[misc]

    # ------------------------------------------------------------ for users

    def reduce_across_groups(self, tensor: Tensor, average: bool = True) -> Tensor:
        """Mean or sum of a tensor over all replica groups (each rank with its like in the other groups).

        Call it in `training_step` or after backward, on every replica, in the same order; it costs a collective of its
        own. If a replica is lost meanwhile, the content is undefined and the step is vetoed. Where there is no quorum
        (validate, test, predict) there is one group, and the tensor is returned as it is.

        Args:
            tensor: any shape, on any device; left untouched. `average` needs a floating point dtype.
            average: divide by the number of participants.

        Raises:
            UsageError: in `fit`, before the first step.
        """
        if self.manager is None or getattr(self, "quorum_lost", False):
            return tensor
        if self.manager.quorum_id == 0:
            raise UsageError("reduce_across_groups before the first training batch: there is no quorum yet")
        result = tensor.detach().clone().contiguous()
        self.manager.allreduce(result, reduce_op=ReduceOp.AVG if average else ReduceOp.SUM).wait()
        return result
