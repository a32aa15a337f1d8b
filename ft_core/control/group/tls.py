"""Which certificates the ranks of a group show each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ft_core.rpc.channel import Tls

if TYPE_CHECKING:
    from ft_core.rpc.lasting_stream import LeaseSettings


def group_tls(settings: LeaseSettings) -> Tls | None:
    """What the ranks of a group talk over. Raises ConfigError if they would do it in clear though TLS is on."""
    tls = settings.tls or Tls.from_env(os.environ)
    return None if tls is None else tls.check_serves("the ranks of this group would talk")
