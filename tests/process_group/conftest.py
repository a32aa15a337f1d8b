"""Fixtures: a c10d store per test session, and a check that nothing is left behind."""

from collections.abc import Iterator

import pytest
import torch

from ft_core.process_group.device.host import ProcessHost
from tests.process_group.ranks import Store, set_aside_lost_groups


@pytest.fixture(scope="session", autouse=True)
def _count_only_ours() -> None:
    set_aside_lost_groups()


@pytest.fixture(scope="session")
def reasons_to_end() -> Iterator[list[str]]:
    """Why this process would have ended: an abort that is stuck by mistake fails its test, and not all of them."""
    reasons: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ProcessHost, "end_process", lambda _host, reason: reasons.append(reason))
        yield reasons


@pytest.fixture(autouse=True)
def _no_abort_is_stuck(reasons_to_end: list[str]) -> Iterator[None]:
    reasons_to_end.clear()
    yield
    assert not reasons_to_end


@pytest.fixture(scope="session")
def store() -> Store:
    torch.set_num_threads(1)
    return Store()
