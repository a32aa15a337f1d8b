"""How hosts find each other by the lighthouse: what is chosen, with a real lighthouse or none."""

from __future__ import annotations

import concurrent.futures
import itertools
from typing import TYPE_CHECKING

import pytest

from ft_core.coordination import LighthouseClient, LighthouseServer
from ft_core.doctor.directory import COMES, GOING, KNOWN, OFFERED, ROOM, Directory, Entry, choose
from ft_core.errors import FaultToleranceError

if TYPE_CHECKING:
    from collections.abc import Iterator

FOUND_S = 20.0
ENTRIES = [Entry(kind, f"h{number}", number) for kind in (GOING, KNOWN, OFFERED, COMES) for number in (1, 2)]


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", token="ours")
    yield server
    server.shutdown()


def test_all_who_see_the_same_choose_the_same() -> None:
    """Whatever is announced: where somebody goes already, else the known one, else the first if all are there."""
    for count in range(1, len(ENTRIES) + 1):
        for seen in itertools.combinations(ENTRIES, count):
            kinds = {entry.kind for entry in seen}
            for late, expected in itertools.product((False, True), (1, 2, 3)):
                found = choose(set(seen), expected, late=late)
                if GOING in kinds or KNOWN in kinds:
                    assert found is not None
                    assert found.kind == (GOING if GOING in kinds else KNOWN)
                elif late or count >= expected:
                    assert found == min(
                        entry for entry in seen if entry.kind == (OFFERED if OFFERED in kinds else COMES)
                    )
                else:
                    assert found is None


@pytest.mark.parametrize("entry", [Entry(OFFERED, "10.0.0.1", 7), Entry(GOING, "fe80::1", 65535), Entry(KNOWN, "h", 1)])
def test_what_is_announced_is_read_back(entry: Entry) -> None:
    assert Entry.from_text(entry.text()) == entry
    assert ":" not in entry.text()


@pytest.mark.parametrize("text", ["", "replica-0:5234641e", "can h", "can h x", "other h 7", "can h 7 8"])
def test_what_others_have_in_that_room(text: str) -> None:
    assert Entry.from_text(text) is None


def test_three_find_each_other(lighthouse: LighthouseServer) -> None:
    env = {"FT_TOKEN": "ours"}
    three = [Directory(lighthouse.address(), env, Entry(OFFERED, f"10.0.0.{n}", 5)) for n in (3, 1, 2)]
    try:
        for one in three:
            one.start()
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda one: one.find(3, FOUND_S), three))
        assert found == [("10.0.0.1", 5)] * 3
        late = Directory(lighthouse.address(), env, Entry(OFFERED, "10.0.0.0", 5))
        late.start()
        assert late.find(9, FOUND_S) == ("10.0.0.1", 5), "where the others are"
        late.close()
    finally:
        for one in three:
            one.close()
            one.close()  # idempotent
    client = LighthouseClient(lighthouse.address(), token="ours", room=ROOM)
    try:
        assert {r.life for room in client.status().rooms for r in room.replicas} == {"gone"}, "all is withdrawn"
    finally:
        client.close()


def test_the_host_that_all_know_is_not_waited_with(lighthouse: LighthouseServer) -> None:
    one = Directory(lighthouse.address(), {"FT_TOKEN": "ours"}, Entry(KNOWN, "10.0.0.9", 29519))
    one.start()
    assert one.find(100, FOUND_S) == ("10.0.0.9", 29519)
    one.close()


def test_a_lighthouse_that_refuses_or_is_not_there(lighthouse: LighthouseServer) -> None:
    refused = Directory(lighthouse.address(), {"FT_TOKEN": "theirs"}, Entry(OFFERED, "h", 1))
    with pytest.raises(FaultToleranceError, match="FT_TOKEN"):
        refused.start()
    refused.close()
    assert repr(refused).startswith("Directory(http://127.0.0.1:")
