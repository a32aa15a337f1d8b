"""How the processes of a job's script wait for each other, where a test chooses what a death meets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 30.0
clock = threading.Event()
"""Never set: what is waited on for some time."""


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(int(LIMIT_S / 0.005)):
        if happened():
            return
        clock.wait(0.005)
    raise AssertionError(f"waited for more than {LIMIT_S} s")
