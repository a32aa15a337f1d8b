"""`Backstop`: a child process that kills this one after a time, unless it is taken back. It needs no lock of Python's.

How it works. A thread cannot end the process while another one sits in a call of C's that keeps Python's lock (an
extension that launches a kernel, on a device whose queue is full behind a collective that hangs). A shell can: it
counts seconds, and kills its parent (-9). No timer of this process is used: `faulthandler` has a single one, signals
belong to the script.

Invariants: it kills nobody but the process that armed it: each second it looks whether that is still its parent, and
ends if not. Taken back it is gone, with all that it has started, when `take_back` returns. Where no shell can be
started there is no backstop, which is logged.
Threads: any.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import threading

logger = logging.getLogger(__name__)

KILLED_S = 5.0
"""Longest that a killed shell is waited for; it takes milliseconds."""
SCRIPT = """
left=$1
while [ "$left" -gt 0 ]; do
  sleep 1
  read -r pid name state parent rest < /proc/$$/stat
  [ "$parent" = "$2" ] || exit 0
  left=$((left - 1))
done
echo "$3" >&2
kill -KILL "$2"
"""
"""Arguments: seconds, the process to kill, what to say then."""


class Backstop:
    """Kills this process once `seconds` (rounded up) have passed, and says so on standard error."""

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()
        self._armed_by = os.getpid()
        self._shell = _started(math.ceil(seconds))

    def __repr__(self) -> str:
        return f"Backstop({'none' if self._shell is None else self._shell.pid})"

    @property
    def pid(self) -> int | None:
        """Of the shell; None: there is none, or it was taken back."""
        return None if self._shell is None else self._shell.pid

    def take_back(self) -> None:
        """Let this process live. Idempotent; in a forked one, nothing."""
        if os.getpid() != self._armed_by:
            return
        with self._lock:
            shell, self._shell = self._shell, None
        if shell is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(shell.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.wait(KILLED_S)


def _started(seconds: int) -> subprocess.Popen[bytes] | None:
    me = str(os.getpid())
    kept = "something keeps Python's lock while a device is aborted"
    says = f"process {me} has not ended within {seconds} s: {kept}; it is killed, to be started again"
    try:
        # A session of its own: what is sent to the job's processes (Ctrl-C) is not for it, and it can be killed as one.
        return subprocess.Popen(
            ["sh", "-c", SCRIPT, "ft-backstop", str(seconds), me, says],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except (OSError, RuntimeError) as error:  # no shell here; or the interpreter ends
        logger.warning("nothing ends this process should a device hang while Python's lock is held: %s", error)
        return None
