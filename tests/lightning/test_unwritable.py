"""A folder that cannot be written: the leader's loggers fail, then the next one's. Told once, not retried."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import pytest

from tests.lightning.test_launcher import Run

if TYPE_CHECKING:
    from tests.lightning.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
PROGRAM = pathlib.Path(__file__).with_name("unwritable_job.py")


def test_a_job_that_cannot_log_ends_at_its_start(tmp_path: pathlib.Path, forge: Forge) -> None:
    """Below a file, as root may write into any folder."""
    (tmp_path / "file").touch()
    with Run(str(PROGRAM), str(tmp_path / "file" / "logs"), cwd=tmp_path, forge=forge) as run:
        assert run.end() == 1, run.lines
    assert len(run.found(r"\[replica-\d\] started")) == 2, "\n".join(run.lines)
    assert run.found(r"fails at its start in all 2 groups \(NotADirectoryError: .*file/logs'"), "\n".join(run.lines)
