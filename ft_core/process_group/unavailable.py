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


class ProcessGroupBabyGloo(_Unavailable):
    """Gloo in a child process that can be killed."""

    _needs = "the child-process groups of a later release of ft_core"


class ProcessGroupBabyNCCL(_Unavailable):
    """NCCL in a child process that can be killed."""

    _needs = "NVIDIA GPUs and the child-process groups of a later release of ft_core"


class ProcessGroupBabyXCCL(_Unavailable):
    """XCCL in a child process that can be killed."""

    _needs = "Intel GPUs and the child-process groups of a later release of ft_core"


class ProcessGroupBabyAccelerator(_Unavailable):
    """The same in a child process that can be killed."""

    _needs = "an accelerator and the child-process groups of a later release of ft_core"
