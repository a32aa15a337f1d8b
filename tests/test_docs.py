"""Pages that say the same about the same thing."""

from __future__ import annotations

import pathlib

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGES = ("lightning.md", "accelerate.md", "own-loop.md")
HEADING = "## What every loop has\n"


def test_what_every_loop_has_is_said_in_the_same_words() -> None:
    said = {page: (DOCS / page).read_text().split(HEADING)[1].split("\n## ")[0] for page in PAGES}
    assert len(set(said.values())) == 1
    assert said["lightning.md"].count("\n| ") >= 8
