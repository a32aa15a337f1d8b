"""Buffers while a graph is open: it keeps the tensors it has, and the module has others with the verdict's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ft_core.runtime.user_state import LiveState
from tests.reduction.fakes import FakeHost, wrap
from tests.reduction.test_buffer_sync import all_bits, bits


def generator() -> tuple[Any, FakeHost]:
    torch.manual_seed(1)
    return wrap(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))


def sent_by_another(value: float) -> Tensor:
    """The bucket of the source, whose buffers are all `value`."""
    source, host = generator()
    attempt = host.start()
    for buffer in source.module.buffers():
        buffer.fill_(value)
    source.gradient_reducer.flush()
    return attempt.sent[0]


def of(value: float) -> dict[str, bytes]:
    module = nn.BatchNorm1d(3)
    for buffer in module.buffers():
        buffer.fill_(value)
    return {f"1.{name}": bits(buffer) for name, buffer in module.named_buffers()}


def committed_under_an_open_graph(value: float = 7.0) -> tuple[Any, FakeHost, Tensor]:
    """Another module's step was committed between forward and backward of this one; `value` came from the source."""
    member, host = generator()
    fake = member(torch.randn(4, 2))
    host.start(is_source=False, peers=[sent_by_another(value)])
    member.gradient_reducer.flush()
    member.gradient_reducer.committed()
    return member, host, fake


@pytest.mark.parametrize("verdict", ["committed", "vetoed"])
def test_a_graph_that_is_open_at_a_verdict_can_be_gone_through(verdict: str) -> None:
    """A GAN's generator, at the step of its discriminator."""
    member, host = generator()
    fake = member(torch.randn(4, 2))
    host.start(is_source=False, peers=[sent_by_another(7.0)])
    member.gradient_reducer.flush()
    getattr(member.gradient_reducer, verdict)()
    attempt = host.start()
    fake.sum().backward()
    assert attempt.events[-1] == "arrived"


@pytest.mark.parametrize("mode", ["training", "evaluating", "no_grad"])
def test_the_next_forward_finds_the_module_s_own_tensors_with_the_values_of_the_verdict(mode: str) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    own = dict(module.named_buffers())
    member, host = wrap(module)
    member(torch.randn(4, 2))
    host.start(is_source=False, peers=[sent_by_another(7.0)])
    member.gradient_reducer.flush()
    member.gradient_reducer.committed()
    assert all_bits(module) == of(7.0)
    seen: list[dict[str, bytes]] = []
    module.register_forward_pre_hook(lambda module, _: seen.append(all_bits(module)))
    member.train(mode == "training")
    with torch.set_grad_enabled(mode != "no_grad"):
        member(torch.randn(4, 2))
    assert seen == [of(7.0)]
    assert all(buffer is own[name] for name, buffer in module.named_buffers())


@pytest.mark.parametrize("verdict", ["committed", "vetoed"])
def test_after_a_verdict_the_module_has_its_values_though_a_parameter_was_not_used(verdict: str) -> None:
    """Its graph is never known to be over."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    module.unused = nn.Parameter(torch.zeros(1))
    member, host = wrap(module)
    before = all_bits(module)
    host.start(is_source=False, peers=[])
    member(torch.randn(4, 2)).sum().backward()
    assert all_bits(module) != before
    member.gradient_reducer.vetoed() if verdict == "vetoed" else member.gradient_reducer.committed()
    assert (all_bits(module) == before) == (verdict == "vetoed")


def test_modules_that_share_a_buffer_share_it_under_an_open_graph() -> None:
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    second._buffers.update(first._buffers)
    own = list(first.buffers())
    member, host = wrap(nn.Sequential(nn.Linear(2, 3), first, second, nn.Linear(3, 1)))
    member(torch.randn(4, 2))
    host.start(is_source=False, peers=[])
    member.gradient_reducer.flush()
    member.gradient_reducer.vetoed()
    assert list(first._buffers.values()) == list(second._buffers.values())
    assert not any(map(torch.Tensor.is_set_to, own, first.buffers()))
    member.eval()(torch.randn(4, 2))
    assert list(map(id, first.buffers())) == list(map(id, second.buffers())) == list(map(id, own))


def test_the_source_contributes_the_values_of_the_verdict() -> None:
    member, host, fake = committed_under_an_open_graph()
    host.start(is_source=True)
    fake.sum().backward()
    member.gradient_reducer.committed()
    assert all_bits(member.module) == of(7.0)


def test_a_forward_after_it_is_undone_by_a_veto_and_no_more() -> None:
    member, host, _ = committed_under_an_open_graph()
    host.start()
    member(torch.randn(4, 2)).sum().backward()
    assert all_bits(member.module) != of(7.0)
    member.gradient_reducer.vetoed()
    assert all_bits(member.module) == of(7.0)


def test_gradients_that_were_there_before_are_no_backward() -> None:
    """A script may clear the generator's gradients only after the discriminator's step."""
    member, host, _ = committed_under_an_open_graph()
    host.start()
    member(torch.randn(4, 2)).sum().backward()
    member.gradient_reducer.committed()
    fake = member(torch.randn(4, 2))
    host.start(is_source=False, peers=[sent_by_another(9.0)])
    member.gradient_reducer.flush(with_accumulated=True)
    member.gradient_reducer.committed()
    host.start()
    fake.sum().backward()


def test_two_verdicts_under_one_graph() -> None:
    member, host, fake = committed_under_an_open_graph()
    host.start(is_source=False, peers=[sent_by_another(9.0)])
    member.gradient_reducer.flush()
    member.gradient_reducer.committed()
    host.start()
    member.gradient_reducer.flush()
    member.gradient_reducer.vetoed()
    host.start()
    fake.sum().backward()
    with torch.no_grad():
        member.eval()(torch.randn(4, 2))
    assert all_bits(member.module) == of(9.0)


def test_a_part_of_the_parameters_leaves_the_graph_open() -> None:
    """A generator and a discriminator in one module, each with its own step."""
    both = nn.ModuleDict({"g": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "d": nn.Linear(3, 1)})
    both.forward = lambda x: (lambda fake: (fake, both["d"](fake.detach())))(both["g"](x))
    host: FakeHost
    member: Any
    member, host = wrap(both)
    host.start()
    fake, judged = member(torch.randn(4, 2))
    judged.sum().backward()
    member.gradient_reducer.committed()
    host.start()
    fake.sum().backward()
    member.gradient_reducer.committed()


def test_others_receive_the_values_of_the_verdict_and_the_graph_keeps_what_it_has() -> None:
    member, host, fake = committed_under_an_open_graph()
    live = LiveState()
    live.register("default", member.module.load_state_dict, member.module.state_dict)
    state = live.collect(member.gradient_reducer.buffer_storages(), 1.0)["default"]
    assert {name: bits(state[name]) for name in all_bits(member.module)} == of(7.0)
    host.start()
    fake.sum().backward()


def test_what_is_written_meanwhile_stays() -> None:
    """`load_state_dict`, or the first rank's buffers in a group of several."""
    member, host, fake = committed_under_an_open_graph()
    fives = {name: torch.full_like(buffer, 5) for name, buffer in member.module.named_buffers()}
    member.module.load_state_dict(fives, strict=False)
    member.gradient_reducer.state_loaded()
    host.start()
    fake.sum().backward()
    member.eval()(torch.randn(4, 2))
    assert all_bits(member.module) == of(5.0)


def test_what_somebody_put_in_its_place_stays() -> None:
    member, _, _ = committed_under_an_open_graph()
    norm = member.module[1]
    norm.running_mean = torch.full((3,), 6.0)
    member.eval()(torch.randn(4, 2))
    assert norm.running_mean.tolist() == [6.0] * 3
    assert norm.running_var.tolist() == [7.0] * 3
