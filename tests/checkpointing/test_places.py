"""Who is served, who waits and who has to go: decided without a socket."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ft_core.checkpointing.http import places as m
from ft_core.checkpointing.http.places import Guest, Places


@dataclass
class Pace:
    began: float | None = None
    moved: int = 0


def guests(n: int, peer: str = "a") -> list[Guest]:
    return [Guest(f"{peer}" if peer else str(i), Pace()) for i in range(n)]


def test_first_come_first_served_up_to_the_bound() -> None:
    places, many = Places(), guests(m.PLACES_MAX + 2, "")
    assert all(places.arrive(g) for g in many)
    assert places.promote() == many[: m.PLACES_MAX]
    assert places.promote() == []
    places.leave(many[3])
    assert places.promote() == [many[m.PLACES_MAX]]


def test_one_machine_cannot_have_all_places_and_others_come_first() -> None:
    places = Places()
    greedy, others = guests(m.PLACES_MAX + 5, "greedy"), guests(2, "other")
    for guest in [*greedy, *others]:
        places.arrive(guest)
    served = places.promote()
    assert len([g for g in served if g.peer == "greedy"]) == m.PLACES_PER_PEER_MAX
    assert set(others) <= set(served)


def test_waiting_is_bounded_for_one_machine_and_for_all() -> None:
    places = Places()
    assert [places.arrive(g) for g in guests(m.WAITING_PER_PEER_MAX + 1)].count(False) == 1
    assert [places.arrive(g) for g in guests(m.WAITING_MAX, "")].count(False) == m.WAITING_PER_PEER_MAX


def test_who_waits_for_an_offer_gives_the_place_up_and_is_next_when_it_is_there() -> None:
    places, many = Places(), guests(m.PLACES_MAX + 3, "")
    for guest in many:
        places.arrive(guest)
    places.promote()
    assert places.park(many[0])
    assert places.promote() == [many[m.PLACES_MAX]]
    places.unpark(many[0])
    places.leave(many[1])
    assert places.promote() == [many[0]]
    places.leave(many[2])
    assert not places.park(many[2])


def test_the_slow_go_only_while_others_wait() -> None:
    places, many = Places(), guests(5, "")
    for guest in many:
        places.arrive(guest)
        guest.spoke = True
    places.promote()
    idle, dripping, fast, ours, silent = many
    idle.pace = Pace(0.0)
    dripping.pace = Pace(0.0, int(m.MIN_BYTES_S * m.STALL_S) - 1)
    fast.pace = Pace(0.0, int(m.MIN_BYTES_S * m.STALL_S))
    ours.pace = Pace(None)
    silent.pace, silent.spoke = Pace(m.STALL_S - m.SILENT_S), False
    assert places.overdue(m.STALL_S) == []
    places.waiting[Guest("b", Pace())] = None
    assert places.overdue(m.STALL_S - 0.1) == []
    assert places.overdue(m.STALL_S) == [idle, dripping, silent]


@given(st.lists(st.tuples(st.sampled_from("apul"), st.integers(0, 40), st.sampled_from("xyz"))))
def test_nobody_is_in_two_places_and_no_bound_is_passed(moves: list[tuple[str, int, str]]) -> None:
    places = Places()
    known: list[Guest] = []
    for what, n, peer in moves:
        if what == "a":
            for guest in guests(n, peer):
                if places.arrive(guest):
                    known.append(guest)
        elif known and what == "p":
            places.park(known[n % len(known)])
        elif known and what == "u" and known[n % len(known)] in places.parked:
            places.unpark(known[n % len(known)])
        elif known and what == "l":
            places.leave(known.pop(n % len(known)))
        places.promote()
        held = [*places.served, *places.waiting, *places.parked]
        assert len(held) == len(set(held)) == len(known)
        assert len(places.served) <= m.PLACES_MAX
        for p in "xyz":
            assert [g.peer for g in places.served].count(p) <= m.PLACES_PER_PEER_MAX
        full = len(places.served) == m.PLACES_MAX
        assert full or all(
            [g.peer for g in places.served].count(w.peer) >= m.PLACES_PER_PEER_MAX for w in places.waiting
        )
