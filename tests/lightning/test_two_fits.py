"""`fit` twice in one script: each is a run of its own, and who comes back in the second one passes over the first."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.launch.job import job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("kill", "gap_s", "by"),
    [
        ("1 1", 0, "SIGKILL"),
        pytest.param("0 0", 0, "SIGKILL", marks=pytest.mark.long),
        ("0 0", 2, "SIGKILL"),
        ("0 0", 0, "SIGSTOP"),
    ],
)
def test_a_kill_in_the_second_fit_or_in_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, kill: str, gap_s: int, by: str
) -> None:
    """Who comes back has the model as the script built it: nobody may begin the second fit with that one.

    With a gap ftrun learns of the death while the first run has ended and the second has not begun. Who was frozen
    finds itself in the middle of a run that is over.
    """
    options = {"FOLDER": str(tmp_path), "KILL": kill, "GAP_S": str(gap_s), "SIGNAL": by}
    options |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name, value in (options | {"FT_LIVENESS_S": "1", "FT_JOIN_S": "3"}).items():
        monkeypatch.setenv(name, value)
    with job(ROOT / "tests/lightning/two_fits_job.py", "--replicas", "2", "--timeout", "20") as running:
        assert running.run() == 0, running.text
    first, second = (re.findall(rf"replica-(\d)/0\] fit {n} (\w+) (\d+)", running.text) for n in range(2))
    whole = {(digest, steps) for _, digest, steps in first if steps == "4"}
    assert len(whole) == 1, running.text
    passed_over = "0" if by == "SIGKILL" else "2"  # the steps that it had made
    assert [(group, steps) for group, _, steps in first if steps != "4"] == [(kill[-1], passed_over)], running.text
    trained = next(iter(whole))[0]
    assert set(re.findall(r"begins 1 (\w+)", running.text)) == {trained}, running.text
    assert sorted(group for group, _, _ in second) == ["0", "1"], running.text
    assert len({digest for _, digest, _ in second}) == 1
    assert {steps for _, _, steps in second} == {"100"}
    assert running.count("passed over") == 1


def test_a_second_fit_that_fails_everywhere_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The first run has finished; what it trained has died in the second one."""
    options = {"FOLDER": str(tmp_path), "KILL": "9 9", "GAP_S": "0", "FAIL": "1"}
    for name, value in (options | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}).items():
        monkeypatch.setenv(name, value)
    options_of_ftrun = ("--replicas", "2", "--timeout", "20", "--max-restarts", "1", "--success", "min")
    with job(ROOT / "tests/lightning/two_fits_job.py", *options_of_ftrun) as running:
        assert running.run() == 1, running.text
    assert running.count(r"\] fit 0 ") == 2, running.text
    assert running.count("ValueError: a mistake in the second fit") >= 1
    # Which of both depends on whether ftrun's last picture shows the first fit's steps, half a second before.
    at_once = running.count(r"fails at its start in all 2 groups \(ValueError: a mistake in the second fit\)")
    once_more = running.count("every replica has died in a later call of fit than this one")
    assert at_once or once_more, running.text
