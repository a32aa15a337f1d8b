"""LocalSGD and DiLoCo: the names exist so that imports hold; the algorithms come with a later version."""

from __future__ import annotations

from typing import NoReturn

from ft_core.errors import NotAvailableError


class LocalSGD:
    """Synchronises parameters every `sync_every` local steps. Not in this version."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        _refuse("LocalSGD")


class DiLoCo:
    """Local inner steps with an outer optimizer. Not in this version."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        _refuse("DiLoCo")


def _refuse(name: str) -> NoReturn:
    raise NotAvailableError(f"{name} needs the local-update algorithms, which are not in this version of ft-training")
