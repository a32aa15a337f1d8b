"""How much of a donor's claim a receiver believes."""

from __future__ import annotations

import json
import os
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core.checkpointing import OwnState, StateServer, fetch, own_state
from ft_core.checkpointing.offer import Offer
from ft_core.checkpointing.own_state import GROWTH_MAX, SLACK_BYTES, limit_for
from ft_core.checkpointing.ranges import dump_manifest, parse_manifest
from ft_core.checkpointing.state_encoding import Leaf
from ft_core.errors import EncodingError, HealError

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def manifest(*sizes: int) -> bytes:
    leaves = [Leaf(f"state[{i}]", torch.uint8, (n,)) for i, n in enumerate(sizes)]
    return dump_manifest(leaves, ["l", *(["T", i] for i in range(len(sizes)))], {})


def test_the_measures_of_a_state() -> None:
    own = OwnState.of({"a": torch.zeros(3, 4), "b": [torch.zeros(2, dtype=torch.uint8)], "n": 5})
    assert (own.nbytes, own.leaves) == (50, 2)
    assert own.skeleton_bytes > 50
    with pytest.raises(EncodingError, match=r"state\['f'\]"):
        OwnState.of({"f": open})


def test_a_state_that_grew_as_optimizers_do_is_believed() -> None:
    model = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.AdamW(model.parameters())
    own = OwnState.of([model.state_dict(), optimizer.state_dict()])
    model(torch.ones(2, 2000)).sum().backward()
    optimizer.step()
    grown = Offer.capture("t", [model.state_dict(), optimizer.state_dict()])
    assert parse_manifest(grown.manifest(), limit_for(own)).leaves == grown.leaves


def test_a_claim_beyond_what_the_own_state_may_grow_to_is_refused_before_it_is_planned() -> None:
    limit = limit_for(OwnState(100, 1, 100))
    assert limit.nbytes == GROWTH_MAX * 100 + SLACK_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(HealError, match=rf"has {32 << 44} bytes.* at most {limit.nbytes}: 16 times its own 100"):
            parse_manifest(manifest(*[1 << 44] * 32), limit)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    with pytest.raises(HealError, match="this machine's memory"):
        parse_manifest(manifest(*[1 << 44] * 32), limit_for(None))
    many = json.dumps(["x"] * 20_000)
    with pytest.raises(HealError, match="20000 tensors"):
        parse_manifest(manifest(*[1] * 20_000), limit)
    assert len(many) < limit.manifest_bytes


def test_nothing_is_believed_that_does_not_fit_into_the_machine() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limit_for(None).nbytes == memory
    assert limit_for(OwnState(memory, 1, 1)).nbytes == memory


def test_a_receiver_gives_up_at_once(donor: Callable[..., StateServer], monkeypatch: pytest.MonkeyPatch) -> None:
    server = donor()
    server.offer("t", {"x": torch.zeros(100)})
    monkeypatch.setattr(Offer, "manifest", lambda _: manifest(*[1 << 44] * 32))
    with pytest.raises(HealError, match="this receiver takes at most"):
        fetch([server.address], "t", into={"x": torch.zeros(100)}, deadline_s=20)
    monkeypatch.setattr(Offer, "manifest", lambda _: b" " * (own_state.MANIFEST_SLACK_BYTES + MIB))
    with pytest.raises(HealError, match="the limit is"):
        fetch([server.address], "t", into={"x": torch.zeros(100)}, deadline_s=20)
