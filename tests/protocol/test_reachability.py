"""Which replicas are left out when some cannot reach each other: against a slow, obvious search, and in known cases."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.protocol.lighthouse.reachability import EXACT, MAX_LINKS, Holds, Reachability, Standing, largest, pair
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.types import Ask, Version

NONE = Version(0, 0)
ALL = Rules()
HOLD_S, RETRY_S, MAX_HOLD_S = Holds().hold_s, Holds().retry_s, Holds().max_s


def standing(name: str, step: int = 0, *, trains: bool = False) -> Standing:
    return Standing(name, Version(step, step), trains)


def obvious(here: list[Standing], cut: set[tuple[str, str]], stable: Version) -> int:
    """The size of the largest group that may be picked, over all subsets."""
    best = (False, 0)
    for size in range(1, len(here) + 1):
        for group in itertools.combinations(here, size):
            names = {s.replica_id for s in group}
            if not any(a in names and b in names for a, b in cut):
                best = max(best, (max(s.newest for s in group) >= stable, size))
    return best[1]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_largest_group_is_found(data: st.DataObject) -> None:
    names = "abcdefgh"[: data.draw(st.integers(1, 8))]
    here = [standing(n, data.draw(st.integers(0, 2)), trains=data.draw(st.booleans())) for n in names]
    pairs = list(itertools.combinations(names, 2))
    cut = set(data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12))) if pairs else set()
    stable = max(s.newest for s in here)
    group = largest(here, cut, stable)
    assert not any(a in group and b in group for a, b in cut)
    assert len(group) == obvious(here, cut, stable)
    assert max(s.newest for s in here if s.replica_id in group) == stable
    assert group == largest(here[::-1], cut, stable), "it does not depend on the order"


def test_ties_go_to_who_trains_then_to_the_newest_state_then_to_the_lower_name() -> None:
    cut = {("a", "b")}
    assert largest([standing("a"), standing("b"), standing("c")], cut, NONE) == {"a", "c"}
    assert largest([standing("a"), standing("b", 3), standing("c")], cut, NONE) == {"b", "c"}
    assert largest([standing("a", 3), standing("b", trains=True)], cut, NONE) == {"b"}


def test_the_newest_stable_state_is_never_left_out() -> None:
    """Without its holder no quorum could form at all (R2), however many reach each other."""
    here = [standing("a", 9), *(standing(n, 3) for n in "bcd")]
    cut = {("a", "b"), ("a", "c"), ("a", "d")}
    assert largest(here, cut, Version(9, 9)) == {"a"}
    assert largest(here, cut, Version(3, 3)) == {"b", "c", "d"}


def test_beyond_the_bound_the_most_cut_go_first() -> None:
    names = [f"n{i:02}" for i in range(EXACT + 6)]
    hub = {pair("n00", n) for n in names[1:]}
    here = [standing(n) for n in names]
    assert largest(here, hub, NONE) == set(names[1:])
    here[0] = standing("n00", 5)
    assert largest(here, hub, Version(5, 5)) == {"n00"}
    bystander = [*here, standing("free")]
    assert "free" in largest(bystander, hub, NONE)


def says(links: Reachability, who: str, unreachable: str = "", reached: str = "", now: float = 0.0) -> list[str]:
    ask = Ask(who, 1, unreachable=tuple(unreachable), reached=tuple(reached))
    return links.stated(ask, ask.unreachable, now)


def test_a_pair_is_cut_while_one_side_says_so() -> None:
    links = Reachability()
    assert says(links, "a", "c") == ["a and c cannot reach each other, reports a"]
    assert says(links, "c", "a") == [], "said once"
    assert links.cut(1.0, ALL) == {("a", "c")}
    says(links, "c", reached="a")
    assert links.cut(2.0, ALL) == {("a", "c")}, "a has not taken it back"
    says(links, "a", reached="c")
    assert links.cut(3.0, ALL) == frozenset()


def test_who_trains_again_does_not_look_so_the_other_side_decides() -> None:
    links = Reachability()
    says(links, "a", "c")
    says(links, "c", "a")
    links.formed("ab")
    assert links.cut(5.0, ALL) == {("a", "c")}
    says(links, "c", reached="a", now=5.0)
    assert links.cut(5.0, ALL) == frozenset()
    says(links, "a", "c", now=6.0)  # it was tried, and failed again
    links.formed("ab")
    says(links, "c", reached="a", now=7.0)
    assert links.cut(6.0 + HOLD_S - 0.1, ALL) == {("a", "c")}
    assert links.next_at(7.0) == 6.0 + HOLD_S
    assert links.cut(6.0 + HOLD_S, ALL) == frozenset()
    at = 0.0
    for _ in range(20):
        at += 1000.0
        says(links, "a", "c", now=at)
        links.formed("ab")
        says(links, "c", reached="a", now=at)
    assert links.cut(at + MAX_HOLD_S - 1, ALL) == {("a", "c")}
    assert links.cut(at + MAX_HOLD_S, ALL) == frozenset()


def test_without_any_word_it_is_tried_again_and_a_quorum_that_works_forgets_it() -> None:
    links = Reachability()
    says(links, "a", "c")
    links.formed("ab")
    assert links.cut(RETRY_S - 1, ALL) == {("a", "c")}
    assert links.cut(RETRY_S, ALL) == frozenset()
    links.committed("abc")
    assert repr(links) == "Reachability(nothing is cut)"


def test_who_returns_after_an_absence_gets_a_chance() -> None:
    links = Reachability()
    says(links, "a", "c")
    links.returned("c")
    assert links.cut(1.0, ALL) == frozenset()


def test_who_has_no_lease_is_absent_not_cut_off() -> None:
    links = Reachability()
    ask = Ask("a", 1, unreachable=("b", "c"))
    assert links.stated(ask, ("c",), 0.0) == ["a and c cannot reach each other, reports a"]


def test_what_is_remembered_is_bounded() -> None:
    links = Reachability()
    for number in range(MAX_LINKS + 5):
        ask = Ask("a", 1, unreachable=(f"n{number}",))
        links.stated(ask, ask.unreachable, 0.0)
    assert len(links.cut(1.0, ALL)) == MAX_LINKS
