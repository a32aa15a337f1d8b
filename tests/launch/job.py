"""Runs ftrun inside the test's process: real keeper, lighthouse, agents and worker processes; the lines are collected.

Workers of these tests are small scripts without torch, so a test takes tenths of a second. `run` must be called on the
main thread, as ftrun itself runs there; `Job.when` acts on a line from another thread while it runs. What such an act
raises kills the run, which would wait for what the act was to do, and comes out of `run`.
"""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_core.launch.control_socket import base_folder
from ft_core.launch.options import parse
from ft_core.launch.output.status_screen import Screen
from ft_core.launch.processes.keeper import Keeper
from ft_core.launch.supervisor import Supervisor

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator, Mapping, Sequence

ACT_S = 20.0
"""How long an act may go on when the run is over."""


@dataclass(eq=False)
class Hook:
    """What to do when lines that match have come, one after the other."""

    awaited: list[re.Pattern[str]]
    act: Callable[[re.Match[str]], None]

    def see(self, line: str) -> re.Match[str] | None:
        """The match, if this line was the last one to wait for."""
        found = self.awaited[0].search(line) if self.awaited else None
        if found is not None:
            del self.awaited[0]
        return None if self.awaited else found


class Lines(Screen):
    """Collects what would be shown."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.hooks: list[Hook] = []
        self.order = threading.Lock()
        """Lines come from several threads."""
        self.acts: list[threading.Thread] = []

    def start(self) -> None:
        """No terminal."""

    def _write(self, lines: Sequence[str], err: bool) -> None:
        del err
        with self.order:
            for line in lines:
                self.all.append(line)
                for hook in list(self.hooks):
                    if found := hook.see(line):
                        self.acts.append(threading.Thread(target=hook.act, args=(found,), daemon=True))
                        self.acts[-1].start()


@dataclass
class Job:
    """One run of ftrun and what it printed."""

    supervisor: Supervisor
    lines: Lines
    status: int = -1
    errors: list[BaseException] = field(default_factory=list)
    """Raised by acts."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines.all)

    def count(self, pattern: str) -> int:
        """Lines that contain a match."""
        return sum(bool(re.search(pattern, line)) for line in self.lines.all)

    def when(self, pattern: str, act: Callable[[re.Match[str]], None], *, after: Sequence[str] = ()) -> None:
        """Call `act(match)` on a thread of its own at the first line that matches; only after lines that match `after`.

        An act that waits for a line by another `when` may come too late for it: that is what `after` is for.
        """

        def guarded(found: re.Match[str]) -> None:
            try:
                act(found)
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self.errors.append(error)
                for _ in range(2):  # the second one kills
                    self.supervisor._put("signal", signal.SIGINT)

        self.lines.hooks.append(Hook([re.compile(one) for one in (*after, pattern)], guarded))

    def run(self) -> int:
        """Run to the end, acts included. Returns the exit status. Raises what an act raised."""
        self.status = self.supervisor.run()
        for thread in list(self.lines.acts):
            thread.join(ACT_S)
        if self.errors:
            raise self.errors[0]
        return self.status


@contextlib.contextmanager
def job(script: pathlib.Path | str, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Job]:
    """A job ready to run; whatever happens, nothing is left of it afterwards."""
    spec = parse([*options, *str(script).split()], env or {})
    folder = tempfile.mkdtemp(prefix=f"{spec.run_id}.", dir=base_folder())
    keeper = Keeper(folder)
    lines = Lines()
    try:
        yield Job(Supervisor(spec, keeper, folder, lines), lines)
    finally:
        keeper.close()
