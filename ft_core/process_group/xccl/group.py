"""`ProcessGroupXCCL`: Intel's XCCL between the replicas, over torch's own backend, by the same protocol as NCCL.

Where its backend has no abort, one that is wanted while a collective runs cannot be had: then this process ends, and
is started again (`device/phases.py`); with nothing in flight the communicator is dropped. torch's XCCL backend reads no
settings from the environment that ours would have to change.

Threads: as of `DeviceProcessGroup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft_core.process_group.availability import check_here
from ft_core.process_group.device.group import DeviceProcessGroup, one_of_ours
from ft_core.process_group.device.torch_communicator import NEVER, TorchCommunicator

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ft_core.process_group.device.communicator import Communicator


class ProcessGroupXCCL(DeviceProcessGroup):
    """A process group over XCCL that can be re-formed and aborted, for tensors on one Intel GPU.

    Raises ConfigError without such a GPU, and without XCCL in this torch.
    """

    what = "XCCL"

    def _find_device(self, device: torch.device | str | int | None) -> torch.device:
        check_here(type(self).__name__, "xccl")
        return one_of_ours("xpu", device)

    def _new_communicator(self) -> Communicator:
        kind = f"XCCL of torch {torch.__version__}"
        return TorchCommunicator(kind, self._device, dist.ProcessGroup.BackendType.XCCL, make_backend)


def make_backend(store: Store, rank: int, world_size: int) -> Any:
    """Make torch's backend; nothing is connected yet."""
    from torch._C._distributed_c10d import ProcessGroupXCCL as TorchXCCL  # not in every build of torch

    options: Any = TorchXCCL.Options()
    options._timeout = NEVER
    return TorchXCCL(store, rank, world_size, options)
