"""Files of events: order, rotation, bounds, disks that take nothing, forks, and what `emit` may cost."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import pathlib
import threading
import time
from typing import Any

import pytest

from ft_core.events import event_file, event_log
from ft_core.events.event_file import EventFile
from ft_core.events.event_log import NO_LIMIT, SILENT, EventLog, open_events
from ft_core.events.schema import REPLICA, TEXT_MAX, check


def events_in(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_bytes().splitlines()]


def opened(folder: pathlib.Path, source: str = "replica-1") -> EventLog:
    log = open_events(str(folder), REPLICA, source, "1.2")
    assert isinstance(log, EventLog)
    return log


def test_events_come_out_in_order_after_who_writes_them(tmp_path: pathlib.Path) -> None:
    before = time.time()
    log = opened(tmp_path / "made")
    for number in range(300):
        log.emit("waiting", reason=f"reason {number}")
    log.close()
    head, *waiting, last = events_in(tmp_path / "made")
    assert head["kind"] == "log"
    assert (head["v"], head["role"], head["source"], head["pid"]) == (1, "replica", "replica-1", os.getpid())
    assert [event["reason"] for event in waiting] == [f"reason {number}" for number in range(300)]
    assert last["kind"] == "closed"
    assert [check(event) for event in (head, *waiting, last)] == [""] * 302
    assert before - 1 <= waiting[0]["t"] <= waiting[-1]["t"] <= time.time() + 1
    log.emit("waiting", reason="too late")
    log.close()
    assert len(events_in(tmp_path / "made")) == 302


def test_no_folder_no_log() -> None:
    assert open_events("", REPLICA, "x") is SILENT
    assert not SILENT.on


def test_what_is_too_long_is_cut_and_infinity_is_a_number(tmp_path: pathlib.Path) -> None:
    log = opened(tmp_path)
    log.emit("pause_begun", reason="x" * 9999, max_s=float("inf"))
    log.close()
    pause = events_in(tmp_path)[1]
    assert len(pause["reason"]) == TEXT_MAX
    assert pause["max_s"] == NO_LIMIT


def test_parts_are_bounded_and_the_oldest_of_this_source_go(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "PART_BYTES", 1000)
    monkeypatch.setattr(event_file, "KEPT_BYTES", 4000)
    for other in ("replica-1.1.abc.jsonl", "replica-10.1.abc.0.jsonl", "replica-1.notes"):
        (tmp_path / other).write_text("not ours")
    (tmp_path / "replica-1.1.abc.0.jsonl").write_text("x" * 900)
    log = opened(tmp_path)
    wait = threading.Event()
    for number in range(60):
        log.emit("waiting", reason=f"{number:050}")
        if number % 10 == 9:  # each a batch of its own
            while log._queue.qsize():
                wait.wait(0.001)
    log.close()
    names = sorted(path.name for path in tmp_path.iterdir() if str(os.getpid()) in path.name)
    sizes = [(tmp_path / name).stat().st_size for name in names]
    assert len(names) > 1
    assert max(sizes) <= 1300  # one batch may be longer than what is left of a part, never of two
    assert sum(sizes) <= 4000
    assert not (tmp_path / "replica-1.1.abc.0.jsonl").exists()
    assert (tmp_path / "replica-1.1.abc.jsonl").exists()
    assert (tmp_path / "replica-10.1.abc.0.jsonl").exists()
    heads = [json.loads((tmp_path / name).read_text().splitlines()[0]) for name in names]
    assert all(head["kind"] == "log" for head in heads)
    reasons = [
        json.loads(line).get("reason", "") for name in names for line in (tmp_path / name).read_text().splitlines()
    ]
    assert max(reasons) == f"{59:050}"  # the newest are kept


def test_an_unwritable_folder_is_one_warning(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        log = opened(tmp_path / "file" / "events")
        log.retry_s = 0.0
        for _ in range(3):
            log.emit("waiting", reason="x")
        log.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "events cannot be written" in caplog.text


def test_a_full_disk_costs_events_and_not_a_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A write that the disk takes in part leaves a torn line; the next one begins on a line of its own."""
    real, full = os.write, threading.Event()

    def write(fd: int, data: Any) -> int:
        if full.is_set() and bytes(data)[:1] in (b"{", b"\n"):
            real(fd, bytes(data)[:5])
            full.clear()
            failing.set()
            return 5
        if failing.is_set():
            failing.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    failing = threading.Event()
    log = opened(tmp_path)
    log.retry_s = 0.0
    log.emit("waiting", reason="before")
    wait = threading.Event()
    while not any(b"before" in path.read_bytes() for path in tmp_path.iterdir()):
        wait.wait(0.001)
    monkeypatch.setattr(os, "write", write)
    full.set()
    with caplog.at_level(logging.WARNING):
        log.emit("waiting", reason="lost")
        while log._unwritten == 0:
            wait.wait(0.001)
        log.emit("waiting", reason="after")
        log.close()
    lines = next(iter(tmp_path.iterdir())).read_bytes().splitlines()
    assert lines[2] == b'{"t":'
    told = [json.loads(line) for line in [*lines[:2], *lines[3:]]]
    assert [event["kind"] for event in told] == ["log", "waiting", "dropped", "waiting", "closed"]
    assert told[2]["events"] == 1
    assert "No space left" in told[2]["reason"]
    assert len(caplog.records) == 1


def test_a_writer_that_hangs_costs_events_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "QUEUE_MAX", 10)
    monkeypatch.setattr(event_log, "CLOSE_S", 0.05)
    hangs, go_on = threading.Event(), threading.Event()
    real = EventFile.write

    def write(self: EventFile, lines: bytes) -> None:
        hangs.set()
        go_on.wait(10)
        real(self, lines)

    monkeypatch.setattr(EventFile, "write", write)
    log = opened(tmp_path)
    log.emit("waiting", reason="the first")
    assert hangs.wait(10)
    for _ in range(50):
        log.emit("waiting", reason="x")
    began = time.monotonic()
    log.close()  # gives up after CLOSE_S
    assert time.monotonic() - began < 5
    go_on.set()
    log._thread.join(10)
    kinds = [event["kind"] for event in events_in(tmp_path)]
    assert kinds.count("waiting") == 11
    dropped = next(event for event in events_in(tmp_path) if event["kind"] == "dropped")
    assert dropped["events"] == 41  # 40, and the "closed"


def _child(log: EventLog, pipe: Any) -> None:
    log.emit("waiting", reason="from the child")
    log.close()
    pipe.send(log.on)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path: pathlib.Path) -> None:
    log = opened(tmp_path)
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe()
    child = context.Process(target=_child, args=(log, its))
    child.start()
    assert mine.recv() is False
    child.join()
    log.emit("waiting", reason="from the parent")
    log.close()
    assert [event.get("reason") for event in events_in(tmp_path)] == [None, "from the parent", None]
