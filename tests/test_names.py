"""The names users of the reference implementation import: all there, and those of later versions say what they need."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from ft_core.errors import NotAvailableError

NAMES = {
    "ft_core": "DistributedDataParallel DistributedSampler DiLoCo LocalSGD Manager Optimizer OptimizerWrapper "
    "ProcessGroupBabyNCCL ProcessGroupGloo ProcessGroupNCCL PureDistributedDataParallel WorldSizeMode",
    "ft_core.checkpointing": "CheckpointTransport HTTPTransport PGTransport",
    "ft_core.checkpointing.http_transport": "HTTPTransport",
    "ft_core.checkpointing.pg_transport": "PGTransport",
    "ft_core.checkpointing.transport": "CheckpointTransport",
    "ft_core.coordination": "LighthouseClient LighthouseServer ManagerClient ManagerServer Quorum QuorumMember",
    "ft_core.data": "DistributedSampler",
    "ft_core.ddp": "DistributedDataParallel PureDistributedDataParallel",
    "ft_core.futures": "context_timeout future_timeout future_wait stream_timeout",
    "ft_core.local_sgd": "DiLoCo LocalSGD",
    "ft_core.manager": "Manager WorldSizeMode",
    "ft_core.optim": "Optimizer OptimizerWrapper",
    "ft_core.parameter_server": "ParameterServer",
    "ft_core.process_group": "ErrorSwallowingProcessGroupWrapper FakeProcessGroupWrapper ManagedProcessGroup "
    "ProcessGroup ProcessGroupAccelerator ProcessGroupBabyAccelerator ProcessGroupBabyGloo ProcessGroupBabyNCCL "
    "ProcessGroupBabyXCCL ProcessGroupDummy ProcessGroupGloo ProcessGroupNCCL ProcessGroupWrapper ProcessGroupXCCL "
    "create_store_client",
}
MANAGER = (
    "pg load_state_dict state_dict min_replica_size use_async_quorum timeout quorum_timeout connect_timeout rank "
    "world_size world_size_mode store_addr store_port lighthouse_addr replica_id port hostname heartbeat_interval "
    "checkpoint_transport init_sync max_retries quorum_retries"
)
LATER = {
    "ft_core.local_sgd": "DiLoCo LocalSGD",
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names.split()])
def test_it_can_be_imported(module: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names.split()])
def test_it_is_at_the_top_level_too(module: str, name: str) -> None:
    import ft_core

    assert getattr(ft_core, name) is getattr(importlib.import_module(module), name)
    assert name in ft_core.__all__


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in LATER.items() for n in names.split()])
def test_what_comes_later_says_what_it_needs(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        None for p in inspect.signature(kind).parameters.values() if p.kind in positional and p.default is p.empty
    ]
    with pytest.raises(NotAvailableError, match=f"{name}.*needs"):
        kind(*needed)


def test_the_managers_arguments_keep_their_order() -> None:
    parameters = list(inspect.signature(importlib.import_module("ft_core.manager").Manager).parameters)
    assert parameters[: len(MANAGER.split())] == MANAGER.split()


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Names are resolved on first use: the lighthouse and ftrun start without torch."""
    script = (
        "import sys; before = set(sys.modules); import ft_core; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*new & {'torch', 'grpc', 'google', 'numpy'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == []
