"""`strategy="fault_tolerant_fsdp2"`: checkpoints of groups of two ranks in groups of one, and the other way round."""

from __future__ import annotations

import re

import pytest

from tests.launch.job import job
from tests.lightning.fsdp2_job import SAVED_AT, STEPS
from tests.lightning.test_fsdp2 import GROUPS, SCRIPT, environment

pytestmark = [pytest.mark.process, pytest.mark.timeout(150), pytest.mark.usefixtures("forged_workers")]
__all__ = ["environment"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_groups_of_another_size_resume(monkeypatch: pytest.MonkeyPatch, before: int, after: int) -> None:
    """From a folder and from a file: parameters and optimizer state bit for bit, and they train on."""
    held: list[list[tuple[str, str, str]]] = []
    text = ""
    for way, ranks in (("save", before), ("load", after)):
        monkeypatch.setenv("WAY", way)
        with job(SCRIPT, "--replicas", str(GROUPS), "--nproc-per-replica", str(ranks), "--timeout", "20") as running:
            assert running.run() == 0, running.text
        text = running.text
        found = re.findall(r"\] whole (\w+) \d \d (\w+) (\d+)", text)
        assert len(found) == 2 * GROUPS * ranks, text
        held.append(sorted(set(found)))
    assert held[0] == held[1], text
    assert [kind for kind, *_ in held[0]] == ["file", "folder"]
    assert {(digest, steps) for _, digest, steps in held[0]} == {(held[0][0][1], str(SAVED_AT))}
    ends = re.findall(rf"\] done \w+ \d (\d) (\w+) {STEPS} ", text)
    assert len(ends) == 2 * GROUPS * after, text
    assert len(set(ends)) == after, text
