"""`strategy="fault_tolerant_fsdp2"`: a rank is killed while all ranks of the leading group write a checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ft_lightning._compat.model_parallel import METADATA
from tests.launch.job import job
from tests.lightning.test_fsdp2 import OPTIONS, RANKS, SCRIPT, STEPS_LEFT, environment, shards

if TYPE_CHECKING:
    import pathlib

pytestmark = [pytest.mark.process, pytest.mark.timeout(150), pytest.mark.usefixtures("forged_workers")]
__all__ = ["environment"]
EVERY, DIES = 3, 6
"""Steps that are saved; that in whose checkpoint it dies."""


@pytest.mark.parametrize(("rank", "part"), [(0, "index"), pytest.param(1, "data", marks=pytest.mark.long)])
def test_a_rank_is_killed_while_it_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, rank: int, part: str
) -> None:
    """Training goes on, what is half written is never in its place, and the other group writes that step's instead."""
    monkeypatch.setenv("WAY", "dies")
    monkeypatch.setenv("DIES_AT", f"{rank} {part} {DIES}")
    half: list[bool] = []

    def look(_: re.Match[str]) -> None:
        folder = tmp_path / f"step={DIES}.ckpt"
        half.append(folder.exists() and not all((folder / name).exists() for name in METADATA))

    def end(on: re.Match[str]) -> None:
        (tmp_path / "end.tmp").write_text(str((int(on[1]) + STEPS_LEFT) // EVERY * EVERY))
        (tmp_path / "end.tmp").rename(tmp_path / "end")

    with job(SCRIPT, *OPTIONS) as running:
        for line in (r"\] dies ", r" lost: ", rf"\] on \d 0 \d+ 1 {DIES}$"):
            running.when(line, look)
        running.when(r"/0\] on \d 0 \d+ 2 (\d+)", end, after=[r"\] dies ", r" back: "])
        assert running.run() == 0, running.text
    there = {"index": ".metadata __0_0.distcp __1_0.distcp", "data": "__0_0.distcp __1_0.distcp"}[part]
    assert running.count(rf"\] dies \d {rank} {there}$") == 1, running.text
    assert half == [False] * 3, running.text
    assert running.count(rf"has made sure of what the former leader may not have written: .*/step={DIES}.ckpt") >= 1
    saved = sorted(path.name for path in tmp_path.iterdir() if path.name not in ("end", "died"))
    assert len(saved) == 2, saved  # nothing is left beside them
    for name in saved:
        assert len(list((tmp_path / name).iterdir())) == RANKS + 2
    digests = [[line.split()[0] for _, line in shards(running, what)] for what in ("kill", "resumed")]
    assert digests[0] == digests[1], running.text
