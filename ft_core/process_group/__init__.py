"""Process groups between the replicas: re-formed at every quorum, aborted in milliseconds (DESIGN 3.2, 3.9 R14)."""

from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.dummy import ProcessGroupDummy
from ft_core.process_group.fake import FakeProcessGroupWrapper
from ft_core.process_group.fork import close_in_child
from ft_core.process_group.gloo import ProcessGroupGloo
from ft_core.process_group.managed import ManagedProcessGroup
from ft_core.process_group.sockets import fds_on_port
from ft_core.process_group.store import create_store_client, open_store, warm_store
from ft_core.process_group.swallowing import ErrorSwallowingProcessGroupWrapper
from ft_core.process_group.unavailable import (
    ProcessGroupAccelerator,
    ProcessGroupBabyAccelerator,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
    ProcessGroupNCCL,
    ProcessGroupXCCL,
)
from ft_core.process_group.work import DoneWork
from ft_core.process_group.wrapper import ProcessGroupWrapper

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
    "create_store_client",
    "open_store",
    "warm_store",
    "close_in_child",
    "fds_on_port",
]
