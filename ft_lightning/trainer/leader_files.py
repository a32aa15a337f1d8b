"""`LeaderFiles`: what one replica, the leader, does for all: checkpoints, loggers, progress bar, config.yaml.

How it works. Who leads, what a new leader makes good, and when a checkpoint is put in its place (once all replicas are
known to hold its step) is the kit's (`ft_core.loop.leadership`, `publishing`); `is_global_zero` and `rank_zero_only`
follow it, on the first rank of the leading group. Before the first quorum a provisional leader does what Lightning
writes at the start: the group with the lowest number, unless a quorum trains already, as the lighthouse knows.

After a change the new leader goes on with what is there. For that all replicas carry the `LeaderState`: the versions of
the loggers' runs, the states of all ModelCheckpoints, and which checkpoint files exist. The leader broadcasts it after
the first vote in every new quorum and every `BROADCAST_EVERY` steps, in one small collective that all members take part
in; not before their gradients, so that an open step can go on in the next quorum (R19), unless it follows a broadcast.
Who adopts another's state receives it with that. `ModelCheckpoint.file_exists` is answered from this list, not from the
disk, so names with a version suffix come out alike on all replicas.

Whether a vote is followed by a broadcast is known to all who voted without a message: it depends on the quorum, its
step, what the fence said, and which broadcasts were begun in this quorum; never on what one member has met with, such
as an error of its own. All who vote ask: who trains, who is out of data, who has ended its training (`voted`).

What is not one local file (other `CheckpointIO`s, `AsyncCheckpointIO`, URLs) is written in its place at once; so is a
checkpoint that is saved because of an exception, after which there is no other step.

Invariants: at most one process has `leads` in a quorum; it changes only in `opened`, or where a step that has
moved writes or is voted on. A replica that does not lead never touches a file of the run.
Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from ft_core.loop.leadership import Leadership
from ft_core.loop.publishing import PlacedFile, Publisher
from ft_core.loop.runs import RUNS
from ft_lightning._compat import writers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core import Manager
    from ft_core.loop.window import StepWindow

KEY = "ft_leader"
"""The name of the LeaderState in what donors hand out."""
BROADCAST_EVERY = 50
"""Steps between two broadcasts in a quorum, after which all know what a ModelCheckpoint did on the leader alone."""
HEAD = 4096
"""Bytes of the first collective of a broadcast; a longer LeaderState needs a second."""
LENGTH = 8
"""Bytes of HEAD that hold the length of the LeaderState."""
MAX_FILES = 10_000
"""Names of existing checkpoint files that a LeaderState carries."""


@dataclass(frozen=True)
class LeaderState:
    """The files of the run, as the leader has them and all replicas carry them."""

    loggers: list[int | str | None]
    """The version of each logger's run."""
    checkpoints: dict[str, Any]
    """The state of each ModelCheckpoint, by its state key."""
    existing: list[str] | None
    """Checkpoint files, at most MAX_FILES; None before the first quorum."""

    def encoded(self) -> str:
        """The state as JSON."""
        return json.dumps(vars(self))

    @staticmethod
    def decoded(text: str) -> LeaderState:
        """The state that `encoded` was called on."""
        return LeaderState(**json.loads(text))


class LeaderFiles:
    """Whether this process writes, and what the leader has written; one per strategy.

    Args:
        strategy: has manager, global_rank, replica_group, `_tree`.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._trainer: Any = None
        self.leads = False
        """This process writes (for `is_global_zero`)."""
        self._fits = False
        """Between `fit`'s set-up and its end."""
        self._ended_together = False
        """All have agreed to the end of the last `fit`: what this replica holds, all hold."""
        self._broadcast_in = 0
        """Quorum in which the LeaderState was broadcast last."""
        self._existing: set[str] | None = None
        """Checkpoint files in the ModelCheckpoints' folders; None before the first broadcast."""
        self._leadership: Leadership | None = None
        """Of the `fit` that is under way, once it has a Manager."""

    def __repr__(self) -> str:
        return f"LeaderFiles(leads={self.leads}, state of {self._broadcast_in:#x}, {self._leadership!r})"

    # ------------------------------------------------------------ before the first quorum

    def without_quorum(self) -> None:
        """The first group writes as long as nothing is known, and in test, validate and predict without fit."""
        if self._trainer is None:
            self._set(self._strategy.replica_group == 0)
        else:
            self._set(self.leads)

    def tunes(self) -> None:
        """The Tuner works on each group for itself, with files of its own."""
        self._set(True)

    def start(self, trainer: Any) -> None:
        """`fit` begins: become the provisional leader, or not. Nothing was written yet."""
        self._trainer, self._fits, self._ended_together = trainer, True, False
        self._broadcast_in, self._existing, self._leadership = 0, None, None
        again = _attempt() > 0
        self._set(self._strategy.replica_group == 0 and not self._trains_already(again))
        if again:
            writers.allow_existing_config(self._strategy._tree, trainer)

    def _trains_already(self, again: bool) -> bool:
        """The lighthouse knows of a quorum, or all is done; if it cannot be asked: whether this is a restart."""
        if self._strategy.global_rank != 0:
            return False
        address = self._strategy.lighthouse_address
        if not address:
            return again
        known = RUNS.seen(address, self._strategy.first_room)  # an earlier fit of this script is over, and no matter
        if known is None:
            return again
        return any(
            room.closed or any(replica.member and replica.life == "up" for replica in room.replicas) for room in known
        )

    def attach(self, manager: Manager, window: StepWindow, leave: Callable[[], None]) -> None:
        """The Manager is there, and the callbacks know their folders. `leave`: ends the run at the process's exit."""
        leads: bool = self._strategy.group_leads(self.leads)
        self._leadership = Leadership(window, Publisher(window, leave), self._changed, self._not_there, leads)
        manager.register_state_dict_fn(KEY, self._receive, self._state)
        for callback in self._checkpoints():
            callback.file_exists = partial(self._exists, callback, callback.file_exists)
            callback._link_checkpoint = self._link

    def ended_together(self) -> None:
        """All have agreed to the end, and nobody waits for the leader any more: each group writes for itself."""
        self._ended_together = True

    def end(self) -> None:
        """`fit` has ended. Who led goes on to lead, for the tests that may follow."""
        self._fits, self._leadership = False, None
        for callback in self._checkpoints() if self._trainer is not None else ():
            callback.__dict__.pop("file_exists", None)
            callback.__dict__.pop("_link_checkpoint", None)

    # ------------------------------------------------------------ in a quorum

    def opened(self) -> None:
        """Right after every `start_quorum` of this Trainer, on every replica: elect, make good."""
        leadership = self._leadership
        assert leadership is not None
        leadership.elect()
        self._set(leadership.leads)
        leadership.take_over()
        for callback in self._checkpoints():
            writers.clock(callback, runs=self.leads)

    def voted(self, manager: Manager) -> None:
        """After every vote of this Trainer, on every replica: elect if the step moved, broadcast if it is time.

        Not where the quorum is over: who leaves it is gone then, and there is another broadcast in the next one.
        """
        leadership = self._leadership
        if leadership is None or manager.quorum_lost:
            return
        if leadership.step_moved:
            self.opened()
        if manager.stop_agreed or manager.hooks.next_quorum:
            return
        if manager.quorum_id != self._broadcast_in or manager.current_step() % BROADCAST_EVERY == 0:
            self._broadcast_in = manager.quorum_id  # whatever becomes of it here
            self._broadcast(manager, leadership.leads)

    def _changed(self, leads: bool) -> None:
        """This group begins to lead, or no longer does; between two steps, or within one that has moved."""
        if leads:
            self._set(True)
            if self.leads:
                self._take_over()
        else:
            if self.leads:
                self._close_writers()
            self._set(False)

    def before_adopting(self, state: Mapping[str, Any]) -> None:
        """A peer's state will be loaded: its ModelCheckpoints' folders come first, or their paths are dropped."""
        if self._leadership is not None:
            self._leadership.forget()
        for callback in self._checkpoints():
            found = state.get("callbacks", {}).get(callback.state_key)
            if found:
                callback.dirpath = found["dirpath"]

    def publish(self, *, everything: bool = False) -> None:
        """Put in place what all are known to hold; `everything` else, too: this process reads it next."""
        if self._leadership is not None:
            publisher = self._leadership.publisher
            publisher.publish_all() if everything else publisher.publish()

    def _set(self, leads: bool) -> None:
        rank = self._strategy.global_rank
        self.leads = leads and rank == 0
        writers.set_rank_zero(self._strategy._tree, 0 if self.leads else max(1, rank))

    def step_down(self) -> None:
        """This replica has left the job: it writes nothing more."""
        if self.leads:
            self._close_writers()
        self._set(False)

    def _close_writers(self) -> None:
        for logger in self._trainer.loggers:
            writers.close_logger(logger)
        writers.progress_bar(self._trainer, shown=False)

    def _take_over(self) -> None:
        tree, trainer = self._strategy._tree, self._trainer
        for logger in trainer.loggers:
            writers.continue_logger(tree, logger)
        writers.write_beginning(tree, trainer)
        writers.progress_bar(trainer, shown=True)

    # ------------------------------------------------------------ the state that all carry

    def _state(self) -> str:
        existing = self._existing
        states: dict[str, Any] = {}
        for callback in self._checkpoints():
            with contextlib.suppress(TypeError):  # a subclass with a state of its own: each replica keeps its own
                states[callback.state_key] = _plain(writers.checkpoint_state(callback))
        versions = [writers.logger_version(logger) for logger in self._trainer.loggers]
        return LeaderState(versions, states, None if existing is None else sorted(existing)[:MAX_FILES]).encoded()

    def _receive(self, text: str) -> None:
        state = LeaderState.decoded(text)
        for logger, version in zip(self._trainer.loggers, state.loggers, strict=False):
            if version is not None:
                writers.set_logger_version(logger, version)
        for callback in self._checkpoints():
            if callback.state_key in state.checkpoints:
                writers.set_checkpoint_state(callback, _tensors(state.checkpoints[callback.state_key]))
        if state.existing is not None:
            self._existing = set(state.existing)

    def _broadcast(self, manager: Manager, sends: bool) -> None:
        """A broadcast as a sum with zeros. An error ends the quorum, and it is sent again in the next one."""
        if sends and self._existing is None:
            self._existing = {path for callback in self._checkpoints() for path in writers.listing(callback)}
        mine = self._state().encode() if sends else b""
        head = len(mine).to_bytes(LENGTH, "little") + mine[: HEAD - LENGTH]
        received = self._sum(manager, head.ljust(HEAD, b"\0"), HEAD)
        length = int.from_bytes(received[:LENGTH], "little")
        if length > HEAD - LENGTH:
            rest = self._sum(manager, mine[HEAD - LENGTH :], length - HEAD + LENGTH)
            received = received[:HEAD] + rest if rest else b""
        if received and not sends and length:
            self._receive(received[LENGTH : LENGTH + length].decode())

    @staticmethod
    def _sum(manager: Manager, mine: bytes, size: int) -> bytes:
        """Of `size` bytes; none if it failed, and the quorum with it. An error of the step before is no matter."""
        buffer = torch.zeros(size, dtype=torch.uint8)
        if mine:
            buffer[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        manager.allreduce(buffer, reduce_op=ReduceOp.SUM).wait()
        attempt = manager.hooks.current_attempt()
        return bytes(buffer.numpy().tobytes()) if attempt is not None and attempt.usable() else b""

    # ------------------------------------------------------------ files

    def _checkpoints(self) -> list[Any]:
        return writers.checkpoint_callbacks(self._strategy._tree, self._trainer)

    def _exists(self, callback: Any, ask_disk: Callable[..., bool], path: str, trainer: Any) -> bool:
        """For ModelCheckpoint.file_exists: what is there, as the leader of the first quorum found and all know."""
        del callback
        if self._existing is None:
            return ask_disk(path, trainer)
        mine = self._strategy.global_rank == 0 and str(path) in self._existing
        there: bool = trainer.strategy.reduce_boolean_decision(mine, all=False)
        return there

    def saving(self, path: object, write: Callable[[Any], None]) -> None:
        """Save a checkpoint if this group leads, by `write(where)`; else remember how, in case that the leader dies."""
        if self._existing is not None:
            self._existing.add(str(path))
        one_file = writers.writes_one_file(self._strategy.checkpoint_io, path)
        if self._ended_together and one_file:
            if self._strategy.global_rank == 0:
                PlacedFile(os.fspath(path), 0).write_in_place(write)  # type: ignore[call-overload]
            return
        if self._leadership is None:
            if self.leads:
                write(path)
            return
        if not one_file or writers.interrupted(self._trainer):
            self._writing(path, partial(write, path), None)
            return
        file = PlacedFile(os.fspath(path), self._strategy.manager.current_step())  # type: ignore[call-overload]
        self._writing(path, partial(file.write, write), file.place, file.discard)

    def saving_together(
        self, path: object, write: Callable[[], None], place: Callable[[], None], discard: Callable[[], None]
    ) -> None:
        """Save what all ranks of a group write, if this group leads; else remember how. On all ranks.

        Args:
            path: its place.
            write: writes it beside its place, on all ranks.
            place: puts it in its place.
            discard: removes what is beside its place.
        """
        if self._existing is not None:
            self._existing.add(str(path))
        if self._leadership is not None:
            self._leadership.writing(str(path), write, place, discard, collective=True)
        elif self._strategy.broadcast(self.leads):  # which is known on the first rank only
            write()
            place()

    def removing(self, path: object, remove: Callable[[], None]) -> None:
        """Remove a checkpoint likewise, once what was saved before is in its place."""
        if self._existing is not None:
            self._existing.discard(str(path))
        if self._leadership is not None:
            self._writing(path, _nothing, remove)
        elif self.leads:
            remove()

    def _link(self, trainer: Any, target: str, at: str) -> None:
        """For ModelCheckpoint(save_last="link"): a link appears with the file that it leads to, or after it."""
        if os.path.abspath(target) != os.path.abspath(at):
            self._writing(at, _nothing, partial(writers.link, target, at))
        trainer.strategy.barrier()

    def _writing(
        self, path: object, write: Callable[[], None], place: Callable[[], None] | None,
        discard: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        assert self._leadership is not None
        if self._strategy.global_rank == 0 and (self._fits or self.leads):
            self._leadership.writing(str(path), write, place, discard)

    def _not_there(self, path: str) -> None:
        if self._existing is not None:
            self._existing.discard(path)


def _nothing() -> None:
    """What is removed or linked needs no file beside its place."""


def _attempt() -> int:
    """How often this process's group was started before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _plain(value: Any) -> Any:
    """For JSON: tensors (scores) become numbers that say so. Raises TypeError for what JSON does not know."""
    if isinstance(value, torch.Tensor):
        return {"tensor": value.detach().cpu().tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return os.fspath(value)


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"tensor", "dtype"}:
            return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        return {key: _tensors(item) for key, item in value.items()}
    return [_tensors(item) for item in value] if isinstance(value, list) else value
