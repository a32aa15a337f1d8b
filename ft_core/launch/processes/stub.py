"""What every worker process is before it becomes the worker: it makes itself known to the keeper, then execs.

How it works. Run as a file (`python -I -S stub.py command args...`), standard library only, for 20 ms. It connects to
the keeper's socket (FTRUN_KEEPER) and waits for one byte: from then on the keeper ends this process if ftrun is gone.
ftrun may have died before that, so the parent is looked at once more afterwards. Nothing runs unregistered: whatever
happens to ftrun, and whenever, no worker is left behind. Without a keeper there is no protection, so no worker either;
but one that was killed is replaced within moments, so that the stub asks again for WAIT_S.

Should ftrun and the keeper be killed in the same moment, the kernel ends the worker (PR_SET_PDEATHSIG), though nothing
that it has started. That follows the thread which forks it, and those of ftrun live longer than their workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time

WAIT_S = 10.0
"""How long the next keeper may take to be there, on a machine that is overloaded."""
ASK_S = 0.02
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Register, then become `argv`. Returns only if that fails."""
    keeper = os.environ.pop("FTRUN_KEEPER")
    parent = int(os.environ.pop("FTRUN_PID"))
    die_with_parent()
    until = time.monotonic() + WAIT_S
    while not (known := register(keeper)) and os.getppid() == parent and time.monotonic() < until:
        if not os.path.isdir(os.path.dirname(keeper)):
            break  # it goes last, so no keeper will come
        time.sleep(ASK_S)
    if os.getppid() != parent:
        return 143  # ftrun is gone: nobody wants this worker
    if not known:
        print("ftrun: its keeper process is gone, so no worker may start (who killed it?)", file=sys.stderr)
        return 143
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what is ignored stays so across exec
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"ftrun: cannot run {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 126


def die_with_parent() -> None:
    """Be killed when ftrun is; it stays so across exec."""
    with contextlib.suppress(OSError, AttributeError):  # no such call here: the keeper has to do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def register(keeper: str) -> bool:
    """Whether the keeper knows this process from now on; False: there is none, or it was killed meanwhile."""
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(keeper)
            return bool(door.recv(1))
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
