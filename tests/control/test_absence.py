"""Which ends of a stream, and failed attempts to open one, are worth a line."""

from __future__ import annotations

import logging

from ft_core.addresses import Addresses
from ft_core.rpc.absence import SILENT_S, Absence

INFO, WARNING = logging.INFO, logging.WARNING
REFUSED, STANDS_BY = "Connection refused", "standby: b:2 is active"


def absence(text: str = "a:1") -> Absence:
    made = Absence("the lighthouse", Addresses.parse(text, "FT_LIGHTHOUSE"))
    made.began(0.0)
    return made


def failed(
    it: Absence, why: str, now: float, address: str = "a:1", *, was_open: bool = False
) -> tuple[int, str] | None:
    return it.failed(address, why, now, was_open=was_open, steady=was_open)


def level(it: Absence, why: str, now: float, address: str = "a:1", *, was_open: bool = False) -> int | None:
    due = failed(it, why, now, address, was_open=was_open)
    return None if due is None else due[0]


def test_at_the_start_a_warning_comes_once_and_only_if_it_lasts() -> None:
    it = absence()
    assert failed(it, REFUSED, 0.0) == (
        INFO, "the lighthouse at a:1 cannot be reached: Connection refused (FT_LIGHTHOUSE); trying again",
    )  # fmt: skip
    assert level(it, REFUSED, 0.5) is None
    assert level(it, REFUSED, SILENT_S) == WARNING
    assert level(it, REFUSED, 2 * SILENT_S) is None
    assert level(it, "another reason", 2 * SILENT_S) == WARNING
    assert it.opened("a:1", 3.0) == "the lighthouse answers after 3.0 s"
    assert it.reason == ""


def test_one_that_answers_soon_is_worth_no_warning() -> None:
    it = absence()
    failed(it, REFUSED, 0.0)
    assert it.opened("a:1", 0.5) == ""


def test_the_end_of_a_stream_is_news_each_time_and_what_follows_once() -> None:
    it = absence()
    it.opened("a:1", 0.0)
    for begin in (10.0, 20.0):
        assert level(it, "Socket closed", begin, was_open=True) == WARNING
        assert level(it, REFUSED, begin + 0.1) == WARNING
        assert level(it, REFUSED, begin + 5.0) is None
        assert it.reason == "the lighthouse at a:1 cannot be reached: Connection refused"
        assert it.opened("a:1", begin + 6.0) == "the lighthouse is back after 6.0 s"


def test_two_addresses_that_fail_for_different_reasons_are_logged_once_each() -> None:
    it = absence("a:1,b:2")
    it.opened("a:1", 0.0)
    assert failed(it, "Socket closed", 10.0, was_open=True) == (
        WARNING, "the lighthouse at a:1 cannot be reached: Socket closed; trying b:2",
    )  # fmt: skip
    assert failed(it, REFUSED, 10.0, "b:2") == (
        WARNING, "the lighthouse at b:2 cannot be reached: Connection refused; trying a:1",
    )  # fmt: skip
    assert level(it, REFUSED, 10.0) == WARNING
    for now in (10.1, 15.0):
        assert level(it, REFUSED, now, "b:2") is None
        assert level(it, REFUSED, now) is None
    both = "a:1: Connection refused; b:2: Connection refused"
    assert it.reason == f"the lighthouse at a:1,b:2 cannot be reached: {both}"
    assert it.opened("b:2", 20.0) == "the lighthouse at b:2 answers after 10.0 s"


def test_one_that_stands_by_is_no_trouble_unless_nobody_takes_us_for_long() -> None:
    it = absence("a:1,b:2")
    assert level(it, STANDS_BY, 0.0) == INFO
    assert it.opened("b:2", 0.1) == ""
    assert level(it, "Socket closed", 10.0, "b:2", was_open=True) == WARNING
    assert level(it, "standby: b:2 has just ended", 10.0) == INFO
    it = absence("a:1,b:2")
    it.opened("a:1", 0.0)
    it.failed("a:1", STANDS_BY, 10.0, was_open=True, steady=True)
    assert level(it, STANDS_BY, 10.5, "b:2") == INFO
    assert level(it, STANDS_BY, 10.5, "a:1") is None
    assert level(it, STANDS_BY, 10.0 + SILENT_S) == WARNING, "neither takes us"
    assert level(it, STANDS_BY, 12.0, "b:2") is None
    assert level(it, STANDS_BY, 12.0) is None
