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
    from ft_core.checkpointing import CheckpointTransport as CheckpointTransport
    from ft_core.checkpointing import HTTPTransport as HTTPTransport
    from ft_core.checkpointing import PGTransport as PGTransport
    from ft_core.coordination import LighthouseClient as LighthouseClient
    from ft_core.coordination import LighthouseServer as LighthouseServer
    from ft_core.coordination import ManagerClient as ManagerClient
    from ft_core.coordination import ManagerServer as ManagerServer
    from ft_core.coordination import Quorum as Quorum
    from ft_core.coordination import QuorumMember as QuorumMember
    from ft_core.data import DistributedSampler as DistributedSampler
    from ft_core.data import ElasticDataLoader as ElasticDataLoader
    from ft_core.data import ElasticSampler as ElasticSampler
    from ft_core.ddp import DistributedDataParallel as DistributedDataParallel
    from ft_core.ddp import PureDistributedDataParallel as PureDistributedDataParallel
    from ft_core.fixed_order import FixedOrderDataParallel as FixedOrderDataParallel
    from ft_core.futures import context_timeout as context_timeout
    from ft_core.futures import future_timeout as future_timeout
    from ft_core.futures import future_wait as future_wait
    from ft_core.futures import stream_timeout as stream_timeout
    from ft_core.local_sgd import DiLoCo as DiLoCo
    from ft_core.local_sgd import LocalSGD as LocalSGD
    from ft_core.manager import Manager as Manager
    from ft_core.manager import WorldSizeMode as WorldSizeMode
    from ft_core.optim import Optimizer as Optimizer
    from ft_core.optim import OptimizerWrapper as OptimizerWrapper
    from ft_core.parameter_server import ParameterServer as ParameterServer
    from ft_core.process_group import ErrorSwallowingProcessGroupWrapper as ErrorSwallowingProcessGroupWrapper
    from ft_core.process_group import FakeProcessGroupWrapper as FakeProcessGroupWrapper
    from ft_core.process_group import ManagedProcessGroup as ManagedProcessGroup
    from ft_core.process_group import ProcessGroup as ProcessGroup
    from ft_core.process_group import ProcessGroupAccelerator as ProcessGroupAccelerator
    from ft_core.process_group import ProcessGroupBabyAccelerator as ProcessGroupBabyAccelerator
    from ft_core.process_group import ProcessGroupBabyGloo as ProcessGroupBabyGloo
    from ft_core.process_group import ProcessGroupBabyNCCL as ProcessGroupBabyNCCL
    from ft_core.process_group import ProcessGroupBabyXCCL as ProcessGroupBabyXCCL
    from ft_core.process_group import ProcessGroupDummy as ProcessGroupDummy
    from ft_core.process_group import ProcessGroupGloo as ProcessGroupGloo
    from ft_core.process_group import ProcessGroupNCCL as ProcessGroupNCCL
    from ft_core.process_group import ProcessGroupWrapper as ProcessGroupWrapper
    from ft_core.process_group import ProcessGroupXCCL as ProcessGroupXCCL
    from ft_core.process_group import create_store_client as create_store_client
    from ft_core.process_group import default_process_group as default_process_group

__version__ = "0.1.0"
_HOME = {
    "CheckpointTransport": "ft_core.checkpointing",
    "HTTPTransport": "ft_core.checkpointing",
    "PGTransport": "ft_core.checkpointing",
    "LighthouseClient": "ft_core.coordination",
    "LighthouseServer": "ft_core.coordination",
    "ManagerClient": "ft_core.coordination",
    "ManagerServer": "ft_core.coordination",
    "Quorum": "ft_core.coordination",
    "QuorumMember": "ft_core.coordination",
    "DistributedSampler": "ft_core.data",
    "ElasticDataLoader": "ft_core.data",
    "ElasticSampler": "ft_core.data",
    "DistributedDataParallel": "ft_core.ddp",
    "PureDistributedDataParallel": "ft_core.ddp",
    "context_timeout": "ft_core.futures",
    "future_timeout": "ft_core.futures",
    "future_wait": "ft_core.futures",
    "stream_timeout": "ft_core.futures",
    "DiLoCo": "ft_core.local_sgd",
    "LocalSGD": "ft_core.local_sgd",
    "Manager": "ft_core.manager",
    "WorldSizeMode": "ft_core.manager",
    "Optimizer": "ft_core.optim",
    "OptimizerWrapper": "ft_core.optim",
    "ParameterServer": "ft_core.parameter_server",
    "ErrorSwallowingProcessGroupWrapper": "ft_core.process_group",
    "FakeProcessGroupWrapper": "ft_core.process_group",
    "ManagedProcessGroup": "ft_core.process_group",
    "ProcessGroup": "ft_core.process_group",
    "ProcessGroupAccelerator": "ft_core.process_group",
    "ProcessGroupBabyAccelerator": "ft_core.process_group",
    "ProcessGroupBabyGloo": "ft_core.process_group",
    "ProcessGroupBabyNCCL": "ft_core.process_group",
    "ProcessGroupBabyXCCL": "ft_core.process_group",
    "ProcessGroupDummy": "ft_core.process_group",
    "ProcessGroupGloo": "ft_core.process_group",
    "ProcessGroupNCCL": "ft_core.process_group",
    "ProcessGroupWrapper": "ft_core.process_group",
    "ProcessGroupXCCL": "ft_core.process_group",
    "create_store_client": "ft_core.process_group",
    "default_process_group": "ft_core.process_group",
    "FixedOrderDataParallel": "ft_core.fixed_order",
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
    importlib.import_module("ft_core.launch.processes.predecessors").wait()
