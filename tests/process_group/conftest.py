"""Fixtures: a c10d store per test session, and a check that nothing is left behind."""

import pytest
import torch

from tests.process_group.ranks import Store, set_aside_lost_groups


@pytest.fixture(scope="session", autouse=True)
def _count_only_ours() -> None:
    set_aside_lost_groups()


@pytest.fixture(scope="session")
def store() -> Store:
    torch.set_num_threads(1)
    return Store()
