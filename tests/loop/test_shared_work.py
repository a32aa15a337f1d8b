"""Work between two steps that the members of a quorum divide. Real Managers, state servers and connections."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.loop.shared_work import KEPT, Board, Place, SharedWork
from ft_core.loop.shared_work_rules import SILENT_S, Heard, Position, identity_of, question
from tests.runtime.conftest import cluster, lighthouse, store
from tests.runtime.harness import LIMIT_S, Cluster, Replica, crash
from tests.runtime.interleavings import once_held

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.harness import Action

__all__ = ["cluster", "lighthouse", "store"]
AT = (3, "stepped")
ENDS_TOO_SOON_S = 0.3
"""A member that does not stay has ended by then; one that stays loses that time in these tests."""
Found = dict[str, dict[int, Any]]


class Worker(Replica):
    """A replica that divides work at some point of its run."""

    work: SharedWork


def ready(replica: Replica) -> None:
    replica.wrap()
    ready_alone(replica)


def ready_alone(replica: Replica) -> None:
    """Without a model that is trained."""
    assert isinstance(replica, Worker)
    replica.work = SharedWork(replica.manager)
    replica.work.serve()


def divides(
    found: Found, *, pieces: int = 6, what: Callable[[Worker], str] = lambda _: "", result: Any = None, times: int = 1
) -> Action:
    """An action: do a part, and note which others came."""

    def act(replica: Replica) -> None:
        assert isinstance(replica, Worker)
        for _ in range(times):
            division = replica.work.divide(f"work {what(replica)}", pieces)
            own = {"part": division.part, "sum": torch.tensor([1.5 * division.part])} if result is None else result
            found.setdefault(replica.name, {}).update(division.exchange("all", own, 0.0))
            found[replica.name][-1] = (division.part, division.parts)

    return act


def workers(count: int, *actions: Action, **options: Any) -> list[Worker]:
    return [Worker(i, at={AT: actions[i % len(actions)]}, setup=ready, steps=5, **options) for i in range(count)]


def parts_of(found: Found) -> dict[str, list[int]]:
    """Which parts came, by name."""
    return {name: sorted(part for part in came if part >= 0) for name, came in sorted(found.items())}


def test_each_member_gets_what_the_others_did(cluster: Cluster) -> None:
    found: Found = {}
    cluster.run(*workers(3, divides(found)))
    cluster.check(steps=5)
    assert sorted(came[-1] for came in found.values()) == [(0, 3), (1, 3), (2, 3)]
    for came in found.values():
        own = came.pop(-1)[0]
        assert sorted([own, *came]) == [0, 1, 2]
        assert all(r["part"] == part and r["sum"].item() == 1.5 * part for part, r in came.items())


def test_with_fewer_pieces_than_members_some_do_the_same(cluster: Cluster) -> None:
    found: Found = {}
    cluster.run(*workers(3, divides(found, pieces=2)))
    cluster.check(steps=5)
    assert sorted(came[-1] for came in found.values()) == [(0, 2), (0, 2), (1, 2)]
    assert all(sorted([came[-1][0], *(p for p in came if p >= 0)]) == [0, 1] for came in found.values())


def test_a_part_whose_owner_dies_is_missing_for_all_others(cluster: Cluster) -> None:
    found: Found = {}
    divide = divides(found)
    # It dies when the others hold the step: else one of them may never know its verdict.
    members = workers(3, divide, divide, lambda dying: once_held(members[:2], 4, crash)(dying))
    cluster.run(*members)
    cluster.check(steps=5, survivors=2)
    assert [len(parts) for parts in parts_of(found).values()] == [1, 1]


def test_several_divisions_at_one_place_are_told_apart(cluster: Cluster) -> None:
    found: Found = {}
    cluster.run(*workers(2, divides(found, times=20)))
    cluster.check(steps=5)
    assert all(len(parts) == 1 for parts in parts_of(found).values())


def test_members_that_mean_something_else_do_not_wait_for_each_other(cluster: Cluster) -> None:
    found: Found = {}
    began = time.monotonic()
    cluster.run(*workers(2, divides(found, what=lambda replica: replica.name)))
    cluster.check(steps=5)
    assert parts_of(found) == {"r0": [], "r1": []}
    assert time.monotonic() - began < LIMIT_S / 2


def test_who_goes_on_with_the_next_step_is_not_waited_for(cluster: Cluster) -> None:
    """It was at this place of the run, and divided nothing there."""
    found: Found = {}
    began = time.monotonic()
    cluster.run(*workers(2, divides(found), lambda _: None))
    cluster.check(steps=5)
    assert parts_of(found) == {"r0": []}
    assert time.monotonic() - began < LIMIT_S / 2


def test_who_has_launched_gradients_is_not_waited_for_in_the_open_step(cluster: Cluster) -> None:
    """One divides before its backward, the other does not divide at all there."""
    found: Found = {}
    began = time.monotonic()
    cluster.run(
        Worker(0, at={(3, "started"): divides(found)}, setup=ready, steps=5), Worker(1, setup=ready, steps=5),
    )  # fmt: skip
    cluster.check(steps=5)
    assert parts_of(found) == {"r0": []}
    assert time.monotonic() - began < LIMIT_S / 4


def test_who_is_slow_is_waited_for(cluster: Cluster) -> None:
    found: Found = {}
    divide, late = divides(found), threading.Event()

    def slow(replica: Replica) -> None:
        late.wait(0.5)
        divide(replica)

    cluster.run(*workers(2, divide, slow))
    cluster.check(steps=5)
    assert all(len(parts) == 1 for parts in parts_of(found).values())


def test_a_result_that_cannot_be_sent_costs_its_part_only(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    found: Found = {}
    cluster.run(*workers(2, divides(found), divides(found, result={"handle": threading.Lock()})))
    cluster.check(steps=5)
    assert parts_of(found) == {"r0": [], "r1": [0]}
    assert any("handle" in r.getMessage() and "each replica does all of this work itself" in r.getMessage()
               for r in caplog.records)  # fmt: skip


@dataclass
class Answer:
    """A class that only who has it can rebuild."""

    value: int = 1


def test_a_result_that_cannot_be_read_is_not_asked_for_again(cluster: Cluster) -> None:
    found: Found = {}
    began = time.monotonic()
    cluster.run(*workers(2, divides(found), divides(found, result=Answer())))
    cluster.check(steps=5)
    assert parts_of(found) == {"r0": [], "r1": [0]}
    assert time.monotonic() - began < SILENT_S


def test_a_result_that_was_given_up_for_newer_ones_is_not_waited_for() -> None:
    board = Board(lambda: Place(3, False))
    at = board.begin("same")
    keys = [question(at, identity_of(5, "same"), str(i)) for i in range(KEPT + 2)]
    for key in keys:
        board.publish(key, b"result")
    heard = [board.answer(f"{key}/1") for key in keys]
    assert heard[:2] == [Heard.NEVER.value] * 2
    assert heard[2:] == [Heard.THERE.value + b"result"] * KEPT
    board.begin("other")
    assert board.answer(f"{keys[0]}/1") == Heard.NEVER.value


def test_what_the_ranks_of_a_group_would_cut_otherwise_is_not_divided(cluster: Cluster) -> None:
    """One rank would go through an exchange that the other one passes over."""
    parts: list[int] = []

    def act(replica: Replica) -> None:
        assert isinstance(replica, Worker)
        alike = SharedWork(replica.manager, lambda mine: (list(mine), [*mine[:-1], mine[-1] + 1]))
        alike.serve()
        parts.append(alike.divide("work", 6, [6, 1]).parts)

    cluster.run(*workers(2, act))
    cluster.check(steps=5)
    assert parts == [1, 1]


def test_before_a_quorum_there_is_nobody_to_share_with(cluster: Cluster) -> None:
    found: Found = {}

    def first(replica: Replica) -> None:
        ready(replica)
        divides(found)(replica)

    cluster.run(*[Worker(i, setup=first, steps=2) for i in range(2)])
    cluster.check(steps=2)
    assert [came[-1] for came in found.values()] == [(0, 1), (0, 1)]


def test_what_another_rank_of_the_group_misses_is_missing_here(cluster: Cluster) -> None:
    found: Found = {}

    def other_rank_misses(replica: Replica) -> None:
        ready(replica)
        assert isinstance(replica, Worker)
        replica.work = SharedWork(replica.manager, lambda mine: (list(mine), [1] if len(mine) == 1 else list(mine)))
        replica.work.serve()

    def member(index: int, setup: Action) -> Worker:
        return Worker(index, at={AT: divides(found)}, setup=setup, steps=5)

    cluster.run(member(0, ready), member(1, other_rank_misses))
    cluster.check(steps=5)
    assert {name: len(parts) for name, parts in parts_of(found).items()} == {"r0": 1, "r1": 0}


def test_who_ends_right_after_it_still_gives_its_part(cluster: Cluster) -> None:
    """The other fetches it a little later."""
    found: Found = {}
    began = time.monotonic()
    cluster.run(*[Worker(i, at={(2, "stepped"): divides(found)}, setup=ready, steps=3) for i in range(2)])
    cluster.check(steps=3)
    assert all(len(parts) == 1 for parts in parts_of(found).values())
    assert time.monotonic() - began < SILENT_S


class Between(threading.Event):
    """What happens between two rounds of a replica's questions."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def wait(self, timeout: float | None = None) -> bool:
        self._act()
        return super().wait(timeout)


@pytest.mark.parametrize("pieces", [3, 2])
def test_who_has_everything_stays_until_the_others_have_too(cluster: Cluster, pieces: int) -> None:
    """Another one that has everything leaves, as at the end of a test run, and so ends the quorum.

    With two pieces the slow one does the same as the first, so nobody wants anything of it.
    """
    found: Found = {}
    first_waits, slow_waits, divide = threading.Event(), threading.Event(), divides(found, pieces=pieces)

    def script(replica: Replica) -> None:
        ready_alone(replica)
        assert isinstance(replica, Worker)
        replica.manager.start_quorum()
        begins, between = course[replica.index]
        replica.work._pause = Between(between)
        assert begins is None or begins.wait(LIMIT_S)
        divide(replica)

    def while_slow_waits() -> None:
        slow_waits.set()
        first.thread.join(LIMIT_S)
        last.thread.join(ENDS_TOO_SOON_S)

    course = {0: (None, first_waits.set), 1: (slow_waits, lambda: None), 2: (first_waits, while_slow_waits)}
    first, last, slow = (Worker(i, setup=lambda _: None, loop=script, use_async_quorum=False) for i in course)
    cluster.run(first, last, slow)
    assert [r.error for r in (first, last, slow)] == [None] * 3
    if pieces == 3:
        assert parts_of(found) == {"r0": [1, 2], "r1": [0, 2], "r2": [0, 1]}
    else:
        assert parts_of(found) == {"r0": [1], "r1": [0], "r2": [1]}


def test_many_results_of_one_division_each_from_who_has_them(cluster: Cluster) -> None:
    """Nobody stays for those of which more follow; a part that is not asked for is not waited for."""
    found: dict[str, list[list[int]]] = {}
    began = time.monotonic()

    def act(replica: Replica) -> None:
        assert isinstance(replica, Worker)
        division = replica.work.divide("work", 3)
        came = found[replica.name] = []
        for number in range(3 * KEPT):
            among = [1, 2] if number % 2 else None
            came.append(sorted(division.exchange(str(number), number, 0.0, among=among, more=number + 1 < 3 * KEPT)))

    cluster.run(*workers(3, act))
    cluster.check(steps=5)
    each = [[others, [part for part in others if part]] * 12 for others in ([0, 1], [0, 2], [1, 2])]
    assert sorted(found.values()) == each
    assert time.monotonic() - began < LIMIT_S / 2


def test_a_result_that_is_kept_no_more_is_not_waited_for(cluster: Cluster) -> None:
    """One of them asks nobody, and is far ahead."""
    found: Found = {}
    began, ahead = time.monotonic(), threading.Event()

    def hurries(replica: Replica) -> None:
        assert isinstance(replica, Worker)
        division = replica.work.divide("work", 2)
        for number in range(KEPT + 1):
            division.exchange(str(number), number, 0.0, among=(), more=True)
        ahead.set()

    def late(replica: Replica) -> None:
        assert isinstance(replica, Worker)
        division = replica.work.divide("work", 2)
        assert ahead.wait(LIMIT_S)
        found[replica.name] = division.exchange("0", 0, 0.0)

    cluster.run(*workers(2, hurries, late))
    cluster.check(steps=5)
    assert parts_of(found) == {"r1": []}
    assert time.monotonic() - began < LIMIT_S / 2


def test_only_the_others_of_a_broken_quorum_are_told_not_to_wait() -> None:
    """Who waits for the next quorum may be a member of it already, and not know it yet."""
    board = Board(lambda: Place(3, True, broken=5, asking=True))

    def told(quorum_id: int) -> bytes | None:
        return board.answer(question(Position(3, True, 0), identity_of(quorum_id, "ab"), "all") + "/0")

    assert told(5) == Heard.NEVER.value
    assert told(6) == Heard.NOT_YET.value
