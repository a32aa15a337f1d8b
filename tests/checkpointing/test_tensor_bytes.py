"""Byte views and fresh memory."""

import torch

from ft_core.checkpointing.tensor_bytes import byte_view, fresh


def test_byte_view_is_the_tensors_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.int32)
    byte_view(tensor)[4] = 7
    assert tensor.tolist() == [0, 7, 0, 0]
    assert len(byte_view(torch.empty(0))) == 0
    assert len(byte_view(torch.tensor(1.0))) == 4


def test_fresh_is_an_ordinary_tensor() -> None:
    tensor = fresh((3 << 20,), torch.float32)
    tensor.fill_(1)
    assert tensor.shape == (3 << 20,)
    assert tensor.untyped_storage().resizable()
