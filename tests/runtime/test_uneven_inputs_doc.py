"""The code in docs/uneven-inputs.md runs as it stands there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.runtime.harness import CLASSES, FEATURES, Cluster, Replica

if TYPE_CHECKING:
    from torch import Tensor

DOC = Path(__file__).resolve().parents[2] / "docs" / "uneven-inputs.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(size, FEATURES), torch.randint(CLASSES, (size,))) for size in sizes]


@pytest.mark.parametrize("block", BLOCKS, ids=["weights", "run_out", "join"])
def test_a_block(cluster: Cluster, block: str) -> None:
    code = compile(textwrap.dedent(re.sub(r"^manager = .*\n", "", block, flags=re.MULTILINE)), str(DOC), "exec")
    ends: dict[int, tuple[int, str]] = {}

    def runs(replica: Replica) -> None:
        sizes = [3, 2 + replica.index, 1] if "micro" in block else [4] * (2 + 2 * replica.index)
        names = {
            "manager": replica.manager, "model": replica.ddp, "optimizer": replica.optimizer, "epochs": 2,
            "loader": batches(sizes), "micro_batches": batches(sizes), "loss_fn": torch.nn.functional.cross_entropy,
        }  # fmt: skip
        exec(code, names)
        ends[replica.index] = (replica.manager.current_step(), replica.digest())

    cluster.run(*[Replica(index, loop=runs) for index in range(3)])
    cluster.check()
    assert len(ends) == 3
    assert len(set(ends.values())) == 1
