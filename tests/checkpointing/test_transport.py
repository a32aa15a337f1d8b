"""`HTTPTransport` as users know it."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_core.checkpointing import CheckpointTransport, HTTPTransport
from ft_core.errors import ConfigError, HealError

SECOND = timedelta(seconds=1)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FT_TOKEN", "from the environment")
    transports: list[HTTPTransport[Any]] = [
        HTTPTransport(timedelta(seconds=10), num_chunks=n, hostname="localhost") for n in (0, 10)
    ]
    yield transports
    for transport in transports:
        transport.shutdown()
        transport.shutdown(wait=False)


def test_a_step_moves_from_donor_to_receiver(pair: Any) -> None:
    donor, receiver = pair
    assert issubclass(HTTPTransport, CheckpointTransport)
    state: Any = {"user": {"w": torch.randn(100_000)}, "ft": {"step": 7}}
    donor.send_checkpoint([1], 7, state, SECOND)
    received = receiver.recv_checkpoint(0, donor.metadata(), 7, SECOND)
    assert torch.equal(received["user"]["w"], state["user"]["w"])
    assert received["ft"] == {"step": 7}
    donor.server.offer("buckets", {"b": 1})
    donor.disallow_checkpoint()
    with pytest.raises(HealError, match="step-7"):
        receiver.recv_checkpoint(0, donor.metadata(), 7, SECOND)
    assert receiver.fetch([donor.metadata()], "buckets").state == {"b": 1}


def test_prefetch_and_blobs_carry_the_token(pair: Any) -> None:
    donor, receiver = pair
    donor.server.offer_live({"w": torch.ones(100_000)})
    assert receiver.prefetch([donor.metadata()]).bytes == 400_000
    donor.server.add_blob("b", lambda: b"x")
    assert receiver.get_blob(donor.metadata(), "b") == b"x"
    assert HTTPTransport.__name__ in repr(donor)


def test_the_argument_beats_the_environment(pair: Any) -> None:
    donor, _ = pair
    other: HTTPTransport[Any] = HTTPTransport(SECOND, token="another", hostname="localhost")
    try:
        with pytest.raises(HealError, match="FT_TOKEN"):
            other.recv_checkpoint(0, donor.metadata(), 1, SECOND)
    finally:
        other.shutdown()


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="timeout"):
        HTTPTransport(timedelta(0))
    with pytest.raises(ConfigError, match="num_chunks"):
        HTTPTransport(SECOND, num_chunks=-1)
