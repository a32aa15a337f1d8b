"""Functions that workers of `test_library` run."""

from __future__ import annotations

import os
from pathlib import Path


def rank_and_more(word: str) -> tuple[str, int, str]:
    return word, int(os.environ["RANK"]), os.environ["FT_REPLICA_ID"]


def nothing() -> None:
    """Returns nothing."""


def fails(rank: int) -> int:
    if int(os.environ["RANK"]) == rank:
        raise KeyError("lost")
    return rank


def dies() -> None:
    os._exit(7)


def succeeds_the_second_time(folder: str) -> str:
    first = Path(folder) / "first"
    if first.exists():
        return "again"
    first.touch()
    raise OSError("not yet")


class Unsendable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("no")


def fails_with_what_cannot_be_sent() -> None:
    raise Unsendable("secret")
