"""What a fetch asks of the links to its donors, whatever carries them."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any

from ft_core.checkpointing.donor_link import Greeting, Item, Links
from ft_core.checkpointing.offer import Offer
from ft_core.checkpointing.range_fetch import Fetch
from ft_core.checkpointing.receive_plan import Given
from ft_core.checkpointing.staging import Staging
from ft_core.checkpointing.tensor_bytes import checksum
from tests.checkpointing.conftest import assert_same_state, make_state

if TYPE_CHECKING:
    import pytest


class Link:
    """A donor in this process. `log`: what was asked of it, in order."""

    reopens = False

    def __init__(self, offer: Offer, window: int = 4, fails_at: int = -1) -> None:
        self.offer, self.most, self.fails_at = offer, window, fails_at
        self.log: list[str] = []
        self.asked: list[tuple[Item, memoryview | None]] = []
        self.was_cut = threading.Event()
        self.left = len(offer.ranges)

    @property
    def window(self) -> int:
        if not self.left:  # all has been answered, and the fetch may end while this worker is just here
            self.was_cut.wait(0.2)
        return self.most

    def open(self, connect_s: float, left_s: float) -> None:
        self.log.append("open")

    def greet(self, wait_s: float, bytes_max: int) -> Greeting:
        return Greeting("t", self.offer.digest, self.offer.manifest())

    def set_idle(self, idle_s: float) -> None:
        """Nothing here is idle."""

    def ask(self, item: Item, target: memoryview | None) -> None:
        self.asked.append((item, target))

    def sums(self, count: int) -> bytes:
        item, _ = self.asked.pop(0)
        return struct.pack(f"<{count}Q", *(checksum(self.read(i)) for i in range(item.first, item.first + count)))

    def range(self, target: memoryview) -> int:
        if self.fails_at == 0:
            raise OSError("it has died")
        self.fails_at -= 1
        item, theirs = self.asked.pop(0)
        assert theirs is not None
        assert theirs.nbytes == target.nbytes
        target[:] = self.read(item.first)
        self.left -= 1
        return checksum(target)

    def read(self, index: int) -> memoryview:
        return self.offer.reading(index, Staging(0)).view()

    def cut(self) -> None:
        self.was_cut.set()
        self.log.append("cut")

    def close(self) -> None:
        if "close" not in self.log:
            self.log.append("close")
        self.asked.clear()


def fetch(links: dict[str, Link], own: Any) -> Any:
    return Fetch(list(links), "state", Links(lambda name: links[name]), 20.0, 5.0, None, Given(own)).result()


def test_a_link_with_nothing_under_way_is_not_cut_at_the_end() -> None:
    """It may say goodbye on what it has borrowed."""
    state = make_state(1, 12)
    link = Link(Offer.capture("t", state))
    assert_same_state(fetch({"a": link}, make_state(2, 12)).state, state)
    assert link.log == ["open", "close"]


def test_a_link_without_work_is_not_cut_either() -> None:
    link = Link(Offer.capture("t", {"step": 1}))
    assert fetch({"a": link}, {"step": 0}).state == {"step": 1}
    assert link.log == ["open", "close"]


def test_a_failed_link_is_closed_before_its_ranges_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still write into their memory until then."""
    state = make_state(1, 40)
    offer = Offer.capture("t", state)
    dying, other = Link(offer, fails_at=2), Link(offer)
    other.left = dying.left = -1
    taken: list[tuple[int, bool]] = []
    original, close, dropped = other.ask, dying.close, set[int]()
    too_early = threading.Event()

    def ask(item: Item, target: memoryview | None) -> None:
        if item.first in dropped:
            taken.append((item.first, "close" in dying.log))
            too_early.set()
        original(item, target)

    def remember(item: Item, target: memoryview | None) -> None:
        dropped.add(item.first)
        dying.asked.append((item, target))

    def slowly() -> None:
        too_early.wait(0.3)  # for who would take them meanwhile
        close()

    monkeypatch.setattr(dying, "close", slowly)
    monkeypatch.setattr(other, "ask", ask)
    monkeypatch.setattr(dying, "ask", remember)
    found = fetch({"dying": dying, "other": other}, make_state(2, 40))
    assert_same_state(found.state, state)
    assert taken
    assert all(closed for _, closed in taken)
