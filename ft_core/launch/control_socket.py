"""Orders to a running ftrun from the same machine and user: today `ftrun resize N`.

How it works. Every ftrun has a run directory of its own below /tmp/ftrun-<uid> (mode 700), with a Unix socket
"control": one line of JSON in, one line of text out ("ok: ..." or "error: ..."). The kernel keeps other users out.

Threads: "ftrun-remote" accepts, one order at a time; it is carried out by the main thread, which calls `reply`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import stat
import tempfile
import threading
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_ORDER = 4096
MAX_SOCKET_NAME = 107
"""What the kernel takes (sun_path)."""
MAX_ENTRY = 40 + 1 + 8
"""Length of a run directory's name: run id, dot, tempfile's random word."""
ANSWER_S = 10.0
AGAIN_S = 0.5
"""Pause after an order that could not be taken."""
log = logging.getLogger("ft_core.launch")


class Remote:
    """The listening side. `resize(n, reply)` is called on its thread and must not block."""

    def __init__(self, folder: str, resize: Callable[[int, Callable[[str], None]], None]) -> None:
        self._address = os.path.join(folder, "control")
        self._resize = resize
        self._door = socket.socket(socket.AF_UNIX)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        """The connection whose order is being read."""
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        """To the order that is being carried out."""
        self._closed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftrun-remote", daemon=True)

    def __repr__(self) -> str:
        return f"Remote({self._address})"

    def start(self) -> None:
        """Listen for orders, on a thread of its own."""
        self._door.bind(self._address)
        self._door.listen(4)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; who waits for an answer gets one. Idempotent."""
        self._ending.set()
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                if self._connection is not None:
                    self._connection.shutdown(socket.SHUT_RD)
            self._answers.put("error: this ftrun is ending")
        if self._thread.ident is not None:
            self._thread.join(ANSWER_S)
        self._door.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve_one()
            except Exception:
                if self._closed:
                    return
                log.exception("ftrun: an order to resize could not be taken; the next one is waited for")
                self._ending.wait(AGAIN_S)  # without a free descriptor the next attempt would fail at once

    def _serve_one(self) -> None:
        connection, _ = self._door.accept()
        with connection:
            with self._lock:
                if self._closed:
                    return
                self._connection = connection
            try:
                connection.settimeout(ANSWER_S)
                with contextlib.suppress(OSError):
                    if line := connection.recv(MAX_ORDER):  # else: it only looked who is there
                        connection.sendall(self._answer(line).encode() + b"\n")
            finally:
                with self._lock:
                    self._connection = None

    def _answer(self, line: bytes) -> str:
        try:
            wanted = json.loads(line)["resize"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return "error: this ftrun does not understand the order"
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            return f"error: resize {wanted!r} is not a number of groups"
        with self._lock:
            if self._closed:
                return "error: this ftrun is ending"
            answers = self._answers = queue.SimpleQueue()  # a late answer to an earlier order is not this one's
        self._resize(wanted, answers.put)
        try:
            return answers.get(timeout=ANSWER_S)
        except queue.Empty:
            return f"error: ftrun did not answer within {ANSWER_S:g} s"


def base_folder() -> str:
    """Where this user's run directories are. Raises ConfigError if it is not private."""
    try:
        folder = os.path.join(tempfile.gettempdir(), f"ftrun-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
        info = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"no directory for ftrun's sockets ({error}): set TMPDIR to a writable one") from None
    longest = len(os.fsencode(folder)) + 1 + MAX_ENTRY + 1 + len("standby")
    if longest > MAX_SOCKET_NAME:
        raise ConfigError(
            f"{folder} is too long a name for the sockets in it: set TMPDIR to a directory with a shorter one, as /tmp"
        )
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a private directory of this user (mode 700): remove it, or set TMPDIR")
    return folder


def order_resize(wanted: int, run_id: str) -> str:
    """Tell a running ftrun to run `wanted` groups. Returns its answer.

    Raises:
        ConfigError: none or several are running, or none of that id.
    """
    base = base_folder()
    found: list[tuple[str, socket.socket]] = []
    with contextlib.ExitStack() as stack:
        for entry in sorted(os.listdir(base)):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(2 * ANSWER_S)
            with contextlib.suppress(OSError):
                connection.connect(os.path.join(base, entry, "control"))
                found.append((entry.rpartition(".")[0], connection))
        names = ", ".join(run for run, _ in found)
        if run_id:
            there = f" (running: {names})" if names else ""
            found = [(run, connection) for run, connection in found if run == run_id]
            if not found:
                raise ConfigError(f"no ftrun with --run-id {run_id} is running as this user here{there}")
            if len(found) > 1:
                raise ConfigError(f"{len(found)} ftruns with --run-id {run_id} are running here: none was told")
        if not found:
            raise ConfigError("no ftrun is running as this user here (with the same TMPDIR)")
        if len(found) > 1:
            raise ConfigError(f"several are running, name one by --run-id: {names}")
        return _ask(found[0][1], wanted) or "error: that ftrun ended before it answered"


def _ask(connection: socket.socket, wanted: int) -> str:
    try:
        connection.sendall(json.dumps({"resize": wanted}).encode() + b"\n")
        with connection.makefile(errors="replace") as answer:
            return answer.readline().strip()
    except OSError as error:
        return f"error: that ftrun did not answer ({error})"
