"""Time limits: who wins between result and timeout, what stays behind, threads, forks."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch.futures import Future

from ft_core import futures
from ft_core.errors import CollectiveError, ConfigError, PeerError, UsageError
from ft_core.futures import (
    FutureTimeoutError,
    context_timeout,
    fail_future,
    future_timeout,
    future_wait,
    stream_timeout,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOON = timedelta(milliseconds=10)
NEVER = timedelta(hours=1)
WAIT_S = 20.0


def new_future() -> Future[int]:
    return Future()


def timer_threads() -> int:
    return sum(thread.name == "ft-timer" for thread in threading.enumerate())


def open_deadlines() -> int:
    return len(futures._timer._heap) - futures._timer._cancelled


class TestFutureTimeout:
    def test_takes_the_result(self) -> None:
        fut = new_future()
        timed = future_timeout(fut, NEVER)
        assert not timed.done()
        fut.set_result(7)
        assert timed.wait() == 7

    def test_takes_the_exception(self) -> None:
        fut = new_future()
        timed = future_timeout(fut, NEVER)
        fut.set_exception(KeyError("lost"))  # type: ignore[arg-type]
        with pytest.raises(KeyError, match="lost"):
            timed.wait()

    def test_fails_when_time_is_up_and_leaves_the_original_alone(self) -> None:
        fut = new_future()
        timed = future_timeout(fut, SOON)
        with pytest.raises(FutureTimeoutError, match=r"did not complete within 0\.01 s"):
            timed.wait()
        assert not fut.done()
        fut.set_result(1)  # too late for `timed`, and no error for whoever completes it
        with pytest.raises(TimeoutError):
            timed.wait()

    def test_a_timeout_is_a_peers_fault(self) -> None:
        assert issubclass(FutureTimeoutError, PeerError)

    def test_done_already_needs_no_deadline(self) -> None:
        fut = new_future()
        fut.set_result(3)
        before = futures._timer._numbers
        assert future_timeout(fut, timedelta(0)).wait() == 3
        assert futures._timer._numbers == before

    @pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-5)])
    def test_no_time_at_all(self, timeout: timedelta) -> None:
        with pytest.raises(FutureTimeoutError):
            future_timeout(new_future(), timeout).wait()

    def test_longer_than_any_lock_can_wait(self) -> None:
        fut = new_future()
        timed = future_timeout(fut, timedelta.max)
        fut.set_result(2)
        assert timed.wait() == 2

    def test_timeout_must_be_a_timedelta(self) -> None:
        with pytest.raises(ConfigError, match="timedelta, got 5"):
            future_timeout(new_future(), 5)  # type: ignore[arg-type]

    def test_completing_cancels_the_deadline(self) -> None:
        before = open_deadlines()
        fut = new_future()
        future_timeout(fut, NEVER)
        assert open_deadlines() == before + 1
        fut.set_result(0)
        assert open_deadlines() == before

    def test_one_thread_for_all(self) -> None:
        future_timeout(new_future(), SOON)
        before = timer_threads()
        pending = [new_future() for _ in range(200)]
        timed = [future_timeout(fut, NEVER) for fut in pending]
        assert timer_threads() == before
        for number, fut in enumerate(pending):
            fut.set_result(number)
        assert [fut.wait() for fut in timed] == list(range(200))

    def test_an_earlier_deadline_overtakes(self) -> None:
        late = future_timeout(new_future(), NEVER)
        with pytest.raises(FutureTimeoutError):
            future_timeout(new_future(), SOON).wait()
        assert not late.done()

    def test_race_of_result_and_timeout_has_one_winner(self) -> None:
        # Completing exactly when the deadline falls: never both, never neither, and no exception in either thread.
        for _ in range(200):
            fut = new_future()
            timed = future_timeout(fut, timedelta(microseconds=50))
            fut.set_result(1)
            with contextlib.suppress(FutureTimeoutError):
                assert timed.wait() == 1

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_result_on_a_device(self) -> None:
        fut: Future[torch.Tensor] = Future(devices=["cuda:0"])
        tensor = torch.ones(3, device="cuda:0")
        timed = future_timeout(fut, NEVER)
        fut.set_result(tensor)
        assert timed.wait() is tensor


class TestFutureWait:
    def test_result_from_another_thread(self) -> None:
        fut = new_future()
        threading.Thread(target=fut.set_result, args=(9,)).start()
        assert future_wait(fut, timedelta(seconds=WAIT_S)) == 9

    def test_exception_as_it_is(self) -> None:
        fut = new_future()
        fut.set_exception(ValueError("bad"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="bad"):
            future_wait(fut, NEVER)

    def test_timeout(self) -> None:
        with pytest.raises(FutureTimeoutError):
            future_wait(new_future(), SOON)


class TestContextTimeout:
    def test_calls_back_when_late(self) -> None:
        called = threading.Event()
        with context_timeout(called.set, SOON):
            assert called.wait(WAIT_S)

    def test_does_not_when_in_time(self) -> None:
        calls: list[int] = []
        before = open_deadlines()
        with context_timeout(lambda: calls.append(1), NEVER):
            assert open_deadlines() == before + 1
        assert open_deadlines() == before
        assert not calls

    def test_the_blocks_exception_passes_and_cancels(self) -> None:
        before = open_deadlines()
        with pytest.raises(KeyError), context_timeout(lambda: None, NEVER):
            raise KeyError
        assert open_deadlines() == before

    def test_a_failing_callback_is_logged_and_the_timer_lives_on(self, caplog: pytest.LogCaptureFixture) -> None:
        ran = threading.Event()

        def fail() -> None:
            ran.set()
            raise ValueError("callback")

        with caplog.at_level(logging.ERROR, logger="ft_core.futures"):
            with context_timeout(fail, SOON):
                assert ran.wait(WAIT_S)
            with pytest.raises(FutureTimeoutError):  # runs after the failure, on the same thread
                future_timeout(new_future(), SOON).wait()
        assert "a timeout's callback failed" in caplog.text


class EndingTimer(futures._Timer):
    """Its thread ends when a callback exits; that of the process lives as long as the process."""

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            super()._run()


@pytest.fixture
def make_timer() -> Iterator[Callable[..., futures._Timer]]:
    """A timer of the test's own."""
    made: list[futures._Timer] = []

    def make(**limits: int) -> futures._Timer:
        made.append(EndingTimer(**limits))
        return made[-1]

    yield make
    for timer in made:
        timer._max_deadlines += 1
        timer.schedule(0, sys.exit)
        assert timer._thread is not None
        timer._thread.join(WAIT_S)


class TestTimer:
    def test_bound(self, make_timer: Callable[..., futures._Timer]) -> None:
        timer = make_timer(max_deadlines=3)
        held = [timer.schedule(3600, lambda: None) for _ in range(3)]
        with pytest.raises(UsageError, match="3 timeouts are open"):
            timer.schedule(3600, lambda: None)
        assert timer.cancel(held[0])
        assert not timer.cancel(held[0])
        timer.schedule(3600, lambda: None)
        assert repr(timer).startswith("_Timer(open=3")

    def test_one_whose_callback_was_taken_cannot_be_cancelled(self, make_timer: Callable[..., futures._Timer]) -> None:
        """Else a result that comes while the callback runs would complete the future a second time."""
        timer = make_timer()
        taken, go_on = threading.Event(), threading.Event()

        def callback() -> None:
            taken.set()
            go_on.wait(5)

        deadline = timer.schedule(0, callback)
        assert taken.wait(5)
        assert not timer.cancel(deadline)
        assert timer._cancelled == 0
        go_on.set()

    def test_cancelled_ones_do_not_pile_up(self, make_timer: Callable[..., futures._Timer]) -> None:
        timer = make_timer(compact_at=10)
        kept = timer.schedule(3600, lambda: None)
        for _ in range(1_000):
            timer.cancel(timer.schedule(7200, lambda: None))
        assert len(timer._heap) <= 20
        assert timer.cancel(kept)

    def test_cancelling_drops_the_callbacks_references(self, make_timer: Callable[..., futures._Timer]) -> None:
        class Big:
            def method(self) -> None: ...

        big = Big()
        gone = weakref.ref(big)
        timer = make_timer()
        timer.cancel(timer.schedule(3600, big.method))
        del big
        gc.collect()
        assert gone() is None

    def test_many_threads(self, make_timer: Callable[..., futures._Timer]) -> None:
        timer = make_timer(compact_at=50)
        done: list[int] = []
        start = threading.Barrier(4)

        def work(callback: Callable[[], None]) -> None:
            start.wait(WAIT_S)
            for number in range(250):
                timer.cancel(timer.schedule(3600 + number, callback))
            fired = threading.Event()
            timer.schedule(0.001, fired.set)
            if fired.wait(WAIT_S):
                done.append(1)

        workers = [threading.Thread(target=work, args=(lambda: None,)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(WAIT_S)
        assert len(done) == 4
        assert repr(timer).startswith("_Timer(open=0")


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_timer_of_its_own() -> None:
    parents = future_timeout(new_future(), NEVER)
    assert timer_threads() > 0
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if open_deadlines() == 0 and not parents.done():
                future_timeout(new_future(), SOON).wait()
        except FutureTimeoutError:
            status = 0
        finally:
            os._exit(status)
    give_up = time.monotonic() + WAIT_S
    with context_timeout(lambda: os.kill(pid, 9), timedelta(seconds=WAIT_S)):
        _, status = os.waitpid(pid, 0)
    assert time.monotonic() < give_up
    assert os.waitstatus_to_exitcode(status) == 0


class TestStreamTimeout:
    @pytest.mark.skipif(torch.accelerator.is_available(), reason="of machines without an accelerator")
    def test_nothing_is_pending_without_an_accelerator(self) -> None:
        late = threading.Event()
        stream_timeout(late.set, timedelta(0))
        assert not late.wait(0.05)

    def test_what_is_no_timedelta(self) -> None:
        with pytest.raises(ConfigError, match=r"timeout must be a datetime\.timedelta, got 5"):
            stream_timeout(lambda: None, 5)  # type: ignore[arg-type]

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_stream_that_is_late_and_one_that_is_not(self) -> None:
        late = threading.Event()
        torch.cuda.synchronize()
        stream_timeout(late.set, timedelta(0))
        assert not late.wait(0.2), "nothing was pending"
        torch.cuda._sleep(2_000_000_000)
        stream_timeout(late.set, SOON)
        assert late.wait(WAIT_S)
        torch.cuda.synchronize()


class Unlike(Exception):
    """It cannot be copied: made of two things, it tells one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class TestFailFuture:
    def test_a_wait_that_failed_keeps_nothing_alive(self) -> None:
        class Model:
            pass

        def train() -> tuple[weakref.ref[Model], Future[int]]:
            model, fut = Model(), new_future()
            try:
                raise ValueError("why")
            except ValueError as cause:
                error = CollectiveError("it failed")
                error.__cause__ = cause
            fail_future(fut, error)
            for _ in range(2):
                with pytest.raises(CollectiveError):
                    fut.wait()
            with pytest.raises(CollectiveError):
                fut.value()
            return weakref.ref(model), fut

        model, fut = train()
        gc.collect()
        assert model() is None
        assert fut.done()

    def test_each_wait_raises_the_error_with_its_causes(self) -> None:
        fut, error = new_future(), CollectiveError("it failed")
        error.__cause__ = ValueError("why")
        fail_future(fut, error)
        for _ in range(2):
            with pytest.raises(CollectiveError, match="it failed") as raised:
                fut.wait()
            assert repr(raised.value.__cause__) == "ValueError('why')"
            assert raised.value is not error

    @pytest.mark.parametrize("error", [Unlike("a", "b"), FutureTimeoutError("late"), OSError(5, "no", "file")])
    def test_errors_of_all_kinds_are_raised_as_they_are(self, error: Exception) -> None:
        fut = new_future()
        fail_future(fut, error)
        with pytest.raises(type(error)) as raised:
            fut.wait()
        assert str(raised.value) == str(error)
        chained = fut.then(lambda done: done.value())
        with pytest.raises(Exception, match=re.escape(str(error))):
            chained.wait()
