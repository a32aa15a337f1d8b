"""Process groups between the replicas: re-formed at every quorum, aborted in milliseconds (DESIGN 3.2, 3.9)."""

from ft_core.process_group.accelerator import ProcessGroupAccelerator
from ft_core.process_group.baby.kinds import (
    ProcessGroupBabyAccelerator,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
)
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.default import (
    ByDevice,
    check_group,
    check_tensors,
    default_process_group,
    host_process_group,
)
from ft_core.process_group.done_work import DoneWork
from ft_core.process_group.fork_safety import close_in_child
from ft_core.process_group.gloo.group import ProcessGroupGloo
from ft_core.process_group.nccl.group import ProcessGroupNCCL
from ft_core.process_group.socket_table import fds_on_port
from ft_core.process_group.store_pool import create_store_client, open_store, warm_store
from ft_core.process_group.wrappers.dummy import ProcessGroupDummy
from ft_core.process_group.wrappers.error_swallowing import ErrorSwallowingProcessGroupWrapper
from ft_core.process_group.wrappers.fault_injection import FakeProcessGroupWrapper
from ft_core.process_group.wrappers.managed import ManagedProcessGroup
from ft_core.process_group.wrappers.wrapper import ProcessGroupWrapper
from ft_core.process_group.xccl.group import ProcessGroupXCCL

__all__ = [
    "ProcessGroup",
    "ProcessGroupWrapper",
    "ProcessGroupGloo",
    "ProcessGroupDummy",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroupNCCL",
    "ProcessGroupXCCL",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupAccelerator",
    "ProcessGroupBabyAccelerator",
    "DoneWork",
    "default_process_group",
    "host_process_group",
    "ByDevice",
    "check_group",
    "check_tensors",
    "create_store_client",
    "open_store",
    "warm_store",
    "close_in_child",
    "fds_on_port",
]
