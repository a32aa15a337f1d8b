"""What a replica reports of the state that it receives."""

from __future__ import annotations

from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.checkpointing import HTTPTransport
from ft_core.errors import HealError
from ft_core.protocol.rank.heal_plan import plan
from ft_core.protocol.types import Member, Quorum, Version
from ft_core.runtime.state_transfer import Healing

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def transport() -> Iterator[HTTPTransport[Any]]:
    made: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=10))
    yield made
    made.shutdown()


def fails(**given: Any) -> None:
    """A fetch whose donor dies half-way."""
    given["gauge"].total, given["gauge"].done = 100, 40
    raise HealError("the donor is gone")


def test_what_is_received_no_more_is_not_reported(
    transport: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the dashboard shows a heal that never ends."""
    transfer = Healing(transport, 0, 10.0, "b:1")
    members = tuple(
        Member(name, Version(step, 1), 0, address="", heal_addresses=("http://127.0.0.1:1/x",))
        for name, step in (("a:1", 9), ("b:1", 0))
    )
    monkeypatch.setattr(transport, "fetch", lambda *_, **given: fails(**given))
    with pytest.raises(HealError):
        transfer.receive(plan(Quorum(3, members), "b:1"), "h:1/q", None, Event())
    assert transfer.healed == (0, 0)
    monkeypatch.setattr(transport, "prefetch", lambda *_, **given: fails(**given))
    assert not transfer.prefetch(["http://127.0.0.1:1/x"], None, 1.0)
    assert transfer.healed == (0, 0)
