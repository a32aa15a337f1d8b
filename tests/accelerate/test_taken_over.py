"""What a replica held or missed before others trained on without it is not written any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_accelerate import healed_state
from tests.accelerate.test_one_group import Setup, lighthouse

if TYPE_CHECKING:
    import pathlib

    import pytest

__all__ = ["lighthouse"]


def test_who_is_healed_writes_nothing_of_before(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setup()
    s.train(1)
    manager, leadership = s.accelerator.manager, s.accelerator._leadership
    monkeypatch.setattr(manager, "num_participants", lambda: 2)
    s.accelerator.save_state(str(tmp_path / "held"))
    leadership._leads = False
    s.accelerator.save_state(str(tmp_path / "missed"))
    healed_state.load(s.accelerator, healed_state.save(s.accelerator))  # as from a donor, whose Manager is further
    step = manager.current_step()
    monkeypatch.setattr(manager, "current_step", lambda: step + 40)
    leadership.opened()
    monkeypatch.undo()
    assert leadership.leads
    s.train(1)
    s.accelerator.end_training()
    assert not (tmp_path / "held").exists()
    assert not (tmp_path / "missed").exists()
