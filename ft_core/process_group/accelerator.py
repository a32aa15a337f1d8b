"""`ProcessGroupAccelerator`: the group of whatever accelerator this machine has. Threads: as of the group it is."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from ft_core.errors import ConfigError
from ft_core.process_group.device.group import ABORT_S, DeviceProcessGroup
from ft_core.process_group.nccl.group import ProcessGroupNCCL
from ft_core.process_group.reformable import DEFAULT_TIMEOUT
from ft_core.process_group.xccl.group import ProcessGroupXCCL

if TYPE_CHECKING:
    from ft_core.process_group.device.communicator import Communicator

KINDS: dict[str, type[DeviceProcessGroup]] = {"cuda": ProcessGroupNCCL, "xpu": ProcessGroupXCCL}
"""Which group carries the tensors of which kind of device."""


def kind_for(device_type: str | None) -> type[DeviceProcessGroup]:
    """Return the kind of group for `torch.accelerator`'s device; raises ConfigError if there is none."""
    if device_type in KINDS:
        return KINDS[device_type]
    found = (
        "torch sees no accelerator here" if device_type is None else f"there is no group for tensors on {device_type}"
    )
    raise ConfigError(f"ProcessGroupAccelerator: {found} (it knows {', '.join(KINDS)}); use ProcessGroupGloo")


class ProcessGroupAccelerator(DeviceProcessGroup):
    """ProcessGroupNCCL on NVIDIA GPUs, ProcessGroupXCCL on Intel's, by the same arguments.

    Raises ConfigError where there is neither, and what that group raises.
    """

    def __init__(
        self,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        device: torch.device | str | int | None = None,
        abort_s: float = ABORT_S,
    ) -> None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._kind = kind_for(None if found is None else found.type)
        self.what = self._kind.what
        super().__init__(timeout, device=device, abort_s=abort_s)

    def _find_device(self, device: torch.device | str | int | None) -> torch.device:
        return self._kind._find_device(self, device)

    def _new_communicator(self) -> Communicator:
        return self._kind._new_communicator(self)
