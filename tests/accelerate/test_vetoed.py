"""A step that all skip because one group reports an error, in a real job without any logging configured: one line."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.accelerate.processes import ROOT
from tests.launch.job import job

pytestmark = [pytest.mark.process, pytest.mark.timeout(60), pytest.mark.usefixtures("forged_workers")]
PROGRAM = pathlib.Path(__file__).with_name("vetoed_job.py")


@pytest.mark.parametrize("level", ["", "warning"])
def test_one_line_says_so(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FT_LOG", level)
    with job(PROGRAM, "--replicas", "2") as running:
        assert running.run() == 0, running.text
    assert running.count(r"replica-\d/0\] skipped 1$") == 2, running.text
    said = [line for line in running.lines.all if re.search("vetoed:|skipped by all|not committed", line)]
    assert len(said) == (not level), running.text
    line = r"replica-0/0\] \S+ vetoed: the step after 2 was skipped by all \(1 of 2 members failed in this step\)$"
    assert all(re.search(line, one) for one in said), said
