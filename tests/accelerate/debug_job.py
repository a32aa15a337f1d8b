"""A program for test_debug: launches a function whose processes wait for ever, and says who they are."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ft_accelerate.debug import ft_debug_launcher


def wait_for_ever(folder: str) -> None:
    """Write down the process id, then wait for a signal that does not come."""
    Path(folder, str(os.getpid())).touch()
    signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts its programs without
    ft_debug_launcher(wait_for_ever, (sys.argv[1],))
