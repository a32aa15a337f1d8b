"""The threads that a test leaves behind: none, but one of a kind per process, and others' that end by themselves.

Invariant: whatever is left fails the test, or the file, that left it; a later one would look for its own threads, or
measure something, and nobody would know why it fails.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import threading
import time

STAY = {
    "ft-gloo-reaper": "destroys the process' Gloo groups",
    "ft-device-reaper": "releases the process' groups of devices",
    "ft-lost-reaper": "destroys groups that tests broke, when Gloo lets go of them",
    "ft-baby-helper": "watches the process that starts children for process groups",
    "ft-timer": "runs the process' timeouts",
    "ft-witness": "keeps the process' link with its witness",
}
"""Threads that live as long as the process, each with what it does. One of each."""
END = {
    "child-process-observer": "Lightning's launcher looks for dead children every five seconds, and after the last one",
    "tqdm_monitor": "tqdm's, one for each class of bars: it wakes every ten seconds, and ends with the class",
}
"""Others' threads that end by themselves, too late to wait for them, each with the reason."""
LEFT_S = 10.0
"""How long a test's threads may outlive it: an abandoned constructor of Gloo's, which cannot be interrupted, 5 s."""
LOOPS = 40
"""How many threads of Gloo's own a file may leave. Each wakes up a hundred times a second: 450 of them took a core from
all tests that came later."""


def alive() -> list[threading.Thread]:
    """All threads that Python code has started."""
    return [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]


def left(before: list[threading.Thread]) -> list[threading.Thread]:
    """Those that were not there before, and must not stay."""
    now = alive()
    names = [thread.name for thread in now]
    return [
        thread
        for thread in now
        if thread not in before
        and thread.name not in END
        and not (thread.name in STAY and names.count(thread.name) == 1)
    ]


def wait_for_end(before: list[threading.Thread], whose: str) -> None:
    """Of all that were started since; fails with their names."""
    pause, until = threading.Event(), time.monotonic() + LEFT_S
    if left(before):
        gc.collect()  # servers of grpc.aio, and loaders with workers, are in circles: their threads end with them
    while threads := left(before):
        assert time.monotonic() < until, f"{whose} has left {threads}: something of it was not shut down"
        pause.wait(0.005)


def loops() -> int:
    """How many threads of this process wait for Gloo's sockets; Python does not know them."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            found += pathlib.Path(f"/proc/self/task/{task}/comm").read_text() == "gloo_tcp_loop\n"
    return found


def check_loops(before: int) -> None:
    """A file has ended; there were so many before it."""
    pause, until = threading.Event(), time.monotonic() + LEFT_S
    if loops() > before + LOOPS:
        gc.collect()
    while (more := loops() - before) > LOOPS:
        assert time.monotonic() < until, (
            f"this file has left {more} threads of Gloo's: its process groups are not let go"
        )
        pause.wait(0.05)
