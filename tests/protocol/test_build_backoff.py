"""A member that alone cannot build its process group is held back; the others train on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ft_core.protocol.lighthouse.build_backoff import DELAY_MAX_S, FREE, FREE_UNSURE, MAX_NAMES, BuildLog
from ft_core.protocol.lighthouse.events import Ended, Hello
from ft_core.protocol.lighthouse.record import Record
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.types import Ask, Version
from tests.protocol.test_room import Script

if TYPE_CHECKING:
    from collections.abc import Iterable

EARLIER = 7
NO_SUCH_ADDRESS = "bind: cannot assign requested address"


def trains(script: Script, *names: str) -> None:
    """They are in a quorum and have committed in it."""
    script.train(*names)
    for name in names:
        script.progress(name, 3)


def round_of(script: Script, *, bad: str, others: str, step: int) -> list[str]:
    """All enter one quorum, one of them cannot build it, and everybody asks again."""
    script.ask(bad, failed=True, unbuilt=NO_SUCH_ADDRESS, unbuilt_here=True, store_address="10.9.8.7:1")
    return asks(script, others, step, failed=True)


def asks(script: Script, names: Iterable[str], step: int, **more: Any) -> list[str]:
    """They ask, one after the other, with a state of an earlier quorum: nothing was committed in this one."""
    return [script.ask(name, version=Version(step, EARLIER), **more) for name in names][-1]


def test_a_newcomer_that_cannot_build_its_group_is_held_back_longer_and_longer() -> None:
    script = Script()
    trains(script, "a", "b")
    script.hello("new")
    script.ask("new")
    out = asks(script, "ab", 4)
    assert out[0].startswith("quorum a, b, new")
    out = round_of(script, bad="new", others="ab", step=4)
    words = (
        "new (10.9.8.7:1) could not build its process group and is held back for 1 s, the others go on: "
        f"{NO_SUCH_ADDRESS}; look at its log, FT_HOSTNAME, FT_INTERFACE and the limit of open files there"
    )
    assert f"# {words}" in out
    assert any(text.startswith("quorum a, b -> ") for text in out)
    assert script.room.waits.held == {"new": words}
    assert script.later(0.9) == []
    assert script.later(0.2) == [
        "tell new: waiting for the running groups to reach their next step boundary",
        "change -> a, b: new wants to join",
    ]
    waits = []
    for step in range(5, 13):
        asks(script, "ab", step)
        round_of(script, bad="new", others="ab", step=step)
        assert script.room.current is not None
        assert script.room.current.members == ("a", "b")
        waits.append(script.room.records["new"].admitted_at - script.now)
        script.later(waits[-1] + 0.01)
    assert [round(wait) for wait in waits] == [2, 4, 8, 16, 30, 30, 30, 30]
    assert max(waits) == DELAY_MAX_S


def test_who_costs_the_others_much_waits_long() -> None:
    """An address of its store that nobody reaches ends only with the time to connect."""
    script = Script()
    trains(script, "a", "b")
    script.hello("new")
    script.ask("new")
    asks(script, "ab", 4)
    script.later(20.0)
    round_of(script, bad="new", others="ab", step=4)
    assert script.room.records["new"].admitted_at == pytest.approx(script.now + 10 * 20.0, abs=0.1)


def test_a_commit_with_it_forgives() -> None:
    script = Script()
    trains(script, "a", "b")
    for _ in range(FREE):
        round_of(script, bad="b", others="a", step=4)
    script.progress("a", 5)
    out = round_of(script, bad="b", others="a", step=6)
    assert any(text.startswith("quorum a, b") for text in out)


def test_what_a_death_explains_is_nobodys_fault() -> None:
    script = Script()
    trains(script, "a", "b", "c")
    for _ in range(FREE + 3):
        script.hello("x", incarnation=7)
        script.ask("x")
        asks(script, "abc", 4)
        script.do(Ended("x"))
        round_of(script, bad="b", others="ac", step=4)
        assert script.room.current is not None
        assert script.room.current.members == ("a", "b", "c")


def test_if_all_failed_those_that_have_committed_before_are_not_held_back() -> None:
    script = Script()
    trains(script, "a", "b")
    script.hello("new")
    script.ask("new")
    asks(script, "ab", 4)
    for _ in range(1):
        for name in ("a", "new", "b"):
            asks(script, [name], 4 if name != "new" else 0, failed=True, unbuilt="timed out")
    assert list(script.room.waits.held) == ["new"]


def test_at_the_start_of_a_job_the_one_whose_machine_it_was_is_held_back() -> None:
    script = Script()
    script.train("a", "b", "c")
    for _ in range(FREE + 1):
        for name in ("b", "a", "c"):
            script.ask(name, failed=True, unbuilt="timed out", unbuilt_here=name == "a")
    assert list(script.room.waits.held) == ["a"]


def test_if_all_name_their_own_machine_the_one_that_failed_first_is() -> None:
    script = Script()
    script.train("a", "b", "c")
    for _ in range(FREE + 1):
        for name in ("b", "a", "c"):
            script.ask(name, failed=True, unbuilt="listens on a loopback address", unbuilt_here=True)
            script.now += 0.01
    assert list(script.room.waits.held) == ["b"]


def test_members_that_could_not_connect_are_not_to_blame() -> None:
    """Two that train are cut from each other, and one of them notices first."""
    script = Script()
    trains(script, "a", "b")
    out: list[str] = []
    for _ in range(FREE + 5):
        script.ask("a", version=Version(4, EARLIER), failed=True, unbuilt="timed out")
        out = asks(script, "b", 4, failed=True)
    assert out[0].startswith("quorum a, b")


@pytest.mark.parametrize(
    ("reached", "others_failed", "held"),
    [(("b", "c"), False, True), (("b",), False, False), (("b", "c"), True, False)],
    ids=["all reached", "one not looked at", "another failed as well"],
)
def test_a_member_that_alone_fails_again_and_again_is_held_back_if_the_network_is_well(
    reached: tuple[str, ...], others_failed: bool, held: bool
) -> None:
    script = Script()
    trains(script, "a", "b", "c")
    for attempt in range(FREE_UNSURE + 1):
        assert "a" not in script.room.waits.held, attempt
        script.ask("a", version=Version(4, EARLIER), failed=True, unbuilt="no usable device", reached=reached)
        asks(script, "b", 4, failed=True, unbuilt="timed out" if others_failed else "")
        asks(script, "c", 4, failed=True)
    assert ("a" in script.room.waits.held) is held


def test_without_the_rule_it_is_in_every_quorum() -> None:
    script = Script(rules=Rules(r15_unbuilt=False))
    trains(script, "a", "b")
    out = [round_of(script, bad="b", others="a", step=4) for _ in range(50)][-1]
    assert any(text.startswith("quorum a, b") for text in out)


def test_names_are_bounded() -> None:
    log = BuildLog()
    records = {}
    for number in range(MAX_NAMES + 5):
        name = f"n{number}"
        records[name] = Record(Hello(name, name, 1, 1), Life.UP, 0.0, Ask("", 0).version, 1)
        log.blame(number + 1, (name,), [Ask(name, 1, quorum_id=number + 1, unbuilt="no", unbuilt_here=True)], records)
    assert len(log._failures) == MAX_NAMES
    assert repr(BuildLog()) == "BuildLog()"
