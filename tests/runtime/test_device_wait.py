"""The host's wait for a device: that nothing cut short is ever taken for whole, and that it always ends."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace

import pytest

from ft_core.errors import CollectiveError
from ft_core.runtime import device_wait
from ft_core.runtime.device_wait import outlast

NEVER = 10**6
ABORTED = CollectiveError("aborted")


class History:
    """A collective that would be whole at tick `whole_at`, and an abort that latches its error at `abort_at`.

    Each look of the host's, at the mark or at the error, is a tick. What was not whole when the error was latched ends
    `lag` ticks later, cut short.
    """

    def __init__(self, whole_at: int, abort_at: int, lag: int) -> None:
        self.whole_at, self.abort_at, self.lag, self.tick = whole_at, abort_at, lag, 0

    @property
    def cut_short(self) -> bool:
        return self.abort_at < self.whole_at

    def query(self) -> bool:
        self.tick += 1
        return self.tick > (self.abort_at + self.lag if self.cut_short else self.whole_at)

    def error(self) -> Exception | None:
        self.tick += 1
        return ABORTED if self.tick > self.abort_at else None

    def ends_well(self) -> bool:
        try:
            outlast([self], self.error)
        except CollectiveError:
            return False
        return True


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_wait, "time", SimpleNamespace(sleep=lambda _s: None))


def test_what_was_cut_short_is_never_taken_for_whole() -> None:
    """Every order of the end of a collective, of an abort, and of the host's looks, over twelve ticks."""
    ended = {True: 0, False: 0}
    for whole_at in (*range(13), NEVER):
        for abort_at in (*range(13), NEVER):
            for lag in range(3):
                history = History(whole_at, abort_at, lag)
                if whole_at == abort_at == NEVER:
                    continue
                well = history.ends_well()
                assert not (well and history.cut_short), (whole_at, abort_at, lag)
                ended[well] += 1
    assert min(ended.values()) > 100, ended


def test_it_ends_with_the_error_also_if_the_device_never_does() -> None:
    assert not History(whole_at=NEVER, abort_at=9, lag=NEVER).ends_well()


def test_all_marks_are_waited_for() -> None:
    early, late = History(1, NEVER, 0), History(30, NEVER, 0)
    outlast([early, late], lambda: None)
    assert late.tick > late.whole_at


def test_without_a_mark_the_error_counts() -> None:
    outlast([], lambda: None)
    with pytest.raises(CollectiveError, match="aborted"):
        outlast([], lambda: ABORTED)


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_sleeps_of_a_thread_that_has_waited_are_not_rounded_up() -> None:
    found: list[int] = []

    def wait() -> None:
        outlast([History(1, NEVER, 0)], lambda: None)
        found.append(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))  # PR_GET_TIMERSLACK

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [device_wait.SLACK_NS]
