"""ftrun says when its groups train each by itself: their script never goes to the lighthouse."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import pytest

from tests.launch.job import job

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.process
ROOT = pathlib.Path(__file__).resolve().parents[2]
UNTIL_TOLD = "import time\nwhile not (folder / 'end').exists(): time.sleep(0.01)\n"
JOINS = (
    "import sys\n"
    f"sys.path.insert(0, {str(ROOT)!r})\n"
    "from tests.control.recorder import Replica\n"
    "one = Replica(os.environ['FT_LIGHTHOUSE'], 'replica-' + os.environ['FT_REPLICA_GROUP'] + ':x',\n"
    "              token=os.environ['FT_TOKEN'])\n"
    "try:\n"
    "    one.ask(room=sys.argv[1] if sys.argv[1:] else None)\n"
    "    one.answer()\n"
    "finally:\n"  # else an error's traceback is printed, and the lease's threads keep the process
    "    one.close()\n"
)
"""A worker that is in a quorum, for a moment."""


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """Write a worker script."""

    def write(text: str) -> pathlib.Path:
        path = tmp_path / "worker.py"
        path.write_text(f"import os, pathlib\nfolder = pathlib.Path({str(tmp_path)!r})\n{text}")
        return path

    return write


def test_it_is_told_at_the_end_once_for_all_groups(write: Callable[[str], pathlib.Path]) -> None:
    with job(write(""), "--replicas", "2") as run:
        assert run.run() == 0, run.text
    assert run.count(r"has ended and never reached the lighthouse: it trains by itself.*FaultTolerantAccelerator") == 1


def test_it_is_told_while_a_script_runs(
    write: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_core.launch.apart.APART_S", 0.2)
    with job(write(UNTIL_TOLD), "--replicas", "2") as run:
        run.when("has not reached the lighthouse .* s after its start", lambda _: (tmp_path / "end").touch())
        assert run.run() == 0, run.text
    assert run.count("the lighthouse .*it trains by itself") == 1


def test_one_group_alone_may_do_without(write: Callable[[str], pathlib.Path]) -> None:
    with job(write(""), "--replicas", "1") as run:
        assert run.run() == 0, run.text
    assert run.count("reached the lighthouse") == 0


@pytest.mark.parametrize("room", ["", " a-room-of-the-scripts"])
def test_groups_that_met_are_not_told_of(write: Callable[[str], pathlib.Path], room: str) -> None:
    """However short they were there, and in whatever room."""
    with job(f"{write(JOINS)}{room}", "--replicas", "2") as run:
        assert run.run() == 0, run.text
    assert run.count("reached the lighthouse") == 0
