"""R19: a death that finds an attempt open, and nothing of it launched. Real Managers, Gloo groups and connections."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.protocol.rank.phases import Phase
from tests.runtime.harness import Cluster, Replica, both, crash
from tests.runtime.interleavings import moves, once_launched, together, until_broken

if TYPE_CHECKING:
    from tests.runtime.harness import Action


def own_collective(replica: Replica) -> None:
    replica.manager.allreduce(torch.ones(2)).wait()


@pytest.mark.parametrize("point", ["started", "forward"])
@pytest.mark.parametrize("use_async", [True, False])
def test_the_attempt_goes_on_in_the_next_quorum(cluster: Cluster, point: str, use_async: bool) -> None:
    here, options = together(3), dict[str, Any](use_async_quorum=use_async)
    survivors = [Replica(i, at={(3, point): moves(here)}, **options) for i in range(2)]
    cluster.run(*survivors, Replica(2, at={(3, point): both(here, crash)}, **options))
    cluster.check(steps=6, survivors=2)
    cluster.check_numbers()
    assert [r.vetoes for r in survivors] == [[], []]


def test_only_who_has_launched_something_computes_again(cluster: Cluster) -> None:
    here = together(2)
    slow, quick = Replica(0, at={(3, "forward"): moves(here)}), Replica(1)

    cluster.run(slow, quick, Replica(2, at={(3, "forward"): both(here, once_launched([quick], 3, crash))}))
    cluster.check(steps=6, survivors=2)
    cluster.check_numbers()
    assert (slow.vetoes, quick.vetoes) == ([], [3])


def test_a_death_after_the_fence_costs_nothing(cluster: Cluster) -> None:
    """The step is settled first; the next one asks, also where nobody pushes anything."""

    def until_it_must_ask(replica: Replica) -> None:
        replica.cluster.lighthouse.wait_for(lambda: bool(replica.manager._runtime.rank.ask_next))

    here = together(3)
    survivors = [Replica(i, at={(3, "backward"): both(here, until_it_must_ask)}) for i in range(2)]
    cluster.run(*survivors, Replica(2, at={(3, "backward"): both(here, crash)}))
    cluster.check(steps=6, survivors=2)
    assert [r.vetoes for r in survivors] == [[], []]


def test_a_second_death_meanwhile(cluster: Cluster) -> None:
    """The attempt that moved once is the first of its quorum: it is lost, and nothing else."""
    here, there = together(4), together(3)
    survivors = [Replica(i, at={(3, "forward"): both(moves(here), there, until_broken)}) for i in range(2)]
    late = Replica(2, at={(3, "forward"): both(moves(here), there, crash)})
    cluster.run(*survivors, late, Replica(3, at={(3, "forward"): both(here, crash)}))
    cluster.check(steps=6, survivors=2)
    cluster.check_numbers()
    assert [r.vetoes for r in survivors] == [[3], [3]]


@pytest.mark.parametrize(
    "told",
    [
        lambda replica: replica.manager.num_participants(),
        lambda replica: replica.manager.participating_rank(),
        lambda replica: replica.manager.members,
        lambda replica: replica.manager.quorum_id,
    ],
)
def test_who_was_told_who_takes_part_keeps_it(cluster: Cluster, told: Action) -> None:
    here = together(3)
    survivors = [Replica(i, at={(3, "started"): both(told, here, until_broken)}) for i in range(2)]
    cluster.run(*survivors, Replica(2, at={(3, "started"): both(here, crash)}))
    cluster.check(steps=6, survivors=2)
    assert [r.vetoes for r in survivors] == [[3], [3]]


def test_a_script_with_collectives_of_its_own_loses_the_attempt(cluster: Cluster) -> None:
    """It may make them whenever the quorum is new, and then on all members."""

    def steps() -> dict[tuple[int, str], Action]:
        return {(step, "started"): own_collective for step in range(3)}

    here = together(3)
    survivors = [Replica(i, at={**steps(), (3, "forward"): both(here, until_broken)}) for i in range(2)]
    cluster.run(*survivors, Replica(2, at={**steps(), (3, "forward"): both(here, crash)}))
    cluster.check(steps=6, survivors=2)
    assert [r.vetoes for r in survivors] == [[3], [3]]


def test_the_end_of_the_last_quorums_second_lane_is_no_news(cluster: Cluster) -> None:
    """A member forms its second lane anew, and so ends the old one, while another is still computing."""
    newcomer, idle = Replica(2, steps=9), threading.Event()
    first, second = Replica(0, steps=9), Replica(1, steps=9)

    def late(replica: Replica) -> None:
        cluster.lighthouse.wait_for(lambda: first.manager._runtime.shell.communicators._forming > 0)
        idle.wait(0.2)  # the point: it would be told now
        assert replica.manager._runtime.rank.phase is Phase.OPEN
        own_collective(replica)

    for replica in (first, second):
        replica.actions[0, "started"] = own_collective
    first.actions |= {(2, "boundary"): cluster.joins(newcomer), (7, "started"): own_collective}
    second.actions[7, "started"] = late
    newcomer.actions[7, "started"] = own_collective
    cluster.run(first, second)
    cluster.check(steps=9, survivors=3)
    assert [r.vetoes for r in (first, second)] == [[], []]


def test_a_quorum_in_which_somebody_needs_state_is_left_again(cluster: Cluster) -> None:
    """A newcomer asks before the others do; state is given at their next boundary, and nobody trains without it."""
    again, here = Replica(3, steps=9), together(3)
    left = []

    def starts(actor: Replica) -> None:
        cluster.start(again)
        transfer = actor.manager._runtime.shell.transfer
        cluster.lighthouse.wait_for(lambda: transfer.snapshot_wanted)  # given by its start_quorum

    def until_the_newcomer_asks(_: Replica) -> None:
        cluster.lighthouse.wait_for(lambda: cluster.lighthouse.asking(again.name))

    def is_refused(replica: Replica) -> None:
        left.append(replica.manager._runtime.rank.broken_reason)

    waits = both(until_the_newcomer_asks, here)
    survivors = [Replica(i, steps=9, at={(3, "forward"): both(moves(waits), is_refused)}) for i in range(2)]
    survivors[0].actions[3, "boundary"] = starts
    cluster.run(*survivors, Replica(2, steps=9, at={(3, "forward"): both(waits, crash)}))
    cluster.check(steps=9, survivors=3)
    cluster.check_numbers()
    assert [r.vetoes for r in survivors] == [[3], [3]]
    assert any("need state" in reason for reason in left), "else: whoever left first ended it for the other"
