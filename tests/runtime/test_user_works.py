"""should_commit waits for what the script launched and did not wait for: collectives, and futures it wrapped."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work
from torch.futures import Future

from ft_core.errors import CollectiveError
from ft_core.runtime.user_works import MAX_WORKS, UserWorks
from tests.runtime.harness import LIMIT_S, Cluster, Replica
from tests.runtime.holding import HoldingGroup

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 7
"""Elements of the tensors whose collectives are held back; the fence and the model's bucket have others."""


class WithoutModel(Replica):
    """Averages a tensor of its own and never waits for it; the fence is a reduction of its own."""

    ended: threading.Event

    def train(self) -> None:
        self.value = torch.zeros(SIZE)
        while self.manager.current_step() < self.steps:
            self.manager.start_quorum()
            gradient = torch.full((SIZE,), float(self.index + 1))
            self.manager.allreduce(gradient)
            committed = self.manager.should_commit()
            self.ended.set()
            if committed:
                self.value -= gradient

    def wrap(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].clone()


def test_a_step_does_not_commit_while_a_collective_is_under_way(cluster: Cluster) -> None:
    gate = threading.Event()
    held = WithoutModel(0, steps=1, pg=lambda: HoldingGroup(SIZE, gate))
    other = WithoutModel(1, steps=1)
    for replica in (held, other):
        replica.ended = threading.Event()
    cluster.expected = 2
    cluster.start(held, other)
    assert other.ended.wait(LIMIT_S)  # the fence has completed
    assert not held.ended.wait(0.2)
    gate.set()
    cluster.join()
    assert [r.error for r in cluster.replicas] == [None, None]
    assert [r.value.tolist() for r in (held, other)] == [[-1.5] * SIZE] * 2


class WithModel(Replica):
    """Launches one more collective between backward and the vote, in step `at_step`."""

    at_step = 2
    result: torch.Tensor | None = None

    def iteration(self) -> None:
        if self.manager.current_step() == self.at_step and self.result is None:
            self.actions[self.at_step, "backward"] = self.launches
        super().iteration()

    def launches(self, _: Replica) -> None:
        self.result = torch.full((SIZE,), float(self.index))
        self.manager.allreduce(self.result)


def test_a_peer_that_launches_late_is_waited_for(cluster: Cluster) -> None:
    early, late = WithModel(0), WithModel(1)
    launch = late.launches
    over = threading.Event()
    early.actions[2, "stepped"] = lambda _: over.set()

    def hesitate(replica: Replica) -> None:
        assert not over.wait(0.2)
        launch(replica)

    late.launches = hesitate  # type: ignore[method-assign,assignment]
    cluster.run(early, late)
    cluster.check(steps=6)
    assert [r.result.tolist() for r in (early, late) if r.result is not None] == [[0.5] * SIZE] * 2
    assert [r.vetoes for r in (early, late)] == [[], []]


def test_a_collective_that_fails_unseen_breaks_the_step_of_its_member(cluster: Cluster) -> None:
    gate = threading.Event()
    gate.set()
    failing = WithModel(0, pg=lambda: HoldingGroup(SIZE, gate, CollectiveError("the cable was pulled")))
    cluster.run(failing, WithModel(1))
    cluster.check(steps=6)
    assert failing.vetoes == [2]  # the other committed it, or it was done again


def wrapped(complete: Callable[[Future[int]], object]) -> type[Replica]:
    class Wrapping(Replica):
        seen: int | None = None

        def loss(self) -> torch.Tensor:
            if self.manager.current_step() == 2 and self.index == 0 and self.seen is None:
                future: Future[int] = Future()
                self.seen = 0
                wrapped = self.manager.wrap_future(future, default=7)
                threading.Timer(0.2, complete, (future,)).start()
                self.actions[2, "stepped"] = lambda _: setattr(self, "seen", wrapped.done() and wrapped.value())
            return super().loss()

    return Wrapping


def test_a_wrapped_future_is_done_when_the_vote_is_over(cluster: Cluster) -> None:
    kind = wrapped(lambda future: future.set_result(3))
    cluster.run(kind(0), kind(1))
    cluster.check(steps=6)
    assert cluster.replicas[0].seen == 3  # type: ignore[attr-defined]
    assert [r.vetoes for r in cluster.replicas] == [[], []]


def test_a_wrapped_future_that_fails_during_the_vote_is_an_error_of_that_step(cluster: Cluster) -> None:
    kind = wrapped(lambda future: future.set_exception(ValueError("late")))  # type: ignore[arg-type]
    cluster.run(kind(0), kind(1))
    cluster.check(steps=6)
    assert cluster.replicas[0].seen == 7  # type: ignore[attr-defined]
    assert cluster.replicas[0].vetoes == [2]  # the other has committed it


# ------------------------------------------------------------ what is kept


def _unexpected(error: BaseException) -> None:
    raise AssertionError("nothing failed") from error


class Ended(Work):
    def __init__(self, log: list[int], number: int, ended: bool, error: Exception | None = None) -> None:
        super().__init__()
        self.log, self.number, self.ended, self.error = log, number, ended, error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.log.append(self.number)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ended


def test_collectives_that_ended_are_dropped_and_their_failures_reported() -> None:
    waited: list[int] = []
    errors: list[BaseException] = []
    works = UserWorks(errors.append)
    assert not works
    failure = CollectiveError("gone")
    works.add(Ended(waited, 0, True, failure))
    works.add(Ended(waited, 1, True))
    assert waited == [0]
    assert errors == [failure]
    assert works.all_ended()
    works.add(Ended(waited, 2, False))
    assert waited == [0, 1]
    assert not works.all_ended()
    works.wait()
    assert waited == [0, 1, 2]
    assert not works


def test_there_is_a_bound_on_collectives_under_way() -> None:
    waited: list[int] = []
    works = UserWorks(_unexpected)
    for number in range(MAX_WORKS + 2):
        works.add(Ended(waited, number, False))
    assert waited == [0, 1]
    assert repr(works) == f"UserWorks({MAX_WORKS} collectives, 0 futures)"


def test_a_future_that_is_never_done_is_reported_at_the_deadline() -> None:
    works = UserWorks(_unexpected)
    works.add_future(Future())
    assert works.wait_futures(0.0) is not None
    assert not works
