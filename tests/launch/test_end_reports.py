"""When the report of a group's end is sent again."""

from __future__ import annotations

import pytest

from ft_core.launch.end_reports import MOST_S, PAUSE_S, REPORT_S, EndReports


def test_what_was_taken_is_not_sent_again_also_if_the_lighthouse_knew_nobody() -> None:
    reports = EndReports()
    for known in (True, False):
        reports.sent("a", 0.0, known=known)
        assert reports.wait_s(0.0) is None
        assert reports.due(100.0) == ""


def test_what_nobody_took_is_sent_again_until_a_lighthouse_knows_it() -> None:
    reports = EndReports()
    reports.sent("a", 0.0, known=None)
    assert reports.wait_s(0.0) == PAUSE_S
    assert reports.due(0.0) == ""
    assert reports.due(PAUSE_S) == "a"
    reports.sent("a", PAUSE_S, known=False)
    assert reports.wait_s(PAUSE_S) == pytest.approx(2 * PAUSE_S), "the members have not told it of themselves yet"
    reports.sent("a", 3 * PAUSE_S, known=True)
    assert reports.wait_s(1.0) is None


def test_pauses_grow_and_it_ends() -> None:
    reports, now, pauses = EndReports(), 5.0, []
    reports.sent("a", now, known=None)
    while (pause_s := reports.wait_s(now)) is not None:
        pauses.append(round(pause_s, 6))
        now += pause_s
        assert reports.due(now) == "a"
        reports.sent("a", now, known=None)
    assert pauses == sorted(pauses)
    assert max(pauses) == pytest.approx(MOST_S)
    assert REPORT_S <= now - 5.0 < REPORT_S + MOST_S


def test_each_group_has_its_own() -> None:
    reports = EndReports()
    reports.sent("a", 0.0, known=None)
    reports.sent("b", 0.01, known=None)
    assert reports.wait_s(0.01) == pytest.approx(PAUSE_S - 0.01)
    assert reports.due(PAUSE_S) == "a"
    reports.sent("a", PAUSE_S, known=True)
    assert reports.due(PAUSE_S) == ""
    assert reports.due(0.01 + PAUSE_S) == "b"
