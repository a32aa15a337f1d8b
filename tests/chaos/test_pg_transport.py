"""State that travels over process groups, in whole jobs: newcomers heal, and donors that are killed amid it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster, gap_s

if TYPE_CHECKING:
    from pathlib import Path

    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
MB = 64


def test_a_killed_replica_heals_over_process_groups(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=3, FT_TRANSPORT="pg", INERT_MB=MB, BN=1, LOG=1) as cluster:
        a, _, _ = (cluster.start(name) for name in "abc")
        a.wait_step(20)
        cluster.kill("c")
        a.wait_step(a.step() + 20)
        back = cluster.start("c")
        back.wait_step(1)
        assert back.commits()[0][2] == 3  # it contributes from its first step on
        assert len(cluster.wait_ends()) == 1
        assert {row[2] for row in a.commits()} == {2, 3}
        # From both, unless a pair meets when the other donor has given all (tests/checkpointing/pg has that).
        received = [line for line in back.errors if re.search(r"healed to step .* from [12] donors", line)]
        assert received, "\n".join(back.errors[-20:])
        assert not any("prefetched" in line for line in back.errors)


@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.long), 7])
def test_a_donor_killed_while_it_gives(forge: Forge, nth: int, tmp_path: Path) -> None:
    """The newcomer heals from the other one, in this quorum or the next; the other trains on."""
    with Cluster(forge, FT_TRANSPORT="pg", INERT_MB=MB, LOG=1) as cluster:
        holds_back = tmp_path / "holds back"
        a = cluster.start("a", HOLDS_BACK=holds_back)  # alone: who is to die gives nothing before the newcomer comes
        a.wait_step(20)
        dying = cluster.start("b", DIES_GIVING=f"{nth}:{holds_back}")
        dying.wait_step(a.step() + 20)
        at = time.monotonic()
        holds_back.touch()  # else it could give all before the pair of the two others has met
        newcomer = cluster.start("c")
        dying.popen.wait(45)
        assert any(line == "dies giving" for _, line in dying.lines)
        del cluster.trainers["b"]
        newcomer.wait_step(1)
        assert newcomer.commits()[0][2] == 2
        assert len(cluster.wait_ends()) == 1
        assert gap_s(a, at) < 3.0, "the other was held up"
