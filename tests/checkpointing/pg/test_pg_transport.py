"""State over process groups: into the receiver's own tensors, from several donors, and what ends a transfer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.checkpointing import HTTPTransport, OwnState, PGTransport
from ft_core.checkpointing.pg.donor import PgDonor
from ft_core.checkpointing.pg.pair import Ask, Pair, Tag
from ft_core.checkpointing.pg_transport import SHUTDOWN_S
from ft_core.checkpointing.ranges import RANGE_BYTES
from ft_core.checkpointing.receive_plan import Gauge
from ft_core.checkpointing.transport import Exchange, Receiver
from ft_core.errors import ConfigError, EncodingError, HealError, StateRefusedError, UsageError
from ft_core.process_group import ProcessGroupGloo, open_store
from ft_core.process_group import reaper as reaping
from tests.certificates import Authority
from tests.checkpointing.conftest import assert_same_state, make_state
from tests.fake_device import install

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator, Sequence

LIMIT = timedelta(seconds=20)


class Members:
    """The transports of one quorum's members: the first `donors` hold the state, the others heal."""

    def __init__(self, store: str, donors: int, receivers: int, idle_s: float = 5.0) -> None:
        self.transports: list[PGTransport[Any]] = [
            PGTransport(ProcessGroupGloo(timeout=LIMIT), LIMIT, idle_s=idle_s) for _ in range(donors + receivers)
        ]
        self.store, self.donors = store, donors
        self.quorum = 0

    def exchange(self, rank: int) -> Exchange:
        holders = tuple(range(self.donors))
        addresses = {r: t.metadata() for r, t in enumerate(self.transports)}
        healing = tuple(range(self.donors, len(self.transports)))
        donors = holders if rank in healing else ()
        store = f"{self.store}/q{self.quorum}"
        return Exchange(f"t{self.quorum}", f"r{rank}", rank, store, holders, healing, addresses, donors)

    def offer(self, state: Any, ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.donors) if ranks is None else ranks:
            self.transports[rank].offer(self.exchange(rank), state)

    def receive(self, rank: int, into: Any = None, **given: Any) -> Any:
        own = OwnState.of(into) if into is not None else None
        return self.transports[rank].receive(self.exchange(rank), Receiver(into, own=own, **given))

    def next_quorum(self) -> None:
        for transport in self.transports:
            transport.close()
        self.quorum += 1


@pytest.fixture
def members() -> Iterator[Callable[..., Members]]:
    store = open_store("127.0.0.1", LIMIT)
    made: list[Members] = []

    def make(donors: int, receivers: int, **options: Any) -> Members:
        made.append(Members(f"127.0.0.1:{store.port}/{len(made)}", donors, receivers, **options))
        return made[-1]

    yield make
    for transport in [transport for group in made for transport in group.transports]:
        transport.shutdown()
        transport.shutdown(wait=False)
    assert reaping.gloo.wait_empty(10)


@pytest.fixture
def two() -> Iterator[list[ProcessGroupGloo]]:
    """Two ranks of one group, configured as a Manager does."""
    store = open_store("127.0.0.1", LIMIT)
    groups = [ProcessGroupGloo(timeout=LIMIT) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda r: groups[r].configure(f"127.0.0.1:{store.port}/two", f"r{r}", r, 2), range(2)))
    yield groups
    for group in groups:
        group.shutdown()
    assert reaping.gloo.wait_empty(10)


@pytest.mark.parametrize("donors", [1, 2, 3])
def test_state_goes_into_the_receivers_own_tensors(members: Callable[..., Members], donors: int) -> None:
    group = members(donors, 1)
    state, own, gauge = make_state(1), make_state(2), Gauge()
    big = own["big"].data_ptr()
    group.offer(state)
    found = group.receive(donors, own, gauge=gauge)
    assert_same_state(found.state, state)
    assert found.state["big"].data_ptr() == big
    assert torch.equal(own["big"], state["big"])
    assert found.bytes == found.total_bytes == gauge.done == gauge.total
    assert 1 <= len(found.donors_used) <= min(donors, 2)
    assert all(name.startswith("replica rank") for name in found.donors_used)


def test_a_pair_that_meets_when_the_other_donor_has_given_all_adds_nothing(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine whose cores are busy: nobody waits for it, and one donor is named."""
    make, over, group = PGTransport._pair, threading.Event(), members(2, 1)

    def late(transport: PGTransport[Any], exchange: Exchange, donor: int, receiver: int, rank: int) -> Pair:
        pair = make(transport, exchange, donor, receiver, rank)
        form, cut = pair.form, pair.cut

        def form_late(within_s: float) -> None:
            assert over.wait(20)
            form(within_s)

        def cut_at_the_end() -> None:
            cut()
            over.set()

        if (donor, rank) == (1, 1):
            monkeypatch.setattr(pair, "form", form_late)
            monkeypatch.setattr(pair, "cut", cut_at_the_end)
        return pair

    monkeypatch.setattr(PGTransport, "_pair", late)
    state, own = make_state(1), make_state(2)
    group.offer(state)
    found = group.receive(2, own)
    assert_same_state(found.state, state)
    assert found.donors_used == ("replica rank 0",)


def test_one_quorum_after_the_other(members: Callable[..., Members]) -> None:
    group = members(2, 2)
    for seed in range(4):
        state = make_state(seed, 6)
        group.offer(state)
        with ThreadPoolExecutor() as pool:
            for found in pool.map(lambda rank: group.receive(rank, make_state(9, 6)), (2, 3)):
                assert_same_state(found.state, state)
        group.next_quorum()
    assert reaping.gloo.wait_empty(10), "the groups of a quorum that is over are gone"


def test_more_receivers_than_pairs_get_it_over_http(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_core.checkpointing.pg.pairing.RECEIVERS_MAX", 1)
    group = members(1, 2)
    state = make_state(1, 4)
    group.offer(state)
    first, second = group.receive(1), group.receive(2)
    assert_same_state(first.state, state)
    assert_same_state(second.state, state)
    assert first.donors_used == ("replica rank 0",)
    assert second.donors_used == (group.transports[0].metadata(),)


def test_a_donor_that_cannot_send_its_state_says_why_and_the_other_does(members: Callable[..., Members]) -> None:
    group = members(2, 1)
    state = make_state(1, 4)
    with pytest.raises(EncodingError):
        group.transports[0].offer(group.exchange(0), {"user": object()})
    group.transports[0].refuse(group.exchange(0), "r0: state['user'] cannot be sent")
    group.offer(state, [1])
    assert group.receive(2).donors_used == ("replica rank 1",)
    group.next_quorum()
    for rank in (0, 1):
        group.transports[rank].refuse(group.exchange(rank), f"r{rank}: state['user'] cannot be sent")
    with pytest.raises(StateRefusedError, match=r"r0: state\['user'\] cannot.*r1: state\['user'\] cannot"):
        group.receive(2)


def test_a_closed_offer_ends_the_transfer_and_waits_for_nobody(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was under way when the donor went on is not taken for received."""
    group = members(1, 1)
    state = make_state(1, 64)
    under_way, go_on = threading.Event(), threading.Event()
    original = PgDonor._seal

    def sealing(donor: PgDonor, answer: Any) -> None:
        under_way.set()
        assert go_on.wait(20)
        original(donor, answer)

    monkeypatch.setattr(PgDonor, "_seal", sealing)
    group.offer(state)
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(group.receive, 1, make_state(2, 64))
        assert under_way.wait(20)
        began = time.monotonic()
        group.transports[0].close()
        assert time.monotonic() - began < SHUTDOWN_S  # so long shutdown() waits for a pair's thread; this one is held
        go_on.set()
        with pytest.raises(HealError, match="replica rank 0"):
            receiving.result(20)


def test_no_seal_is_sent_for_what_was_read_of_a_closed_offer(two: list[ProcessGroupGloo], donor: Any) -> None:
    """Also if the connection still stands: the book decides, not the socket."""
    server = donor()
    server.offer("t", make_state(1))
    ends = [Pair(group, 1 - rank) for rank, group in enumerate(two)]
    raised = []

    def serve() -> None:
        try:
            PgDonor(ends[0], server.book, server.sums, "t").serve(time.monotonic() + 20, 20.0)
        except Exception as error:  # noqa: BLE001 - looked at below
            raised.append(type(error).__name__)

    thread = threading.Thread(target=serve)
    thread.start()
    body = torch.zeros(RANGE_BYTES, dtype=torch.uint8)
    told = [ends[1].tell(Tag.QUESTION, Ask.RANGE, 0, 0)]
    ends[1].wait(ends[1].receive(Tag.BODY, body), 20)
    server.close("t")
    told.append(ends[1].tell(Tag.QUESTION, Ask.FLUSH, 0, 0))
    thread.join(20)
    for work in told:
        ends[1].wait(work, 20)
    assert raised == ["Cut"]


def test_nothing_is_written_any_more_when_a_receive_was_cancelled(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = members(1, 1)
    own, cancel = make_state(2, 64), threading.Event()
    go_on = threading.Event()
    original = PgDonor._seal

    def sealing(donor: PgDonor, answer: Any) -> None:
        cancel.set()
        assert go_on.wait(20)
        original(donor, answer)

    monkeypatch.setattr(PgDonor, "_seal", sealing)
    group.offer(make_state(1, 64))
    with pytest.raises(HealError, match="cancelled"):
        group.receive(1, own, cancel=cancel)
    before = own["big"].clone()
    go_on.set()
    group.next_quorum()
    assert reaping.gloo.wait_empty(10)
    assert torch.equal(own["big"], before)


@pytest.mark.parametrize("spoil", [Tag.BODY, Tag.SEAL])
def test_what_does_not_verify_is_not_taken(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch, spoil: Tag
) -> None:
    """A flipped bit on the way, or an answer that does not end as it should: the range comes from the other donor."""
    group = members(2, 1)
    state, original = make_state(1, 24), Pair.send
    spoiled: list[torch.Tensor] = []
    lock = threading.Lock()

    def send(pair: Pair, tag: Tag, tensor: torch.Tensor) -> Any:
        with lock:  # both donors send, and one of them is to be spoiled
            hit = tag is spoil and not spoiled and (tag is Tag.SEAL or tensor.numel() == RANGE_BYTES)
            if hit:
                tensor = tensor.clone()
                spoiled.append(tensor)
        if hit:
            tensor[0] ^= 1
        return original(pair, tag, tensor)

    monkeypatch.setattr(Pair, "send", send)
    group.offer(state)
    found = group.receive(2, make_state(2, 24))
    assert_same_state(found.state, state)
    assert len(spoiled) == 1


def test_a_silent_donor_is_given_up(members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch) -> None:
    group = members(2, 1, idle_s=0.3)
    state, go_on = make_state(1, 24), threading.Event()
    original = PgDonor._range
    silent: list[PgDonor] = []

    def ranges(donor: PgDonor, index: int) -> None:
        if not silent or silent[0] is donor:
            silent.append(donor)
            assert go_on.wait(20)
        original(donor, index)

    monkeypatch.setattr(PgDonor, "_range", ranges)
    group.offer(state)
    found = group.receive(2, make_state(2, 24))
    go_on.set()
    assert_same_state(found.state, state)
    assert len(found.donors_used) == 1


def test_a_receiver_that_never_comes_costs_its_donor_nothing(members: Callable[..., Members]) -> None:
    group = members(1, 2)
    state = make_state(1, 4)
    group.offer(state)
    assert_same_state(group.receive(2).state, state)
    began = time.monotonic()
    group.transports[0].close()
    group.transports[0].shutdown()
    assert time.monotonic() - began < 2.0


def test_questions_that_are_none_end_the_pair(two: list[ProcessGroupGloo], donor: Any) -> None:
    server = donor()
    server.offer("t", make_state(1))
    for question in ((99, 0, 0), (Ask.RANGE, 10_000, 0), (Ask.SUMS, 0, -1)):
        ends = [Pair(group, 1 - rank) for rank, group in enumerate(two)]
        told = ends[1].tell(Tag.QUESTION, *question)
        with pytest.raises(OSError, match="asked for"):
            PgDonor(ends[0], server.book, server.sums, "t").serve(time.monotonic() + 20, 20.0)
        ends[1].wait(told, 20)


# -- the reference implementation's calls


def test_a_step_moves_over_the_group_itself(two: list[ProcessGroupGloo]) -> None:
    own = make_state(2, 8)
    donor: PGTransport[Any] = PGTransport(two[0], LIMIT, torch.device("cpu"))
    receiver: PGTransport[Any] = PGTransport(two[1], timeout=LIMIT, device="cpu", state_dict=lambda: own)
    try:
        for step in range(3):
            state = make_state(step, 8)
            with ThreadPoolExecutor() as pool:
                sending = pool.submit(donor.send_checkpoint, [1], step, state, LIMIT)
                found = receiver.recv_checkpoint(0, donor.metadata(), step, LIMIT)
                sending.result(20)
            donor.disallow_checkpoint()
            assert_same_state(found, state)
            assert found["big"].data_ptr() == own["big"].data_ptr()
        with ThreadPoolExecutor() as pool:  # without a tensor, the receiver has nothing to ask for
            sending = pool.submit(donor.send_checkpoint, [1], 9, {"n": 1}, LIMIT)
            assert receiver.recv_checkpoint(0, "", 9, LIMIT) == {"n": 1}
            sending.result(20)
        work = [group.allreduce([torch.ones(3)]) for group in two]
        assert all(one.wait() for one in work), "the group is as good as before"
        assert "PGTransport(ft-gloo, 0 pairs" in repr(donor)
    finally:
        donor.shutdown()
        receiver.shutdown()


def test_nobody_sends_and_nobody_receives(two: list[ProcessGroupGloo]) -> None:
    short = timedelta(milliseconds=100)
    transports: list[PGTransport[Any]] = [PGTransport(group, LIMIT) for group in two]
    try:
        with pytest.raises(HealError, match="rank 0"):
            transports[1].recv_checkpoint(0, "", 3, short)
        with pytest.raises(HealError, match="step 3 was not sent to rank 1"):
            transports[0].send_checkpoint([1], 3, {"w": torch.ones(3)}, short)
    finally:
        for transport in transports:
            transport.shutdown()


def test_arguments_are_checked(tmp_path: pathlib.Path) -> None:
    group = ProcessGroupGloo()
    with pytest.raises(ConfigError, match="pg must be"):
        PGTransport(None, LIMIT)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="state_dict must be a function"):
        PGTransport(group, LIMIT, "cpu", {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device='nowhere'"):
        PGTransport(group, LIMIT, "nowhere")
    with pytest.raises(ConfigError, match="timeout"):
        PGTransport(group, timedelta(0))
    with pytest.raises(ConfigError, match="encrypts nothing"):
        PGTransport(group, LIMIT, tls=Authority().files(tmp_path))
    unconfigured: PGTransport[Any] = PGTransport(group, LIMIT)
    try:
        with pytest.raises(UsageError, match="configure"):
            unconfigured.send_checkpoint([1], 1, {}, LIMIT)
        with pytest.raises(UsageError, match="configure"):
            unconfigured.recv_checkpoint(0, "", 1, LIMIT)
        assert isinstance(unconfigured, HTTPTransport)
        assert unconfigured.prefetch(["http://127.0.0.1:1"]) is None
    finally:
        unconfigured.shutdown()
        group.shutdown()


# -- state on devices


def test_state_goes_from_device_to_device(members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through two buffers per pair, one being copied while the other is sent."""
    device = install(monkeypatch)
    monkeypatch.setenv("FT_STAGING_MB", "8")
    group = members(2, 1)
    state = make_state(1, 40)
    on_device, own = device.place(state), device.place(make_state(2, 40))
    for transport in group.transports[:-1]:
        transport.mark(on_device)
    group.transports[-1].mark(own)
    group.offer(on_device)
    assert device.copies == 0
    with device.running():
        found = group.receive(2, own)
    assert found.state["big"] is own["big"]
    assert_same_state(own | {"step": 1, "name": "model"}, state)
    assert device.broken == []
    assert device.pinned_bytes <= 3 * 2 * RANGE_BYTES
    device.run()


def test_a_donor_whose_device_fails_ends_its_pair(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = install(monkeypatch)
    group = members(1, 1)
    device.fail_copy = 2
    group.offer(device.place(make_state(1, 24)))
    with device.running(), pytest.raises(HealError, match="replica rank 0"):
        group.receive(1, make_state(2, 24))
    device.run()
