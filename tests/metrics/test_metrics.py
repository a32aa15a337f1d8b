"""Events that are counted beside the log: bounds, forks, events that do not fit, and what is looked up at a scrape."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest

from ft_core.events.schema import LIGHTHOUSE, REPLICA
from ft_core.metrics import metrics as module
from ft_core.metrics.metrics import Both, Metrics, beside
from ft_core.metrics.tally import Change, Put
from tests.fakes import FakeEvents

if TYPE_CHECKING:
    from collections.abc import Iterable

VETO = {"reason": "x", "step": 1, "attempt_s": 0.0, "attempts": 1, "cause": "error"}


def value(metrics: Metrics, name: str, *labels: str) -> object:
    return {family.name: family.values for family in metrics.families()}[name].get(labels)


def test_the_log_and_the_metrics_take_the_same_events() -> None:
    log, metrics = FakeEvents(), Metrics(REPLICA)
    both = beside(log, metrics)
    both.emit("vetoed", **VETO)
    both.emit("waiting", reason="for b")
    assert value(metrics, "ft_vetoes_total", "error") == 1
    assert log.kinds == ["vetoed", "waiting"]
    log.on = False
    assert both.on, "metrics without a log"
    assert isinstance(both, Both)
    assert beside(log, None) is log


def test_closing_ends_what_serves_them_once() -> None:
    metrics, ended = Metrics(REPLICA), []
    metrics.ends = lambda: ended.append(1)
    both = beside(FakeEvents(), metrics)
    both.close()
    both.close()
    assert ended == [1]


def test_what_finds_no_room_is_counted_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 10)
    metrics = Metrics(REPLICA)
    for _ in range(25):
        metrics.emit("vetoed", **VETO)
    assert value(metrics, "ft_vetoes_total", "error") == 10
    assert value(metrics, "ft_metrics_dropped_total") == 15
    metrics.emit("vetoed", **VETO)
    assert value(metrics, "ft_vetoes_total", "error") == 11


def test_an_event_that_does_not_fit_is_one_warning_and_the_others_count(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(REPLICA)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            metrics.emit("vetoed", reason="without the rest")
            metrics.emit("counters", commits="many")
        metrics.emit("vetoed", **VETO)
        assert value(metrics, "ft_vetoes_total", "error") == 1
    assert len(caplog.records) == 1
    assert "'vetoed' was not counted" in caplog.text


def test_what_is_looked_up_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Change] = [Put("ft_lease_age_seconds", 2.0)]

    def look() -> Iterable[Change]:
        if not answers:
            raise RuntimeError("gone")
        return answers

    metrics = Metrics(REPLICA, sampled=look)
    assert value(metrics, "ft_lease_age_seconds") == 2.0
    answers.clear()
    with caplog.at_level(logging.WARNING):
        assert value(metrics, "ft_lease_age_seconds") is None, "an old age would be wrong"
        assert value(metrics, "ft_lease_age_seconds") is None
    assert len(caplog.records) == 1


def test_many_threads_emit_while_others_look() -> None:
    metrics, threads = Metrics(LIGHTHOUSE), []
    goes = threading.Event()

    def emits() -> None:
        for _ in range(300):
            metrics.emit("goodbye", room="job", replica_id="a", reason="", finished=False)

    def looks() -> None:
        while not goes.is_set():
            metrics.families()

    lookers = [threading.Thread(target=looks) for _ in range(2)]
    threads = [threading.Thread(target=emits) for _ in range(4)]
    for thread in (*lookers, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    goes.set()
    for thread in lookers:
        thread.join()
    assert value(metrics, "ft_lighthouse_goodbyes_total", "job") == 1200


@pytest.mark.forks
def test_a_forked_child_counts_nothing() -> None:
    metrics = Metrics(REPLICA)
    metrics.emit("vetoed", **VETO)
    child = os.fork()
    if child == 0:
        metrics.emit("vetoed", **VETO)
        os._exit(len(metrics._waiting) + 2 * metrics.on)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert value(metrics, "ft_vetoes_total", "error") == 1
