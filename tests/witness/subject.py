"""A process whose death is watched, without torch: `subject PORT`. It connects to PORT and does what lines on its
standard input say, each in turn; it answers with a line.

A forked child keeps the connection open in all cases, so that nothing but the witness can end it when this one is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

from ft_core.witness import link
from ft_core.witness.link import DeathNotice


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


class Subject:
    """The process; `notice` watches it once a thread has called `hold`."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.further: list[socket.socket] = []
        self.notice = DeathNotice(lambda: [self.connection.fileno(), *(one.fileno() for one in self.further)])

    def hold(self) -> None:
        self.notice.hold()

    def linked(self) -> None:
        """Until the witness has been told everything."""
        while link._link._socket is None:
            os.sched_yield()
        with link._link._lock:
            pass

    def start_slowly(self) -> None:
        """No witness is started until `start_now`."""
        self.may_start = threading.Event()
        start = link._start_witness

        def start_when_told() -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
            self.may_start.wait()
            return start()

        link._start_witness = start_when_told

    def start_now(self) -> None:
        self.may_start.set()

    def hold_another(self) -> None:
        """As a second Manager of this process."""
        self.another = DeathNotice(lambda: [self.connection.fileno()])
        self.another.hold()

    def update(self) -> None:
        self.notice.update()

    def release(self) -> None:
        self.notice.release()

    def hold_in_a_thread(self) -> None:
        """Which goes on to live."""
        held = threading.Event()

        def train() -> None:
            self.notice.hold()
            held.set()
            threading.Event().wait()

        threading.Thread(target=train, daemon=True).start()
        held.wait()

    def hold_in_a_thread_that_ends(self) -> None:
        thread = threading.Thread(target=self.notice.hold)
        thread.start()
        thread.join()

    def release_from_another_thread(self) -> None:
        thread = threading.Thread(target=self.notice.release)
        thread.start()
        thread.join()

    def fork(self) -> None:
        """As DataLoader workers: the child ends regularly."""
        if os.fork() == 0:
            os._exit(0)
        os.wait()

    def fork_and_kill(self) -> None:
        child = os.fork()
        if child == 0:
            signal.pause()
        os.kill(child, signal.SIGKILL)
        os.wait()

    def raise_(self) -> None:
        raise RuntimeError("as a training script may")

    def exit(self) -> None:
        sys.exit(0)

    def exec(self) -> None:
        os.execv(sys.executable, [sys.executable, "-c", "import sys; print('new', flush=True); sys.stdin.read()"])

    def raise_in_a_thread(self) -> None:
        def train() -> None:
            self.notice.hold()
            raise RuntimeError("in the thread that trains")

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    def limit_files(self) -> None:
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, most))


def main(argv: list[str]) -> int:
    subject = Subject(int(argv[0]))
    if os.fork() == 0:  # keeps the connection open until the test closes its end
        with contextlib.suppress(OSError):
            subject.connection.recv(1, socket.MSG_WAITALL)
        os._exit(0)
    say("ready")
    for line in sys.stdin:
        getattr(subject, line.strip())()
        say(line.strip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
