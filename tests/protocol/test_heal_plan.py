"""`heal_plan.plan`: every member computes the same, and every role is consistent."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.protocol.rank.heal_plan import Plan, WorldSizeMode, plan
from ft_core.protocol.types import VOID, Member, Quorum, Version
from tests.protocol.rig import member

MINE = {"replica_rank", "heals_first", "donors", "relays", "excluded"}


def plans(members: list[Member], **more: object) -> list[Plan]:
    quorum = Quorum(9, tuple(members))
    return [plan(quorum, m.replica_id, **more) for m in members]  # type: ignore[arg-type]


@st.composite
def quorums(draw: st.DrawFn) -> list[Member]:
    allow, init = draw(st.booleans()) or draw(st.booleans()), draw(st.booleans())
    names = "abcdef"[: draw(st.integers(1, 6))]
    versions = st.sampled_from([VOID, Version(0, 0), Version(0, 0), Version(4, 1), Version(4, 2), Version(5, 1)])
    members = [
        member(
            name,
            (version := draw(versions)).step,
            version.quorum_id,
            draw(st.integers(1, 3)),
            allow_heal=allow,
            init_sync=init,
            heals_before_forward=draw(st.booleans()),
        )
        for name in names
    ]
    if all(m.version == VOID for m in members):
        members[0] = dataclasses.replace(members[0], version=Version(0, 0))
    return members


@settings(max_examples=500, deadline=None)
@given(quorums(), st.sampled_from(WorldSizeMode), st.integers(1, 6))
def test_all_members_compute_one_consistent_plan(members: list[Member], mode: WorldSizeMode, needed: int) -> None:
    all_plans = plans(members, mode=mode, min_replicas=needed)
    fields = [f.name for f in dataclasses.fields(Plan) if f.name not in MINE]
    for name in fields:
        assert len({repr(getattr(p, name)) for p in all_plans}) == 1, name
    one = all_plans[0]
    newest = max(m.version for m in members)
    assert one.target == newest
    allow = members[0].allow_heal
    for rank, (mine, who) in enumerate(zip(all_plans, members, strict=True)):
        assert mine.replica_rank == rank
        assert mine.size == len(members)
        holds = who.version == newest and not mine.heals and not mine.excluded
        assert holds + mine.heals + mine.excluded == 1, "exactly one of: holds the truth, heals, waits"
        assert mine.heals == (rank in mine.healing)
        assert not (mine.heals and not allow)
        assert not (mine.excluded and allow)
        if mine.heals:
            assert mine.donors
            for donor in mine.donors:
                assert members[donor].version == newest
                assert donor not in mine.healing
                if newest.step or members[0].init_sync:
                    assert members[donor].lineage == mine.target_lineage
            place = mine.healing.index(rank)
            assert set(mine.relays) <= set(mine.healing[:place]), "who waits for whom is no circle"
        else:
            assert mine.donors == mine.relays == ()
        assert mine.heals_first == (mine.heals and (newest.step == 0 or who.heals_before_forward))
    assert set(one.participants) <= set(range(len(members)))
    assert list(one.participants) == sorted(set(one.participants))
    assert one.ready_expected == sum(p.heals and not p.heals_first for p in all_plans)
    able = [r for r, p in enumerate(all_plans) if not p.excluded]
    if mode is WorldSizeMode.DYNAMIC:
        assert list(one.participants_healed) == able
        assert [r for r in able if not all_plans[r].heals or all_plans[r].heals_first] == list(one.participants)
    else:
        assert len(one.participants_healed) == min(needed, len(able))
        assert len(one.participants) <= needed
    assert any(not all_plans[r].heals for r in one.participants), "somebody who holds the state counts (R11)"


def test_donors_are_rotated_so_that_load_spreads() -> None:
    members = [member(n, 4, 1) for n in "abc"] + [member(n) for n in "defghi"]
    firsts = Counter(p.donors[0] for p in plans(members) if p.heals)
    assert firsts == {0: 2, 1: 2, 2: 2}
    assert plans(members)[4].donors == (1, 2, 0)


def test_many_receivers_of_one_source_pass_its_state_on() -> None:
    members = [member(f"r{i:02}", lineage=i + 1, heals_before_forward=True) for i in range(32)]
    all_plans = plans(members)
    assert all_plans[0].relays == all_plans[1].relays == ()
    assert [p.relays for p in all_plans[2:6]] == [(1,), (1,), (2, 1), (2, 1)]
    load = Counter(rank for p in all_plans for rank in p.relays)
    assert max(load.values()) == 6
    enough = [member(n, 4, 1) for n in "abc"] + [member(n) for n in "def"]
    assert [p.relays for p in plans(enough)] == [()] * 6


def test_equal_step_of_another_quorum_heals() -> None:
    members = [member("a", 4, 1), member("b", 4, 2), member("c", 4, 1)]
    assert [p.heals for p in plans(members)] == [True, False, True]


def test_another_lineage_heals_from_the_one_most_groups_hold() -> None:
    members = [member("a", 4, 1, lineage=7), member("b", 4, 1, lineage=8), member("c", 4, 1, lineage=8)]
    assert [p.heals for p in plans(members)] == [True, False, False]
    members = [member("a", 4, 1, lineage=7), member("b", 4, 1, lineage=8)]
    assert [p.heals for p in plans(members)] == [False, True], "a tie goes to the lowest rank"


@pytest.mark.parametrize(("init_sync", "heal"), [(True, [False, True, True]), (False, [False, False, False])])
def test_init_sync(init_sync: bool, heal: list[bool]) -> None:
    members = [member(n, lineage=i, init_sync=init_sync) for i, n in enumerate("abc")]
    assert [p.heals for p in plans(members)] == heal
    assert all(p.participants == (0, 1, 2) for p in plans(members))


def test_allow_heal_false_waits_and_never_counts() -> None:
    members = [member("a", 4, 1, allow_heal=False), member("b", 3, 1, allow_heal=False)]
    first, second = plans(members)
    assert (first.participants, second.excluded, second.heals) == ((0,), True, False)


def test_void_heals_even_from_an_untrained_group() -> None:
    first, second = plans([member("a", -1, -1), member("b")])
    assert (first.heals, first.donors, second.heals) == (True, (1,), False)


def test_spares() -> None:
    members = [member("a"), member("b", 4, 1), member("c", 4, 1), member("d", 4, 1)]
    spared = plans(members, mode=WorldSizeMode.FIXED_WITH_SPARES, min_replicas=2)
    assert spared[0].participants == spared[0].participants_healed == (1, 2)


def test_a_member_that_heals_is_no_participant_while_others_hold_the_state() -> None:
    """Found as I7 (R11): the only participant was a member whose heal failed each time; nothing was ever committed."""
    members = [member("a", heals_before_forward=True), member("b", 4, 1)]
    first, _ = plans(members, mode=WorldSizeMode.FIXED_WITH_SPARES, min_replicas=1)
    assert first.participants == (1,)


def test_a_stranger_has_no_plan() -> None:
    with pytest.raises(ValueError, match="x is not a member of quorum 9"):
        plan(Quorum(9, (member("a"),)), "x")
    assert plans([member("a", store_address="h:1")])[0].store_address == "h:1"
