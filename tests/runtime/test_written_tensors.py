"""R7: a script's own tensors are written to while it computes nothing, also where a heal ends before its time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.errors import HealError, RefusedError
from ft_core.protocol.pushes import Refusal
from ft_core.runtime.state_transfer import Healing
from tests.runtime.harness import LIMIT_S, Cluster, Replica, crash

if TYPE_CHECKING:
    from collections.abc import Mapping

COMES_TOO_SOON_S = 0.2
"""A script that does not wait would have gone on by then; one that waits loses that time in these tests."""


class LateWrites:
    """What a newcomer's worker does: it goes on writing after what it writes for has ended, once."""

    def __init__(self, newcomer: str) -> None:
        self.newcomer = newcomer
        self.begun, self.computing, self.ended = threading.Event(), threading.Event(), threading.Event()

    def are_due(self, healing: Healing) -> bool:
        return healing._replica_id.startswith(f"{self.newcomer}:") and not self.begun.is_set()

    def write(self, into: Mapping[str, Any] | None, ends: threading.Event) -> None:
        assert into is not None
        self.begun.set()
        assert ends.wait(LIMIT_S)
        self.computing.wait(COMES_TOO_SOON_S)
        with torch.no_grad():
            for tensor in into["user"]["default"]["model"].values():
                tensor.add_(1.0)
        self.ended.set()

    def compute(self, newcomer: Replica) -> None:
        """The newcomer's action at `forward`, in each step until then: the first ones are to warm up."""
        if not self.begun.is_set():
            newcomer.actions[newcomer.step, "forward"] = self.compute
            return
        self.computing.set()
        assert self.ended.wait(LIMIT_S)


def test_nothing_is_computed_while_a_heal_whose_quorum_broke_still_writes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member dies meanwhile; backward would find other parameters than those of forward."""
    first, dies, newcomer = (Replica(i, steps=9, use_async_quorum=False) for i in range(3))
    late, receive = LateWrites(newcomer.name), Healing.receive

    def slow(healing: Healing, plan: Any, store: str, into: Mapping[str, Any] | None, cancel: threading.Event) -> Any:
        if not late.are_due(healing):
            return receive(healing, plan, store, into, cancel)
        late.write(into, cancel)
        raise HealError("cancelled")

    monkeypatch.setattr(Healing, "receive", slow)

    def once_it_heals(replica: Replica) -> None:
        if newcomer.name in cluster.lighthouse.members():
            assert late.begun.wait(LIMIT_S)
            crash(replica)

    first.actions[3, "boundary"] = cluster.joins(newcomer)
    dies.actions |= {(step, "started"): once_it_heals for step in range(3, 9)}
    newcomer.actions[0, "forward"] = late.compute
    cluster.run(first, dies)
    cluster.check(steps=9, survivors=2)
    assert late.ended.is_set()


def test_who_is_refused_is_told_so_when_nothing_is_copied_to_it_any_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may go on without the others."""
    first, newcomer = Replica(0, steps=9, use_async_quorum=False), Replica(1, use_async_quorum=False)
    late, refused, prefetch = LateWrites(newcomer.name), threading.Event(), Healing.prefetch

    def slow(healing: Healing, donors: Any, into: Mapping[str, Any] | None, within_s: float) -> bool:
        if not late.are_due(healing):
            return prefetch(healing, donors, into, within_s)
        late.write(into, refused)
        return True

    monkeypatch.setattr(Healing, "prefetch", slow)

    def goes_on_alone(replica: Replica) -> None:
        with pytest.raises(RefusedError):
            replica.train()
        late.computing.set()
        assert late.ended.is_set()

    def refuse(_: Replica) -> None:
        cluster.start(newcomer)
        assert late.begun.wait(LIMIT_S)
        newcomer.manager._runtime.shell.on_push(Refusal(RefusedError("another model")))
        refused.set()

    newcomer._loop = goes_on_alone
    first.actions[3, "boundary"] = refuse
    cluster.run(first)
    assert [r.error for r in (first, newcomer)] == [None, None]
    assert late.ended.is_set()
