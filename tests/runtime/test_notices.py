"""What a user sees of faults without configuring logging: each line once, from one of the members."""

from __future__ import annotations

import logging

import pytest

from ft_core.errors import ConfigError
from ft_core.protocol.types import Member, Quorum, Version
from ft_core.runtime import notices
from ft_core.runtime.notices import VETOES_S, Membership, Vetoes, level, say, speaker


def quorum(quorum_id: int, step: int, *ids: str, fresh: str = "") -> Quorum:
    """`fresh`: names of those who were in none before."""
    return Quorum(
        quorum_id,
        tuple(
            Member(i, Version(step, 1), 1, previous_quorum_id=0 if i in fresh.split() else quorum_id - 1) for i in ids
        ),
    )


START = quorum(1, 0, "a:1", "b:1", "c:1", fresh="a:1 b:1 c:1")
WITHOUT_B = quorum(2, 7, "a:1", "c:1")
BACK = quorum(3, 9, "a:1", "b:2", "c:1", fresh="b:2")
THAWED = quorum(3, 9, "a:1", "b:1", "c:1")
NO_A = quorum(4, 12, "b:2", "c:1")
NEW_A = quorum(5, 15, "a:2", "b:2", "c:1", "d:1", fresh="a:2 d:1")


def lines(*quorums: Quorum) -> list[str]:
    """What all members say of the last one, together."""
    everybody = {member for one in quorums for member in one.ids}
    said: list[str] = []
    for me in sorted(everybody):
        mine = Membership()
        heard = [mine.entered(one, me) for one in quorums if me in one.ids]
        said += heard[-1] if me in quorums[-1].ids else []
    return said


def test_each_change_is_said_by_one_of_them() -> None:
    assert lines(START) == []
    assert lines(START, WITHOUT_B) == ["lost: b (step 7: 2 groups train on)"]
    assert lines(START, WITHOUT_B, BACK) == ["back: b (step 9: 3 groups train)"]
    assert lines(START, WITHOUT_B, THAWED) == ["back: b after it was frozen or cut off (step 9: 3 groups train)"]
    assert lines(START, WITHOUT_B, BACK, NO_A, NEW_A) == [
        "joined: d (step 15: 4 groups train)", "back: a (step 15: 4 groups train)",
    ][::-1]  # fmt: skip
    assert lines(START, quorum(2, 3, "c:1")) == ["lost: a, b (step 3: 1 group trains on)"]
    assert lines(START, quorum(2, 3, "a:1", "b:1", "c:1")) == [], "nobody was lost"


def test_the_speaker_was_in_a_quorum_before() -> None:
    assert speaker(START) == ""
    assert speaker(NEW_A) == "b:2"
    thawed = Quorum(9, (Member("a:1", Version(9, 1), 1, previous_quorum_id=1), *NO_A.members))
    assert speaker(thawed) == "b:2", "who was away does not know who else was"


def test_vetoes_in_a_row_are_counted() -> None:
    vetoes = Vetoes()
    assert vetoes.vetoed(3, "NaN", 100.0) == "vetoed: the step after 3 was skipped by all (NaN)"
    assert vetoes.vetoed(3, "NaN", 101.0) == ""
    assert vetoes.vetoed(3, "NaN", 102.0) == ""
    assert vetoes.vetoed(3, "NaN", 100.0 + VETOES_S).endswith("; so were 2 more since the last such line")


@pytest.mark.parametrize(("value", "shown"), [(None, True), ("info", True), ("warning", False), ("ERROR", False)])
def test_without_configuration_a_line_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str | None, shown: bool
) -> None:
    monkeypatch.setattr(notices.log, "propagate", False)  # pytest has configured the root logger
    monkeypatch.delenv("FT_LOG", raising=False)
    if value is not None:
        monkeypatch.setenv("FT_LOG", value)
    say("lost: b")
    say("details", quiet=True)
    assert capsys.readouterr().err[9:] == ("lost: b\n" if shown else "")


def test_with_configuration_it_is_the_users(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "ft_core"):
        say("lost: b")
        say("details", quiet=True)
    assert caplog.messages == ["lost: b", "details"]
    with caplog.at_level(logging.WARNING, "ft_core"):
        say("back: b")
    assert "back: b" not in caplog.messages
    assert capsys.readouterr().err == ""


def test_a_level_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="FT_LOG='loud' must be one of debug, info, warning, error"):
        level({"FT_LOG": "loud"})
