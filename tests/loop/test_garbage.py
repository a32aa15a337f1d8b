"""The full garbage collection before a process becomes a member."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ft_core.loop import garbage

if TYPE_CHECKING:
    import pytest


def collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_once_per_process_and_not_where_the_script_collects_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_made", False)
    gc.disable()
    try:
        before = collections()
        garbage.collect_once()
        assert collections() == before
    finally:
        gc.enable()
    garbage.collect_once()
    garbage.collect_once()
    assert collections() == before + 1
