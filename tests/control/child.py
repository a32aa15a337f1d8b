"""A replica in a process of its own.   python -m tests.control.child ADDRESS REPLICA_ID

Asks once, says so, prints a line per event, then does what its standard input says: `hold SECONDS` keeps the GIL,
`fork` forks a child that outlives it.
"""

from __future__ import annotations

import ctypes
import os
import sys

from tests.control.recorder import Replica


def main() -> None:
    """See the module's text."""
    one = Replica(sys.argv[1], sys.argv[2])
    one.lease.wait_connected(10)
    one.ask()
    print("asks", flush=True)
    print("quorum", *one.answer().ids, flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "hold":
            print("holding", flush=True)
            ctypes.PyDLL(None).usleep(int(float(rest) * 1e6))  # unlike CDLL it keeps the GIL
            print("held", flush=True)
        elif word == "fork" and os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        elif word == "fork":
            print("forked", flush=True)
        elif word == "exit":
            return  # without shutdown: the interpreter has to end all the same


if __name__ == "__main__":
    main()
