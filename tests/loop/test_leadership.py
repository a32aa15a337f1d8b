"""Who writes, what a new leader makes good, and when a checkpoint is in its place: real Managers, no framework."""

from __future__ import annotations

import contextlib
from traceback import StackSummary
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from ft_core.loop.leadership import Leadership, Write
from ft_core.loop.publishing import Publisher
from tests.loop.looped import Looped
from tests.runtime.harness import Crash, both, crash
from tests.runtime.interleavings import moves, once_held, once_launched, together, until_broken

if TYPE_CHECKING:
    from tests.runtime.harness import Cluster


def placed(disk: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in disk if line.startswith("place")]


def written(disk: list[str]) -> list[str]:
    return [line for line in disk if not line.startswith("place")]


def test_one_writes_and_each_step_is_in_its_place_after_the_next(cluster: Cluster) -> None:
    disk: list[str] = []
    replicas = [Looped(i, disk) for i in range(3)]
    cluster.run(*replicas)
    cluster.check(steps=6, survivors=3)
    assert [r.led for r in replicas] == [[True], [], []]
    expected = ["r0 1"]
    for step in range(2, 7):
        expected += [f"place {step - 1}", f"r0 {step}"]
    assert disk == expected


def test_a_leader_that_dies_while_it_writes(cluster: Cluster) -> None:
    """The next one writes that step, and all the others; none is missing, none comes twice."""
    disk: list[str] = []

    def dies(replica: Looped, step: int) -> None:
        if step == 3 and replica.index == 0:
            once_launched(others, 3)(replica)  # each of them has committed step 3, and lost the next
            raise Crash

    others = [Looped(i, disk) for i in (1, 2)]
    cluster.run(Looped(0, disk, dies), *others)
    cluster.check(steps=6, survivors=2)
    assert [r.led for r in others] == [[True], []]
    assert written(disk) == ["r0 1", "r0 2", "r1 3", "r1 4", "r1 5", "r1 6"]
    assert placed(disk) == [1, 2, 3, 4, 5]


def test_a_leader_that_dies_before_it_puts_in_place_what_the_commit_allows(cluster: Cluster) -> None:
    disk: list[str] = []
    leader, *others = [Looped(i, disk) for i in range(3)]

    def dies_after_the_vote(replica: Looped) -> None:
        publish = replica.window.after_vote
        assert publish is not None

        def never() -> None:
            once_launched(others, 4)(replica)
            raise Crash

        replica.window.after_vote = never

    leader.actions[3, "backward"] = dies_after_the_vote  # type: ignore[assignment]
    cluster.run(leader, *others)
    cluster.check(steps=6, survivors=2)
    assert placed(disk) == [1, 2, 3, 4, 5], "the new leader puts step 3 in its place"
    assert written(disk)[3:] == ["r1 4", "r1 5", "r1 6"]


def test_a_step_after_a_save_stays_in_its_quorum(cluster: Cluster) -> None:
    """The leader may not have written yet: its successor writes that state, which is there until the next commit."""
    disk: list[str] = []
    leader, *others = [Looped(i, disk) for i in range(3)]
    here = together(3)
    for replica in others:
        replica.actions[3, "forward"] = both(here, until_broken)
    leader.actions[3, "forward"] = both(here, crash)
    cluster.run(leader, *others)
    cluster.check(steps=6, survivors=2)
    assert [r.vetoes for r in others] == [[3], [3]]
    assert written(disk)[3:] == ["r1 3", "r1 4", "r1 5", "r1 6"]


def test_what_is_written_inside_a_step_that_went_on_without_its_leader(cluster: Cluster) -> None:
    """Who leads in the quorum that the step is in now writes it, before the state changes."""
    disk: list[str] = []
    leader, *others = [Looped(i, disk, saves=False) for i in range(3)]
    here = together(3)

    def saves(replica: Looped) -> None:
        replica.save(replica.step)

    for replica in others:
        replica.actions[3, "forward"] = both(moves(here), saves)  # type: ignore[arg-type]
    leader.actions[3, "forward"] = both(here, crash)
    cluster.run(leader, *others)
    cluster.check(steps=6, survivors=2)
    assert [r.vetoes for r in others] == [[], []], "the step went on"
    assert [r.led for r in others] == [[True], []]
    assert written(disk) == ["r1 3"]
    assert placed(disk) == [3]


def test_who_comes_back_does_not_lead_at_once(cluster: Cluster) -> None:
    """It does not know what the former leader, itself before its death, was to write."""
    disk: list[str] = []
    again = Looped(0, disk, name="r0", seed=77, steps=12)
    leader = Looped(0, disk, steps=12, at={(3, "stepped"): crash})
    others = [Looped(i, disk, steps=12) for i in (1, 2)]
    others[0].actions[5, "boundary"] = cluster.joins(again)
    cluster.run(leader, *others)
    cluster.check(steps=12, survivors=3)
    assert others[0].led == [True]
    assert again.led in ([], [True]), "only where a later quorum formed"
    assert sorted(set(placed(disk))) == list(range(1, 12))


def test_an_error_of_the_leader_ends_it_and_its_successor_trains_on(cluster: Cluster) -> None:
    """A full disk is everybody's: all would end one after the other, and the state that is in memory with them."""
    disk: list[str] = []

    def full(_: Looped, step: int) -> None:
        if step == 3:
            raise OSError("no space left on device")

    replicas = [Looped(i, disk, full) for i in range(3)]
    cluster.run(*replicas)
    cluster.check(steps=6, survivors=2, errors=True)
    assert isinstance(replicas[0].error, OSError)
    assert [r.error for r in replicas[1:]] == [None, None]
    assert placed(disk) == [1, 2, 4, 5], "the leader left in agreement after its error: nobody wrote that one"


def test_a_successor_whose_write_fails_trains_on(cluster: Cluster) -> None:
    disk: list[str] = []

    def full(replica: Looped, step: int) -> None:
        if step == 3 and replica.index == 0:
            once_launched(others, 3)(replica)
            raise Crash
        if step == 3:
            raise OSError("no space left on device")

    others = [Looped(i, disk, full) for i in (1, 2)]
    cluster.run(Looped(0, disk, full), *others)
    cluster.check(steps=6, survivors=2)
    assert [r.failed for r in others] == [["step 3"], []]
    assert placed(disk) == [1, 2, 4, 5]


def test_the_last_that_holds_the_state_trains_on_without_its_file(cluster: Cluster) -> None:
    disk: list[str] = []

    def full(_: Looped, step: int) -> None:
        if step == 5:
            raise OSError("no space left on device")

    alone = Looped(0, disk, full)
    cluster.run(alone, Looped(1, disk, at={(3, "boundary"): crash}))
    cluster.check(steps=6, survivors=1)
    assert alone.failed == ["step 5"]
    assert placed(disk)[-1] == 6, "alone, what is written is in its place at once"


@pytest.mark.parametrize("dying", [1, 2])
def test_the_death_of_another_one_changes_nothing(cluster: Cluster, dying: int) -> None:
    disk: list[str] = []
    replicas = [Looped(i, disk) for i in range(3)]
    others = [replica for replica in replicas if replica.index != dying]
    replicas[dying].actions[3, "forward"] = once_held(others, 3, crash)
    cluster.run(*replicas)
    cluster.check(steps=6, survivors=2)
    assert [r.led for r in replicas] == [[True], [], []]
    assert written(disk) == [f"r0 {n}" for n in range(1, 7)]


def of_all_ranks() -> BaseException:
    return CheckpointException("write", {1: (OSError("no space left on device"), StackSummary())})


@pytest.mark.parametrize(
    ("error", "collective", "tolerated"),
    [(of_all_ranks(), True, True), (OSError("here"), True, False), (OSError("here"), False, True),
     (KeyboardInterrupt(), False, False)],
)  # fmt: skip
def test_errors_that_all_ranks_of_a_group_know(error: BaseException, collective: bool, tolerated: bool) -> None:
    """A disk without room is everybody's, in groups of several ranks as well; DCP tells all of them."""

    def write() -> None:
        raise error

    failed: list[str] = []
    window: Any = None
    leadership = Leadership(window, Publisher(window, lambda: None), lambda _: None, failed.append, leads=True)
    item = Write("step 3", write, None, lambda: None, 3, lambda: None, collective)
    with contextlib.nullcontext() if tolerated else pytest.raises(type(error)):
        leadership._tolerate(item, write)
    assert failed == ["step 3"] * tolerated
