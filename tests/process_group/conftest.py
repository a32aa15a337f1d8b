"""Fixtures: a c10d store per test session, and a check that nothing is left behind."""

from collections.abc import Iterator

import pytest
import torch

from ft_core.process_group.device.host import ProcessHost
from tests.process_group.ranks import Store, set_aside_lost_groups


@pytest.fixture(scope="session", autouse=True)
def _count_only_ours() -> None:
    set_aside_lost_groups()


@pytest.fixture(autouse=True)
def _no_abort_ends_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that is stuck by mistake fails its test, not all of them."""
    reasons: list[str] = []
    monkeypatch.setattr(ProcessHost, "end_process", lambda _host, reason: reasons.append(reason))
    yield
    assert not reasons


@pytest.fixture(scope="session")
def store() -> Store:
    torch.set_num_threads(1)
    return Store()
