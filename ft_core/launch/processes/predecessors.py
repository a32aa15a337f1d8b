"""Waits until the processes that this one replaces have given back what they held: memory, above all a GPU's.

How it works. ftrun starts a replacement as soon as it knows of a death, and the kernel may need seconds to free what
the dead process had. FT_PREDECESSORS names such processes as `pid:start time`, separated by commas; the start time
(field 22 of /proc/<pid>/stat) tells them from others that were given the same number since. `import ft_core` waits for
them, and so does a warm standby before it runs the script: starting Python and reading modules need not wait.

It waits for at most WAIT_S, logs that once if it takes longer than SAY_S, and then goes on. The variable is removed:
children do not wait again. What cannot be seen (another PID namespace, no /proc) is not waited for.

Standard library only, nothing of ft_core: `launch.warm` runs it as a file. On the thread that calls.
"""

from __future__ import annotations

import os
import select
import sys
import time

VARIABLE = "FT_PREDECESSORS"
WAIT_S = 10.0
"""How long at most; what is not gone then hangs in the kernel, and may for ever."""
SAY_S = 0.5
"""What takes longer is logged."""
START_TIME = 19
"""Where field 22 is among those that follow the name in /proc/<pid>/stat."""


def wait() -> None:
    """Wait until all that FT_PREDECESSORS names are gone, and remove it."""
    waiting: dict[int, str] = {}  # pidfd -> pid
    poll = select.poll()
    for one in os.environ.pop(VARIABLE, "").split(","):
        pid, _, started = one.partition(":")
        pidfd = _open(pid, started)
        if pidfd is not None:
            waiting[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
    began, said = time.monotonic(), False
    while waiting:
        for pidfd, _ in poll.poll(max(0.0, began + (WAIT_S if said else SAY_S) - time.monotonic()) * 1000):
            poll.unregister(pidfd)
            os.close(pidfd)
            del waiting[pidfd]
        took = time.monotonic() - began
        if waiting and took >= WAIT_S:
            _say(f"the memory of {_names(waiting)} is still not free after {WAIT_S:g} s: going on without it")
            break
        if waiting and took >= SAY_S and not said:
            said = True
            _say(f"waiting until the memory of {_names(waiting)} is free, for at most {WAIT_S:g} s")
    for pidfd in waiting:
        os.close(pidfd)


def start_time(pid: int | str) -> str:
    """When this process started, as FT_PREDECESSORS has it. Raises OSError where /proc does not know it."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[START_TIME].decode()


def _open(pid: str, started: str) -> int | None:
    """A pidfd, which becomes readable when all threads are gone; None: this is not, or not any more, that process."""
    try:
        pidfd = os.pidfd_open(int(pid))
    except (OSError, AttributeError, ValueError):
        return None
    try:
        if start_time(pid) == started:  # the number means that process now, so it did when the pidfd was opened
            return pidfd
    except (OSError, IndexError):
        pass
    os.close(pidfd)
    return None


def _names(waiting: dict[int, str]) -> str:
    pids = sorted(waiting.values(), key=int)
    return f"the dead process{'es' if len(pids) > 1 else ''} {', '.join(pids)}"


def _say(text: str) -> None:
    print(f"ft_core: {text}", file=sys.stderr, flush=True)
