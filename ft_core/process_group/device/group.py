"""`DeviceProcessGroup`: a process group over a communicator of devices, re-formed and aborted at any time.

How it works: it holds one `Incarnation` (one formed group) at a time. `configure` makes a new one, ends the old one and
hands that to the reaper; `abort` ends the current one. A kind of group says which device it is for, whether this
machine can, and makes the communicators.

Invariants: the newest `configure`, `abort` or `shutdown` wins: an earlier configure that is still forming fails as soon
as a later call comes. `errored()` is set before anything of a group is cut short. After an abort every collective
raises until a new configure. Errors of an earlier incarnation never show in a later one.

Threads: as of the base class; `abort` returns at once, from any thread, also while another is inside a launch.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ft_core.errors import CollectiveError, ConfigError, UsageError
from ft_core.process_group import reaper as reaping
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.device.incarnation import Incarnation, Spec
from ft_core.process_group.device.phases import Phase
from ft_core.process_group.device.tensors import check_devices
from ft_core.process_group.store_pool import parse_store_addr

if TYPE_CHECKING:
    from ft_core.process_group.device.communicator import Communicator

DEFAULT_TIMEOUT = timedelta(seconds=60)
ABORT_S = 10.0
"""How long an abort may take before this process ends: a device whose abort hangs is not to be had back."""

Self = TypeVar("Self", bound="DeviceProcessGroup")


class DeviceProcessGroup(ProcessGroup):
    """Base of the groups of devices.

    `timeout`: of forming, and of each collective. `device`: the one whose tensors it carries, by default the current
    one of the thread that makes the group. `abort_s`: how long an abort may take; a process in which one takes longer
    ends with status 75, for its supervisor to start it again. Raises ConfigError where this machine cannot.
    """

    what = "device"
    """The library, as it is called in messages and, in lower case, in torch."""

    def __init__(
        self,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        device: torch.device | str | int | None = None,
        abort_s: float = ABORT_S,
    ) -> None:
        super().__init__()
        _check_timeout(timeout)
        if not 0 < abort_s < float("inf"):
            raise ConfigError(f"abort_s={abort_s}: expected seconds, more than zero")
        self._timeout = timeout
        self._abort_s = abort_s
        self._device = self._find_device(device)
        self._lock = threading.Lock()
        self._incarnation: Incarnation | None = None
        self._is_shut_down = False

    def __repr__(self) -> str:
        name, incarnation = type(self).__name__, self._incarnation
        if self._is_shut_down:
            return f"{name}(shut down)"
        if incarnation is None:
            return f"{name}(unconfigured, {self._device})"
        spec, phase = incarnation.spec, incarnation.phase
        place = f"rank {spec.rank} of {spec.world_size}"
        if phase is Phase.READY:
            return f"{name}({place}, ready, {self._device}, {incarnation.in_flight} in flight)"
        if incarnation.is_aborted:
            return f"{name}({place}, {phase.value}: {incarnation.error})"
        return f"{name}({place}, {phase.value})"

    def __del__(self) -> None:
        # Only hands it over: releasing happens on the reaper's thread, never here.
        incarnation = getattr(self, "_incarnation", None)
        reaper = getattr(reaping, "device", None)  # None while an ending interpreter takes its modules apart
        if incarnation is not None and reaper is not None:
            reaper.retire(incarnation)

    # ---------------------------------------------------------------------------------------- what a kind implements

    def _find_device(self, device: torch.device | str | int | None) -> torch.device:
        """Return the device, with its index; raises ConfigError where this machine, or this torch, cannot."""
        raise NotImplementedError

    def _new_communicator(self) -> Communicator:
        """Return a communicator that is not initialized."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ the life cycle

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Form a new group; see the base class. With one rank no store is contacted."""
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
        if world_size > 1:
            parse_store_addr(store_addr)
        spec = Spec(
            what=self.what,
            store_addr=store_addr,
            replica_id=replica_id,
            rank=rank,
            world_size=world_size,
            timeout_s=self._timeout.total_seconds(),
            abort_s=self._abort_s,
        )
        with self._lock:
            if self._is_shut_down:
                raise UsageError(f"configure() after shutdown(): make a new {type(self).__name__}")
            old = self._incarnation
            new = self._incarnation = Incarnation(spec, self._new_communicator(), before=old)
            self._update_registration(world_size)
        reaping.device.start()
        if old is not None:
            _end(old, "configure() was called again")
        new.form()

    def abort(self) -> None:
        """End the current group, in the background, within `abort_s`; without one, nothing happens."""
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.abort(CollectiveError(f"abort() was called on {incarnation.spec}; configure() it again"))

    def shutdown(self) -> None:
        """End it for good; releasing the group goes on in the background."""
        self.unregister()
        with self._lock:
            self._is_shut_down = True
            old, self._incarnation = self._incarnation, None
        if old is not None:
            _end(old, "shutdown() was called")

    def errored(self) -> Exception | None:
        """Return the first error of the current group, found by waiting or not; never blocks.

        It is there before a collective is cut short: whoever sees, in this order, that all collectives have ended and
        that there is no error, has their results.
        """
        incarnation = self._incarnation
        return None if incarnation is None else incarnation.first_error()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the next configure and of collectives launched from now on."""
        _check_timeout(timeout)
        self._timeout = timeout
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.timeout_s = timeout.total_seconds()

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

    def size(self) -> int:
        """Return the number of ranks; 0 while unconfigured."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.spec.world_size

    def rank(self) -> int:
        """Return this rank; 0 while unconfigured."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.spec.rank

    def _launch(self, name: str, *arguments: Any) -> Any:
        incarnation = self._incarnation
        if incarnation is None:
            raise UsageError(f"{self!r}: configure() it first")
        check_devices(name, arguments, self._device)
        if incarnation.phase is Phase.FORMING:
            raise UsageError(f"{self!r}: configure() has not returned yet")
        return incarnation.launch(name, arguments)


def _end(incarnation: Incarnation, why: str) -> None:
    incarnation.abort(CollectiveError(f"{incarnation.spec} has ended: {why}"))
    reaping.device.retire(incarnation)


def _check_timeout(timeout: timedelta) -> None:
    if timeout <= timedelta(0):
        raise ConfigError(f"timeout={timeout}: expected more than zero")


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
