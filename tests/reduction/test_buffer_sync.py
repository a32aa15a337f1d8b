"""Buffers: bit for bit the source's after a commit, bit for bit one's own after a veto."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ft_core.errors import UsageError
from ft_core.protocol.rank.ballot import FENCE_SLOTS
from tests.reduction.fakes import FakeAttempt, wrap


class Odd(nn.Module):
    """Buffers of every kind that travels differently."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        generator = torch.Generator().manual_seed(1)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"of_{name}", torch.randn(3, 5, dtype=dtype, generator=generator))
        self.register_buffer("special", torch.tensor([-0.0, 0.0, float("inf"), float("-inf"), 1e-45, 3e38]))
        self.register_buffer("nan64", torch.tensor([float("nan"), -0.0], dtype=torch.float64))
        self.register_buffer("big", torch.tensor([-(2**63), 2**63 - 1, -1, 2**31]))
        self.register_buffer("small", torch.tensor([-128, 127, -1, 5, 6], dtype=torch.int8))
        self.register_buffer("bytes", torch.tensor([0, 255, 17], dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("hidden", torch.tensor([1.5]), persistent=False)
        self.register_buffer("expanded", torch.tensor([2.0]).expand(4))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def all_bits(module: nn.Module) -> dict[str, bytes]:
    return {name: bits(buffer) for name, buffer in module.named_buffers()}


def scramble(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if name != "expanded":
            buffer.copy_(torch.zeros_like(buffer) if buffer.dtype == torch.bool else torch.full_like(buffer, 3))


def step(member: nn.Module, attempt: FakeAttempt) -> None:
    member(torch.ones(3)).backward()
    assert attempt.events[-1] == "arrived"


def test_a_commit_gives_every_member_the_buffers_of_the_source() -> None:
    source, source_port = wrap(Odd())
    other, other_port = wrap(Odd())
    scramble(other.module)
    wanted = all_bits(source.module)
    assert all_bits(other.module) != wanted
    sent = source_port.start()
    step(source, sent)
    received = other_port.start(is_source=False, peers=[sent.sent[0]])
    step(other, received)
    # What the source gets back is the sum as well.
    source_port.start(peers=[received.sent[0]])
    step(source, source_port.attempt)  # type: ignore[arg-type]
    other.gradient_reducer.committed()
    source.gradient_reducer.committed()
    assert all_bits(other.module) == wanted
    assert all_bits(source.module) == wanted


def test_a_veto_restores_what_was_before_the_first_forward() -> None:
    member, host = wrap(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    before = all_bits(member.module)
    host.start()
    for _ in range(2):
        member(torch.randn(4, 2)).sum().backward()
    assert all_bits(member.module) != before
    member.gradient_reducer.vetoed()
    assert all_bits(member.module) == before
    member(torch.randn(4, 2)).sum().backward()
    member.gradient_reducer.committed()
    after = all_bits(member.module)
    member.gradient_reducer.vetoed()  # nothing was changed since the commit
    assert all_bits(member.module) == after


def test_a_forward_before_start_quorum_belongs_to_the_step_as_well() -> None:
    member, host = wrap(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    before = all_bits(member.module)
    output = member(torch.randn(4, 2))
    host.start()
    output.sum().backward()
    member.gradient_reducer.vetoed()
    assert all_bits(member.module) == before


def test_loaded_state_is_not_undone_by_a_veto() -> None:
    member, host = wrap(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    host.start()
    member(torch.randn(4, 2)).sum().backward()
    healed = {name: torch.full_like(value, 5) for name, value in member.module.state_dict().items()}
    member.module.load_state_dict(healed)
    member.gradient_reducer.state_loaded()
    member.gradient_reducer.vetoed()
    assert torch.equal(member.module[1].running_mean, torch.full((3,), 5.0))


def test_no_buffers_no_elements() -> None:
    member, _ = wrap(nn.Linear(2, 3))
    tail = member.gradient_reducer.plan.tail
    assert tail.end == tail.used + tail.used_numel
    member.gradient_reducer.vetoed()
    member.gradient_reducer.committed()


def test_broadcast_buffers_false_leaves_them_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    member, host = wrap(module, broadcast_buffers=False)
    attempt = host.start()
    member(torch.randn(4, 2)).sum().backward()
    assert attempt.sent[0].numel() == 9 + 6 + FENCE_SLOTS + 4
    after = all_bits(module)
    member.gradient_reducer.vetoed()
    assert all_bits(module) == after


def test_ignored_buffers_stay_local() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module._ddp_params_and_buffers_to_ignore = ["1.running_mean", "1.bias"]  # type: ignore[assignment]
    member, _ = wrap(module)
    assert [b.name for b in member.gradient_reducer.plan.buffers] == ["1.running_var", "1.num_batches_tracked"]
    assert member.gradient_reducer.plan.names == ["0.weight", "0.bias", "1.weight"]


def test_storages_name_all_buffers_as_they_are_now() -> None:
    module = nn.BatchNorm1d(3)
    member, _ = wrap(module, broadcast_buffers=False)
    assert module.running_mean is not None
    module.running_mean = module.running_mean.clone()
    addresses = {b.untyped_storage().data_ptr() for b in module.buffers()}
    assert member.gradient_reducer.buffer_storages() == addresses


def test_a_replaced_buffer_is_followed_and_a_reshaped_one_refused() -> None:
    module = Odd()
    member, host = wrap(module)
    host.start()
    module.scalar = torch.tensor(9)
    step(member, host.attempt)  # type: ignore[arg-type]
    module.scalar.zero_()
    member.gradient_reducer.committed()
    assert module.scalar == 9
    module.scalar = torch.tensor([1, 2])
    with pytest.raises(UsageError, match=r"buffer scalar was int64 \[\] .* is int64 \[2\] now"):
        member(torch.ones(3))
