"""--chaos at work: kills, freezes and drains local groups by a reproducible schedule, for users to try their script.

How it works. The schedule (`chaos_schedule.schedule`) starts when all groups train for the first time, so that a slow
import does not move it. An act hits a group that trains; if none may be hit at that moment, it is left out: chaos tests
training, not starting or ending. Used on the main thread only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from ft_core.launch.chaos_schedule import Act, schedule, victim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ft_core.launch.chaos_schedule import ChaosSettings
    from ft_core.launch.group import Group

EXCUSE = "killed by --chaos"
CHAOS = "--chaos"


class Monkey:
    """Performs the acts.

    Args:
        settings: what to do; None: nothing.
        elsewhere: how many groups the job has, if not all are local. Every ftrun draws the same acts then, each over
            all groups, and performs those that hit its own; 0: one local group must be left to train on.
        say: (group name, text) for the user.
        drain: begins to drain a group.
        ordered: (group name, what, why): an act, for the log.
    """

    def __init__(
        self, settings: ChaosSettings | None, elsewhere: int, say: Callable[[str, str], None],
        drain: Callable[[Group, str], None], ordered: Callable[[str, str, str], None],
    ) -> None:  # fmt: skip
        self._acts: Iterator[Act] = schedule(settings) if settings else iter(())
        self._act = next(self._acts, None)
        self._elsewhere = elsewhere
        self._say = say
        self._drain = drain
        self._ordered = ordered
        self._began: float | None = None

    def __repr__(self) -> str:
        return f"Monkey(next={self._act})"

    def patience(self, now: float) -> float:
        """Seconds until the next act."""
        if self._act is None or self._began is None:
            return 60.0
        return self._began + self._act.at_s - now

    def on_time(self, groups: Iterable[Group], over: bool) -> None:
        """Do what is due. `over`: training has ended, or is being stopped."""
        groups = list(groups)
        now = time.monotonic()
        for group in groups:
            if group.frozen_until and now >= group.frozen_until:
                self.thaw(group)
        if self._act is not None and self._began is None and groups and all(g.training for g in groups):
            self._began = now
        while self._act is not None and self._began is not None and now >= self._began + self._act.at_s:
            if not over and not any(group.ended == "finished" for group in groups):
                self._perform(self._act, groups)
            self._act = next(self._acts, None)

    def thaw(self, group: Group) -> None:
        """End a freeze."""
        if group.frozen_until:
            group.frozen_until = 0.0
            self._ordered(group.name, "thaw", CHAOS)
            group.agent.send(signal.SIGCONT)

    def _perform(self, act: Act, groups: list[Group]) -> None:
        able = {
            group.name: group for group in groups
            if group.training and not (group.ended or group.draining or group.frozen_until) and group.agent.pids()
        }  # fmt: skip
        if self._elsewhere:
            number = int(act.pick * self._elsewhere)
            group = next((g for g in able.values() if g.number == number), None)
        else:
            group = able[victim(act, list(able))] if len(able) > 1 else None
        if group is None:
            return
        if act.kind != "drain":  # which is an order like any other
            self._ordered(group.name, {"stop": "freeze"}.get(act.kind, act.kind), CHAOS)
        match act.kind:
            case "kill":
                pids = sorted(group.agent.pids().values())
                pid = pids[int(act.pick * 997) % len(pids)]
                group.training = False
                group.agent.excuse(EXCUSE)
                self._say(group.name, f"chaos: kill -9 of pid {pid}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            case "stop":
                group.frozen_until = time.monotonic() + act.hold_s
                self._say(group.name, f"chaos: frozen for {act.hold_s:.1f} s")
                group.agent.send(signal.SIGSTOP)
            case "drain":
                group.again = True
                self._say(group.name, "chaos: drained, then started again")
                self._drain(group, CHAOS)
