"""Copying ahead of joining: what a later fetch still transfers, and that it is never wrong."""

import gc
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ft_core.checkpointing import StateServer, fetch, offers, prefetch
from ft_core.checkpointing.http.answers import Answers
from ft_core.checkpointing.ranges import RANGE_BYTES
from ft_core.checkpointing.receive_plan import Gauge
from ft_core.checkpointing.tensor_bytes import byte_view
from ft_core.errors import EncodingError, HealError
from tests.checkpointing.conftest import MIB, Trainer, assert_same_state, make_state

Start = Callable[..., StateServer]


def test_only_what_changed_travels(donor: Start) -> None:
    state, own = make_state(1), make_state(2)
    server = donor()
    with Trainer(server, state):
        have = prefetch([server.address], into=own)
    state["medium"].add_(1)
    state["big"][5] ^= 1
    server.offer("t", state)
    result = fetch([server.address], "t", into=own, have=have)
    assert_same_state(result.state, state)
    assert result.bytes == RANGE_BYTES + 280_000  # the range of big that holds byte 5, and medium
    assert result.state["big"] is own["big"]
    assert result.total_bytes == have.bytes


def test_a_gauge_shows_how_far_it_is(donor: Start) -> None:
    state, own, copied, fetched = make_state(1), make_state(2), Gauge(), Gauge()
    server = donor()
    with Trainer(server, state):
        have = prefetch([server.address], into=own, gauge=copied)
    assert copied.done == copied.total == have.bytes
    state["medium"].add_(1)
    server.offer("t", state)
    result = fetch([server.address], "t", into=own, have=have, gauge=fetched)
    assert result.bytes < result.total_bytes
    assert fetched.done == fetched.total == result.total_bytes, "what is known to be equal is here, too"


def test_nothing_changed_nothing_travels(donor: Start) -> None:
    state = make_state(1)
    servers = [donor(), donor()]
    with Trainer(servers[0], state), Trainer(servers[1], state):
        addresses = [s.address for s in servers]
        have = prefetch(addresses)
        assert set(have.donors_used) == set(addresses)
        for server in servers:
            server.offer("t", state)
        result = fetch(addresses, "t", have=have)
    assert result.bytes == 0
    assert_same_state(result.state, state)
    assert "0.0" in repr(have)


def test_ranges_that_only_32_bits_take_for_equal_are_told_apart(donor: Start) -> None:
    """crc32 is linear: this difference of five bytes is a multiple of its polynomial."""
    own = {"big": torch.arange(8 * MIB, dtype=torch.int32).view(torch.uint8)}
    state = {"big": own["big"].clone()}
    for i, byte in enumerate(((0xEDB88320 << 1) | 1).to_bytes(5, "little")):
        state["big"][1000 + i] ^= byte
    assert zlib.crc32(byte_view(own["big"])[:RANGE_BYTES]) == zlib.crc32(byte_view(state["big"])[:RANGE_BYTES])
    server = donor()
    with Trainer(server, {"big": own["big"].clone()}):
        have = prefetch([server.address], into=own)
    server.offer("t", state)
    result = fetch([server.address], "t", into=own, have=have)
    assert result.bytes == RANGE_BYTES
    assert torch.equal(result.state["big"], state["big"])


@pytest.mark.parametrize("behind_autograd", [False, True])
def test_a_torn_prefetch_ends_right(donor: Start, behind_autograd: bool) -> None:
    state, own = make_state(1), make_state(2)

    def step() -> None:
        target = state["big"].data if behind_autograd else state["big"]
        target[:: 1 << 16].add_(1)
        state["medium"].mul_(0.5)

    server = donor()
    with Trainer(server, state, step):
        have = prefetch([server.address], into=own)
    server.offer("t", state)
    assert_same_state(fetch([server.address], "t", into=own, have=have).state, state)


def test_a_receiver_that_changed_its_memory_meanwhile(donor: Start) -> None:
    state, own = make_state(1), make_state(2)
    server = donor()
    with Trainer(server, state):
        have = prefetch([server.address], into=own)
    own["big"].zero_()
    own["small"]["p3"].zero_()
    server.offer("t", state)
    result = fetch([server.address], "t", into=own, have=have)
    assert_same_state(result.state, state)
    assert result.bytes == own["big"].numel()


def test_a_layout_that_changed_meanwhile(donor: Start) -> None:
    """The optimizer's state appears after the prefetch."""
    state, own = make_state(1), make_state(2)
    server = donor()
    with Trainer(server, state):
        have = prefetch([server.address], into=own)
    state["moment"] = torch.randn(100_000)
    state["small"]["new"] = torch.randn(10)
    own["small"]["new"] = torch.zeros(10)
    server.offer("t", state)
    result = fetch([server.address], "t", into=own, have=have)
    assert_same_state(result.state, state)
    assert torch.equal(result.state["moment"], state["moment"])
    assert result.bytes == 400_000 + 50 * 400 + 40


def test_the_same_prefetch_serves_several_fetches(donor: Start) -> None:
    state = make_state(1)
    server = donor()
    with Trainer(server, state):
        have = prefetch([server.address])
    for i in range(3):
        state["medium"].add_(1)
        server.offer(f"t{i}", state)
        result = fetch([server.address], f"t{i}", have=have)
        assert_same_state(result.state, state)
        assert result.bytes == 280_000
        server.close(f"t{i}")


def test_a_prefetch_keeps_what_arrived_when_donors_fail(donor: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(1)
    server = donor()
    original, served = Answers._range, []

    def limited(self: Answers, stream: Any, offer: Any, index: int) -> None:
        served.append(index)
        if len(served) == 4:
            server.drop_live()
        original(self, stream, offer, index)

    monkeypatch.setattr(Answers, "_range", limited)
    server.offer_live(state)
    have = prefetch([server.address], deadline_s=0.5)
    assert 0 < have.bytes < 24 << 20
    server.offer("t", state)
    result = fetch([server.address], "t", have=have)
    assert_same_state(result.state, state)
    assert result.bytes + have.bytes == result.total_bytes


@pytest.mark.parametrize("limit", ["deadline_s", "given_s"])
def test_a_donor_that_reaches_no_step_boundary(donor: Start, limit: str) -> None:
    server = donor()
    began = time.monotonic()
    with pytest.raises(HealError, match=r"live state.*(no live state|offered by nobody)"):
        prefetch([server.address], **{limit: 0.2})  # type: ignore[arg-type]
    assert time.monotonic() - began < 10.0
    while server.snapshot_wanted:  # until the donor, too, has seen the end of the time that it was given
        threading.Event().wait(0.001)


def test_snapshot_wanted_is_a_request(donor: Start) -> None:
    server = donor()
    assert not server.snapshot_wanted
    thread = threading.Thread(target=prefetch, args=([server.address],))
    thread.start()
    while not server.snapshot_wanted:
        threading.Event().wait(0.001)
    with pytest.raises(EncodingError):
        server.offer_live({"x": object()})
    assert not server.snapshot_wanted  # reported once, not at every step
    server.offer_live({"x": 1})
    thread.join(10)
    assert not server.snapshot_wanted


def test_an_idle_live_offer_lets_its_tensors_go(donor: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "LIVE_IDLE_S", 0.05)
    server = donor()
    server.offer_live({"x": torch.zeros(1 << 20)})
    live = server.book._live
    gone = threading.Event()
    weakref.finalize(live, gone.set)
    del live
    assert gone.wait(5)
    gc.collect()
    assert "offers=[]" in repr(server)


def test_a_live_offer_outlives_a_replaced_and_a_freed_tensor(donor: Start) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    freed = torch.ones(1 << 20)
    server = donor()
    server.offer_live({"p": parameter})
    parameter.data = torch.zeros(1)
    assert prefetch([server.address]).bytes == 4 << 20
    server.offer_live({"f": freed})
    freed.untyped_storage().resize_(0)
    assert prefetch([server.address]).bytes == 0


def test_changes_that_leave_every_sum_equal_are_seen(donor: Start) -> None:
    """Behind autograd's back, and only moving values around: no version and no sum of words tells."""
    state = {"x": torch.arange(1 << 20)}
    server = donor()
    with Trainer(server, state):
        have = prefetch([server.address])
        view = state["x"].numpy()
        view[[0, 512]] = view[[512, 0]]
        server.offer("t", state)
        assert torch.equal(fetch([server.address], "t", have=have).state["x"], state["x"])
