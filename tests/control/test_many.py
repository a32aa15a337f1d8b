"""A lighthouse with more replicas than it decides about one by one: real leases, all in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ft_core.protocol.lighthouse import pace
from ft_core.protocol.lighthouse.room import Room
from tests.control.recorder import Replica, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.lighthouse.events import Effect

MANY = 20
"""Leases with real clients: enough for packed answers."""


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a room decided; every room is taken for a large one, and rests for 50 ms."""
    made: list[float] = []
    settle = Room.settle

    def counted(room: Room, now: float) -> list[Effect]:
        made.append(now)
        return settle(room, now)

    monkeypatch.setattr(Room, "settle", counted)
    monkeypatch.setattr(pace, "ALONE", 0)
    monkeypatch.setattr(pace, "SETTLE_S_PER_REPLICA", 0.05 / MANY)
    return made


def test_what_comes_together_is_decided_about_together(replica: Callable[..., Replica], decisions: list[float]) -> None:
    names = [f"r{number:02}:1" for number in range(MANY)]
    everybody = [replica(name, expected=MANY) for name in names]
    for one in everybody:
        one.lease.wait_connected(10)
    decisions.clear()
    for one in everybody:
        one.ask()
    quorums = [one.answer() for one in everybody]
    assert {quorum.ids for quorum in quorums} == {tuple(names)}
    assert len({quorum.quorum_id for quorum in quorums}) == 1
    assert len(decisions) < MANY / 2, "not one decision per ask"

    everybody[3].close()
    decisions.clear()
    for one in everybody:
        if one is not everybody[3]:
            one.ask(step=1, failed=True)
    others = [one for one in everybody if one is not everybody[3]]
    assert {one.answer().ids for one in others} == {tuple(name for name in names if name != "r03:1")}
    assert len(decisions) < MANY / 2


def test_a_single_change_is_decided_about_at_once_after_a_rest(
    replica: Callable[..., Replica], decisions: list[float]
) -> None:
    one = replica("a:1")
    one.lease.wait_connected(5)
    one.ask()
    assert one.answer().ids == ("a:1",)
    assert decisions


def test_a_lighthouse_with_many_leases_asks_for_fewer_renewals(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "renewal_s", lambda _leases, liveness_s: liveness_s / 2)
    one = replica("a:1")
    one.lease.wait_connected(5)
    wait_until(lambda: one.lease._renew_s == 0.5)  # half of the lighthouse's liveness timeout, as the budget allows
    monkeypatch.undo()
    wait_until(lambda: one.lease._renew_s == 0.25)  # four times in it
