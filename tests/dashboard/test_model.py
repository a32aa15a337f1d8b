"""What the browser is sent: states in words, why there is no quorum, and only what has changed."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.dashboard.history import RoomHistory, sentence
from ft_core.dashboard.model import NAMES_MAX, REPLICAS_MAX, ROOMS_MAX, Memory, changes, room_page
from ft_core.dashboard.sample import Note, PairSample, ReplicaSample
from tests.dashboard.samples import NOW, formed, quorum, replica, room, sample


def shown(one: ReplicaSample, **of_room: Any) -> dict[str, Any]:
    found = room_page(room([one], **of_room), RoomHistory(), NOW)["replicas"][0]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("more", "of_room", "state", "told"),
    [
        ({}, {}, "training", ""),
        ({}, {"members": ()}, "joining", "connected, not in a quorum"),
        ({"phase": "warm-up"}, {"members": ()}, "joining", "warm-up"),
        ({"asking": True, "asked_at": NOW - 2}, {}, "waiting", "asks for a quorum since 2.0 s"),
        ({"asking": True}, {"held": {"a:1": "too many crashes"}}, "waiting", "too many crashes"),
        ({"paused_until": NOW + 9, "phase": "validation"}, {}, "paused", "validation, for at most 9 s more"),
        ({"stalled": "did not come"}, {}, "stalled", "did not come"),
        ({"incomplete": "rank 1 is missing"}, {}, "incomplete", "rank 1 is missing"),
        ({"life": "closed", "since": NOW}, {}, "lost", "its connection has closed; it may come back"),
        ({"life": "lost", "since": NOW - 4}, {}, "lost", "its connection closed 4 s ago"),
        ({"life": "missed", "since": NOW - 4}, {}, "lost", "silent since 4 s: frozen or cut off"),
        ({"life": "gone", "since": NOW - 4}, {}, "gone", "ended 4 s ago"),
        ({"life": "unknown"}, {}, "unknown", "in a running quorum, but not seen since this lighthouse was started"),
    ],
)
def test_each_state_has_a_word(more: dict[str, Any], of_room: dict[str, Any], state: str, told: str) -> None:
    found = shown(replica(**more), **of_room)
    assert (found["state"], found["told"]) == (state, told)


def test_who_heals_says_how_far_it_is() -> None:
    history = RoomHistory()
    healer = replica("b:2", step=0, healed=(250_000, 1_000_000))
    there = room([replica("a:1", step=40), healer], formed=quorum(3, {"a:1": 40, "b:2": 0}))
    history.take(there, NOW)
    found = room_page(there, history, NOW)["replicas"][1]
    assert (found["state"], found["told"], found["heal"]) == ("healing", "0.2 of 1.0 MB (25%)", [250_000, 1_000_000])


@pytest.mark.parametrize(
    ("replicas", "of_room", "why"),
    [
        ([replica()], {}, ""),
        ([replica()], {"quorum_id": 0, "members": ()}, "nobody asks for one yet; connected: a:1 (step)"),
        ([replica(asking=True)], {"ended": True, "reason": "waiting for b"}, "waiting for b"),
        ([replica(asking=True)], {"ended": True}, "a quorum is being formed"),
        ([replica(life="lost")], {"ended": True}, "no replica is connected"),
        ([], {"quorum_id": 0, "closed": "training is over"}, "training is over"),
        ([replica(f"{n}:1", phase="") for n in "abcdef"], {"quorum_id": 0, "members": ()},
         "nobody asks for one yet; connected: a:1 (starting), b:1 (starting), c:1 (starting), d:1 (starting) "
         "and 2 more"),
    ],
)  # fmt: skip
def test_why_there_is_no_quorum(replicas: list[ReplicaSample], of_room: dict[str, Any], why: str) -> None:
    there = room(replicas, **of_room)
    found = room_page(there, RoomHistory(), NOW)
    assert found["why"] == why
    assert (found["quorum"] == "") is bool(why)


def test_a_replica_has_address_version_and_lease() -> None:
    found = shown(replica(), formed=quorum(3, {"a:1": 5}))
    assert found["address"] == "a:900"
    assert shown(replica())["address"] == "10.0.0.1:5", "where it serves its state, if nothing else is known"
    assert found["version"] == "6@3"
    assert found["lease_s"] == 0.1
    assert shown(replica(silence_s=-1.0))["lease_s"] == -1
    assert found["release"] == "1.2.3"


def test_living_replicas_and_rooms_come_first() -> None:
    gone = replica("a:1", life="gone")
    memory = Memory()
    memory.take(sample(room([gone], name="a"), room([gone, replica("b:1")], name="z", members=("b:1",))))
    page = memory.page()
    assert [one["room"] for one in page["rooms"]] == ["z", "a"]
    assert [one["id"] for one in page["rooms"][0]["replicas"]] == ["b:1", "a:1"]


def test_notes_reach_their_room_and_those_of_the_lighthouse_all() -> None:
    memory = Memory()
    notes = (formed(3, ["a:1"], room="x"), Note(NOW, "stood_still", {"seconds_s": 2.0}))
    memory.take(sample(room([], name="x"), room([], name="y"), notes=notes))
    stories = {one["room"]: [told["kind"] for told in one["story"]] for one in memory.page()["rooms"]}
    assert stories == {"x": ["stood_still", "quorum_formed"], "y": ["stood_still"]}


def test_sizes_are_bounded() -> None:
    memory = Memory()
    many = [replica(f"r:{number}") for number in range(REPLICAS_MAX + 7)]
    names = [one.replica_id for one in many]
    memory.take(sample(room(many, name="full"), *(room([], name=str(n)) for n in range(ROOMS_MAX + 4)),
                       notes=(formed(3, names, room="full", joined=names),)))  # fmt: skip
    page = memory.page()
    assert (len(page["rooms"]), page["more_rooms"]) == (ROOMS_MAX, 5)
    full = page["rooms"][0]
    assert (len(full["replicas"]), full["more_replicas"]) == (REPLICAS_MAX, 7)
    assert full["quorums"][0]["joined"][-2:] == [names[NAMES_MAX - 1], f"{len(names) - NAMES_MAX} more"]


def merged(before: dict[str, Any] | None, change: dict[str, Any]) -> dict[str, Any]:
    """What the browser makes of it (page/app.js: `merge`)."""
    if before is None:
        return change
    known = {one["room"]: one for one in before["rooms"]}
    for one in change["rooms"]:
        old = known.get(one["room"])
        if old is None:
            continue
        for name in ("fine", "coarse", "quorums", "heals", "story"):
            one.setdefault(name, old[name])
        for name, points in one["newest"].items():
            for point in points:
                if one[name] and one[name][-1][0] == point[0]:
                    one[name][-1] = point
                else:
                    one[name].append(point)
    return change


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 3), st.integers(0, 3), st.booleans()), max_size=30))
def test_changes_add_up_to_the_page(moves: list[tuple[float, int, bool]]) -> None:
    """As long as a browser gets every change; the long lists travel only when they have changed."""
    memory, now, step, kept, sent = Memory(), NOW, 0, None, None
    for passes, members, happens in moves:
        now, step = now + passes, step + 1
        there = room([replica(f"{n}:1", step=step) for n in range(members)], step)
        notes = (formed(step, ["a:1"], at=now),) if happens else ()
        memory.take(sample(there, at=now, notes=notes))
        page = json.loads(json.dumps(memory.page()))
        change = changes(sent, page)
        if sent is not None:
            assert not {"fine", "coarse"} & set(change["rooms"][0])
            assert ("quorums" in change["rooms"][0]) is happens
        kept = merged(kept, json.loads(json.dumps(change)))
        assert kept == page
        sent = copy.deepcopy(page)


def test_before_the_first_sample_there_is_a_page() -> None:
    assert Memory().page()["rooms"] == []


# ------------------------------------------------------------ one of two lighthouses


@pytest.mark.parametrize(
    ("pair", "told", "alone"),
    [
        (
            ("standby", 90, True, 90, True),
            "stands by for b:1, for 90 s now: .* its records are complete",
            False,
        ),
        (("standby", 900, True, 900, False), "for 15 min now: .* its records are not complete", False),
        (("starting", 0.3, False, 0.3, False), "has just started, and looks for b:1 before it serves", False),
        (("active", 9000, True, 60, True), "has been active for 2 h. b:1 stands by", False),
        (("active", 60, True, 60, True, True), "for 60 s, since it took the place of b:1. b:1 stands by", False),
        (("active", 60, False, 40, True, True), "Nobody stands by: b:1 has been out of contact for 40 s. Start", True),
    ],
)
def test_what_a_lighthouse_of_a_pair_does_is_said(pair: tuple[Any, ...], told: str, alone: bool) -> None:
    role, since, contact, contact_since, *rest = pair
    memory = Memory()
    memory.take(sample(pair=PairSample(role, "b:1", NOW - since, contact, NOW - contact_since, *rest)))
    page = memory.page()["pair"]
    assert re.search(told, page["told"]), page["told"]
    assert page["alone"] is alone
    assert (page["role"], page["other"], page["since_s"]) == (role, "b:1", since)


def test_a_lighthouse_without_another_one_says_nothing_of_it() -> None:
    memory = Memory()
    assert memory.page()["pair"] is None
    memory.take(sample())
    assert memory.page()["pair"] is None


@pytest.mark.parametrize(
    ("role", "before", "contact", "took_over", "told"),
    [
        ("active", "standby", False, True, "this lighthouse took the place of b:1, which cannot be reached"),
        ("active", "starting", True, False, "this lighthouse is active from now on"),
        ("standby", "active", True, False, "this lighthouse stands by from now on"),
        ("active", "active", True, False, "b:1 stands by"),
        ("active", "active", False, False, "nobody stands by: b:1 cannot be reached"),
    ],
)
def test_changes_of_the_pair_are_in_the_story(
    role: str, before: str, contact: bool, took_over: bool, told: str
) -> None:
    fields = {
        "role": role, "before": before, "other": "b:1", "contact": contact, "complete": True, "took_over": took_over,
    }  # fmt: skip
    assert sentence(Note(NOW, "pair", fields)) == told
