"""A replica on a GPU is killed, and its successor receives state from the survivor's device memory into its own."""

from __future__ import annotations

import pathlib

import pytest

from tests.gpu.pair import MARKS, Child, Pair

pytestmark = MARKS
MIN_REPLICAS = 1
JOB = str(pathlib.Path(__file__).with_name("heal_job.py"))


def trained(child: Child, participants: int) -> int:
    """The next step that so many made."""
    line = child.wait_for(
        lambda text: text.startswith("step ") and text.split()[2] == str(participants), f"a step of {participants}"
    )
    return int(line.split()[1])


@pytest.mark.parametrize(("backend", "transport"), [("nccl", "http"), ("nccl", "pg"), ("baby-nccl", "http")])
def test_a_killed_replica_heals_from_device_to_device(lighthouse: str, backend: str, transport: str) -> None:
    with Pair(JOB, lighthouse, FT_BACKEND=backend, FT_TRANSPORT=transport) as pair:
        survivor, victim = pair.children
        for child in pair.children:
            trained(child, 2)
        victim.kill()
        trained(survivor, 1)
        again = pair.start(1)
        healed = again.wait_for(lambda text: text.startswith("healed"), "that it received state")
        assert healed == f"healed {survivor_device()}"
        end = trained(again, 2) + 10
        for child in (survivor, again):
            child.tell(str(end))
        digests = {child.wait_for(lambda text: text.startswith("digest"), "its digest") for child in (survivor, again)}
        assert len(digests) == 1
        for child in (survivor, again):
            assert child.process.wait(60) == 0, child.lines[-20:]


def survivor_device() -> str:
    return "cuda:0"
