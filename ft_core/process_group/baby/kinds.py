"""The kinds of groups in a child process: `ProcessGroupBabyGloo` and those for devices.

Each names the class that runs in the child, which is looked up there, in ft_core.process_group. Threads: see group.py.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ft_core.errors import ConfigError
from ft_core.process_group.availability import check_here
from ft_core.process_group.baby.group import ProcessGroupBaby
from ft_core.process_group.device.group import one_of_ours
from ft_core.process_group.gloo.group import check_operation, where_to_listen
from ft_core.process_group.reformable import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from torch.distributed import Work


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """`ProcessGroupGloo` in a child process. Tensors of devices are copied through CPU memory.

    `timeout`: of forming, and of each collective. `hostname` or `interface` choose where to listen, as of
    `ProcessGroupGloo`.
    """

    inner = "ProcessGroupGloo"
    what = "Gloo"
    backend_name = "ft-baby-gloo"

    def __init__(
        self, timeout: timedelta = DEFAULT_TIMEOUT, hostname: str | None = None, interface: str | None = None
    ) -> None:
        hostname, interface = where_to_listen(hostname, interface)
        super().__init__(timeout, hostname=hostname, interface=interface)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks called it; rank 0's error names a rank that did not."""
        self._launch("monitored_barrier", timeout or self._timeout, wait_all_ranks).wait()

    def _launch(self, name: str, *arguments: Any) -> Work:
        check_operation(getattr(arguments[-1] if arguments else None, "reduceOp", None))
        return super()._launch(name, *arguments)


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """`ProcessGroupNCCL` in a child process, for a driver or fabric on which NCCL's own abort hangs.

    Device memory is mapped by the child (CUDA IPC), which has a CUDA context of its own. `device`: by default
    the one that is current when it is made. ConfigError where `ProcessGroupNCCL` raises it: without CUDA, without NCCL
    or with one that is too old, and for a device that is not there.
    """

    inner = "ProcessGroupNCCL"
    what = "NCCL"
    backend_name = "ft-baby-nccl"
    on_device = True

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT, *, device: torch.device | str | int | None = None) -> None:
        check_here(type(self).__name__, "baby-nccl")
        # Now: configure() runs on a thread whose current device is another one.
        self._device = one_of_ours("cuda", device)
        super().__init__(timeout, device=self._device)

    @property
    def device(self) -> torch.device:
        """The device whose tensors it carries."""
        return self._device

    @property
    def torch_device_type(self) -> str:
        """The kind of device whose tensors it carries."""
        return "cuda"

    @property
    def torch_backend(self) -> str:
        """Name of torch's own backend of this kind."""
        return "nccl"


class ProcessGroupBabyXCCL(ProcessGroupBaby):
    """`ProcessGroupXCCL` in a child process: refused, because torch cannot share Intel GPUs' memory with a child."""

    inner = "ProcessGroupXCCL"
    what = "XCCL"
    backend_name = "ft-baby-xccl"
    on_device = True

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        raise ConfigError(
            f"{type(self).__name__}(timeout={timeout}): torch {torch.__version__} cannot map an Intel GPU's memory in "
            "another process; use ProcessGroupBabyGloo, which copies through CPU memory, or ProcessGroupXCCL"
        )


class ProcessGroupBabyAccelerator(ProcessGroupBabyNCCL):
    """`ProcessGroupAccelerator` in a child process, on accelerators whose memory a child can map: CUDA's."""

    inner = "ProcessGroupAccelerator"
    what = "accelerator's"
    backend_name = "ft-baby-accelerator"
