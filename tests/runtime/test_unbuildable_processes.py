"""A newcomer that cannot build its process group does not stop those who train, and they are told who it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.chaos.cluster import Cluster

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]
STEPS = 100
"""More than the others could make in the pauses between one quorum after the other that breaks at once."""
HERE = "127.0.0.1"
NOT_HERE = "203.0.113.7"
"""Of a net that is for documentation only: no machine has it."""


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"FT_HOSTNAME": NOT_HERE}, f"Gloo cannot listen there: Cannot resolve {NOT_HERE}"),
        pytest.param({"FILES": 0}, "Too many open files", marks=pytest.mark.long),
    ],
    ids=["host name", "open files"],
)
def test_survivors_train_on(forge: Forge, broken: dict[str, object], complaint: str) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    with Cluster(forge, STEP_MS=5) as cluster:
        survivors = [cluster.start(other) for other in "ab"]
        for survivor in survivors:
            survivor.wait_step(20)
        bad = cluster.start("z", LOG=1, FT_INSECURE=1, MASTER_ADDR=HERE, MASTER_PORT=store.port, **broken)
        bad.wait_for(lambda: any("is held back for" in line for line in bad.errors), "was told that it is held back")
        began = max(survivor.step() for survivor in survivors)
        for survivor in survivors:
            survivor.wait_step(began + STEPS)
        told = next(line for line in bad.errors if "is held back for" in line)
        assert "z:" in told
        assert "could not build its process group" in told
        assert complaint in told
        cluster.trainers.pop("z")
        bad.popen.kill()
        cluster.wait_ends()
