"""`PGTransport`: live state over a process group. Until that comes with a later release, the name stands for HTTP.

Scripts of the reference implementation construct it, and what they want of it, that newcomers receive the others'
state, `HTTPTransport` does as well. So they run, and one log line names what carries their state.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from ft_core.checkpointing.http_transport import HTTPTransport

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

T = TypeVar("T")
_warned = False


class PGTransport(HTTPTransport[T]):
    """Serves this replica's state and fetches from others, over HTTP in this release.

    Args:
        pg: accepted for compatibility; nothing is sent over it.
        timeout: default deadline of a transfer.
        device: accepted for compatibility: received state goes to where the receiver's own is.
        state_dict: accepted for compatibility: the Manager knows where received state belongs.
    """

    def __init__(self, pg: Any, timeout: timedelta, device: torch.device | str, state_dict: Any = None) -> None:
        del pg, device, state_dict
        global _warned
        if not _warned:
            _warned = True
            warnings.warn(
                "PGTransport: sending live state over a process group comes with a later release of ft_core; until "
                "then it goes over HTTP, as with HTTPTransport(timeout), which is what to pass to be rid of this line",
                stacklevel=2,
            )
        super().__init__(timeout)

    def __repr__(self) -> str:
        return f"PGTransport(over HTTP, {self.server!r})"
