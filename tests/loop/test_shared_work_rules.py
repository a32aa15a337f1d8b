"""Whose part of shared work is waited for, and what is answered to whoever asks for one."""

from __future__ import annotations

import pytest

from ft_core.loop.shared_work_rules import (
    ASK_S,
    SILENT_S,
    Asked,
    Heard,
    Move,
    Position,
    answer,
    asked_for,
    decide,
    question,
    stays,
)

HERE = Position(7, False, 1)


@pytest.mark.parametrize(
    ("heard", "silent_s", "waited_s", "broken", "move"),
    [
        (Heard.THERE, 0.0, 99.0, True, Move.TAKE),
        (Heard.NEVER, 0.0, 0.0, False, Move.REPEAT),
        (Heard.REFUSED, 0.0, 0.0, False, Move.REPEAT),
        (Heard.NOT_YET, 0.0, 9.9, True, Move.WAIT),  # another member is lost: this one is not
        (Heard.NOT_YET, 0.0, 10.0, False, Move.REPEAT),
        (Heard.SILENT, SILENT_S - 0.1, 5.0, False, Move.WAIT),
        (Heard.SILENT, SILENT_S, 5.0, False, Move.REPEAT),
        (Heard.SILENT, ASK_S, 2.0, True, Move.REPEAT),
        (Heard.SILENT, 1.0, 10.0, False, Move.REPEAT),
    ],
)
def test_what_is_done_about_a_part(heard: Heard, silent_s: float, waited_s: float, broken: bool, move: Move) -> None:
    decision = decide(heard, silent_s=silent_s, waited_s=waited_s, limit_s=10.0, broken=broken)
    assert decision.move is move
    assert decision.reason


@pytest.mark.parametrize(
    ("heard", "silent_s", "waited_s", "broken", "stays_there"),
    [
        (Heard.NOT_YET, 0.0, 9.9, False, True),
        (Heard.NOT_YET, 0.0, 9.9, True, True),  # another member has left: this one has not
        (Heard.NOT_YET, 0.0, 10.0, False, False),
        (Heard.NEVER, 0.0, 0.0, False, False),
        (Heard.REFUSED, 0.0, 0.0, False, False),
        (Heard.SILENT, SILENT_S - 0.1, 5.0, False, True),
        (Heard.SILENT, SILENT_S, 5.0, False, False),
        (Heard.SILENT, ASK_S - 0.1, 2.0, True, True),
        (Heard.SILENT, ASK_S, 2.0, True, False),
    ],
)
def test_for_whom_a_member_stays(
    heard: Heard, silent_s: float, waited_s: float, broken: bool, stays_there: bool
) -> None:
    assert stays(heard, silent_s=silent_s, waited_s=waited_s, limit_s=10.0, broken=broken) is stays_there


@pytest.mark.parametrize(
    ("begun", "same_work", "heard"),
    [
        (HERE, True, Heard.NOT_YET),  # it is at it
        (HERE, False, Heard.NEVER),  # it divides something else here
        (Position(7, False, 0), False, Heard.NOT_YET),  # it is at the division before
        (Position(7, False, -1), False, Heard.NOT_YET),  # it has just committed
        (Position(6, True, 3), False, Heard.NOT_YET),  # it is about to commit
        (Position(7, False, 2), True, Heard.NEVER),
        (Position(7, True, -1), False, Heard.NEVER),  # it has begun the next step
        (Position(8, False, -1), False, Heard.NEVER),
    ],
)
def test_what_is_said_about_a_part_that_is_not_there(begun: Position, same_work: bool, heard: Heard) -> None:
    assert answer(HERE, begun, same_work=same_work) is heard


@pytest.mark.parametrize(
    ("begun", "broken", "asking"),
    [
        (Position(6, True, -1), Heard.NEVER, Heard.NEVER),  # it vetoed what who asks has committed
        (Position(7, False, -1), Heard.NOT_YET, Heard.NEVER),  # somebody is lost since its commit, and it comes to it
        (Position(7, False, 0), Heard.NOT_YET, Heard.NEVER),  # it is at the division before
        (HERE, Heard.NOT_YET, Heard.NOT_YET),  # it is at it
    ],
)
def test_what_is_said_by_who_needs_another_quorum(begun: Position, broken: Heard, asking: Heard) -> None:
    assert answer(HERE, begun, same_work=True, broken=True) is broken
    assert answer(HERE, begun, same_work=True, broken=True, asking=True) is asking
    assert answer(HERE, begun, same_work=True, asking=True) is Heard.NOT_YET  # for the quorum that others are in


@pytest.mark.parametrize(
    ("asked", "begun", "heard"),
    [
        (Position(6, True, 0), Position(6, True, -1), Heard.NEVER),  # it has passed that window without dividing
        (HERE, Position(6, True, -1), Heard.NOT_YET),  # it is about to commit
    ],
)
def test_what_is_said_by_who_waits_for_gradients(asked: Position, begun: Position, heard: Heard) -> None:
    assert answer(asked, begun, same_work=False, launched=True) is heard


def test_a_question_is_read_as_it_was_written() -> None:
    at = Position(12, True, 3)
    key = question(at, "ab12", "0")
    assert asked_for(f"{key}/2") == Asked(key, at, "ab12", 2, offers=False)
    assert asked_for(f"{key}/2?") == Asked(key, at, "ab12", 2, offers=True)


@pytest.mark.parametrize("name", ["", "x", "1/2/3/4/5", "a/0/0/x/y/1", "1/0/0/x/y/z/1", "1/0/0/x/y/", "1/0/0/x/y/?"])
def test_what_is_no_question(name: str) -> None:
    assert asked_for(name) is None
