"""Each story, replayed: the log is what the file says, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.transcript import FOLDER, play

STORIES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_goes_as_it_is_written(path: Path) -> None:
    written = path.read_text()
    assert play(written) == written, f"read the difference, then: python -m {play.__module__}"


def test_every_story_is_there() -> None:
    told = {path.stem for path in STORIES}
    assert told == {
        "join", "kill", "freeze", "late_error", "veto", "heal", "heal_fails", "drain", "two_generals",
        "lighthouse_restart", "groups_of_two_ranks", "a_rank_freezes_alone", "cut_link", "everybody_dies",
    }  # fmt: skip


@pytest.mark.parametrize("command", ["dance a", "until a is", "run"])
def test_a_command_that_is_none_is_refused(command: str) -> None:
    with pytest.raises((AssertionError, TypeError)):
        play(f"> cluster groups=2\n> {command}\n")
