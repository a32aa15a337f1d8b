"""ft-report on a real run: ftrun with --chaos, real training, and what the report says of it."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING

import pytest

from ft_core.events.schema import check
from ft_core.report.account import account
from ft_core.report.cli import HTML, PNG, main
from ft_core.report.reader import read
from ft_core.report.story import State
from tests.launch.job import job

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.report.account import Account

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[[int], None]:
    """Lets all workers train to a step and end there."""
    path = tmp_path / "steps"
    for name, value in {"STEPS_FILE": str(path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)

    def end(step: int) -> None:
        partial = path.with_suffix(".tmp")
        partial.write_text(str(step))
        partial.rename(path)

    return end


@pytest.fixture
def ran(end: Callable[[int], None], tmp_path: pathlib.Path, forged_workers: None) -> tuple[pathlib.Path, str]:
    """A run of three groups, of which --chaos kills one; its events, and what it printed."""
    folder = tmp_path / "events"

    def back(found: re.Match[str]) -> None:
        end(int(found[1]) + 30)

    options = ("--replicas", "3", "--events", str(folder), "--chaos", "kill=1s,seed=2")
    with job(ROOT / "tests/chaos/worker.py", *options) as running:
        killed = [r"chaos: kill -9", r"started \(pid \d+\)"]
        running.when(r"\] commit (\d+) 3", back, after=killed)
        assert running.run() == 0, running.text
        return folder, running.text


def test_a_chaos_run_is_told_as_it_was(ran: tuple[pathlib.Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, printed = ran
    found = read([str(folder)])
    assert found.problems == []
    assert [check(event) for log in found.logs for event in log.events if check(event)] == []
    result = account(found)
    kills = len(re.findall("chaos: kill -9", printed))
    assert [story.name for story in result.stories] == ["replica-0", "replica-1", "replica-2"]
    check_failures(result, kills)
    starts = len(re.findall(r"\] started", printed))
    assert sum(log.role == "replica" for log in found.logs) == starts
    assert result.heals >= 1
    assert result.seconds[State.RESTARTING] > 0
    assert result.total_s == pytest.approx(sum(result.seconds.values()))
    assert 0 < (result.share or 0) < 1
    assert result.steps == max(int(n) for n in re.findall(r"\] commit (\d+) ", printed))
    assert main([str(folder)]) == 0
    assert "killed by --chaos" in capsys.readouterr().out
    assert (folder / HTML).stat().st_size > 0
    assert (folder / PNG).stat().st_size > 0


def check_failures(result: Account, kills: int) -> None:
    killed = [failure for failure in result.failures if failure.what == "killed"]
    assert len(killed) == kills >= 1
    assert all(failure.cause.startswith("killed by --chaos: rank 0 (pid ") for failure in killed)
    assert killed[0].back_s is not None
    assert killed[0].noticed_s is not None
    assert killed[0].noticed_s < 1.0
    assert {gap.cause for gap in result.gaps} >= {"member lost"}
