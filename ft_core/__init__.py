"""Fault-tolerant data-parallel training for PyTorch.

The names a training script uses are here; they load on first use, so that the lighthouse (which imports
`ft_core.lighthouse`) starts without torch. A worker that replaces another waits here until that one's memory is free
(`predecessors`).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_core.data import DistributedSampler as DistributedSampler
    from ft_core.data import ElasticDataLoader as ElasticDataLoader
    from ft_core.data import ElasticSampler as ElasticSampler
    from ft_core.ddp import DistributedDataParallel as DistributedDataParallel
    from ft_core.ddp import PureDistributedDataParallel as PureDistributedDataParallel
    from ft_core.local_sgd import DiLoCo as DiLoCo
    from ft_core.local_sgd import LocalSGD as LocalSGD
    from ft_core.manager import Manager as Manager
    from ft_core.manager import WorldSizeMode as WorldSizeMode
    from ft_core.optim import Optimizer as Optimizer
    from ft_core.optim import OptimizerWrapper as OptimizerWrapper
    from ft_core.process_group import ProcessGroupBabyNCCL as ProcessGroupBabyNCCL
    from ft_core.process_group import ProcessGroupGloo as ProcessGroupGloo
    from ft_core.process_group import ProcessGroupNCCL as ProcessGroupNCCL
    from ft_core.trajectory import FixedOrderDataParallel as FixedOrderDataParallel

__version__ = "0.1.0"
_HOME = {
    "DistributedDataParallel": "ft_core.ddp",
    "PureDistributedDataParallel": "ft_core.ddp",
    "DistributedSampler": "ft_core.data",
    "ElasticDataLoader": "ft_core.data",
    "ElasticSampler": "ft_core.data",
    "FixedOrderDataParallel": "ft_core.trajectory",
    "DiLoCo": "ft_core.local_sgd",
    "LocalSGD": "ft_core.local_sgd",
    "Manager": "ft_core.manager",
    "WorldSizeMode": "ft_core.manager",
    "Optimizer": "ft_core.optim",
    "OptimizerWrapper": "ft_core.optim",
    "ProcessGroupBabyNCCL": "ft_core.process_group",
    "ProcessGroupGloo": "ft_core.process_group",
    "ProcessGroupNCCL": "ft_core.process_group",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ft_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


if os.environ.get("FT_PREDECESSORS"):  # before anything of this process takes memory that they still have
    importlib.import_module("ft_core.predecessors").wait()
