"""What is remembered of a room: heals, quorums, throughput; and that all of it is bounded."""

from __future__ import annotations

import pytest

from ft_core.dashboard.history import HEALS_MAX, QUORUMS_MAX, SECONDS, STORY_MAX, RoomHistory, Series, by_room, sentence
from ft_core.dashboard.sample import Note
from ft_core.events.schema import KINDS
from tests.dashboard.samples import NOW, formed, quorum, replica, room


def test_a_series_has_means_and_the_fewest_members() -> None:
    series = Series(1.0, 3)
    for now, rate, members in ((10.1, 4.0, 3), (10.6, 8.0, 2), (11.2, 5.0, 3)):
        series.look(now, rate, members)
    assert list(series.points) == [(10.0, 6.0, 2), (11.0, 5.0, 3)]
    for now in (12.0, 14.0, 15.0):
        series.look(now, 1.0, 1)
    assert [point.begin for point in series.points] == [12.0, 14.0, 15.0], "what nobody looked at is not invented"


def test_a_point_that_was_handed_out_does_not_change() -> None:
    series = Series(1.0, 3)
    series.look(1.0, 4.0, 3)
    before = list(series.points)
    series.look(1.5, 8.0, 1)
    assert before == [(1.0, 4.0, 3)]


def test_a_heal_has_begin_progress_and_end() -> None:
    history = RoomHistory()
    new = quorum(3, {"a:1": 40, "b:2": 0})
    history.noted(formed(3, ["a:1", "b:2"], at=NOW - 0.3))
    history.take(room([replica("a:1", step=40), replica("b:2", step=0)], formed=new), NOW)
    heal = history.heal_of("b:2")
    assert heal is not None
    assert (heal.at, heal.from_step, heal.to_step, heal.total) == (NOW - 0.3, 0, 40, 0)
    assert history.heal_of("a:1") is None
    history.take(room([replica("a:1", step=40), replica("b:2", step=0, healed=(25, 100))], formed=new), NOW + 0.5)
    assert (heal.bytes, heal.total, heal.ended_at) == (25, 100, 0)
    history.take(room([replica("a:1", step=42), replica("b:2", step=42, healed=(100, 100))], formed=new), NOW + 1)
    assert (heal.bytes, heal.ok, heal.ended_at) == (100, True, NOW + 1)
    assert history.heal_of("b:2") is None
    history.take(room([replica("a:1", step=43), replica("b:2", step=43, healed=(100, 100))], formed=new), NOW + 2)
    assert len(history.heals) == 1, "the same quorum is planned once"
    assert history.rate_of("b:2", NOW + 2) == 1.0, "steps that it received are not its own"


def test_a_newcomer_that_copies_before_it_joins_heals() -> None:
    history = RoomHistory()
    alone = room([replica("a:1", step=40), replica("b:2", step=0, healed=(10, 100))], members=("a:1",))
    history.take(alone, NOW)
    heal = history.heal_of("b:2")
    assert heal is not None
    assert heal.to_step == 0
    both = room(alone.replicas, 4, formed=quorum(4, {"a:1": 41, "b:2": 0}))
    history.take(both, NOW + 1)
    assert history.heal_of("b:2") is heal
    assert (heal.at, heal.to_step) == (NOW, 41)


def test_a_heal_whose_replica_is_lost_has_ended() -> None:
    history = RoomHistory()
    new = quorum(3, {"a:1": 40, "b:2": 0})
    history.take(room([replica("a:1"), replica("b:2", step=0)], formed=new), NOW)
    history.take(room([replica("a:1"), replica("b:2", step=0, life="closed")], formed=new), NOW + 1)
    (heal,) = history.heals
    assert (heal.ok, heal.ended_at) == (False, NOW + 1)


def test_quorums_end_with_a_reason() -> None:
    history = RoomHistory()
    history.noted(formed(3, ["a:1", "b:1"]))
    history.noted(Note(NOW + 5, "quorum_ended", {"room": "default", "quorum_id": 3, "reason": "b:1 has ended"}))
    history.noted(formed(4, ["a:1"], at=NOW + 6, without=["b:1"], step=9))
    first, second = history.quorums
    assert (first.ended_at, first.reason) == (NOW + 5, "b:1 has ended")
    assert (second.ended_at, second.without, second.step) == (0, ("b:1",), 9)


def test_a_loss_says_more_than_the_asks_that_follow() -> None:
    history = RoomHistory()
    history.noted(formed(3, ["a:1", "b:1"]))
    history.noted(Note(NOW, "member_lost", {"room": "default", "quorum_id": 3, "replica_id": "b:1", "how": "silent"}))
    history.noted(Note(NOW + 1, "quorum_ended", {"room": "default", "quorum_id": 3, "reason": "a:1 asked"}))
    assert history.quorums[0].reason == "lost b:1: silent"


def test_the_room_is_at_its_members_newest_step() -> None:
    history = RoomHistory()
    history.take(room([replica("a:1", step=40), replica("b:2", step=900)], members=("a:1",)), NOW)
    assert history.step == 40
    gone = room([replica("a:1", step=40, life="closed")])
    history.take(gone, NOW + 1)
    assert history.step == 40, "also when nobody is left"
    assert history.fine.points[-1].members == 0
    history.take(gone, NOW + 2 * SECONDS)
    assert history.fine.points[-1].begin == NOW + 1, "a room that is over adds nothing"


def test_steps_of_a_checkpoint_were_not_made_now() -> None:
    """A job that goes on at step 50,000 has the rate of the steps that follow."""
    history = RoomHistory()
    history.take(room([replica("a:1", step=0)], 0, members=()), NOW)  # connected, and loads
    for second, step in enumerate((50_000, 50_004, 50_008), 1):
        there = room([replica("a:1", step=step)], formed=quorum(3, {"a:1": 50_000}))
        history.take(there, NOW + second)
    assert (history.rate.per_s(NOW + 3), history.rate_of("a:1", NOW + 3)) == (4.0, 4.0)
    assert max(point.rate for point in history.fine.points) == 4.0


def test_steps_before_a_lighthouse_was_started_were_not_made_now() -> None:
    """It is told of the quorum in force first, and of its members' steps a moment later."""
    history = RoomHistory()
    for second, step in enumerate((0, 50_000, 50_004, 50_008)):
        history.take(room([replica("a:1", step=step)]), NOW + second)
    assert (history.rate.per_s(NOW + 3), history.rate_of("a:1", NOW + 3)) == (4.0, 4.0)


def test_what_is_kept_is_bounded() -> None:
    history = RoomHistory()
    for number in range(2000):
        history.noted(formed(number, ["a:1"], at=NOW + number))
        healer = replica(f"b:{number}", step=0)
        there = room([replica("a:1"), healer], number, formed=quorum(number, {"a:1": 7, f"b:{number}": 0}))
        history.take(there, NOW + number)
    assert len(history.quorums) == QUORUMS_MAX
    assert len(history.heals) == HEALS_MAX
    assert len(history.story) == STORY_MAX
    assert len(history.fine.points) == SECONDS
    assert len(history._rates) == 2


def test_rooms_that_are_forgotten_are_forgotten() -> None:
    kept = by_room({}, ("x", "y"))
    assert by_room(kept, ("y", "z"))["y"] is kept["y"]
    assert set(by_room(kept, ("y", "z"))) == {"y", "z"}


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("quorum_formed", {"members": ["a", "b"], "joined": ["b"], "without": ["c"], "step": 5},
         "a quorum of 2 at step 5; joined: b; without: c"),
        ("member_lost", {"replica_id": "b", "how": "its connection ended"}, "lost b: its connection ended"),
        ("goodbye", {"replica_id": "b", "reason": "drained"}, "b left: drained"),
        ("refused", {"replica_id": "b", "reason": "another model"}, "refused b: another model"),
        ("no_quorum_yet", {"reason": "1 of 2 are here"}, "no quorum: 1 of 2 are here"),
        ("stood_still", {"seconds_s": 2.345}, "the lighthouse itself stood still for 2.3 s"),
        ("order", {"replica_id": "b", "what": "drain", "reason": "maintenance"},
         "b was ordered to drain: maintenance"),
        ("quorum_ended", {}, ""),
    ],
)  # fmt: skip
def test_what_happened_is_a_sentence(kind: str, fields: dict[str, object], text: str) -> None:
    assert kind in KINDS
    assert sentence(Note(NOW, kind, fields)) == text


def test_a_heal_that_nobody_needs_any_more_is_none() -> None:
    """A newcomer copied, its donors died, and all begin at the same checkpoint; its last report stays as it is."""
    history = RoomHistory()
    rest = replica("b:2", step=0, healed=(10, 100))
    history.take(room([replica("a:1", step=40), rest], members=("a:1",)), NOW)
    assert history.heal_of("b:2") is not None
    for second in (1, 2):
        history.take(room([rest], 4, formed=quorum(4, {"b:2": 0})), NOW + second)
        assert list(history.heals) == []


def test_a_copy_that_was_given_up_is_no_heal() -> None:
    history = RoomHistory()
    for healed, count in (((10, 100), 1), ((0, 0), 0)):
        history.take(room([replica("b:2", step=0, healed=healed)], members=()), NOW)
        assert len(history.heals) == count


def test_a_heal_over_which_the_lighthouse_was_started_anew_ends() -> None:
    """It knows the quorum, and not who is behind in it."""
    history = RoomHistory()
    for second, done in enumerate((10, 60, 100, 100)):
        history.take(room([replica("a:1"), replica("b:2", step=7 * (done == 100), healed=(done, 100))]), NOW + second)
    (heal,) = history.heals
    assert (heal.ok, heal.ended_at, heal.bytes) == (True, NOW + 2, 100)
