"""`Room.validate` and its parts notice what contradicts the invariants of the fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_core.protocol.lighthouse.current_quorum import CurrentQuorum
from ft_core.protocol.lighthouse.events import Hello
from ft_core.protocol.lighthouse.record import Record
from ft_core.protocol.lighthouse.replica_table import MAX_RECORDS, ReplicaTable
from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.types import VOID, Ask, Member, Quorum
from ft_core.settings import LighthouseSettings

HELLO = Hello("a", "a", 1, 1)
ASK = Ask("a", 1)
OTHERS = Quorum(7, (Member.of(Ask("b", 1)),), 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"hello": replace(HELLO, replica_id="b")},
        {"generation": -1},
        {"life": Life.CLOSED, "ask": ASK},
        {"ask": Ask("b", 1)},
        {"ask": ASK, "stalled": "late"},
        {"answered": (1, OTHERS)},
        {"same_name_until": 5.0},
        {"peer_reported_failure": True},
        {"presumed_dead": True},
        {"life": Life.GONE, "incomplete": "a lacks rank 1"},
    ],
)
def test_a_record_that_contradicts_itself(fields: dict[str, Any]) -> None:
    sound = Record(HELLO, Life.UP, 1.0, VOID, 1)
    sound.validate("a")
    with pytest.raises(AssertionError):
        replace(sound, **fields).validate("a")


def test_a_quorum_whose_members_are_unknown_or_gone() -> None:
    members, table = CurrentQuorum(), ReplicaTable(LighthouseSettings(), 0.0)
    members.validate(table)
    members.form(Quorum(7, (Member.of(ASK),), 0))
    with pytest.raises(AssertionError):
        members.validate(table)
    seen = table.hello(HELLO, (), 1.0)
    members.validate(table)
    assert seen is not None
    seen.goes(2.0)
    with pytest.raises(AssertionError):
        members.validate(table)
    members.end(2.0)
    members.validate(table)
    assert repr(table) == "ReplicaTable(a: gone)"


def test_a_table_is_full_when_everybody_in_it_may_be_needed() -> None:
    table = ReplicaTable(LighthouseSettings(), 0.0)
    names = [f"r{number}" for number in range(MAX_RECORDS)]
    for name in names:
        table.hello(Hello(name, name, 1, 1), (), 1.0)
    table.validate()
    assert table.hello(HELLO, names, 2.0) is None
    assert not table.reported_ended("a", 2.0)
    assert table.reported_ended("r7", 2.0)
    assert table.hello(HELLO, names, 3.0) is None, "members are not forgotten"
    assert table.hello(HELLO, (), 3.0) is not None
    assert "r7" not in table.records
