"""`Leadership`: one replica group, the leader, writes what is written once per job.

How it works. The leader is the first member of the quorum that did not have to heal, so all know it without a message.
Before the first quorum a provisional leader does what a script writes at its start: the group with the lowest number,
unless, as the lighthouse reports, a quorum trains already. When training has ended, who led goes on to lead.

What the leader writes is put in its place by a `Publisher`, once all replicas are known to hold the step.

A leader may die while it saves. So each replica remembers what the leader was to write at this step (references: the
state changes with the next commit only), and a new leader writes that again before it goes on. It may also die after
the commit that allows what it wrote at the step before to be put in its place: then a new leader does that. Both are
done at a boundary, so while a replica remembers something its steps do not go on in the next quorum (R19).

If a write fails, that was the leader's error and ended it. Its successor, and whoever is alone in the quorum, reports
it and trains on: otherwise all would end one after the other, and the state that is in memory with them. Of what all
ranks of a group write that holds for errors that all of them know; another one ends the rank, and its group.

Invariants: at most one group leads in a quorum; that changes only in `opened`. Threads: the training thread.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ft_core.loop.job_checkpoint import known_to_all_ranks
from ft_core.loop.quorum_wait import others_train
from ft_core.runtime import notices

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from ft_core import Manager
    from ft_core.loop.publishing import Publisher
    from ft_core.loop.window import StepWindow

log = logging.getLogger("ft_core")
MAX_MISSED = 64
"""Writes remembered of two steps; more are not made good after the leader's death."""


@dataclass(frozen=True)
class Write:
    """Something that the leader writes, or removes."""

    name: str
    write: Callable[[], Any]
    """Writes it beside its place, or in it."""
    place: Callable[[], Any] | None
    """Puts it in its place, if it is still beside it."""
    discard: Callable[[], Any]
    """Removes it, if it is still beside its place."""
    step: int
    """Of the state that is written."""
    work: Callable[[], Future[object] | None]
    """What still writes it after `write` has returned; None: nothing."""
    collective: bool
    """All ranks of the group take part, and an error of one may be unknown to the others."""


class Leadership:
    """Whether this group leads, and what a leader writes.

    Args:
        window: of its run.
        publisher: of this replica.
        changed: called with True when this group begins to lead, with False when it no longer does.
        failed: called with the name of what could not be written, where training goes on all the same.
        leads: whether this group leads before the first quorum, as `changed` need not be told; None: the group with the
            lowest number does, unless a quorum trains already.
    """

    def __init__(
        self,
        window: StepWindow,
        publisher: Publisher,
        changed: Callable[[bool], None],
        failed: Callable[[str], None] = lambda _: None,
        leads: bool | None = None,
    ) -> None:
        self._window = window
        self.publisher = publisher
        self._changed, self._failed = changed, failed
        self._leads = leads
        self._elected_in = 0
        """The quorum that was opened last."""
        self._begins = False
        """It was elected, and has not taken over."""
        self._missed: list[Write] = []
        """Of this step and the one before; at most MAX_MISSED."""

    def __repr__(self) -> str:
        return f"Leadership({self._leads}, {len(self._missed)} writes missed)"

    @property
    def leads(self) -> bool:
        """Whether this group writes."""
        if self._leads is None:
            self._leads = self._window.group == 0 and not self._trains_without_us()
        return self._leads

    @property
    def step_moved(self) -> bool:
        """The step that is, or was, open went on in another quorum than the one it was opened in (R19).

        The leader of that may be dead, and it is not known here who leads now.
        """
        manager = self._window.manager
        return manager is not None and manager.hooks.meeting[0] != self._elected_in

    @property
    def _step(self) -> int:
        """The step of the state that would be written now. A heal moves it on as well as this replica's own commits."""
        manager = self._window.manager
        return 0 if manager is None else manager.current_step()

    def _trains_without_us(self) -> bool:
        # Not this group's own earlier process, nor an earlier run of this one: their leases may stand for a moment.
        known = others_train(self._window.address, self._window.place.name)
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0 if known is None else known

    def opened(self) -> None:
        """A quorum was opened: elect, and make good what the former leader may not have done."""
        self.elect()
        self.take_over()

    def elect(self) -> None:
        """A quorum was opened: know who leads."""
        manager = self._window.manager
        assert manager is not None
        self._elected_in = manager.hooks.meeting[0]
        leads = not self._window.left and manager.hooks.leads
        before, self._leads = bool(self._leads), leads
        # Kept until the second commit: the leader's death may show only in the step after this window was opened with
        # it, and what it wrote last is put in its place by the commit after.
        self._missed = [item for item in self._missed if self._step - 1 <= item.step <= self._step]
        self._kept()
        self._begins = leads and not before
        if before and not leads:  # whoever leads now writes again what was to be written at this step
            self.publisher.drop_step(self._step)
            self._changed(False)

    def take_over(self) -> None:
        """After `elect`: go on where the former leader stopped."""
        manager = self._window.manager
        if not self._begins or manager is None:
            return
        self._begins, missed, self._missed = False, self._missed, []
        step = manager.current_step()
        notices.say(
            f"{manager.replica_id} saves and logs from step {step} on", quiet=step <= 0 or self._window.rank > 0
        )
        self._changed(True)
        with self._window.pause("saving what the former leader may not have saved"):
            for item in missed:
                if item.step == step:
                    self._make(item, mine=False)
                elif item.place is not None:  # the commit of this step has shown that all hold the one before
                    self._tolerate(item, item.place)
        if missed:
            names = ", ".join(item.name for item in missed)
            log.info("%s has made sure of what the former leader may not have written: %s", manager.replica_id, names)

    def step_aside(self) -> None:
        """This run is passed over: the others have written what is of it."""
        self._leads = False
        self.forget()

    def forget(self) -> None:
        """The others' state is taken over: what was to be written was of another one."""
        self._missed = []
        self._kept()
        self.publisher.forget()

    def writing(
        self,
        name: str,
        write: Callable[[], Any],
        place: Callable[[], Any] | None = None,
        discard: Callable[[], Any] = lambda: None,
        *,
        work: Callable[[], Future[object] | None] = lambda: None,
        collective: bool = False,
    ) -> Any:
        """Write if this group leads; otherwise remember how, in case that the leader dies.

        Args:
            name: of what is written.
            write: writes it, over what is there.
            place: puts it in its place, once all replicas are known to hold the step, unless that was done; None:
                `write` does.
            discard: removes what is beside its place.
            work: after `write`, what goes on writing; None: nothing.
            collective: all ranks of the group take part in `write`, so an error ends this replica in any case, unless
                all ranks have got it.

        Returns:
            What `write` returns; None where nothing was written.
        """
        self._settle()
        item = Write(name, write, place, discard, self._step, work, collective and self._window.ranks > 1)
        if self.leads:
            with self._window.pause(f"saving {name}"):
                return self._make(item, mine=True)
        if len(self._missed) < MAX_MISSED:
            self._missed.append(item)
            self._kept()
        return None

    def _settle(self) -> None:
        """In an open step: it stays in its quorum from now on, and who leads there is known."""
        manager = self._window.manager
        if manager is None or not self._window.is_open:
            return
        manager.hooks.stay()
        if self.step_moved:
            self.opened()

    def _kept(self) -> None:
        """What is remembered has changed."""
        if self._window.manager is not None:
            self._window.manager.hooks.keep_steps_in_quorums(bool(self._missed))

    def _make(self, item: Write, *, mine: bool) -> Any:
        """Write, and hold it until it may be in its place. `mine`: no other leader's error went before."""
        self.publisher.drop(item.name)
        written = [None]

        def write() -> None:
            written[0] = item.write()
            if item.place is not None:
                self.publisher.hold(item.name, item.place, item.discard, item.work())

        if mine and not self._alone(self._window.manager):
            write()
        else:
            self._tolerate(item, write)
        return written[0]

    def _alone(self, manager: Manager | None) -> bool:
        """Nobody else may have the state that is in memory here, though the job was meant to have others."""
        if manager is None or not manager.quorum_id or self._window.place.total <= 1:
            return False
        return manager.num_participants() <= 1

    def _tolerate(self, item: Write, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            if not known_to_all_ranks(error) and (item.collective or not isinstance(error, Exception)):
                raise
            self._failed(item.name)
            log.exception(
                "%s could not be written; training goes on, as no other replica may have its state", item.name
            )
