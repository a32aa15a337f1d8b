"""A pair of lighthouses in processes: the one that serves is killed, frozen, comes back; replicas die beside it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import WAIT_S, Cluster, Process

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]


class Pair(Cluster):
    """A cluster with two lighthouses, each of which knows the other."""

    lighthouses = 2

    def __init__(self, forge: Forge, **env: object) -> None:
        super().__init__(forge, **env)
        self.env["FT_LIGHTHOUSE"] = ",".join(f"{self.host}:{port}" for port in self.ports)
        self.pair: list[Process] = []

    def __enter__(self) -> Pair:
        self.pair = [self.begin(0), self.begin(1)]
        self.pair[0].wait_for(lambda: self.serving() is not None, "found out who serves")
        return self

    def begin(self, index: int) -> Process:
        """Start one of the two."""
        other = f"{self.host}:{self.ports[1 - index]}"
        return self.lighthouse_at(self.ports[index], f"lighthouse{index}", "--peer", other)

    def serving(self) -> int | None:
        """The one that serves, by what they have logged; None: not known yet."""
        last = [
            next((line for line in reversed(one.errors) if "serves now" in line or "stands by" in line), "")
            for one in self.pair
        ]
        serves = [index for index, line in enumerate(last) if "serves now" in line and self.lives(index)]
        return serves[0] if len(serves) == 1 else None

    def lives(self, index: int) -> bool:
        """Whether its process lives."""
        return self.pair[index].popen.poll() is None

    def kill_serving(self) -> int:
        """SIGKILL the one that serves; returns which it was."""
        index = self.serving()
        assert index is not None
        self.pair[index].signal(signal.SIGKILL)
        self.pair[index].popen.wait(WAIT_S)
        return index


def test_the_standby_takes_over_and_a_member_is_lost_and_comes_back(forge: Forge) -> None:
    with Pair(forge, FT_NUM_REPLICA_GROUPS=3, LOG=1) as pair:
        a, b, _ = (pair.start(name) for name in "abc")
        a.wait_step(10)
        killed = pair.kill_serving()
        other = pair.pair[1 - killed]
        other.wait_for(lambda: any("adopted the running quorum" in line for line in other.errors), "took over")
        before = a.step()
        pair.kill("c")
        for one in (a, b):
            one.wait_step(before + 30)
        pair.start("c").wait_step(before + 30)
        pair.pair[killed] = pair.begin(killed)  # the first is back, and stands by
        back = pair.pair[killed]
        back.wait_for(lambda: any("stands by" in line for line in back.errors), "stands by")
        step = a.step()
        pair.kill_serving()
        pair.kill("b")
        a.wait_step(step + 60)
        pair.start("b").wait_step(step + 30)
        assert len(pair.wait_ends()) == 1


def test_half_of_the_last_quorum_goes_on_while_both_lighthouses_live(forge: Forge) -> None:
    """Two of three die at once: the other lighthouse has to record what is left, and does."""
    with Pair(forge, FT_NUM_REPLICA_GROUPS=3, LOG=1) as pair:
        a, _, _ = (pair.start(name) for name in "abc")
        a.wait_step(10)
        pair.kill("b")
        pair.kill("c")
        a.wait_step(a.step() + 60)
        pair.start("b").wait_step(a.step())
        assert len(pair.wait_ends()) == 1


def test_what_may_train_on_elsewhere_is_waited_for_in_words(forge: Forge) -> None:
    """The serving lighthouse and two of three replicas die at once: the third may not know whether they live."""
    with Pair(forge, FT_NUM_REPLICA_GROUPS=3, LOG=1) as pair:
        a, _, c = (pair.start(name) for name in "abc")
        a.wait_step(10)
        killed = pair.kill_serving()
        pair.kill("a")
        pair.kill("b")
        c.wait_for(lambda: any("cannot be reached" in line for line in c.errors), "said what it waits for")
        said = next(line for line in c.errors if "cannot be reached" in line)
        assert f"{pair.host}:{pair.ports[killed]}" in said, said
        at = c.step()
        pair.start("a"), pair.start("b")
        pair.pair[killed] = pair.begin(killed)
        assert c.step() == at, "it has gone on by itself"
