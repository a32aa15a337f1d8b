"""The benchmarks' trainer notes what a recovery consists of: it looks inside the Manager, which may change under it."""

from __future__ import annotations

import pytest

from benchmarks.common import Job, Options


@pytest.mark.long  # of the benchmarks alone: what a recovery is, the tests of tests/chaos show
@pytest.mark.process
def test_the_trainer_notes_every_stage_of_a_recovery() -> None:
    with Job("test", Options(runs=1, kills=1, keep=False)) as job:
        job.start_lighthouse()
        survivor, victim = job.start_trainer(0), job.start_trainer(1)
        job.wait_settled(2, steps=5)
        at, _ = job.kill(victim)
        end = job.wait_went_on(at, participants=1, steps=5)
        stages = {"broken", "aborted", "asked", "answered", "configuring", "configured"}
        assert {event.kind for event in survivor.between(at, end, *stages)} == stages
        (digest,) = job.finish(ahead=5)
        assert digest
