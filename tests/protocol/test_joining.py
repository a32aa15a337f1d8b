"""Newcomers that arrive within a step of each other join together, and who comes alone waits for nobody."""

from __future__ import annotations

import pytest

from ft_core.protocol.lighthouse.joining import TOGETHER_MAX_S
from ft_core.protocol.lighthouse.rules import Rules
from tests.protocol.test_room import Script

STEP_S = 2.0


def training(*, rules: Rules | None = None, step_s: float = STEP_S) -> Script:
    """Two members whose steps take `step_s`."""
    script = Script(rules=rules)
    script.train("a", "b")
    for step in range(1, 4):
        for name in "ab":
            script.progress(name, step)
        script.later(step_s)
    return script


def told(lines: list[str]) -> list[str]:
    """What the members are told of newcomers."""
    return [text for text in lines if text.startswith("change")]


def test_members_are_told_once_of_those_who_come_within_a_step() -> None:
    script = training()
    script.hello("c")
    script.hello("d")
    assert told(script.ask("c")) == []
    assert told(script.later(0.9 * STEP_S)) == []
    assert told(script.ask("d")) == ["change -> a, b: c, d wants to join"]


def test_without_the_rule_they_are_told_of_each() -> None:
    script = training(rules=Rules(together=False))
    script.hello("c")
    script.hello("d")
    assert told(script.ask("c")) == ["change -> a, b: c wants to join"]
    assert told(script.ask("d")) == ["change -> a, b: c, d wants to join"]


def test_nobody_waits_for_longer_than_a_step() -> None:
    script = training()
    script.hello("c")
    script.hello("never asks")
    assert told(script.ask("c")) == []
    assert told(script.later(0.9 * STEP_S)) == []
    assert told(script.later(0.2 * STEP_S)) == ["change -> a, b: c wants to join"]
    script.hello("d")
    assert told(script.ask("d")) == []
    assert told(script.later(1.1 * STEP_S)) == ["change -> a, b: c, d wants to join"], "a step again"


def test_a_long_step_is_not_waited_for() -> None:
    script = training(step_s=10 * TOGETHER_MAX_S)
    script.hello("c")
    script.hello("d")
    assert told(script.ask("c")) == []
    assert told(script.later(0.9 * TOGETHER_MAX_S)) == []
    assert told(script.later(0.2 * TOGETHER_MAX_S)) == ["change -> a, b: c wants to join"]


def test_who_comes_alone_waits_for_nobody() -> None:
    script = training()
    script.hello("c")
    assert told(script.ask("c")) == ["change -> a, b: c wants to join"]


@pytest.mark.parametrize("end", ["leaves", "silence"])
def test_who_was_waited_for_and_is_gone_holds_nobody(end: str) -> None:
    script = training()
    script.hello("c")
    script.hello("d")
    assert told(script.ask("c")) == []
    lines = script.ends("d", 0.1 if end == "leaves" else 100.0)
    assert told(lines) == ["change -> a, b: c wants to join"]


def test_while_no_pace_is_known_nobody_waits() -> None:
    script = Script()
    script.train("a", "b")
    script.hello("c")
    script.hello("d")
    assert told(script.ask("c")) == ["change -> a, b: c wants to join"]


def test_a_quorum_that_has_ended_waits_for_no_newcomer_that_has_not_asked() -> None:
    script = training()
    script.hello("c")
    script.hello("d")
    script.ask("c", 0)
    script.ask("a", 3, failed=True)
    lines = script.ask("b", 3, failed=True) + script.later(1.0)
    assert any(text.startswith("quorum a, b, c ->") for text in lines), lines


def test_the_pace_is_that_of_the_members() -> None:
    script = training()
    assert repr(script.room._joining) == f"Joining(steps of {STEP_S:.3f} s)"
    script.hello("c")
    script.progress("c", 1000)
    script.later(0.6)
    assert repr(script.room._joining) == f"Joining(steps of {STEP_S:.3f} s)"
