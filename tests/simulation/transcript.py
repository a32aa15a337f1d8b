"""Transcripts: a story in a text file, its commands, and the log that they must lead to. A person can read it.

How it works. A file holds comments (`#`), commands (`>`) and under each command the lines logged since the one before.
`play` runs the commands in a simulated cluster whose dice always show the same, so that nothing is left to chance but
what a command says; it returns the file as it should be. `python -m tests.simulation.transcript` writes the files anew:
read the difference before it is committed.

A log line holds the simulated time (s), who, and what happened: what a process did, or an event that reached a rank's
machine, the actions that the machine answered with, and the phase it is in then. Quorums are called Q1, Q2, ... in the
order in which they formed.

Commands:

    cluster [FIELD=VALUE ...] [GROUP ...]
                                    a lighthouse and these groups (all) start; fields of `Config`
    run SECONDS                     let time pass
    train STEPS                     until every running group has committed so many more steps
    until RANK is PHASE             to the event that leads a rank there
    kill | freeze | thaw | start | drain GROUP, freeze | thaw GROUP/RANK
    fault KIND GROUP                what the script of a group, or its heal, runs into next: late, soft, heal, ...
    clear GROUP                     what was to go wrong there does not any more
    cut | mend GROUP GROUP          nothing passes between two groups
    cut | mend GROUP lighthouse
    stop | start lighthouse
    dice VALUE                      what all dice show from now on (0 to 1; 0.5 at first)
"""

from __future__ import annotations

import random
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.heal_plan import Plan
from ft_core.protocol.rank.phases import Phase
from ft_core.protocol.types import VOID, Ask, Quorum, Version
from tests.simulation.config import Config
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.rank.actions import Actions
    from tests.simulation.group import Group
    from tests.simulation.rank import Rank

FOLDER = Path(__file__).parent / "transcripts"
NAMES = "abcdefgh"
"""Of groups."""
LIMIT_S = 60.0
"""A command that waits longer than this (simulated) fails."""
UNSAID = (on.Tick, on.NoQuorumYet)
"""Events that are no news: a timer, and a reason that the lighthouse's own line shows."""


KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": "True".__eq__}
"""How a field's value is read."""


class Dice(random.Random):
    """Dice that always show the same, so that a transcript has no chance in it."""

    value = 0.5

    def random(self) -> float:
        """The value that a command has set."""
        return self.value

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """So far into the range as the value says."""
        low, high = (0, start) if stop is None else (start, stop)
        return low + step * int(self.value * ((high - low) // step))


class Player:
    """Plays the commands of one file."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._dice = Dice(1)
        self._quorums: dict[int, str] = {}
        self._written = 0
        """How much of the world's story is in the log."""

    @property
    def world(self) -> World:
        """The cluster that the first command started."""
        assert self._world is not None, "begin with: cluster"
        return self._world

    def do(self, command: str) -> list[str]:
        """Perform one command; the lines that it led to. Raises AssertionError for a command that is none."""
        verb, *words = command.split()
        act: Callable[..., None] | None = getattr(self, f"_do_{verb}", None)
        assert act is not None, f"no such command: {command}"
        act(*words)
        story = self.world.story
        new, self._written = story[self._written :], len(story)
        return [f"{at:8.3f}  {self._plain(text % args if args else text)}" for at, text, args in new]

    # ------------------------------------------------------------ commands

    def _do_cluster(self, *settings: str) -> None:
        values: dict[str, Any] = {"timeout_s": 5.0}
        kinds = {field.name: str(field.type) for field in fields(Config)}
        for setting in settings:
            name, _, text = setting.partition("=")
            if not text:
                continue
            values[name] = KINDS[kinds[name]](text)
        self._world = world = World(1, Config(**values))
        world.rng, world.watch = self._dice, self._watch
        world.start_lighthouse()
        named = [setting for setting in settings if "=" not in setting]
        for name in named or NAMES[: world.config.groups]:
            world.spawn(NAMES.index(name))

    def _do_run(self, seconds: str) -> None:
        self.world.until(self.world.now + float(seconds))

    def _do_train(self, steps: str) -> None:
        running = [g for g in self.world.active.values() if not g.frozen]
        goal = {group.rid: group.commits + int(steps) for group in running}
        self._wait(lambda: all(g.commits >= goal[g.rid] for g in self.world.active.values() if g.rid in goal))

    def _do_until(self, name: str, _: str, phase: str) -> None:
        self._wait(lambda: bool(self._group(name[0]).ranks) and self._rank(name).machine.phase is Phase(phase))

    def _wait(self, ready: Callable[[], bool]) -> None:
        limit = self.world.now + LIMIT_S
        while not ready():
            assert self.world.step(limit), f"not within {LIMIT_S:g} s"

    def _do_kill(self, name: str) -> None:
        self._group(name).die("is killed")

    def _do_freeze(self, name: str) -> None:
        if "/" in name:
            self._rank(name).stop()
        else:
            self._group(name).freeze()

    def _do_thaw(self, name: str) -> None:
        if "/" in name:
            self._rank(name).resume()
        else:
            self._group(name).thaw()

    def _do_start(self, name: str) -> None:
        if name == "lighthouse":
            self.world.start_lighthouse()
        else:
            self.world.spawn(NAMES.index(name))

    def _do_stop(self, name: str) -> None:
        assert name == "lighthouse", name
        self.world.stop_lighthouse()

    def _do_drain(self, name: str) -> None:
        group = self._group(name)
        self.world.say("%s is asked to drain", group.rid)
        group.leaving = True
        for rank in group.ranks:
            rank.dispatch(on.LeaveWanted())

    def _do_fault(self, kind: str, name: str) -> None:
        self._group(name).injected.add(kind)

    def _do_clear(self, name: str) -> None:
        self._group(name).injected.clear()

    def _do_cut(self, one: str, other: str) -> None:
        if other == "lighthouse":
            self._group(one).set_cut(True)
        else:
            key = frozenset((self._group(one).number, self._group(other).number))
            self.world.links[key] = key

    def _do_mend(self, one: str, other: str) -> None:
        if other == "lighthouse":
            self._group(one).set_cut(False)
        else:
            del self.world.links[frozenset((self._group(one).number, self._group(other).number))]
            self.world.recheck()

    def _do_dice(self, value: str) -> None:
        self._dice.value = float(value)

    def _group(self, name: str) -> Group:
        return next(group for group in self.world.active.values() if group.name == name)

    def _rank(self, name: str) -> Rank:
        group, _, index = name.partition("/")
        return self._group(group).ranks[int(index or 0)]

    # ------------------------------------------------------------ the log

    def _watch(self, rank: Rank, event: on.Event, before: Phase, actions: Actions) -> None:
        """An event has reached a machine."""
        if isinstance(event, UNSAID) and not actions:
            return
        done = ", ".join(self._words(action) for action in actions if type(action).__name__ != "Report")
        now = rank.machine.phase
        went = f" [{now.value}]" if now is not before else ""
        self.world.say("%s", f"{rank.name} <- {self._words(event)}{went}" + (f": {done}" if done else ""))

    def _words(self, value: object) -> str:
        assert is_dataclass(value)
        parts = (self._part(f.name, getattr(value, f.name)) for f in fields(value))
        return " ".join((type(value).__name__, *(part for part in parts if part)))

    def _part(self, name: str, value: object) -> str:
        if isinstance(value, Quorum | Plan):
            return self._quorum(value.quorum_id)
        if name == "quorum_id" and isinstance(value, int) and value:
            return self._quorum(value)
        if value in (None, "", (), False, 0) or isinstance(value, Ask) or is_dataclass(value):
            return str(value) if isinstance(value, Version) and value != VOID else ""
        if isinstance(value, tuple):
            return f"{name}={','.join(map(str, value))}"
        return str(value) if isinstance(value, str | Exception) else f"{name}={value}"

    def _quorum(self, quorum_id: int) -> str:
        return self._quorums.setdefault(quorum_id, f"Q{len(self._quorums) + 1}") if quorum_id > 0 else "no quorum"

    def _plain(self, text: str) -> str:
        return re.sub(r"0x([0-9a-f]+)", lambda m: self._quorum(int(m[1], 16)), text)


def play(text: str) -> str:
    """The file with the log that its commands lead to."""
    player, out = Player(), []
    for line in text.splitlines():
        if line.startswith(">"):
            out += [line, *(f"  {said}".rstrip() for said in player.do(line[1:].strip()))]
        elif not line.startswith(" "):
            out.append(line)
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(play(path.read_text()))
