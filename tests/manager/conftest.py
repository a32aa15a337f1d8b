"""A lighthouse per test, and a look afterwards whether anything was left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ft_core import manager_setup
from tests.manager.harness import Cluster
from tests.manager.loopback import Loopback, LoopbackControl


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    torch.set_num_threads(1)
    loopback = Loopback()

    def control(config: Any, replica_id: str, session: Any, store: Any) -> LoopbackControl:
        return LoopbackControl(loopback, replica_id, session)

    monkeypatch.setattr(manager_setup, "_control", control)
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
