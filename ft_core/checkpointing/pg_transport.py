"""`PGTransport`: live state over a process group. The name is there; the implementation comes with a later release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.errors import NotAvailableError

if TYPE_CHECKING:
    from datetime import timedelta

    import torch


class PGTransport:
    """Not available yet; `HTTPTransport` does the same over sockets."""

    def __init__(self, pg: Any, timeout: timedelta, device: torch.device, state_dict: Any = None) -> None:
        del pg, timeout, device, state_dict
        raise NotAvailableError("PGTransport needs the process-group transport of a later release; use HTTPTransport")
