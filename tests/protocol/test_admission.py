"""Who may be in a quorum, who is left out, who is refused: one group that is set up differently stops nobody else."""

from __future__ import annotations

import pytest

from ft_core.protocol.group.merge import Mismatch, merge_asks
from ft_core.protocol.lighthouse.events import Announce, Asked, Ended, Left
from ft_core.protocol.lighthouse.model_signature import setting_lines
from ft_core.protocol.lighthouse.quorum_rule import decide
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.lighthouse.view import Current, Formed, Life, NotReady, Seen, View
from ft_core.protocol.types import VOID, Ask, Version
from ft_core.rpc import codec
from tests.protocol.test_room import LIVENESS, Script

# ---------------------------------------------------------------- places in a quorum


PLACES = 64


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quorum of fewer than a thousand: each message here is decided about."""
    for module in ("admission", "candidates"):
        monkeypatch.setattr(f"ft_core.protocol.lighthouse.{module}.MAX_REPLICAS", PLACES)


def full(script: Script) -> tuple[str, ...]:
    """As many groups as a quorum can hold, all in one."""
    names = tuple(f"g{number:03}" for number in range(PLACES))
    script.train(*names)
    return names


def test_one_group_more_than_a_quorum_holds_is_refused_at_its_hello() -> None:
    script = Script()
    names = full(script)
    assert script.hello("one more") == [
        "refuse one more: 64 replica groups are here, and a quorum holds at most 64: there is no place for one more. "
        "Run fewer groups with more ranks each, or another job at another lighthouse or room"
    ]
    assert script.ask("one more") == [], "it has no lease"
    out = [script.ask(name, 2) for name in names][-1]
    assert out[0].startswith("quorum g000, g001, ")
    script.do(Left("g007", script.generation["g007"], "drained", False, VOID, agreed=True))
    assert script.hello("one more") == [], "a place is free"


def test_a_restarted_group_has_the_place_of_its_predecessor() -> None:
    script = Script()
    full(script)
    script.ends("g007", silence_s=LIVENESS)
    assert script.hello("g007:2") == []
    script.hello("g007")
    assert script.hello("g007:3") == [], "it waits until the other one of its name has gone"


def test_members_that_return_to_a_restarted_lighthouse_find_a_place() -> None:
    """The newcomer came first; the members are never refused because of it, and a quorum of them can be encoded."""
    old, new = Script(), Script(boot_window_s=5.0)
    names = full(old)
    new.hello("newcomer")
    assert new.ask("newcomer")[0].startswith("tell newcomer: the lighthouse has just started")
    new.quorum, new.members, new.seq = old.quorum, old.members, old.seq | {"newcomer": 1}
    for name in names:
        assert not [text for text in new.hello(name) if text.startswith("refuse")]
    new.later(6.0)
    assert new.room.waits.held == {"newcomer": "newcomer waits for a place: a quorum holds at most 64 groups"}
    asks = [Asked(Ask(name, 2, Version(3, 1), quorum_id=new.quorum[name]), 1) for name in names]
    effects = new.room.handle_all(asks, new.now)
    (formed,) = (effect.quorum for effect in effects if isinstance(effect, Announce))
    assert formed.ids == names
    codec.encode_quorum(formed)
    assert not new.do(Asked(Ask("newcomer", 1), 1)), "nothing is pending because of it: nobody asks again for its sake"


# ---------------------------------------------------------------- min_replica_size


def test_a_newcomer_with_a_larger_min_replica_size_is_left_out_and_told_why() -> None:
    script = Script()
    script.train("a", "b", "c")
    script.hello("new")
    words = (
        "new asks for min_replica_size=10 (FT_MIN_REPLICAS), the running groups for 1: they go on without it until 10 "
        "groups are here; start it with 1"
    )
    assert script.ask("new", min_replicas=10) == [f"tell new: {words}"], "nobody is asked to make place for it"
    out = [script.ask(name, 5) for name in ("a", "b", "c")][-1]
    assert out[0] == "quorum a, b, c -> a#2, b#2, c#2"
    script.later(600.0)
    assert script.room.waits.reason == words


def test_it_joins_when_as_many_groups_are_here() -> None:
    script = Script()
    script.train("a", "b")
    script.hello("c")
    script.ask("c", min_replicas=4)
    script.hello("d")
    assert script.ask("d", min_replicas=4)[-1] == "change -> a, b: c, d wants to join"
    script.ask("a", 5)
    assert script.ask("b", 5)[0] == "quorum a, b, c, d -> a#2, b#2, c#1, d#1"


def test_before_a_quorum_exists_the_larger_min_replica_size_counts() -> None:
    script = Script()
    script.hello("a")
    script.hello("b")
    script.ask("a", min_replicas=3)
    assert "1 of the 3 groups that min_replicas asks for are here (a)" in script.later(0.2)[-1]
    assert "2 of the 3 groups that min_replicas asks for are here (a, b)" in script.ask("b")[-1]


def test_the_usual_min_replica_size_decides_when_members_die() -> None:
    """One of four has a larger one; it was in the quorum, and must not take the others with it."""
    script = Script()
    for name, least in (("a", 2), ("b", 2), ("c", 2), ("d", 4)):
        script.hello(name, min_replicas=least)
    for name, least in (("a", 2), ("b", 2), ("c", 2), ("d", 4)):
        script.ask(name, min_replicas=least)
    script.later(1.0)
    assert script.room.current is not None
    assert script.room.current.members == ("a", "b", "c", "d")
    script.do(Ended("a"))
    out = [script.ask(name, 3, min_replicas=least) for name, least in (("b", 2), ("d", 4), ("c", 2))][-1]
    assert out[0] == "quorum b, c -> b#2, c#2"
    assert script.room.waits.reason.startswith("d asks for min_replica_size=4")


def test_without_the_rule_a_larger_min_replica_size_stops_everybody() -> None:
    def asks(name: str, least: int) -> Seen:
        return Seen(name, Life.UP, 0.0, ask=Ask(name, 1, Version(5, 9), min_replicas=least), asked_at=99.0)

    seen = {name: asks(name, 1) for name in "abc"} | {"d": asks("d", 10)}
    ended = Current(9, ("a", "b", "c"), ended=True, ended_at=99.0)
    formed = decide(View(100.0, seen, ended))
    assert isinstance(formed, Formed)
    assert [ask.replica_id for ask in formed.asks] == ["a", "b", "c"]
    assert isinstance(decide(View(100.0, seen, ended, rules=Rules(min_by_majority=False))), NotReady)


# ---------------------------------------------------------------- another model


def test_a_member_is_not_refused_because_of_a_newcomer_with_another_model() -> None:
    """A lighthouse that has just started hears the newcomer first."""
    script = Script(boot_window_s=5.0)
    script.hello("new")
    script.ask("new", signature=2, signature_lines=("w float32 [3]",))
    running = {"quorum_id": 77 << 32, "members": ("a", "b"), "signature": 1, "signature_lines": ("w float32 [2]",)}
    out = script.hello("a", **running)
    assert out[0].startswith(
        "refuse new: new has another model than a: parameter 0 is 'w float32 [3]' here and 'w float32 [2]' there"
    )
    assert not [text for text in out + script.hello("b", **running) if text.startswith(("refuse a", "refuse b"))]
    assert script.room.records["new"].ask is None
    assert script.hello("late", signature=2, signature_lines=("w float32 [3]",))[0].startswith("refuse late: late has")


MODEL = ("w float32 [2]", "settings BucketSettings(find_unused=False)")
DIFFERENCES: list[tuple[tuple[str, ...], str]] = [
    (
        (*setting_lines({"world_size_mode": "FIXED_WITH_SPARES", "min_replica_size": 2}), *MODEL),
        "b runs with world_size_mode=FIXED_WITH_SPARES, and a with world_size_mode=DYNAMIC: give all replica groups "
        "the same world_size_mode",
    ),
    (MODEL, "b runs with world_size_mode=not set, and a with world_size_mode=DYNAMIC"),
    (
        (*setting_lines({"world_size_mode": "DYNAMIC"}), MODEL[0], "settings BucketSettings(find_unused=True)"),
        "b has another model than a: the bucket settings (bucket_cap_mb, broadcast_buffers, find_unused_parameters) "
        "are BucketSettings(find_unused=True) here and BucketSettings(find_unused=False) there",
    ),
    (
        (*setting_lines({"world_size_mode": "DYNAMIC"}), "w float32 [3]", MODEL[1]),
        "b has another model than a: parameter 0 is 'w float32 [3]' here and 'w float32 [2]' there",
    ),
]


@pytest.mark.parametrize(("lines", "sentence"), DIFFERENCES)
def test_the_first_difference_is_named_with_both_values(lines: tuple[str, ...], sentence: str) -> None:
    script = Script()
    script.hello("a", signature=1, signature_lines=(*setting_lines({"world_size_mode": "DYNAMIC"}), *MODEL))
    assert script.hello("b", signature=2, signature_lines=lines)[0].startswith(f"refuse b: {sentence}")


def test_ranks_of_one_group_that_differ_in_a_setting_are_told() -> None:
    asks = {
        rank: Ask(
            "a", 1, signature=rank, group_world_size=2, signature_lines=setting_lines({"parity_check_every": every})
        )
        for rank, every in enumerate((0, 5))
    }
    merged = merge_asks(asks, 2)
    assert isinstance(merged, Mismatch)
    assert merged.reason == "the ranks of a differ in parity_check_every: ['0', '5']; pass the same on all ranks"


def test_a_lease_that_is_refused_for_its_size_does_not_stay() -> None:
    script = Script()
    script.hello("a", group_world_size=4)
    script.ask("a", group_world_size=4)
    script.hello("b", group_world_size=2)
    assert script.room.records["b"].life is Life.GONE


def test_the_durations_of_a_newcomer_hold_up_nobody() -> None:
    script = Script()
    script.train("a", "b")
    script.hello("new", join_s=86_400.0, orphan_s=1e9)
    script.ask("new")
    script.ask("a", 3)
    assert script.later(11.0)[0].startswith("# b is alive but did not arrive within 10 s")
