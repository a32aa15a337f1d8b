"""Who pairs with whom, when state travels over process groups of two."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ft_core.checkpointing.pg.pairing import DONORS_MAX, RECEIVERS_MAX, pairs
from ft_core.protocol.rank.heal_plan import plan
from ft_core.protocol.types import Member, Quorum, Version


@given(st.integers(1, 12), st.integers(1, 60))
def test_no_donor_has_too_many_and_nobody_goes_without_while_one_has_room(donors: int, receivers: int) -> None:
    holders, healing = range(donors), range(donors, donors + receivers)
    found = pairs(holders, healing)
    load = Counter(donor for chosen in found.values() for donor in chosen)
    assert list(found) == list(healing)
    assert all(len(set(chosen)) == len(chosen) <= DONORS_MAX for chosen in found.values())
    assert max(load.values()) <= RECEIVERS_MAX
    assert max(load.values()) - min(load.get(donor, 0) for donor in holders) <= DONORS_MAX, "about equally many"
    without = [receiver for receiver, chosen in found.items() if not chosen]
    assert not without or len(load) == donors
    assert not without or min(load.values()) == RECEIVERS_MAX


@given(st.integers(1, 5), st.integers(1, 9))
def test_a_receiver_prefers_whom_the_heal_plan_prefers(donors: int, receivers: int) -> None:
    members = tuple(
        Member(f"r{i}:1", Version(9 if i < donors else 3, 1), 0, heal_addresses=("h:1",))
        for i in range(donors + receivers)
    )
    for member in members[donors:]:
        planned = plan(Quorum(4, members), member.replica_id)
        chosen = pairs(planned.holders, planned.healing)[planned.replica_rank]
        assert chosen == planned.donors[: len(chosen)]
        assert planned.first_holder == planned.holders[0] == 0
