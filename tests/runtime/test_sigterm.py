"""What SIGTERM does to a process that holds Managers: the signal is really raised, the shell only notes it."""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from ft_core.runtime import drain_signal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ft_core.runtime.drain_signal import Drains

LIMIT_S = 10.0


class Asked:
    """Stands for a shell."""

    def __init__(self) -> None:
        self.reasons: queue.Queue[str] = queue.Queue()

    def drain(self, reason: str) -> None:
        self.reasons.put(reason)

    def reason(self) -> str:
        return self.reasons.get(timeout=LIMIT_S)

    @property
    def shell(self) -> Drains:
        return cast("Drains", self)


class Previous:
    """A handler of the user's."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


@pytest.fixture
def previous() -> Iterator[Previous]:
    handler = Previous()
    before = signal.signal(signal.SIGTERM, handler)
    yield handler
    signal.signal(signal.SIGTERM, before)


def present() -> object:
    return signal.getsignal(signal.SIGTERM)


def test_the_first_drains_every_manager_and_calls_the_handler_before_it(previous: Previous) -> None:
    one, two = Asked(), Asked()
    for each in (one, two):
        drain_signal.on_sigterm(each.shell)
    signal.raise_signal(signal.SIGTERM)
    assert [one.reason(), two.reason()] == ["SIGTERM", "SIGTERM"]
    assert previous.calls == 1
    signal.raise_signal(signal.SIGTERM)  # launchers say it twice
    assert previous.calls == 1
    assert one.reasons.empty()
    drain_signal.forget(one.shell)
    drain_signal.forget(two.shell)
    assert present() is not previous
    signal.raise_signal(signal.SIGTERM)  # while the process ends
    assert previous.calls == 1


def test_it_goes_with_the_last_manager(previous: Previous) -> None:
    one, two = Asked(), Asked()
    for each in (one, two):
        drain_signal.on_sigterm(each.shell)
    drain_signal.forget(one.shell)
    assert present() is not previous
    drain_signal.forget(two.shell)
    assert present() is previous


def test_the_second_is_the_previous_handlers(previous: Previous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_signal, "SAME_S", 0.0)
    one = Asked()
    drain_signal.on_sigterm(one.shell)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert one.reason() == "SIGTERM"
    assert previous.calls == 2
    assert present() is previous


def test_locks_of_the_interrupted_thread_do_no_harm(previous: Previous) -> None:
    one = Asked()
    drain_signal.on_sigterm(one.shell)
    with threading._active_limbo_lock, one.reasons.mutex:  # type: ignore[attr-defined]
        signal.raise_signal(signal.SIGTERM)
    assert one.reason() == "SIGTERM"
    drain_signal.forget(one.shell)


def test_a_handler_installed_later_stays(previous: Previous) -> None:
    one, later = Asked(), Previous()
    drain_signal.on_sigterm(one.shell)
    ours = present()

    def mine(*args: Any) -> None:
        later()
        cast("drain_signal.Sigterm", ours)(*args)

    signal.signal(signal.SIGTERM, mine)
    signal.raise_signal(signal.SIGTERM)
    assert one.reason() == "SIGTERM"
    assert (later.calls, previous.calls) == (1, 1)
    drain_signal.forget(one.shell)
    assert present() is mine


def test_where_it_does_not_listen(previous: Previous) -> None:
    one = Asked()
    thread = threading.Thread(target=drain_signal.on_sigterm, args=(one.shell,))
    thread.start()
    thread.join()
    assert present() is previous
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    drain_signal.on_sigterm(one.shell)
    assert present() is signal.SIG_IGN


def test_a_manager_that_was_only_forgotten_does_not_swallow_the_signal(previous: Previous) -> None:
    one = Asked()
    drain_signal.on_sigterm(one.shell)
    thread = threading.Thread(target=drain_signal.forget, args=(one.shell,))  # shut down off the main thread
    thread.start()
    thread.join()
    assert present() is not previous
    signal.raise_signal(signal.SIGTERM)
    assert previous.calls == 1
    assert present() is previous
    assert one.reasons.empty()


@pytest.mark.process
def test_forked_workers_keep_dying_of_it() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    one = Asked()
    try:
        drain_signal.on_sigterm(one.shell)
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        drain_signal.forget(one.shell)
        assert present() is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.process
def test_an_order_to_exit_ends_a_process_that_hangs() -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        drain_signal.kill(told_first=True)
        threading.Event().wait(LIMIT_S)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
