"""`ProcessGroupNCCL`: NCCL between the replicas, over torch's own backend (`device/torch_communicator.py`).

How it works: a communicator is made and connected on a thread that may be left behind; it is never destroyed, only
aborted. It is one of NCCL's blocking ones: for each launch on another one NCCL starts a thread and torch waits for it,
which costs more than the launch. torch's own limits are switched off (`environment.py`), its timeout made longer than
any job: the group has its own. Why not torch 2.14's reconfigurable backend, and what NCCL is known to hang on:
docs/nccl.md.

Threads: as of `DeviceProcessGroup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft_core.process_group.availability import check_here
from ft_core.process_group.device.group import DeviceProcessGroup, one_of_ours
from ft_core.process_group.device.torch_communicator import NEVER, TorchCommunicator
from ft_core.process_group.nccl import environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ft_core.process_group.device.communicator import Communicator


class ProcessGroupNCCL(DeviceProcessGroup):
    """A process group over NCCL that can be re-formed and aborted, for tensors on one GPU.

    Raises ConfigError without a GPU, without NCCL in this torch, and for an NCCL older than 2.25.
    """

    what = "NCCL"

    def _find_device(self, device: torch.device | str | int | None) -> torch.device:
        check_here(type(self).__name__, "nccl")
        return one_of_ours("cuda", device)

    def _new_communicator(self) -> Communicator:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return TorchCommunicator(f"NCCL {version}", self._device, dist.ProcessGroup.BackendType.NCCL, make_backend)


def make_backend(store: Store, rank: int, world_size: int) -> Any:
    """Make torch's backend; nothing is connected yet."""
    from torch._C._distributed_c10d import ProcessGroupNCCL as TorchNCCL  # not in every build of torch

    options: Any = TorchNCCL.Options()
    options.config.blocking = 1  # also where TORCH_NCCL_USE_COMM_NONBLOCKING says otherwise
    options._timeout = NEVER
    with environment.applied():
        return TorchNCCL(store, rank, world_size, options)
