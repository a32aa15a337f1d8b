"""Two groups of two ranks each, with Managers over the real lighthouse and Gloo, as threads of one process."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from ft_core import DistributedDataParallel, Manager, OptimizerWrapper, ProcessGroupGloo
from ft_core.errors import HealError, RefusedError
from ft_core.protocol.group.merge import UNEVEN
from ft_core.protocol.pushes import Over

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.control.lighthouse.server import LighthouseServer
    from ft_core.protocol.types import Verdict
    from ft_core.runtime.state_transfer import Received

LIMIT_S = 30.0
SIZE = 2
STEPS = 8


class Rank:
    """One rank: a shard of its own (the ranks of a group hold different ones), trained with the same rank of others."""

    def __init__(self, lighthouse: LighthouseServer, store: TCPStore, name: str, number: int, width: int) -> None:
        self.name, self.number = name, number
        self.model = nn.Linear(width, 3)
        self.at: dict[int, Callable[[Rank], object]] = {}
        """Before the vote of this step, once; instead of `always`."""
        self.always: Callable[[Rank], object] = lambda _: None
        self.seen: list[tuple[int, bool, int]] = []
        """(step, committed, participants) of every attempt."""
        self.error: BaseException | None = None
        self.group: Group
        self.manager: Manager
        self._width = width
        self._options: dict[str, Any] = {
            "lighthouse_addr": lighthouse.address(), "replica_id": name, "rank": number, "world_size": SIZE,
            "store_addr": "127.0.0.1", "store_port": store.port, "hostname": "127.0.0.1", "exit_on_drain": False,
            "timeout": timedelta(seconds=15), "use_async_quorum": False,
        }  # fmt: skip
        self.thread = threading.Thread(target=self._run, name=f"train-{name}{number}", daemon=True)

    def __repr__(self) -> str:
        return f"Rank({self.name}{self.number}, {self.seen}, error={self.error!r})"

    def train(self) -> None:
        while self.manager.current_step() < self.group.steps:
            self.optimizer.zero_grad()
            step = self.manager.current_step()
            generator = torch.Generator().manual_seed(100 * step + 10 * self.number + ord(self.name))
            loss: torch.Tensor = self.ddp(torch.randn(4, self._width, generator=generator)).square().mean()
            loss.backward()
            self.at.pop(step, self.always)(self)
            participants = self.manager.num_participants()
            self.optimizer.step()
            self.seen.append((step, self.optimizer.committed, participants))
            assert sum(not committed for _, committed, _ in self.seen) < STEPS, "no progress"

    def _run(self) -> None:
        try:
            inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.manager = Manager(
                ProcessGroupGloo(hostname="127.0.0.1"), self.model.load_state_dict, self.model.state_dict,
                **self._options,
            )  # fmt: skip
            try:
                self.ddp = DistributedDataParallel(self.manager, self.model)
                self.optimizer = OptimizerWrapper(self.manager, inner)
                self.train()
            finally:
                self.manager.shutdown()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error


class Group:
    """Its ranks, and the store they meet in."""

    def __init__(self, lighthouse: LighthouseServer, name: str, *, width: int = 5, expected: int = 2) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = [Rank(lighthouse, self.store, name, number, width) for number in range(SIZE)]
        for rank in self.ranks:
            rank._options |= {"expected_replicas": expected, "min_replica_size": 1}
            rank.group = self
        self.steps = STEPS

    def start(self) -> Group:
        for rank in self.ranks:
            rank.thread.start()
        return self

    def join(self) -> None:
        for rank in self.ranks:
            rank.thread.join(LIMIT_S)
        assert not any(rank.thread.is_alive() for rank in self.ranks), f"hangs: {self.ranks}"


def test_a_rank_that_cannot_be_healed_costs_all_one_step(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its group's share is in one ring, not in the other: nobody commits, and it is not counted on until it heals."""
    a, b = Group(lighthouse, "a"), Group(lighthouse, "b")
    bad = b.ranks[1]

    def falls_behind(rank: Rank) -> None:
        """Once the other group has committed the step its ring breaks; the next heal of this rank fails."""
        committed = threading.Event()
        for _ in range(1000):
            if all(other.manager.current_step() > 3 for other in a.ranks):
                break
            committed.wait(0.01)
        healing = rank.manager._runtime.shell.transfer
        receive = healing.receive

        def failing(*_: Any) -> Received:
            healing.receive = receive  # type: ignore[method-assign]
            raise HealError("injected: no donor could be received from")

        healing.receive = failing  # type: ignore[assignment, method-assign]
        rank.manager._runtime.shell.fail(OSError("injected: a connection broke"))

    bad.at[3] = falls_behind
    with caplog.at_level("INFO", logger="ft_core"):
        for group in (a, b):
            group.start()
        for group in (a, b):
            group.join()
    ranks = [*a.ranks, *b.ranks]
    assert [rank.error for rank in ranks] == [None] * 4, ranks
    # Step 3 was committed by the other group alone; of step 4 all four ranks vetoed one attempt with its share.
    assert [(3, True, 2) in rank.seen for rank in ranks] == [True, True, False, False]
    assert caplog.text.count(UNEVEN) == 4
    # In the next quorum it is no participant; it is healed meanwhile, and counts again.
    assert all((4, True, 1) in rank.seen and rank.seen[-1] == (STEPS - 1, True, 2) for rank in ranks), ranks
    for mine, other in zip(a.ranks, b.ranks, strict=True):
        assert torch.equal(mine.model.weight, other.model.weight)
    assert not torch.equal(a.ranks[0].model.weight, a.ranks[1].model.weight)


def test_another_model_is_refused_on_all_ranks(lighthouse: LighthouseServer) -> None:
    a = Group(lighthouse, "a", expected=1)
    a.steps = 1 << 30
    trains, done = threading.Event(), threading.Event()

    def look(rank: Rank) -> None:
        trains.set()
        if done.is_set():  # the other rank is in this step, too: neither passes a vote without the other
            a.steps = min(a.steps, rank.manager.current_step() + 2)

    a.ranks[0].always = look
    a.start()
    assert trains.wait(LIMIT_S)
    b = Group(lighthouse, "b", width=6, expected=1).start()
    b.join()
    done.set()
    a.join()
    for rank in b.ranks:
        assert isinstance(rank.error, RefusedError), rank
        assert "weight" in str(rank.error), rank
    assert [rank.error for rank in a.ranks] == [None, None], "who was there trains on"


@pytest.mark.parametrize("what", ["lost", "failed"])
def test_what_one_rank_hears_between_vote_and_answer(lighthouse: LighthouseServer, what: str) -> None:
    """Found by review: it asked alone while its group went on, or crashed; now the group asks together."""
    a, b = Group(lighthouse, "a"), Group(lighthouse, "b")

    def hears_late(rank: Rank) -> None:
        shell = rank.manager._runtime.shell
        vote = shell.control.vote

        def then_vote(verdict: Verdict, limit_s: float) -> Verdict:
            del shell.control.vote
            if what == "lost":
                shell.on_push(Over(shell.rank.quorum_id))
            else:
                shell.fail(OSError("a late failure"))
            return vote(verdict, limit_s)

        shell.control.vote = then_vote  # type: ignore[method-assign,assignment]

    b.ranks[1].at[3] = hears_late
    a.start()
    b.start()
    a.join()
    b.join()
    for rank in (*a.ranks, *b.ranks):
        assert rank.error is None
        assert [step for step, committed, _ in rank.seen if committed] == list(range(STEPS))
        assert sum(not committed for _, committed, _ in rank.seen) == 1
