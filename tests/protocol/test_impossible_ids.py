"""Ids and steps that nobody can have: refused where they arrive, so that they cost their sender only."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.errors import ConfigError
from ft_core.protocol.lighthouse.events import Announce, Asked, Hello, Refuse
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.quorum_ids import EPOCH_2020_S, MAX_AHEAD_S, QuorumIds, boot_of
from ft_core.protocol.rank.saved_progress import read
from ft_core.protocol.types import Ask, Version
from ft_core.settings import MAX_STEP, LighthouseSettings

NOW = 1_790_000_000.0
INT64 = 2**63 - 1


def room_of_two() -> Room:
    room = Room("job", LighthouseSettings(), QuorumIds(boot_of(NOW), 7, deque(range(9))), boot_at=NOW - 100)
    for number, name in enumerate("ab", 1):
        room.handle(Hello(f"{name}:1", name, number, 7), NOW)
    return room


def form(room: Room) -> int:
    effects = room.handle_all([Asked(Ask(f"{n}:1", 1), g) for g, n in enumerate("ab", 1)], NOW + 1)
    return next(e.quorum.quorum_id for e in effects if isinstance(e, Announce))


@pytest.mark.parametrize(
    ("field", "hello"),
    [
        ("highest_id", {"highest_id": INT64}),
        ("quorum_id", {"quorum_id": INT64, "members": ("x:1",)}),
        ("version_quorum_id", {"version": Version(3, INT64)}),
    ],
)
def test_a_hello_with_an_impossible_id_is_refused_and_costs_nobody_else(field: str, hello: dict[str, object]) -> None:
    room = room_of_two()
    (refusal,) = room.handle(Hello("x:1", "x", 9, 7, **hello), NOW)  # type: ignore[arg-type]
    assert isinstance(refusal, Refuse)
    assert refusal.to == "x:1"
    assert f"{field}={INT64} cannot be the id of a quorum: it would be of a lighthouse that starts" in refusal.reason
    assert "x:1" not in room.records
    assert 0 < form(room) <= INT64


def test_an_ask_with_an_impossible_version_is_refused() -> None:
    room = room_of_two()
    effects = room.handle(Asked(Ask("a:1", 1, Version(3, INT64)), 1), NOW)
    assert [type(e) for e in effects] == [Refuse]
    assert 0 < form(room) <= INT64


def test_a_lighthouse_whose_clock_stands_in_1970_believes_those_that_have_one() -> None:
    ids = QuorumIds(boot_of(0.0), 7)
    real = (boot_of(NOW) << 32) | 5
    assert ids.implausible(quorum_id=real) == ""
    ids.observe(real)
    assert ids.next() > real


@given(st.integers(1, MAX_AHEAD_S - 100), st.lists(st.integers(0, INT64), max_size=20), st.data())
def test_ids_grow_and_fit_whatever_is_presented(boot: int, presented: list[int], data: st.DataObject) -> None:
    ids = QuorumIds(boot, 7, deque(range(3)))
    edge = ((boot + MAX_AHEAD_S) << 32) | 0xFFFFFFFF
    last = 0
    for given_id in [*presented, edge]:
        if not ids.implausible(quorum_id=given_id):
            ids.observe(given_id)
            last = max(last, given_id)
        if data.draw(st.booleans()):
            made = ids.next()
            assert last < made <= INT64
            last = made
    # Whatever it was brought to, a lighthouse that starts a second later believes it.
    assert QuorumIds(boot + 1, 7).implausible(quorum_id=last) == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", MAX_STEP + 1),
        ("step", -2),
        ("step", "x"),
        ("batches_committed", -1),
        ("quorum_id", INT64),
        ("lineage", -1),
    ],
)
def test_a_damaged_checkpoint_is_named_where_it_is_loaded(key: str, value: object) -> None:
    saved: dict[str, object] = {
        "step": 3,
        "batches_committed": 6,
        "quorum_id": boot_of(NOW) << 32,
        "lineage": 5,
        key: value,
    }
    with pytest.raises(ConfigError, match=f"the manager's checkpoint has {key}={value!r}, which .* load another one"):
        read(saved, 1, NOW)  # type: ignore[arg-type]


def test_a_checkpoint_without_a_lineage_gives_all_the_same_one() -> None:
    plain = {"step": 3, "batches_committed": 6}
    assert read(plain, 1, NOW) == read(plain, 2, NOW)
    assert read({"step": 0, "batches_committed": 0}, 5, NOW) == (Version(0, 0), 5, 0)
    with pytest.raises(ConfigError, match=r"lacks \['batches_committed'\]"):
        read({"step": 3}, 1, NOW)


def test_boots_count_from_2020() -> None:
    assert boot_of(EPOCH_2020_S + 5.9) == 5
    assert boot_of(-1.0) == 1
