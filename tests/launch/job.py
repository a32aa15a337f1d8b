"""Runs ftrun inside the test's process: real keeper, lighthouse, agents and worker processes; the lines are collected.

Workers of these tests are small scripts without torch, so a test takes tenths of a second. `run` must be called on the
main thread, as ftrun itself runs there; `Job.when` acts on a line from another thread while it runs.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_core.launch.keeper import Keeper
from ft_core.launch.options import parse
from ft_core.launch.remote import base_folder
from ft_core.launch.screen import Screen
from ft_core.launch.supervisor import Supervisor

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator, Mapping, Sequence


class Lines(Screen):
    """Collects what would be shown."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.hooks: list[tuple[re.Pattern[str], Callable[[re.Match[str]], None]]] = []

    def start(self) -> None:
        """No terminal."""

    def _write(self, lines: Sequence[str], err: bool) -> None:
        del err
        for line in lines:
            self.all.append(line)
            for hook in list(self.hooks):
                if (found := hook[0].search(line)) and hook in self.hooks:
                    self.hooks.remove(hook)
                    threading.Thread(target=hook[1], args=(found,), daemon=True).start()


@dataclass
class Job:
    """One run of ftrun and what it printed."""

    supervisor: Supervisor
    lines: Lines
    status: int = -1
    results: list[object] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines.all)

    def count(self, pattern: str) -> int:
        """Lines that contain a match."""
        return sum(bool(re.search(pattern, line)) for line in self.lines.all)

    def when(self, pattern: str, act: Callable[[re.Match[str]], None]) -> None:
        """Call `act(match)` on a thread of its own at the first line that matches."""
        self.lines.hooks.append((re.compile(pattern), act))

    def run(self) -> int:
        """Run to the end. Returns the exit status."""
        self.status = self.supervisor.run()
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
