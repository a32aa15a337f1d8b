"""The code in docs/same-trajectory.md runs as it stands there, on two replicas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ft_core.data import ElasticDataLoader
from ft_core.fixed_order import FixedOrderDataParallel
from ft_core.optim import OptimizerWrapper
from tests.fixed_order.reference import CLASSES, FEATURES, Points
from tests.runtime.harness import Cluster, Replica

DOC = Path(__file__).resolve().parents[2] / "docs" / "same-trajectory.md"
(BLOCK,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)


def test_the_guide(cluster: Cluster) -> None:
    curves: list[dict[int, float]] = []

    def runs(replica: Replica) -> None:
        def make_manager(net: nn.Module, inner: torch.optim.Optimizer) -> Any:
            replica.model, replica.inner = net, inner
            return replica.manager

        names: dict[str, Any] = {
            "torch": torch, "make_manager": make_manager, "ElasticDataLoader": ElasticDataLoader, "curve": {},
            "FixedOrderDataParallel": FixedOrderDataParallel, "Optimizer": OptimizerWrapper, "epochs": 2,
            "dataset": Points(150), "build_model": lambda: nn.Linear(FEATURES, CLASSES),
            "loss_fn": nn.functional.cross_entropy,
        }  # fmt: skip
        with cluster.build_lock:  # torch's generator belongs to all threads
            code = BLOCK.partition("model = ")
            exec(compile(code[0], str(DOC), "exec"), names)
        exec(compile("".join(code[1:]), str(DOC), "exec"), names)
        curves.append(names["curve"])

    cluster.run(*[Replica(index, loop=runs, setup=lambda _: None) for index in range(2)])
    cluster.check()
    assert curves[0] == curves[1]
    assert sorted(curves[0]) == list(range(1, 7))
