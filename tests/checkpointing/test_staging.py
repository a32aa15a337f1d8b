"""State from and into device memory: bounded pinned buffers, nothing looked at before it is there, and what fails.

The device is a fake (`tests/fake_device.py`) whose events are late; `test_devices_gpu.py` has the real one.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.checkpointing import HTTPTransport, devices, fetch
from ft_core.checkpointing.ranges import RANGE_BYTES
from ft_core.checkpointing.staging import Staging
from ft_core.errors import ConfigError, HealError
from ft_core.settings import STAGING_MB, staging_bytes
from tests.checkpointing.conftest import MIB, assert_same_state, heal_threads, make_state
from tests.fake_device import FakeDevice, install

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = timedelta(seconds=20)
TWO = 2 * RANGE_BYTES


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    found = install(monkeypatch)
    yield found
    assert found.broken == []


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HTTPTransport[Any]]]:
    """Donor and receiver, with two buffers each."""
    monkeypatch.setenv("FT_STAGING_MB", "8")
    made: list[HTTPTransport[Any]] = [HTTPTransport(SECONDS) for _ in range(2)]
    yield made
    for transport in made:
        transport.shutdown()
    assert heal_threads() == []


# -- buffers


def test_there_are_never_more_buffers_than_allowed(device: FakeDevice) -> None:
    staging = Staging(TWO)
    assert device.pinned_bytes == 0, "nothing is made before it is needed"
    first, second = staging.take(device, 0), staging.take(device, 0)
    assert first is not None
    assert second is not None
    assert staging.take(device, 0.01) is None
    staging.give_back(first)
    assert staging.take(device, 0) is first
    assert device.pinned_bytes == TWO
    staging.give_back(second)
    assert "2 of 2 buffers" in repr(staging)
    staging.drop()
    assert "1 of 2 buffers" in repr(staging)


def test_all_buffers_are_made_at_the_first_boundary_and_none_while_collectives_run(device: FakeDevice) -> None:
    """Making pinned memory may wait for the device, and so for a collective that hangs."""
    staging, state = Staging(TWO), {"w": torch.zeros(4)}
    staging.mark(state)
    assert device.pinned_bytes == 0, "nothing is made for state in CPU memory"
    on_device = device.place(state)
    for _ in range(2):
        staging.mark([state, on_device])
        assert device.pinned_bytes == TWO
    for _ in range(3):
        buffers = [staging.take(device, 0) for _ in range(2)]
        for buffer in buffers:
            assert buffer is not None
            staging.give_back(buffer)
    assert device.pinned_bytes == TWO
    device.run()


def test_memory_that_cannot_be_made_at_the_boundary_is_told_to_who_needs_it(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = Staging(TWO)
    monkeypatch.setattr(device, "pinned", lambda _: (_ for _ in ()).throw(RuntimeError("no pinned memory")))
    staging.mark(device.place([torch.zeros(4)]))
    with pytest.raises(RuntimeError, match="no pinned memory"):
        staging.take(device, 0)
    device.run()


def test_the_devices_of_the_state_are_marked_whichever_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [FakeDevice() for _ in range(3)]

    def device_of(tensor: torch.Tensor) -> FakeDevice | None:
        at = tensor.untyped_storage().data_ptr()
        return next((device for device in several if at in device.storages), None)

    monkeypatch.setattr(devices, "device_of", device_of)
    staging = Staging(TWO)
    staging.mark({"a": [several[1].place(torch.zeros(2))], "b": several[2].place(torch.zeros(2)), "c": torch.zeros(1)})
    assert [len(device.training) for device in several] == [0, 1, 1]
    for device in several[1:]:
        assert staging.boundary(device) is device.training[0][1]
        device.run()


def test_a_buffer_that_is_still_copied_is_not_handed_out(device: FakeDevice) -> None:
    staging = Staging(0)  # at least two
    buffers = [staging.take(device, 0) for _ in range(2)]
    moment = device.mark()
    assert buffers[0] is not None
    staging.give_back(buffers[0], moment)
    assert staging.take(device, 0.01) is None
    device.run()
    assert staging.take(device, 0) is buffers[0]


def test_who_waits_for_a_buffer_gets_the_one_given_back(device: FakeDevice) -> None:
    staging, got = Staging(TWO), []
    buffers = [staging.take(device, 0) for _ in range(2)]
    thread = threading.Thread(target=lambda: got.append(staging.take(device, 20)))
    thread.start()
    assert buffers[1] is not None
    staging.give_back(buffers[1])
    thread.join(20)
    assert got == [buffers[1]] or got[0] is buffers[1]


def test_memory_that_cannot_be_made_is_not_counted(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, original = Staging(TWO), device.pinned

    def fails(_: int) -> torch.Tensor:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(device, "pinned", fails)
    for _ in range(5):
        with pytest.raises(RuntimeError):
            staging.take(device, 0)
    monkeypatch.setattr(device, "pinned", original)
    assert staging.take(device, 0) is not None


def test_the_setting_has_bounds() -> None:
    assert staging_bytes({}) == STAGING_MB << 20
    assert staging_bytes({"FT_STAGING_MB": "8"}) == 8 << 20
    for wrong in ("0", "7", "-1", "65537"):
        with pytest.raises(ConfigError, match=rf"FT_STAGING_MB={wrong} must be between 8 and 65536"):
            staging_bytes({"FT_STAGING_MB": wrong})
    with pytest.raises(ConfigError, match="FT_STAGING_MB='much'"):
        staging_bytes({"FT_STAGING_MB": "much"})


# -- a donor


def test_an_offer_copies_nothing_until_somebody_asks(
    device: FakeDevice, pair: list[HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = device.place(make_state(1))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("copied to the host at once"))
    pair[0].mark(state)
    pair[0].server.offer("t", state)
    assert (device.copies, device.pinned_bytes) == (0, TWO)
    pair[0].server.close("t")
    assert (device.copies, device.to_host) == (0, 0)
    device.run()


def test_state_on_a_device_is_sent_through_two_buffers(device: FakeDevice, pair: list[HTTPTransport[Any]]) -> None:
    state = make_state(1)
    on_device = device.place(state)
    on_device["cpu too"] = torch.arange(5)
    pair[0].mark(on_device)
    pair[0].server.offer("t", on_device)
    with device.running():
        found = pair[1].fetch([pair[0].metadata()], "t")
    assert_same_state(found.state, state)
    assert found.state["cpu too"].tolist() == [0, 1, 2, 3, 4]
    assert device.pinned_bytes <= TWO
    assert found.bytes == device.to_host + 5 * 8


def test_what_training_launched_before_the_boundary_is_in_what_is_sent(
    device: FakeDevice, pair: list[HTTPTransport[Any]]
) -> None:
    """The optimizer's last step is still in the device's queue when the offer is made."""
    state = device.place({"w": torch.zeros(2 * MIB), "small": torch.zeros(7)})
    device.launch(lambda: state["w"].fill_(3.0))
    device.launch(lambda: state["small"].fill_(4.0))
    pair[0].mark(state)
    pair[0].server.offer("t", state)
    with device.running(from_first_copy=True):
        found = pair[1].fetch([pair[0].metadata()], "t").state
    assert bool((found["w"] == 3.0).all())
    assert bool((found["small"] == 4.0).all())


def test_a_range_is_not_summed_up_before_its_copy_has_ended(
    device: FakeDevice, pair: list[HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait the donor would send what the buffer held before, with a checksum that fits."""
    state = make_state(1, 12)
    on_device = device.place(state)
    pair[0].mark(on_device)
    pair[0].server.offer("t", on_device)
    with device.running(0.02):
        found = pair[1].fetch([pair[0].metadata()], "t")
    assert_same_state(found.state, state)


def test_a_thread_that_captures_is_put_behind_the_boundary_whatever_stream_was_trained_on(
    device: FakeDevice, pair: list[HTTPTransport[Any]]
) -> None:
    """It copies what is not contiguous, on its own stream."""
    state = device.place({"w": torch.zeros(4, 6)})
    pair[0].server.offer("before", state)
    assert device.followed == []
    pair[0].mark(state)
    boundary = pair[0].staging.boundary(device)
    thread = threading.Thread(target=pair[0].server.offer, args=("t", state))
    thread.start()
    thread.join()
    assert device.followed == [boundary]
    device.run()


def test_what_is_named_is_copied_on_its_device_and_read_behind_that_copy(
    device: FakeDevice, pair: list[HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = device.place({"large": torch.zeros(MIB), "small": torch.zeros(7)})
    copies = []

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        """What a device's copy is until the device has come to it."""
        found, value = torch.full_like(tensor, -1.0), tensor.tolist()
        device.storages.add(found.untyped_storage().data_ptr())

        def arrive() -> None:
            found.copy_(torch.tensor(value))

        device.launch(arrive)
        copies.append(found)
        return found

    pair[0].mark(state)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", clone)
        pair[0].server.offer("t", state, copy_storages={t.untyped_storage().data_ptr() for t in state.values()})
    for tensor in state.values():
        tensor.add_(1)  # as forward does
    with device.running(from_first_copy=True):
        found = pair[1].fetch([pair[0].metadata()], "t").state
    assert len(copies) == 2
    assert all(not tensor.any() for tensor in found.values())


def test_closing_an_offer_waits_for_no_copy_and_nothing_of_it_counts(
    device: FakeDevice, pair: list[HTTPTransport[Any]]
) -> None:
    on_device = device.place({"w": torch.zeros(2 * MIB)})
    pair[0].mark(on_device)
    pair[0].server.offer("t", on_device)
    errors: list[Exception] = []

    def receive() -> None:
        try:
            pair[1].fetch([pair[0].metadata()], "t")
        except HealError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    with device.changed:
        assert device.changed.wait_for(lambda: device.copies > 0, 20)
    pair[0].close()  # the copy is in the device's queue; the training thread goes on
    device.run()
    with device.running():
        thread.join(20)
    assert len(errors) == 1
    assert "t" in str(errors[0])


@pytest.mark.parametrize("how", ["fail_copy", "refuse_copy"])
def test_a_donor_whose_device_fails_is_replaced_by_another_try(
    device: FakeDevice, pair: list[HTTPTransport[Any]], how: str
) -> None:
    state = make_state(1)
    setattr(device, how, 2)
    on_device = device.place(state)
    pair[0].mark(on_device)
    pair[0].server.offer("t", on_device)
    with device.running():
        found = pair[1].fetch([pair[0].metadata()], "t")
    assert_same_state(found.state, state)
    assert device.pinned_bytes <= TWO, "its buffer came back"


def test_live_state_is_read_from_the_device_as_it_changes(device: FakeDevice, pair: list[HTTPTransport[Any]]) -> None:
    state = make_state(1, 8)
    pair[0].server.offer_live(device.place(state))
    assert device.copies == 0
    with device.running():
        have = pair[1].prefetch([pair[0].metadata()])
        assert have is not None
        pair[0].server.offer("t", device.place(state))
        found = pair[1].fetch([pair[0].metadata()], "t", have=have)
    assert found.bytes == 0, "nothing differs"
    assert_same_state(found.state, state)


# -- a receiver


def test_state_goes_into_the_receivers_tensors_on_its_device(
    device: FakeDevice, pair: list[HTTPTransport[Any]]
) -> None:
    state, own = make_state(1), device.place(make_state(2))
    pair[0].server.offer("t", state)
    pair[1].mark(own)
    with device.running():
        found = pair[1].fetch([pair[0].metadata()], "t", into=own)
    assert found.state["big"] is own["big"]
    assert_same_state(own | {"step": 1, "name": "model"}, state)
    assert device.pinned_bytes <= TWO


def test_nothing_is_written_to_the_device_before_training_is_through_with_it(
    device: FakeDevice, pair: list[HTTPTransport[Any]]
) -> None:
    """A warm-up step that was launched last would write over what was received."""
    own = device.place({"w": torch.zeros(2 * MIB)})
    pair[0].server.offer("t", {"w": torch.full((2 * MIB,), 5.0)})
    device.launch(lambda: own["w"].fill_(1.0))
    pair[1].mark(own)
    with device.running(from_first_copy=True):
        pair[1].fetch([pair[0].metadata()], "t", into=own)
    assert bool((own["w"] == 5.0).all())


@pytest.mark.parametrize("number", [1, 5])
def test_a_copy_to_the_device_that_fails_is_not_a_state_received(
    device: FakeDevice, pair: list[HTTPTransport[Any]], number: int
) -> None:
    device.fail_copy = number
    pair[0].server.offer("t", make_state(1))
    with device.running(), pytest.raises(HealError, match="illegal memory access"):
        pair[1].fetch([pair[0].metadata()], "t", into=device.place(make_state(2)))


def test_a_copy_that_could_not_be_launched_is_made_again(device: FakeDevice, pair: list[HTTPTransport[Any]]) -> None:
    own = device.place(make_state(2))
    device.refuse_copy = 3
    pair[0].server.offer("t", make_state(1))
    with device.running():
        pair[1].fetch([pair[0].metadata()], "t", into=own)
    assert_same_state(own | {"step": 1, "name": "model"}, make_state(1))
    assert device.pinned_bytes <= TWO, "its buffer came back"


def test_a_device_that_hangs_ends_the_transfer(
    device: FakeDevice, pair: list[HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_core.checkpointing.receive_plan.COPY_S", 0.1)
    pair[0].server.offer("t", {"w": torch.zeros(MIB)})
    with pytest.raises(HealError, match="device has not copied"):
        pair[1].fetch([pair[0].metadata()], "t", into=device.place({"w": torch.zeros(MIB)}))
    device.run()


def test_without_staging_a_device_is_left_alone(device: FakeDevice, pair: list[HTTPTransport[Any]]) -> None:
    """For whoever calls `fetch` itself."""
    own = device.place({"w": torch.zeros(MIB)})
    pair[0].server.offer("t", {"w": torch.ones(MIB)})
    found = fetch([pair[0].metadata()], "t", into=own).state
    assert bool((found["w"] == 1).all())
    assert bool((own["w"] == 0).all())
    assert device.copies == 0
