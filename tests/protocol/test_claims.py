"""R18: what a stranger claims counts for nothing while those who were in the room's quorums are there; and what must
count all the same: a quorum presented after a restart, a checkpoint newer than all at the start of a job."""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.protocol.lighthouse.events import Ended, Hello, Left
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.types import VOID, Version
from tests.protocol.test_room import LIVENESS, ORPHAN, Script

HUGE = Version(10**12, 7)


def training(*, believes_all: bool = False, **more: Any) -> Script:
    script = Script(rules=Rules(r18_claims=not believes_all), **more)
    script.train("a", "b")
    script.progress("a", 3)
    script.progress("b", 3)
    return script


def stranger(script: Script, **hello: Any) -> list[str]:
    return script.hello("s:1", **hello)


def restarted(old: Script) -> Script:
    new = Script(boot_window_s=0.5)
    new.quorum, new.members, new.seq = old.quorum, old.members, old.seq
    return new


# ---------------------------------------------------------------- in a running job


@pytest.mark.parametrize("how", ["hello", "progress"])
def test_a_stranger_that_claims_a_huge_stable_step_stops_nobody(how: str) -> None:
    for believes_all in (True, False):
        script = training(believes_all=believes_all)
        if how == "hello":
            stranger(script, stable=HUGE)
        else:
            stranger(script)
            script.progress("s:1", HUGE.step)
        told = [*script.ask("a", 4), *script.ask("b", 4)]
        formed = any(line.startswith("quorum a, b") for line in told)
        assert formed != believes_all
        if believes_all:
            assert "s:1 holds step 1000000000000, newer than the step 4 of those who ask" in script.room.waits.reason


def test_a_fake_quorum_overrules_nobody() -> None:
    for believes_all in (True, False):
        script = training(believes_all=believes_all)
        fake = script.quorum["a"] + 5
        told = stranger(script, quorum_id=fake, members=("s:1", "a"))
        assert script.room.current is not None
        assert (script.room.current.quorum_id == fake) == believes_all
        assert ("superseded -> b" in told) == believes_all
        if not believes_all:
            assert told == ["superseded -> s:1"]


def test_a_strangers_state_is_not_the_newest() -> None:
    for believes_all in (True, False):
        script = training(believes_all=believes_all)
        stranger(script)
        script.ask("s:1", version=HUGE)
        script.ask("a", 4)
        told = script.ask("b", 4)
        assert script.room.last_quorum is not None
        found = {m.replica_id: m.version for m in script.room.last_quorum.members}
        assert set(found) == {"a", "b", "s:1"}
        newest = max(found, key=lambda i: found[i])
        if believes_all:
            assert newest == "s:1"
            continue
        assert found["s:1"] == VOID
        assert found[newest].step == 4
        assert told[-1].startswith("# s:1 comes with step 1000000000000, newer than all that this room has seen")
        # It has received nothing and insists: it was in a quorum now, and still never held the room's state.
        script.ask("a", 5)
        script.ask("s:1", version=HUGE)
        script.ask("b", 5)
        assert max(m.version for m in script.room.last_quorum.members).step == 5
        # Once it commits with the others, it is one of them.
        committed = Version(6, script.room.last_quorum.quorum_id)
        script.quorum["s:1"] = committed.quorum_id
        script.ask("s:1", version=committed)
        script.ask("a", 5)
        script.ask("b", 5)
        assert max(m.version for m in script.room.last_quorum.members) == committed


def test_a_stranger_does_not_close_the_room() -> None:
    for believes_all in (True, False):
        script = training(believes_all=believes_all)
        stranger(script)
        told = script.do(Left("s:1", script.generation["s:1"], "done", finished=True, version=HUGE, agreed=True))
        assert bool(script.room.closed) == believes_all
        if not believes_all:
            assert told[-1] == "# s:1 was in no quorum of this room: that it has finished ends nothing"


def test_a_strangers_waiting_times_are_not_the_rooms() -> None:
    script = training()
    stranger(script, join_s=1e9, orphan_s=1e9, expected=256)
    view = script.room._view(script.now)
    assert (view.join_s, view.orphan_s, view.expected) == (10.0, ORPHAN, 0)


def test_a_second_process_of_a_members_id_inherits_nothing() -> None:
    script = training()
    script.do(Ended("a"))
    script.hello("a", incarnation=2, quorum_id=0, members=(), stable=HUGE)
    assert not script.room.records["a"].proven
    script.ask("b", 4, failed=True)
    assert "holds" not in script.room.waits.reason


# ---------------------------------------------------------------- what must count


def test_the_newest_checkpoint_is_the_state_at_the_start() -> None:
    script = Script()
    script.hello("a", expected=2)
    script.hello("b", expected=2)
    script.ask("a", version=Version(990, 5))
    script.ask("b", version=Version(1000, 6))
    assert script.room.last_quorum is not None
    assert max(m.version for m in script.room.last_quorum.members) == Version(1000, 6)


def test_a_checkpoint_of_a_step_that_the_room_has_seen_counts() -> None:
    """b's process crashed and returns with what was published; the others are at that step, too."""
    script = training()
    held = Version(3, script.quorum["a"])
    script.do(Left("b", script.generation["b"], "crash", finished=False, version=held, agreed=True))
    script.hello("b2", quorum_id=0, members=())
    script.ask("b2", version=held)
    script.ask("a", 3)
    assert script.room.last_quorum is not None
    assert {m.version for m in script.room.last_quorum.members} == {held}


def test_when_nobody_of_the_room_is_connected_a_checkpoint_counts_again() -> None:
    script = training()
    for name in ("a", "b"):
        script.do(Left(name, script.generation[name], "killed", finished=False, version=VOID, agreed=True))
    stranger(script)
    script.ask("s:1", version=Version(5000, 9))
    script.later(1.0)
    assert script.room.last_quorum is not None
    assert script.room.last_quorum.members[0].version == Version(5000, 9)


def test_a_restarted_lighthouse_adopts_what_two_members_present_not_what_a_stranger_does() -> None:
    old = training()
    fake = old.quorum["a"] + 5
    for order in (["s", "a", "b"], ["a", "s", "b"], ["a", "b", "s"]):
        new = restarted(old)
        for name in order:
            if name == "s":
                stranger(new, quorum_id=fake, members=("s:1",), stable=HUGE)
            else:
                new.hello(name, stable=Version(3, old.quorum[name]))
        assert new.room.current is not None
        assert new.room.current.members == ("a", "b")
        assert [i for i, r in new.room.records.items() if r.proven] in (["a", "b"], ["b", "a"])
        new.later(1.0)
        new.ask("a", 4)
        assert any(line.startswith("quorum a, b") for line in new.ask("b", 4)), order


def test_a_lone_survivor_is_adopted_and_its_state_counts() -> None:
    old = Script()
    old.train("a")
    old.progress("a", 3)
    new = restarted(old)
    assert new.hello("a", stable=Version(3, old.quorum["a"]))[0] == "# adopted the running quorum of a from a"
    new.hello("b")
    new.ask("b", version=Version(2, 1))
    new.later(1.0)
    new.ask("a", 4)
    assert new.room.last_quorum is not None
    assert max(m.version for m in new.room.last_quorum.members).step == 4


def test_a_member_named_in_an_older_quorum_may_present_a_newer_one() -> None:
    old = training()
    before = old.quorum["b"], old.members["b"]
    old.ends("b", silence_s=LIVENESS)
    old.ask("a", 4, failed=True)
    assert old.members["a"] == ("a",)
    for order in ("ab", "ba"):
        new = restarted(old)
        new.quorum["b"], new.members["b"] = before
        told = [line for name in order for line in new.hello(name)]
        assert new.room.current is not None
        assert new.room.current.members == ("a",)
        assert "superseded -> b" in told


def test_a_stream_that_says_hello_twice_confirms_nothing() -> None:
    """One lease is one witness, however often it is opened."""
    old = training()
    new = restarted(old)
    stranger(new, quorum_id=old.quorum["a"] + 5, members=("s:1", "s:2"))
    stranger(new, quorum_id=old.quorum["a"] + 5, members=("s:1", "s:2"))
    new.hello("a")
    new.hello("b")
    assert new.room.current is not None
    assert new.room.current.members == ("a", "b")


def test_a_hello_without_claims_is_what_it_was() -> None:
    script = Script()
    assert script.do(Hello("a:1", "a", 1, 7)) == []


def test_where_all_of_the_room_lost_their_state_a_strangers_counts() -> None:
    script = training()
    script.ask("a", version=VOID)
    stranger(script)
    script.ask("s:1", version=Version(5000, 9))
    assert script.room.last_quorum is not None
    assert script.room.last_quorum.ids == ("a", "b"), "b holds one, and is waited for"
    script.ask("b", version=VOID)
    assert {m.replica_id: m.version.step for m in script.room.last_quorum.members} == {"a": -1, "b": -1, "s:1": 5000}
