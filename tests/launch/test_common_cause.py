"""Which deaths end the job: an error that hits every group before the first commit, or twice in a row after it."""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.launch.common_cause import FILES_LOOK_S, LOOK_MAX_S, LOOK_S, CommonCause, Death, patience_s

OVERFLOW = {"code": 1, "error": "OverflowError: too large", "trace": "t1", "known": True, "lived_s": 3.0}
OTHER = {"code": 1, "error": "ValueError: no", "trace": "t2", "known": True, "lived_s": 3.0}
KILLED = {"code": -9}
NO_MODULE = {"code": 1, "error": "ModuleNotFoundError: No module named 'x'", "trace": "t3"}
SETTING = {"code": 1, "error": "ft_core.errors.ConfigError: timeout=0", "trace": "t4", "known": True}
USAGE = {"code": 2}
CODE_7 = {"code": 7}
DENIED_TEXT = "PermissionError: [Errno 13] Permission denied: '/logs'"
DENIED = {"code": 1, "error": DENIED_TEXT, "trace": "t6", "lived_s": 3.0}
DENIED_LATER = DENIED | {"trace": "t7", "known": True}
DENIED_ELSEWHERE = DENIED_LATER | {"error": "PermissionError: [Errno 13] Permission denied: '/data'"}
NO_PEER = {"code": 1, "error": "ConnectionRefusedError: [Errno 111] Connection refused", "trace": "t8", "known": True}
LATE = {"code": 1, "error": "ft_core.errors.QuorumTimeoutError: no quorum", "trace": "t5", "known": True}
AWAY = OVERFLOW | {"reachable": False}
LOST = {"code": 1, "error": "ft_core.errors.StateLostError: this job has committed 3 steps, and more", "known": True}

Deaths = list[tuple[str, dict[str, Any]]]
Case = tuple[str, Deaths, str]

BEFORE: list[Case] = [
    ("ab", [("a", OVERFLOW)], ""),
    (
        "ab",
        [("a", OVERFLOW), ("b", OVERFLOW)],
        "train.py fails at its start in all 2 groups (OverflowError: too large)",
    ),
    ("ab", [("a", OVERFLOW), ("a", OVERFLOW), ("b", OVERFLOW)], "train.py fails at its start in all 2 groups"),
    ("ab", [("a", OVERFLOW), ("b", OTHER)], ""),
    ("ab", [("a", OVERFLOW), ("b", OTHER), ("a", OTHER)], "(ValueError: no)"),
    ("ab", [("a", OVERFLOW), ("b", KILLED)], ""),
    ("ab", [("a", KILLED), ("b", KILLED)], ""),
    ("ab", [("a", NO_MODULE), ("b", CODE_7)], "in all 2 groups (exit code 7)"),
    ("ab", [("a", NO_MODULE), ("b", OTHER)], ""),
    ("ab", [("a", SETTING), ("b", SETTING | {"trace": "t4b"})], "ConfigError: timeout=0"),
    (
        "ab",
        [("a", DENIED), ("b", DENIED_LATER)],
        "in all 2 groups (PermissionError: [Errno 13] Permission denied: '/logs'",
    ),
    ("ab", [("a", DENIED), ("a", DENIED), ("b", DENIED_LATER)], "in all 2 groups (PermissionError"),
    ("ab", [("a", DENIED), ("b", DENIED_ELSEWHERE)], ""),
    ("ab", [("a", DENIED | {"reachable": False}), ("b", DENIED_LATER)], ""),
    ("ab", [("a", NO_PEER), ("b", NO_PEER | {"trace": "t9"})], ""),
    ("ab", [("a", LATE), ("b", LATE)], ""),
    ("ab", [("a", AWAY), ("b", AWAY)], ""),
    ("a", [("a", CODE_7)], ""),
    ("a", [("a", USAGE)], "train.py fails at its start (exit code 2)"),
    ("a", [("a", NO_MODULE)], "fails at its start (ModuleNotFoundError"),
    ("a", [("a", SETTING)], "fails at its start (ft_core.errors.ConfigError"),
    ("a", [("a", OVERFLOW)], ""),
    ("a", [("a", OVERFLOW), ("a", OVERFLOW)], "fails at its start (OverflowError"),
    ("a", [("a", OVERFLOW), ("a", KILLED), ("a", OVERFLOW)], ""),
    ("a", [("a", LATE), ("a", LATE)], ""),
    ("ab", [("a", LOST)], "this job has committed 3 steps, and more"),
]
AFTER: list[Case] = [
    ("ab", [("a", OVERFLOW), ("b", OVERFLOW)], ""),
    ("ab", [("a", OVERFLOW), ("b", OVERFLOW), ("a", OVERFLOW)], ""),
    (
        "ab",
        [("a", OVERFLOW), ("b", OVERFLOW)] * 2,
        "fails with the same error again and again in all 2 groups (Overflow",
    ),
    ("ab", [("a", OVERFLOW), ("a", OVERFLOW), ("b", OVERFLOW), ("b", OVERFLOW)], "again and again"),
    ("ab", [("a", OVERFLOW), ("b", OVERFLOW), ("a", KILLED), ("b", OVERFLOW)], ""),
    ("ab", [("a", OVERFLOW), ("b", OTHER)] * 3, ""),
    ("ab", [("a", CODE_7), ("b", CODE_7)] * 3, ""),
    ("ab", [("a", LATE), ("b", LATE)] * 3, ""),
    ("ab", [("a", AWAY), ("b", AWAY)] * 3, ""),
    ("a", [("a", OVERFLOW)] * 2, "again and again (Overflow"),
    ("ab", [("a", LOST)], "this job has committed 3 steps"),
]


def last_word(groups: str, deaths: Deaths, *, committed: bool, whole_job: bool = True, **ages: float) -> str:
    cause = CommonCause("train.py", whole_job=whole_job)
    said = ""
    for name, death in deaths:
        assert not said, f"ended before {name}"
        said = cause.failed(Death(name, **death), {g: ages.get(g, 0.0) for g in groups}, job_committed=committed)
    return said


@pytest.mark.parametrize(("groups", "deaths", "expected"), BEFORE)
def test_before_the_first_commit(groups: str, deaths: Deaths, expected: str) -> None:
    said = last_word(groups, deaths, committed=False)
    assert expected in said
    assert bool(said) == bool(expected)


@pytest.mark.parametrize(("groups", "deaths", "expected"), AFTER)
def test_after_it(groups: str, deaths: Deaths, expected: str) -> None:
    said = last_word(groups, deaths, committed=True)
    assert expected in said
    assert bool(said) == bool(expected)


def test_who_has_got_over_the_error_does_not_count() -> None:
    deaths: Deaths = [("a", OVERFLOW), ("b", OVERFLOW)]
    assert last_word("ab", deaths, committed=False, a=2.0)
    assert not last_word("ab", deaths, committed=False, a=30.0)


def test_once_somebody_trains_two_errors_have_no_common_cause() -> None:
    for began in (False, True):
        cause = CommonCause("train.py", whole_job=True)
        if began:
            cause.began()
        ages = {"a": 0.0, "b": 0.0}
        cause.failed(Death("a", 1, "ValueError: x", "t1"), ages, job_committed=False)
        assert bool(cause.failed(Death("b", 1, "KeyError: y", "t2"), ages, job_committed=False)) != began


def test_one_group_of_a_bigger_job_is_its_policys_business() -> None:
    assert not last_word("a", [("a", OVERFLOW)] * 3, committed=False, whole_job=False)
    assert not last_word("a", [("a", OVERFLOW)] * 3, committed=True, whole_job=False)
    assert last_word("a", [("a", SETTING)], committed=False, whole_job=False)


def test_how_long_the_others_are_waited_for() -> None:
    assert patience_s(Death("a", 1, lived_s=0.0), job_committed=False, groups=2) == LOOK_S
    assert patience_s(Death("a", 1, lived_s=6.0), job_committed=False, groups=2) == 6.5
    assert patience_s(Death("a", 1, lived_s=600.0), job_committed=False, groups=2) == LOOK_MAX_S
    assert patience_s(Death("a", 1, lived_s=6.0), job_committed=True, groups=2) == 0.0
    assert patience_s(Death("a", -9, lived_s=6.0), job_committed=False, groups=2) == 0.0
    for groups, wait_s in (2, FILES_LOOK_S), (1, 3.5):
        assert patience_s(Death("a", 1, DENIED_TEXT, lived_s=3.0), job_committed=False, groups=groups) == wait_s
