"""A rank that comes seconds after its siblings, at the start and after a restart: the other group trains meanwhile."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.fsdp.test_faults import LIVENESS_S, ROOT, TOGETHER, digests, end_soon, send
from tests.launch.job import job

if TYPE_CHECKING:
    import pathlib

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
LATE_S = 2 * LIVENESS_S
"""More than the time after which a silent rank is lost."""


@pytest.mark.parametrize(
    ("rank", "place"),
    [(0, "open"), pytest.param(1, "loop", marks=pytest.mark.long), pytest.param(1, "start", marks=pytest.mark.long)],
)
def test_a_rank_comes_late(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, rank: int, place: str) -> None:
    """Its group joins when it is whole. Killed, it is started again, and that rank is late again."""
    end = tmp_path / "end"
    environment = {"FT_LIVENESS_S": str(LIVENESS_S), "BATCHES": "100000", "LATE": f"1 {rank} {place} {LATE_S}"}
    for name, value in {**environment, "PYTHONPATH": str(ROOT), "END": str(end)}.items():
        monkeypatch.setenv(name, value)
    with job(ROOT / "tests/fsdp/loop_job.py", "--replicas", "2", "--nproc-per-replica", "2") as running:
        running.when(r"\] commit \d+ 1 0 ", lambda _: send(running, "1 1", signal.SIGKILL))
        running.when(r"\] commit (\d+) 1 1 ", end_soon(end), after=[r"replica-1:\w+: healed to step"])
        assert running.run() == 0, running.text
    assert running.count(r"\] here ") == 2, running.text
    alone = running.text.index("group trains on)"), running.text.index("] here 1", running.text.index("] here 1") + 1)
    assert len(re.findall(r"\] commit \d+ 0 0 ", running.text[slice(*alone)])) > 5, running.text
    found = digests(running)
    assert [key for key, held in found.items() if len(set(held)) > 1] == []
    assert sum(len(held) == 2 for held in found.values()) >= 2 * TOGETHER, running.text
    ends = re.findall(r"\] done \d (\d) (\d+ \w+)", running.text)
    assert len(ends) == 4, running.text
    assert len(set(ends)) == 2
    assert running.count(r"2 finished after .*, 1 restart$") == 1, running.text
