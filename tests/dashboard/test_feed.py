"""Every browser gets the newest page; one that is slow costs the others nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ft_core.dashboard import feed as feeds
from ft_core.dashboard.feed import READERS_MAX, Feed, Reader, encode
from ft_core.dashboard.model import CHARTS, LONG


def page(at: int) -> dict[str, Any]:
    return {"at": at, "rooms": [{"room": "x", **{name: [at] for name in (*CHARTS, *LONG)}}]}


def read(reader: Reader) -> tuple[str, dict[str, Any]]:
    """The message that is there."""
    message = asyncio.run(asyncio.wait_for(reader.next(), 5))
    assert message is not None
    head, data, *rest = message.decode().split("\n")
    assert rest == ["", ""]
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def opened(feed: Feed, at: int) -> Reader:
    reader = feed.open(page(at))
    assert reader is not None
    return reader


def test_first_the_page_then_changes() -> None:
    feed = Feed()
    reader = opened(feed, 1)
    assert read(reader) == ("page", page(1))
    feed.publish(page(2))
    kind, change = read(reader)
    assert (kind, change["at"]) == ("change", 2)
    assert "fine" not in change["rooms"][0]


def test_who_is_behind_gets_the_newest_page_instead() -> None:
    feed = Feed()
    slow, quick = opened(feed, 1), opened(feed, 1)
    for at in range(2, 50):
        read(quick)
        feed.publish(page(at))
    assert read(quick)[0] == "change"
    assert read(slow) == ("page", page(49))
    feed.publish(page(50))
    assert read(slow)[0] == read(quick)[0] == "change"


def test_a_page_is_encoded_once_for_all() -> None:
    feed, encoded = Feed(), []
    before = feeds.message

    def counted(kind: str, page: dict[str, Any]) -> bytes:
        encoded.append(kind)
        return before(kind, page)

    feeds.message = counted
    try:
        readers = [opened(feed, 1) for _ in range(10)]
        for reader in readers[1:]:
            read(reader)
        encoded.clear()
        feed.publish(page(2))
    finally:
        feeds.message = before
    assert sorted(encoded) == ["change", "page"]


def test_readers_are_bounded() -> None:
    feed = Feed()
    readers = [opened(feed, 1) for _ in range(READERS_MAX)]
    assert feed.open(page(1)) is None
    feed.close(readers[0])
    assert feed.open(page(1)) is not None


def test_the_end_reaches_all() -> None:
    feed = Feed()
    reader = opened(feed, 1)
    feed.end()
    assert asyncio.run(asyncio.wait_for(reader.next(), 5)) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_is_encoded_in_pieces_is_json(value: Any) -> None:
    assert encode(value) == json.dumps(value, separators=(",", ":")).encode()
