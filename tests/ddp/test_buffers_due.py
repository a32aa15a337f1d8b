"""Buffers while a graph is open: what a verdict says of them waits for the next forward, as with torch's DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ft_core.live_state import LiveState
from tests.ddp.fakes import FakePort, wrap
from tests.ddp.test_buffers import all_bits, bits


def generator() -> tuple[Any, FakePort]:
    torch.manual_seed(1)
    return wrap(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))


def sent_by_another(value: float) -> Tensor:
    """The bucket of the source, whose buffers are all `value`."""
    source, port = generator()
    attempt = port.start()
    for buffer in source.module.buffers():
        buffer.fill_(value)
    source.carrier.flush()
    return attempt.sent[0]


def of(value: float) -> dict[str, bytes]:
    module = nn.BatchNorm1d(3)
    for buffer in module.buffers():
        buffer.fill_(value)
    return {f"1.{name}": bits(buffer) for name, buffer in module.named_buffers()}


def committed_under_an_open_graph(value: float = 7.0) -> tuple[Any, FakePort, Tensor]:
    """Another module's step was committed between forward and backward of this one; `value` came from the source."""
    member, port = generator()
    fake = member(torch.randn(4, 2))
    port.start(is_source=False, peers=[sent_by_another(value)])
    member.carrier.flush()
    member.carrier.committed()
    return member, port, fake


@pytest.mark.parametrize("verdict", ["committed", "vetoed"])
def test_a_graph_that_is_open_at_a_verdict_can_be_gone_through(verdict: str) -> None:
    """A GAN's generator, at the step of its discriminator."""
    member, port = generator()
    fake = member(torch.randn(4, 2))
    port.start(is_source=False, peers=[sent_by_another(7.0)])
    member.carrier.flush()
    getattr(member.carrier, verdict)()
    attempt = port.start()
    fake.sum().backward()
    assert attempt.events[-1] == "arrived"


@pytest.mark.parametrize("mode", ["training", "evaluating", "no_grad"])
def test_the_next_forward_has_what_was_due(mode: str) -> None:
    member, _, _ = committed_under_an_open_graph()
    seen: list[dict[str, bytes]] = []
    member.module.register_forward_pre_hook(lambda module, _: seen.append(all_bits(module)))
    member.train(mode == "training")
    with torch.set_grad_enabled(mode != "no_grad"):
        member(torch.randn(4, 2))
    assert seen == [of(7.0)]


def test_what_is_due_is_written_with_the_next_verdict_after_the_backward() -> None:
    member, port, fake = committed_under_an_open_graph()
    port.start()
    fake.sum().backward()
    member.carrier.vetoed()
    assert all_bits(member.module) == of(7.0)


def test_the_source_contributes_what_is_due() -> None:
    member, port, fake = committed_under_an_open_graph()
    port.start(is_source=True)
    fake.sum().backward()
    member.carrier.committed()
    assert all_bits(member.module) == of(7.0)


def test_a_forward_after_what_was_due_is_undone_by_a_veto_and_no_more() -> None:
    member, port, _ = committed_under_an_open_graph()
    port.start()
    member(torch.randn(4, 2)).sum().backward()
    assert all_bits(member.module) != of(7.0)
    member.carrier.vetoed()
    assert all_bits(member.module) == of(7.0)


def test_gradients_that_were_there_before_are_no_backward() -> None:
    """A script may clear the generator's gradients only after the discriminator's step."""
    member, port, _ = committed_under_an_open_graph()
    port.start()
    member(torch.randn(4, 2)).sum().backward()
    member.carrier.committed()
    fake = member(torch.randn(4, 2))
    port.start(is_source=False, peers=[sent_by_another(9.0)])
    member.carrier.flush(with_accumulated=True)
    member.carrier.committed()
    port.start()
    fake.sum().backward()


def test_two_verdicts_under_one_graph() -> None:
    member, port, fake = committed_under_an_open_graph()
    port.start(is_source=False, peers=[sent_by_another(9.0)])
    member.carrier.flush()
    member.carrier.committed()
    port.start()
    member.carrier.flush()
    member.carrier.vetoed()
    port.start()
    fake.sum().backward()
    with torch.no_grad():
        member.eval()(torch.randn(4, 2))
    assert all_bits(member.module) == of(9.0)


def test_a_part_of_the_parameters_leaves_the_graph_open() -> None:
    """A generator and a discriminator in one module, each with its own step."""
    both = nn.ModuleDict({"g": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "d": nn.Linear(3, 1)})
    both.forward = lambda x: (lambda fake: (fake, both["d"](fake.detach())))(both["g"](x))
    port: FakePort
    member: Any
    member, port = wrap(both)
    port.start()
    fake, judged = member(torch.randn(4, 2))
    judged.sum().backward()
    member.carrier.committed()
    port.start()
    fake.sum().backward()
    member.carrier.committed()


def test_others_receive_what_is_due_and_the_graph_keeps_what_it_has() -> None:
    member, port, fake = committed_under_an_open_graph()
    before = all_bits(member.module)
    live = LiveState()
    live.register("default", member.module.load_state_dict, member.module.state_dict)
    with member.carrier.buffers_as_due():
        state = live.collect(member.carrier.buffer_storages(), 1.0)["default"]
    assert {name: bits(state[name]) for name in before} == of(7.0)
    assert all_bits(member.module) == before
    port.start()
    fake.sum().backward()


def test_the_first_rank_of_a_group_gives_the_others_what_is_due() -> None:
    member, _, _ = committed_under_an_open_graph()
    due = member.carrier.buffers.due()
    assert {name: bits(due[id(buffer)]) for name, buffer in member.module.named_buffers()} == of(7.0)
    for tensor in due.values():
        tensor.fill_(8)
    with torch.no_grad():
        member.eval()(torch.randn(4, 2))
    assert all_bits(member.module) == of(8.0)


def test_who_writes_to_a_buffer_meanwhile_has_the_last_word() -> None:
    member, _, _ = committed_under_an_open_graph()
    member.module.load_state_dict({name: torch.full_like(t, 5) for name, t in member.module.state_dict().items()})
    member.eval()(torch.randn(4, 2))
    assert all_bits(member.module) == of(5.0)


def test_loaded_state_is_not_overwritten_by_what_was_due() -> None:
    member, _, _ = committed_under_an_open_graph()
    for buffer in member.module.buffers():
        buffer.data.fill_(5)
    member.carrier.state_loaded()
    member.eval()(torch.randn(4, 2))
    assert all_bits(member.module) == of(5.0)
