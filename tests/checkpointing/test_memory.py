"""Byte views, checksums, and when a remembered checksum is trusted."""

import zlib

import pytest
import torch

from ft_core.checkpointing import memory
from ft_core.checkpointing.memory import ChecksumCache, byte_view, checksum, fingerprint, fresh


def test_byte_view_is_the_tensors_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.int32)
    byte_view(tensor)[4] = 7
    assert tensor.tolist() == [0, 7, 0, 0]
    assert len(byte_view(torch.empty(0))) == 0
    assert len(byte_view(torch.tensor(1.0))) == 4


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000])
def test_fingerprint_sees_every_byte(size: int) -> None:
    data = bytearray(size)
    before = fingerprint(memoryview(data))
    for index in {0, size // 2, size - 1} & set(range(size)):
        data[index] ^= 1
        assert fingerprint(memoryview(data)) != before
        data[index] ^= 1
    assert fingerprint(memoryview(data)) == before


def test_fingerprint_sees_order() -> None:
    tensor = torch.arange(4096)
    before = fingerprint(byte_view(tensor))
    assert fingerprint(byte_view(tensor.roll(1))) != before
    assert fingerprint(byte_view(tensor.flip(0))) != before


def test_a_remembered_checksum_is_used_while_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(100_000)
    view = byte_view(tensor)
    cache = ChecksumCache()
    value = cache.compute(tensor, 0, view, remember=True)
    assert value == zlib.crc32(view)
    monkeypatch.setattr(memory, "checksum", lambda data: pytest.fail("not needed"))
    assert cache.compute(tensor, 0, view, remember=False) == value


@pytest.mark.parametrize("how", ["version", "data", "neither"])
def test_a_changed_tensor_is_checked_again(how: str) -> None:
    tensor = torch.arange(100_000)
    view = byte_view(tensor)
    cache = ChecksumCache()
    old = cache.compute(tensor, 0, view, remember=True)
    if how == "version":
        tensor.add_(1)
    elif how == "data":
        tensor.data.add_(1)  # bumps no version
    else:
        view[12345] ^= 1
    new = cache.compute(tensor, 0, view, remember=True)
    assert new == checksum(view) != old


def test_memory_that_changes_meanwhile_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(100_000)
    view = byte_view(tensor)
    cache = ChecksumCache()

    def racing(data: memoryview) -> int:
        view[0] ^= 1
        return zlib.crc32(data)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "checksum", racing)
        cache.compute(tensor, 0, view, remember=True)
    assert not cache._entries


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CACHE_ENTRIES_MAX", 3)
    cache = ChecksumCache()
    tensor = torch.zeros(100, dtype=torch.uint8)
    view = byte_view(tensor)
    for start in range(10):
        cache.compute(tensor, start, view[start : start + 10], remember=True)
    assert len(cache._entries) <= 3


def test_without_numpy_every_checksum_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_numpy", None)
    tensor = torch.arange(1000)
    cache = ChecksumCache()
    assert cache.compute(tensor, 0, byte_view(tensor), remember=True) == checksum(byte_view(tensor))
    assert not cache._entries


def test_fresh_is_an_ordinary_tensor() -> None:
    tensor = fresh((3 << 20,), torch.float32)
    tensor.fill_(1)
    assert tensor.shape == (3 << 20,)
    assert tensor.untyped_storage().resizable()
