"""`serve`: what runs in the child process: one group, and the collectives that its parent sends.

How it works. The main thread takes the parent's messages in their order: `configure`, once; then collectives, which it
launches on the inner group, and timeouts. A collective whose work has a future reports its end from that (Gloo's
thread); of the others (send, recv, the reduce-scatters) the oldest MAX_WAITING are waited for by a thread each, so that
their end is known without anybody asking; those beyond are launched as well, and waited for when one of these has
ended. On a device one thread asks for all (device_ends.py). Gloo can lose a work when a connection breaks, and only a
`wait` notices: so what is not done after WATCH_S is waited for as well, by one more thread; the parent takes the first
report of a work. The child never aborts anything: whoever wants its group to end kills it.

Messages (the parent's side is `incarnation.py`):

| from | message | with descriptors |
|---|---|---|
| parent | CONFIGURE, inner class, its arguments, environment, (store, replica, rank, size) | |
| parent | LAUNCH, number, Call, Manifest | new segments and storages |
| parent | SET_TIMEOUT, timeout | |
| child | HELLO, pid | of this process (pidfd), so that the parent can kill it and nobody else |
| child | FORMED / FORMING_FAILED, error | FORMED: the connections to the peers |
| child | DONE, number, rank of the sender or None / FAILED, number, error | |

Invariants: it ends when the parent does: its channel ends, its starter kills it, and the kernel does if the starter is
gone. Signals that a terminal or a scheduler sends to all processes of a job are left to the parent. At most
MAX_WAITING threads wait; how much is in flight is bounded by the parent. Standard input is empty; output and errors go
where the parent's go.
Threads: the main one launches; every thread may report.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import ft_core.errors as errors
from ft_core.errors import CollectiveError, FaultToleranceError
from ft_core.process_group.baby.collectives import Call, rebuild
from ft_core.process_group.baby.device_ends import DeviceEnds
from ft_core.process_group.baby.parcel import Manifest, Unpacker

if TYPE_CHECKING:
    from torch.distributed import Work

    from ft_core.process_group.baby.channel import Channel
    from ft_core.process_group.base import ProcessGroup

CONFIGURE, LAUNCH, SET_TIMEOUT = "configure", "launch", "set timeout"
HELLO, FORMED, FORMING_FAILED, DONE, FAILED = "hello", "formed", "forming failed", "done", "failed"
MAX_WAITING = 256
"""Threads that wait for works whose end is not told otherwise."""
WATCH_S = 0.05
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-C and a scheduler's SIGTERM go to every process of the job; whether the group ends is the parent's decision."""
_PR_SET_PDEATHSIG = 1

Error = tuple[str, str]
"""An error on its way: the name of its class, and its text."""


def as_sent(error: Exception) -> Error:
    """Return an error in the form in which it travels."""
    return type(error).__name__, str(error)


def as_received(sent: Error) -> Exception:
    """Return the error that travelled: of the class of ours that it had, or a RuntimeError, as torch's are."""
    kind = getattr(errors, sent[0], None)
    if isinstance(kind, type) and issubclass(kind, FaultToleranceError):
        return kind(sent[1])
    return RuntimeError(sent[1])


def die_with(parent: int, number: int) -> None:
    """Have the kernel send this process the signal `number` when its parent ends; ends it if that has happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def serve(channel: Channel, starter: int) -> NoReturn:
    """Run one group for the process at the other end of `channel`; never returns."""
    die_with(starter, signal.SIGKILL)
    faulthandler.enable()
    torch.set_num_threads(1)
    me = os.pidfd_open(os.getpid())
    try:
        channel.send((HELLO, os.getpid()), [me])
        os.close(me)
        _Server(channel).run()
    except OSError:
        pass  # the parent has ended
    os._exit(0)


class _Server:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._unpacker = Unpacker()
        self._group: ProcessGroup | None = None
        self._timeout = timedelta(0)
        """Of each message and reduce-scatter."""
        self._threads = ThreadPoolExecutor(MAX_WAITING, "ft-baby-wait")
        self._on_device: DeviceEnds | None = None
        """Of a group that does not block the host."""
        self._followed: dict[int, Work] = {}
        self._launched = threading.Event()
        threading.Thread(target=self._watch, name="ft-baby-watch", daemon=True).start()

    def run(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, fds = received
            if message[0] == LAUNCH:
                _, number, call, manifest = message
                self._launch(number, call, manifest, fds)
            elif message[0] == CONFIGURE:
                self._configure(*message[1:])
            elif self._group is not None:
                self._timeout = message[1]
                self._group.set_timeout(message[1])

    def _configure(self, inner: str, arguments: dict[str, Any], environment: dict[str, str], place: Any) -> None:
        os.environ.update(environment)
        self._timeout = arguments["timeout"]
        try:
            kinds = importlib.import_module("ft_core.process_group")  # which imports this file
            group: ProcessGroup = getattr(kinds, inner)(**arguments)
            group.configure(*place)
        except Exception as error:  # noqa: BLE001 - raised by the parent's configure
            self._channel.send((FORMING_FAILED, as_sent(error)))
            return
        self._group = group
        if not group.blocks_host:  # its works' futures are done when they are launched
            self._on_device = DeviceEnds(group.errored, self._ended)
        self._channel.send((FORMED,), group.connection_fds())

    def _launch(self, number: int, call: Call, manifest: Manifest, fds: list[int]) -> None:
        try:
            if self._group is None:
                raise CollectiveError("the group has not formed")
            tensors = self._unpacker.unpack(manifest, fds)
            arguments = rebuild(call, tensors.__getitem__)
            if call.name == "monitored_barrier":
                barrier = getattr(self._group, call.name)  # of Gloo's alone
                self._wait_on_thread(number, lambda: barrier(*arguments))
                return
            work = self._group._launch(call.name, *arguments)
            if self._on_device is not None:
                self._on_device.add(number, work)
            elif not self._follow(number, work):
                timeout = self._timeout  # said here: without, Gloo takes the one that its connections were made with
                self._wait_on_thread(number, lambda: _finish(work, call.name, timeout))
        except Exception as error:  # noqa: BLE001 - raised by the parent's work
            self._report(FAILED, number, as_sent(error))

    def _follow(self, number: int, work: Work) -> bool:
        """Report the end of a work that has a future; whether it has."""
        try:
            future = work.get_future()
        except (RuntimeError, NotImplementedError):
            return False

        def ended(done: torch.futures.Future[Any]) -> None:
            self._followed.pop(number, None)
            try:
                done.value()
            except Exception as error:  # noqa: BLE001 - c10d may have made another class of what was a CollectiveError
                ours = error if isinstance(error, FaultToleranceError) else CollectiveError(str(error))
                self._report(FAILED, number, as_sent(ours))
            else:
                self._report(DONE, number, None)

        self._followed[number] = work
        future.add_done_callback(ended)
        self._launched.set()
        return True

    def _watch(self) -> None:
        while True:
            self._launched.wait()
            self._launched.clear()
            time.sleep(WATCH_S)
            for number, work in list(self._followed.items()):
                try:
                    work.wait()
                except Exception as error:  # noqa: BLE001 - raised by the parent's work
                    self._report(FAILED, number, as_sent(error))
                self._followed.pop(number, None)

    def _ended(self, number: int, error: Exception | None) -> None:
        """A work on a device has ended: only now may the parent's streams go on."""
        if error is None:
            self._report(DONE, number, None)
        else:
            self._report(FAILED, number, as_sent(error))

    def _wait_on_thread(self, number: int, wait: Any) -> None:
        def run() -> None:
            try:
                self._report(DONE, number, wait())
            except Exception as error:  # noqa: BLE001 - raised by the parent's work
                self._report(FAILED, number, as_sent(error))

        self._threads.submit(run)

    def _report(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the parent has ended, and so does this process
            self._channel.send(message)


def _finish(work: Work, name: str, timeout: timedelta) -> int | None:
    work.wait(timeout)
    return work._source_rank() if name == "recv_anysource" else None
