"""A lighthouse per test, and a look afterwards whether anything was left behind."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.process_group import open_store
from ft_core.runtime import leaving, startup, steps
from tests.runtime.harness import Cluster
from tests.runtime.loopback import Loopback, LoopbackControl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import TCPStore


@pytest.fixture(scope="session")
def store() -> TCPStore:
    """One for all tests."""
    return open_store("127.0.0.1", timedelta(seconds=30))


@pytest.fixture
def exit_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets EXIT_S, the limit of what a replica that ends may wait for."""

    def set_to(seconds: float) -> None:
        for module in (leaving, steps):
            monkeypatch.setattr(module, "EXIT_S", seconds)

    return set_to


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch, store: TCPStore) -> Iterator[Loopback]:
    torch.set_num_threads(1)
    loopback = Loopback()
    open_store = startup._open_store
    monkeypatch.setattr(
        startup,
        "_open_store",
        lambda config: (store, f"127.0.0.1:{store.port}") if config.store is None else open_store(config),
    )

    def control(config: Any, replica_id: str, shell: Any, store: Any) -> LoopbackControl:
        return LoopbackControl(loopback, replica_id, shell)

    monkeypatch.setattr(startup, "_control", control)
    yield loopback
    loopback.stop()


@pytest.fixture
def cluster(lighthouse: Loopback) -> Iterator[Cluster]:
    cluster = Cluster(lighthouse)
    yield cluster
    for replica in cluster.replicas:
        replica.gate.set()
    for replica in cluster.replicas:
        replica.thread.join(10)
