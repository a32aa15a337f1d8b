"""How a child learns that collectives on a device have ended: nobody waits, each is reported once, errors at once."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import Work

from ft_core.errors import CollectiveError
from ft_core.process_group.baby.device_ends import DeviceEnds
from tests.process_group.ranks import wait_until

MANY = 1000


class OnDevice(Work):
    """A work that ends when it is told to; waiting for it would block for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.error = False, None
        self.broken: Exception | None = None

    def wait(self, timeout: Any = None) -> bool:
        raise AssertionError("nobody waits for it")

    def is_completed(self) -> bool:
        if self.broken is not None:
            raise self.broken
        return self.ended

    def exception(self) -> Any:
        return self.error


class Group:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.reported: dict[int, Exception | None] = {}
        self.ends = DeviceEnds(lambda: self.error, self.report)

    def report(self, number: int, error: Exception | None) -> None:
        assert number not in self.reported
        self.reported[number] = error


def test_any_number_is_in_flight_on_one_thread_and_each_is_reported_when_it_has_ended() -> None:
    """Also before one that was launched earlier: that may be a message that is sent later."""
    group, works = Group(), [OnDevice() for _ in range(MANY)]
    before = threading.active_count()
    for number, work in enumerate(works):
        group.ends.add(number, work)
    assert threading.active_count() <= before + 1
    assert group.reported == {}
    for work in works[1:]:
        work.ended = True
    wait_until(lambda: len(group.reported) == MANY - 1)
    assert repr(group.ends) == "DeviceEnds(1 in flight)"
    works[0].ended = True
    wait_until(lambda: len(group.reported) == MANY)
    assert set(group.reported.values()) == {None}


def test_what_the_group_has_failed_of_is_reported_though_it_does_not_end() -> None:
    group, works = Group(), [OnDevice() for _ in range(3)]
    for number, work in enumerate(works):
        group.ends._running.append((number, work))
    works[0].ended = True
    assert group.ends.look()
    group.error = CollectiveError("a peer has gone")
    works[1].ended, works[1].error = True, CollectiveError("it was cut short")  # type: ignore[assignment]
    assert not group.ends.look()
    assert group.reported == {0: None, 1: works[1].error, 2: group.error}


def test_what_the_device_reports_is_an_end() -> None:
    group, work = Group(), OnDevice()
    work.broken = RuntimeError("an illegal memory access")
    group.ends._running.append((0, work))
    assert not group.ends.look()
    assert group.reported == {0: work.broken}
