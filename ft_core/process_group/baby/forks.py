"""`main`: the process that starts the children of one parent, by forking itself.

How it works. It imports torch and this library once, opens no device and has no threads, and then forks a child for
each channel that the parent sends: 20 ms, instead of an interpreter's start and torch's import. It waits for its
children's ends, so that none is left as a zombie, and reports them to the parent with their exit status.

Invariants: when its parent ends, it kills its children, waits for them and ends. Should it be stopped (SIGSTOP) then,
the kernel wakes it (SIGCONT is its signal for its parent's end). If it is killed, the kernel kills the children.
Threads: one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket

from ft_core.process_group import host_names
from ft_core.process_group.baby.channel import Channel
from ft_core.process_group.baby.child import IGNORED, die_with, serve
from ft_core.process_group.baby.descriptors import readable

FORK, DIED = "fork", "died"
KILLED_WAIT_S = 5.0
"""How long killed children are waited for at the end."""


def main(fd: int, parent: int) -> None:
    """Serve the process `parent` at the other end of the socket `fd`, until it ends."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    die_with(parent, signal.SIGCONT)
    host_names.stop_asking()  # the children inherit it
    gc.freeze()
    _Starter(Channel(socket.socket(fileno=fd))).run()


class _Starter:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}  # pidfd -> pid, until waited for

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd in self._children:
                        poll.unregister(fd)
                        self._reap(fd)
                        continue
                    received = self._channel.receive()
                    if received is None:
                        return
                    for end in received[1]:
                        poll.register(self._fork(end), select.POLLIN)
        except OSError:
            return  # the parent has ended
        finally:
            self._end()

    def _fork(self, end: int) -> int:
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._channel.close()
                for fd in self._children:
                    os.close(fd)
                serve(Channel(socket.socket(fileno=end)), me)
            finally:
                os._exit(1)
        os.close(end)
        fd = os.pidfd_open(pid)
        self._children[fd] = pid
        return fd

    def _reap(self, fd: int) -> None:
        pid = self._children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self._channel.send((DIED, pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
        for fd, pid in self._children.items():
            if readable(fd, KILLED_WAIT_S):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
