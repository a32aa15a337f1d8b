"""Makes a process slow to be gone, as one with much memory is, but for as long as a test wants: `lingering(tid)`.

A tracer has the kernel stop one thread in its exit (PTRACE_O_TRACEEXIT). Should the process be killed, all other
threads die, and with them whoever holds a robust mutex; the process keeps its memory and its descriptors, and its pidfd
stays silent, until the tracer goes, which lets the thread go on.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, O_TRACEEXIT = 0x4206, 0x40
print("traced" if libc.ptrace(SEIZE, int(sys.argv[1]), None, O_TRACEEXIT) == 0 else ctypes.get_errno(), flush=True)
sys.stdin.read()
"""
THREAD = """
import ctypes, threading
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: anybody may trace this process (Yama)
lingering = threading.Thread(target=threading.Event().wait, daemon=True)
lingering.start()
"""
"""What a process that is to linger begins with; `lingering.native_id` is the thread."""
PATIENCE_S = 20.0


@contextlib.contextmanager
def linger(tid: int) -> Iterator[subprocess.Popen[str]]:
    """While this is open, the process of that thread cannot be gone; so it is when the tracer is killed."""
    command = [sys.executable, "-I", "-S", "-c", TRACER, str(tid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        try:
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == "traced\n"
            yield tracer
        finally:
            tracer.kill()


def is_there(pidfd: int, within_s: float = 0.0) -> bool:
    """The process is not gone, nor is it after this time."""
    gone = select.poll()  # `select.select` takes no descriptor above 1023
    gone.register(pidfd, select.POLLIN)
    return not gone.poll(within_s * 1000)
