"""Process groups that come with a later release: importing them works, constructing one names what it needs."""

from __future__ import annotations

from typing import Any, NoReturn

from ft_core.errors import NotAvailableError
from ft_core.process_group.base import ProcessGroup


class _Unavailable(ProcessGroup):
    _needs = ""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise NotAvailableError(f"{cls.__name__} needs {cls._needs}; use ProcessGroupGloo until then")


class ProcessGroupNCCL(_Unavailable):
    """NCCL between the replicas."""

    _needs = "NVIDIA GPUs and a later release of ft_core"


class ProcessGroupXCCL(_Unavailable):
    """XCCL between the replicas."""

    _needs = "Intel GPUs and a later release of ft_core"


class ProcessGroupAccelerator(_Unavailable):
    """The collectives of whatever accelerator this machine has, between the replicas."""

    _needs = "an accelerator and a later release of ft_core"
