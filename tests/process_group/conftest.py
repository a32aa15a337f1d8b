"""Fixtures: a c10d store per test session, and a check that nothing is left behind."""

import pytest
import torch

from ft_core.process_group.gloo import reaper as reaping
from tests.process_group.ranks import Store

_left_by_others: list[object] = []
"""Groups that other tests of this run broke on purpose and that Gloo cannot end before their timeout: kept, so that
nothing destroys them, but not counted here."""


@pytest.fixture(scope="session", autouse=True)
def _count_only_ours() -> None:
    reaping.reaper.wait_empty(1.0)
    with reaping.reaper._destroying:
        _left_by_others.extend(reaping.reaper._held)
        reaping.reaper._held = []


@pytest.fixture(scope="session")
def store() -> Store:
    torch.set_num_threads(1)
    return Store()
