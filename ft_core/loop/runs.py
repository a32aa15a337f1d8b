"""`Runs`: the training runs of one process, one after the other, each in a room (quorum namespace) of its own.

How it works. All replicas run one script, so the nth run of each is the same, and meets the others in its room. A
second run begins at the step at which the one before ended. So a replica that has not made all of that is behind, and
takes over the others' model; it could be the one whose model all take over otherwise. A run that failed is tried again
in its room.

Invariant: one run at a time; the name of a replica group is taken once. Threads: the training thread.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

from ft_core.control.lighthouse.client import rooms
from ft_core.errors import FaultToleranceError, JobFinishedError
from ft_core.protocol.lineage import fold_lineage
from ft_core.settings import DEFAULT_ROOM, room_of_run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ft_core import Manager
    from ft_core.rpc.codec import pb

log = logging.getLogger("ft_core")
BETWEEN_S = 10.0
"""How long the others may be between the end of one run and the beginning of the next."""
LOOK_S = 0.2


def carried_over(state: Mapping[str, int], group: int) -> dict[str, int]:
    """The state that the Manager of the next run begins with; {} for none.

    Args:
        state: of the last run's Manager, at its end; {} if there was none.
        group: number of this replica group. Each has a lineage of its own, as at the start of a job, so all take the
            state of one: the script may have drawn a new model.
    """
    step = state.get("step", 0)
    return {**state, "lineage": fold_lineage(step, group, 0, ())} if step else {}


def _again() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


class PassedOverError(FaultToleranceError):
    """This run has ended, and the others are in a later one."""


class RunLostError(FaultToleranceError):
    """All replicas of a later run have died, and with them what the runs before it had trained."""


def nothing_left(error: JobFinishedError) -> SystemExit:
    """The end of a replica that comes after the others have finished: its work is done as well."""
    log.warning("nothing left to train: %s", str(error).partition(";")[0])  # the rest is for who starts lighthouses
    return SystemExit(0)


@dataclasses.dataclass(frozen=True)
class Words:
    """How the user of a framework names things."""

    run: str = "training run"
    again: str = "start the job again, and load a checkpoint"


class Runs:
    """Training runs of this process."""

    def __init__(self) -> None:
        self.ended = 0
        """How many came to their end. One that failed is tried again in its room."""
        self.members: int | None = None
        """Groups in the last quorum: so many come to the next shared run outside of training. None: nobody knows."""
        self._evaluations = 0
        """Shared runs outside of training."""
        self._carried: dict[str, int] = {}
        """The Manager's state at the end of the last one; nothing if this process passed over it."""
        self._supersede: weakref.WeakMethod[Any] | None = None
        """Ends the run whose Manager was started last."""

    def __repr__(self) -> str:
        return f"Runs({self.ended} ended)"

    def begin(self, supersede: Callable[[], None]) -> None:
        """A run begins; the one before ends, if it has not.

        Args:
            supersede: a method of the run, which is not kept alive; called when another run begins.
        """
        before = self._supersede() if self._supersede is not None else None
        if before is not None and before != supersede:
            before()
        self._supersede = weakref.WeakMethod(supersede)

    def over(self, state: Mapping[str, int]) -> None:
        """A run came to its end.

        Args:
            state: of its Manager; {} where it was passed over.
        """
        self.ended += 1
        self._carried = dict(state)

    def carried(self, group: int) -> dict[str, int]:
        """The state that the next Manager begins with (`carried_over`), {} for none: who passed over a run is behind.

        Args:
            group: number of this replica group.
        """
        return carried_over(self._carried, group) if self.ended else {}

    def room(self, first: str = DEFAULT_ROOM) -> str:
        """The room of the run that is under way, or next.

        Args:
            first: room of the first run.
        """
        return room_of_run(self.ended).replace(DEFAULT_ROOM, first, 1)

    def join(self, make: Callable[[str], Manager], address: str, first: str, words: Words) -> Manager:
        """The Manager of this run.

        Args:
            make: constructs it, in the room that it is called with.
            address, first: as in `later`.

        Raises:
            PassedOverError, RunLostError, SystemExit: as `missed` returns.
        """
        if self.left_for_a_later_one(address, first):
            raise self._passed_over("nobody is in this one any more", words)
        try:
            return make(self.room(first))
        except JobFinishedError as error:
            raise self.missed(error, address, first, words) from error

    def missed(
        self, error: JobFinishedError, address: str, first: str, words: Words, *, trained: bool = False
    ) -> BaseException:
        """What becomes of a replica of which the others have finished the run.

        Args:
            error: the lighthouse's word for it.
            address, first: as in `later`.
            trained: the replica has been in this run.

        Returns:
            PassedOverError: they are in a later one; this replica joins them there.
            RunLostError: they were, and all of them have died.
            SystemExit: (0) they have finished everything.
        """
        why = str(error).partition(";")[0]
        if self.later(address, first, trained=trained):
            return self._passed_over(why, words)
        if self.lost(address, first):
            return RunLostError(
                f"every replica has died in a later {words.run} than this one, so nobody is left who has the model "
                f"that this {words.run} trained ({why}): {words.again}"
            )
        return nothing_left(error)

    @staticmethod
    def _passed_over(why: str, words: Words) -> PassedOverError:
        log.warning("this %s is passed over, as the others are in a later one: %s", words.run, why)
        return PassedOverError(why)

    def evaluation(self, first: str, stage: str) -> str:
        """The room of the next shared evaluation outside of training; a replica that comes later is alone in it."""
        self._evaluations += 1
        return f"{first}.{stage}.{self._evaluations}"

    def seen(self, address: str, first: str = DEFAULT_ROOM) -> list[pb.RoomStatus] | None:
        """The rooms of this run and later ones at the lighthouse; None if it cannot be asked. `first`: as in `room`."""
        known = rooms(address)
        if known is None:
            return None
        return [room for room in known if room.room == self.room(first)] + self._later(known, first)

    def later(self, address: str, first: str = DEFAULT_ROOM, *, trained: bool = False) -> bool:
        """A later run than this one is under way at the lighthouse.

        Who was away, because it was started again or because it has `trained` in this run, waits BETWEEN_S for one: the
        others may be between two runs.

        Args:
            address: of the lighthouse.
            first: as in `room`.
            trained: this replica has been in the run.
        """
        deadline = time.monotonic() + (BETWEEN_S if trained or _again() else 0.0)
        while not (found := self._under_way(address, first)) and time.monotonic() < deadline:
            if self._nobody_is_left(address, first, {"gone"}):
                break
            time.sleep(LOOK_S)
        return found

    def left_for_a_later_one(self, address: str, first: str = DEFAULT_ROOM) -> bool:
        """This process was started again, nobody is in this run, and somebody in a later one. `first`: as in `room`."""
        if not _again():
            return False
        known = rooms(address) or []
        here = [room for room in known if room.room == self.room(first)]
        return self._up(self._later(known, first)) and not self._up(here)

    def lost(self, address: str, first: str = DEFAULT_ROOM) -> bool:
        """A later run than this one had begun at the lighthouse and did not end, and nobody of it is left.

        Whose connection ended without a word may come back for a while (`life` "lost"): ask after `later`, which waits.
        """
        return self._nobody_is_left(address, first, {"gone", "lost"})

    def _nobody_is_left(self, address: str, first: str, away: Collection[str]) -> bool:
        begun = [room for room in self._later(rooms(address) or [], first) if not room.closed and room.replicas]
        return bool(begun) and all(member.life in away for room in begun for member in room.replicas)

    def _under_way(self, address: str, first: str) -> bool:
        return self._up(self._later(rooms(address) or [], first))

    @staticmethod
    def _up(some: list[pb.RoomStatus]) -> bool:
        return any(member.life == "up" for room in some for member in room.replicas)

    def _later(self, known: list[pb.RoomStatus], first: str) -> list[pb.RoomStatus]:
        """Rooms of later runs than this one."""
        numbers = ((room, room.room.removeprefix(f"{first}.")) for room in known)
        return [r for r, n in numbers if r.room != n and n.isdecimal() and int(n) - 1 > self.ended]


RUNS = Runs()
"""Of this process."""
