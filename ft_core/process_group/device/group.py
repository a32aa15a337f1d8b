"""`DeviceProcessGroup`: a process group over a communicator of devices, re-formed and aborted at any time.

How it works: an incarnation is one communicator (`incarnation.py`); the reaper releases it once it has ended. A kind of
group says which device it is for, whether this machine can, and makes the communicators; that of a group of one rank is
the same for all kinds (`one_rank.py`).

Invariants: as of `ReformableGroup`, and `errored()` is set before anything of a group is cut short: whoever sees, in
this order, that all collectives have ended and that there is no error, has their results.

Threads: as of `ReformableGroup`; `abort` returns at once, from any thread, also while another is inside a launch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ft_core.errors import ConfigError
from ft_core.process_group import reaper as reaping
from ft_core.process_group.device.incarnation import Incarnation
from ft_core.process_group.device.one_rank import OneRankCommunicator
from ft_core.process_group.device.phases import Phase
from ft_core.process_group.device.tensors import check_devices
from ft_core.process_group.reformable import DEFAULT_TIMEOUT, ReformableGroup

if TYPE_CHECKING:
    from ft_core.process_group.device.communicator import Communicator
    from ft_core.process_group.spec import Spec

ABORT_S = 10.0
"""How long an abort may take before this process ends: a device whose abort hangs is not to be had back."""

Self = TypeVar("Self", bound="DeviceProcessGroup")


class DeviceProcessGroup(ReformableGroup):
    """Base of the groups of devices.

    `timeout`: of forming, and of each collective. `device`: the one whose tensors it carries, by default the current
    one of the thread that makes the group. `abort_s`: how long an abort may take; a process in which one takes longer
    ends with status 75, for its supervisor to start it again. Raises ConfigError where this machine cannot.
    """

    what = "device"
    """The library, as it is called in messages and, in lower case, in torch."""
    _incarnation: Incarnation | None

    def __init__(
        self,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        device: torch.device | str | int | None = None,
        abort_s: float = ABORT_S,
    ) -> None:
        super().__init__(timeout)
        if not 0 < abort_s < float("inf"):
            raise ConfigError(f"abort_s={abort_s}: expected seconds, more than zero")
        self._abort_s = abort_s
        self._device = self._find_device(device)
        self._unconfigured = f"unconfigured, {self._device}"

    # ---------------------------------------------------------------------------------------- what a kind implements

    def _find_device(self, device: torch.device | str | int | None) -> torch.device:
        """Return the device, with its index; raises ConfigError where this machine, or this torch, cannot."""
        raise NotImplementedError

    def _new_communicator(self) -> Communicator:
        """Return a communicator of several ranks that is not initialized."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ the life cycle

    def _incarnate(self, spec: Spec, before: Incarnation | None) -> Incarnation:
        return Incarnation(spec, self._communicator_for(spec), abort_s=self._abort_s, before=before)

    def _communicator_for(self, spec: Spec) -> Communicator:
        if spec.world_size == 1:  # it need not wait for the whole abort of the group before, half a second
            return OneRankCommunicator(self.what, self._device)
        return self._new_communicator()

    def _retire(self, incarnation: Incarnation) -> None:
        reaper = getattr(reaping, "device", None)  # None while an ending interpreter takes its modules apart
        if reaper is not None:
            reaper.retire(incarnation)

    def _state_of(self, incarnation: Incarnation) -> str:
        phase = incarnation.phase
        if phase is Phase.READY:
            return f"ready, {self._device}, {incarnation.in_flight} in flight"
        return f"{phase.value}: {incarnation.error}" if incarnation.is_aborted else phase.value

    # ----------------------------------------------------------------------------------------------------- what it is

    @property
    def device(self) -> torch.device:
        """The device whose tensors it carries."""
        return self._device

    @property
    def carries_cpu_memory(self) -> bool:
        """False: it carries tensors on its device."""
        return False

    @property
    def blocks_host(self) -> bool:
        """False: a work's wait() orders the current stream behind it and returns."""
        return False

    def sibling(self: Self) -> Self:
        """Return an unconfigured group of the same kind, device and settings."""
        return type(self)(self._timeout, device=self._device, abort_s=self._abort_s)

    def getBackendName(self) -> str:
        """Return the name."""
        return f"ft-{self.torch_backend}"

    @property
    def torch_backend(self) -> str:
        """What torch calls this kind of backend."""
        return self.what.lower()

    @property
    def torch_device_type(self) -> str:
        """The kind of device, as torch calls it."""
        return self._device.type

    def _launch(self, name: str, *arguments: Any) -> Any:
        incarnation: Incarnation = self._current()
        check_devices(name, arguments, self._device)
        return incarnation.launch(name, arguments)


def one_of_ours(kind: str, device: torch.device | str | int | None) -> torch.device:
    """Return the device with its index: the current one by default. Raises ConfigError if there is no such device."""
    module = torch.get_device_module(kind)
    if device is None:
        return torch.device(kind, module.current_device())
    try:
        found = torch.device(kind, device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: {error}") from error
    if found.type != kind:
        raise ConfigError(f"device={device!r}: expected one of {kind}")
    if found.index is None:
        return torch.device(kind, module.current_device())
    if not 0 <= found.index < module.device_count():
        raise ConfigError(f"device={device!r}: this process sees {module.device_count()} of {kind}, from 0")
    return found
