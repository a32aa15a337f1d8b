"""One half of a pair: what it writes down of rooms, for how long, and what it does where there is no place for more."""

from __future__ import annotations

from dataclasses import replace

from ft_core.protocol.lighthouse.pair import MAX_NOTES, Pair, Report, Role, Send
from ft_core.protocol.lighthouse.partner import Proposal, Told, together
from ft_core.protocol.types import VOID, Basis

ORPHAN_S = 60.0
OTHER = Report(2, Role.STANDBY, 1, contact=True, complete=True)


def told(name: str, *, ended: bool = True) -> Told:
    """Of a room whose last quorum has ended: the next one has not formed yet, or out of reach."""
    basis = Basis(5, ("a", "b", "c"))
    return Told(name, 5, basis.members, ended, (basis,), entered=5, orphan_s=ORPHAN_S)


def in_contact(role: Role = Role.ACTIVE) -> Pair:
    """One that serves, or stands by, since second 100."""
    pair = Pair(1, "host1:29510", 1.0, 0.0, role)
    pair.heard(replace(OTHER, role=Role.STANDBY if role is Role.ACTIVE else Role.ACTIVE), 100.0, 0)
    assert pair.contact
    assert pair.role is role
    return pair


def keep(pair: Pair, now: float) -> Pair:
    """As many rooms as there is place for have made place for others."""
    for number in range(MAX_NOTES):
        assert pair.makes_place(f"room {number}", (), now) == []
        pair.keeps(told(f"room {number}"), now)
    return pair


def test_no_room_is_forgotten_in_which_somebody_may_train() -> None:
    pair = keep(in_contact(), 200.0)
    assert pair.makes_place("one more", (), 200.0 + ORPHAN_S - 1) is None
    assert pair.makes_place("room 7", (), 200.0) == [], "it is known already"
    assert pair.known("room 0") == (told("room 0"),)


def test_a_room_in_which_nobody_can_train_any_more_makes_place_and_the_other_one_is_told() -> None:
    pair = keep(in_contact(), 200.0)
    actions = pair.makes_place("one more", (), 200.0 + ORPHAN_S)
    assert actions is not None
    assert [a.report.told for a in actions if isinstance(a, Send)] == [(Told("room 0", merged=(5,)),)]
    standby = in_contact(Role.STANDBY)
    standby.stops(told("room 0"), 50.0)
    standby.heard(replace(OTHER, role=Role.ACTIVE, told=(Told("room 0", merged=(5,)),)), 300.0, 0)
    assert not any(known.ids for known in standby.known("room 0"))


def test_a_room_that_is_served_again_is_not_told_as_over() -> None:
    pair = keep(in_contact(), 200.0)
    served = [f"room {number}" for number in range(MAX_NOTES)]
    assert pair.makes_place("one more", served, 200.0 + ORPHAN_S) is None


def test_while_the_other_one_may_have_the_leases_no_room_is_over() -> None:
    pair = keep(in_contact(), 200.0)
    pair.ended()
    assert pair.makes_place("one more", (), 1e6) is None


def test_one_that_has_finished_is_remembered_as_that() -> None:
    pair = keep(in_contact(), 200.0)
    pair.keeps(replace(told("room 3"), closed="it is over"), 200.0)
    actions = pair.makes_place("one more", (), 201.0)
    assert actions is not None
    assert [a.report.told for a in actions if isinstance(a, Send)] == [
        (Told("room 3", closed="it is over", finished=VOID, merged=(5,)),)
    ]


def test_one_that_stands_by_and_has_no_place_records_nothing() -> None:
    pair = in_contact(Role.STANDBY)
    for number in range(MAX_NOTES):
        pair.stops(told(f"room {number}"), 100.0)
    members = ("a",)
    proposal = Proposal("one more", 9, members, (Basis(9, members),), ())
    (answer,) = [
        a.report.answers
        for a in pair.heard(replace(OTHER, role=Role.ACTIVE, complete=False, proposals=(proposal,)), 100.5, 0)
        if isinstance(a, Send)
    ]
    assert answer == ((9, False),)
    assert pair.partner.informed


def test_one_that_had_to_forget_a_room_is_as_one_that_was_started_again() -> None:
    pair = in_contact(Role.STANDBY)
    for number in range(MAX_NOTES):
        pair.stops(told(f"room {number}"), 100.0)
    assert pair.partner.informed
    pair.heard(replace(OTHER, role=Role.ACTIVE, told=(told("one more"),)), 150.0, 0)
    assert pair.overrun
    assert not pair.partner.informed
    assert pair.partner.since == 150.0


def test_what_both_knew_of_a_room_is_told_as_one() -> None:
    """Two reports of one room would take each other's place at a lighthouse that stands by."""
    pair = in_contact(Role.STANDBY)
    first, mine, theirs = Basis(5, ("a", "b", "c")), Basis(6, ("a", "b")), Basis(7, ("a", "c"))
    pair.stops(Told("job", 6, mine.members, bases=(first, mine), entered=5, orphan_s=ORPHAN_S, furthest=9), 100.0)
    other = Told("job", 7, theirs.members, bases=(first, theirs), entered=5, furthest=8)
    pair.heard(replace(OTHER, role=Role.ACTIVE, told=(other,)), 101.0, 0)
    (one,) = pair.all_known()
    assert one == replace(other, bases=(first, mine, theirs), elsewhere=(mine,), orphan_s=ORPHAN_S, furthest=9)
    entered = replace(other, entered=7, bases=(theirs,))
    assert together((*pair.known("job")[:1], entered)) == replace(entered, orphan_s=ORPHAN_S, furthest=9)


def test_what_is_read_after_a_freeze_does_not_mend_the_contact() -> None:
    """It was sent before the other one began to serve; a report of one that hears this one again does."""
    pair = in_contact()
    pair.heard(replace(OTHER, complete=False), 100.9, 0)
    assert pair.contact
    assert pair.partner.silent_at == 101.9
    pair.heard(replace(OTHER, complete=False), 102.0, 0)  # before `tick`
    assert not pair.contact
    assert not pair.partner.stands_by
    pair.heard(OTHER, 102.1, 0)
    assert pair.contact
    assert pair.partner.met_at == 102.1, "until then replicas may have had leases there"
