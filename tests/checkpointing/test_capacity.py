"""More receivers than places: they queue, pass on what they have, and nobody who is slow keeps them out."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.checkpointing import HTTPTransport, StateServer, fetch
from ft_core.checkpointing.http import places
from ft_core.checkpointing.http import server as http_server
from ft_core.errors import HealError
from ft_core.protocol.rank.heal_plan import plan
from ft_core.protocol.types import Member, Quorum, Version
from ft_core.runtime.state_transfer import Healing
from tests.checkpointing.conftest import MIB, Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import ThreadPoolExecutor

    from ft_core.checkpointing.receive_plan import ReceivePlan

    Start = Callable[..., StateServer]

GROUPS = 32


@pytest.fixture
def squatters() -> Iterator[Callable[..., list[socket.socket]]]:
    held: list[socket.socket] = []

    def squat(server: StateServer, count: int, *requests: bytes) -> list[socket.socket]:
        host, port = server.address.removeprefix("http://").split(":")
        for _ in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.sendall(b"".join(b"GET %s HTTP/1.1\r\n\r\n" % r for r in requests))
            held.append(sock)
        return held

    yield squat
    for sock in held:
        sock.close()


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.005)


def in_parallel(*calls: Callable[[], object]) -> list[object]:
    """Their results or exceptions; all start together."""
    results: list[object] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def run(i: int) -> None:
        gate.wait()
        try:
            results[i] = calls[i]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def member(i: int, heal_address: str) -> Member:
    return Member(
        replica_id=f"r{i}", version=Version(0, 0), lineage=i, store_address="", heal_addresses=(heal_address,),
        heals_before_forward=True,
    )  # fmt: skip


def test_32_groups_that_start_at_step_0_receive_from_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    transports: list[HTTPTransport[Any]] = [
        HTTPTransport(timeout(30), bind="127.0.0.1", hostname="127.0.0.1") for _ in range(GROUPS)
    ]
    relayed = []
    original = StateServer.relay

    def relay(self: StateServer, tag: str, received: ReceivePlan) -> None:
        original(self, tag, received)
        relayed.append(self)

    monkeypatch.setattr(StateServer, "relay", relay)
    try:
        quorum = Quorum(7, tuple(member(i, t.server.address) for i, t in enumerate(transports)))
        healings = [Healing(t, 0, 30.0, f"r{i}") for i, t in enumerate(transports)]
        plans = [plan(quorum, f"r{i}") for i in range(GROUPS)]
        state: dict[str, Any] = {"w": torch.randn(3 * MIB), "n": [1, 2, torch.arange(5)]}
        assert [p.donors for p in plans[1:]] == [(0,)] * (GROUPS - 1)
        calls = [
            lambda h=h, p=p: h.receive(p, "h:1/q", None, threading.Event())
            for h, p in list(zip(healings, plans, strict=True))[1:]
        ]
        healings[0].offer(plans[0], "h:1/q", lambda: state, 30.0)
        results: list[Any] = in_parallel(*calls)
        assert [r for r in results if isinstance(r, Exception)] == []
        assert all(torch.equal(r.state["w"], state["w"]) for r in results)
        assert len(relayed) == GROUPS - 1
        assert len({address for r in results for address in r.donors}) > 1
    finally:
        for transport in transports:
            transport.shutdown()


def timeout(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "requests", [(), (b"/state/t/manifest", b"/state/t/range/0"), (b"/state/never/manifest?wait_ms=60000",)],
    ids=["silent", "stalled", "waiting"],
)  # fmt: skip
def test_squatters_do_not_keep_a_receiver_out(
    donor: Start, squatters: Callable[..., Any], requests: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "STALL_S", 60.0)
    monkeypatch.setattr(places, "SILENT_S", 60.0)
    server = donor()
    server.offer("t", {"x": torch.zeros(8 * MIB)})
    squatters(server, places.PLACES_MAX + 8, *requests)
    held = server._places
    wait_for(lambda: len(held.served) + len(held.waiting) + len(held.parked) == places.PLACES_MAX + 8)
    monkeypatch.setattr(places, "STALL_S", 0.5)
    monkeypatch.setattr(places, "SILENT_S", 0.5)
    assert torch.equal(fetch([server.address], "t", deadline_s=20).state["x"], torch.zeros(8 * MIB))


def test_a_receiver_waits_for_a_place_inside_its_deadline(
    donor: Start, gate: Gate, squatters: Callable[..., Any], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All places are taken by transfers that move: it queues, and gets in when one ends."""
    monkeypatch.setattr(places, "PLACES_MAX", 2)
    server = donor()
    monkeypatch.setattr(server._places, "overdue", lambda _: [])
    server.offer("t", {"x": torch.zeros(8 * MIB)})
    first = pool.submit(fetch, [server.address], "t", deadline_s=20)
    assert gate.reached.wait(10)
    second = pool.submit(fetch, [server.address], "t", deadline_s=20)
    wait_for(lambda: len(server._places.waiting) == 2)
    gate.resume.set()
    assert torch.equal(first.result(20).state["x"], second.result(20).state["x"])


def test_a_deadline_ends_the_wait_for_a_place(
    donor: Start, squatters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = donor()
    server.offer("t", {"x": 1})
    monkeypatch.setattr(server._places, "overdue", lambda _: [])
    squatters(server, places.PLACES_MAX)
    wait_for(lambda: len(server._places.served) + len(server._places.waiting) == places.PLACES_MAX)
    with pytest.raises(HealError, match=r"not complete after 0\.[345]"):
        fetch([server.address], "t", deadline_s=0.3)
    held = places.PLACES_MAX - places.PLACES_PER_PEER_MAX  # squatters that wait themselves: they come from one address
    wait_for(lambda: len(server._places.waiting) == held)


def test_one_too_many_is_told_to_come_back_and_does(
    donor: Start, squatters: Callable[..., Any], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "WAITING_MAX", 0)
    monkeypatch.setattr(http_server, "RETRY_S", 0)
    server = donor()
    server.offer("t", {"x": 1})
    future = pool.submit(fetch, [server.address], "t", deadline_s=20)
    wait_for(lambda: server._lingering)
    monkeypatch.setattr(places, "WAITING_MAX", 8)
    assert future.result(20).state == {"x": 1}


def test_a_relay_serves_only_what_was_verified(donor: Start) -> None:
    """Its user may write to what was received before the relay is closed."""
    source, relay = donor(), donor()
    state = {"w": torch.randn(6 * MIB), "small": torch.arange(9)}
    source.offer("t", state)
    mine = {"w": torch.zeros(6 * MIB), "small": torch.zeros(9, dtype=torch.int64)}
    got = fetch([source.address], "t", into=mine, arrived=lambda p: relay.relay("t", p)).state
    source.close("t")
    again = fetch([relay.address], "t").state
    assert torch.equal(again["w"], state["w"])
    assert torch.equal(again["small"], state["small"])
    got["w"][-1] += 1
    with pytest.raises(HealError, match="changed here since it was received"):
        fetch([relay.address], "t", deadline_s=5)
    relay.close_all()
    with pytest.raises(HealError, match="was closed"):
        fetch([relay.address], "t", deadline_s=5)


def test_nobody_counts_on_a_relay_that_has_nothing(donor: Start) -> None:
    """The donor is gone, and the relay still waits itself: to fail at once is to ask again at once."""
    source, relay = donor(), donor()
    source.offer("t", {"x": 1})
    source.close("t")
    before = time.monotonic()
    with pytest.raises(HealError, match="was closed"):
        fetch([source.address], "t", relays=[relay.address], deadline_s=20)
    assert time.monotonic() - before < 10


def test_a_relay_takes_over_when_the_donor_goes(donor: Start, gate: Gate, pool: ThreadPoolExecutor) -> None:
    source, relay = donor(), donor()
    state = {"w": torch.randn(6 * MIB)}
    source.offer("t", state)
    future = pool.submit(fetch, [source.address], "t", relays=[relay.address], deadline_s=20)
    assert gate.reached.wait(10)
    fetch([source.address], "t", arrived=lambda p: relay.relay("t", p))
    source.shutdown()
    gate.resume.set()
    assert torch.equal(future.result(20).state["w"], state["w"])
    wait_for(lambda: not any(thread.is_alive() for thread in source._threads))  # the gate held one beyond shutdown
