"""What is shown where: plain streams, a real (pseudo) terminal with status lines, and streams that break."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import pytest

from ft_core.launch.output.status_screen import Row, Screen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 20.0
ROWS = [Row("a-0", "training", 12, 0, 3.25), Row("a-1", "joining", None, 2, None, "waits for [bold]a-0[/bold]")]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_plain_lines_go_to_their_streams(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.start()
    assert repr(screen) == "Screen(plain)"
    assert not screen.live
    screen.workers("a-0/0", ["one", "[bold]two[/bold] :smile:", ""], False)
    screen.workers("a-1/0", ["oops"], True)
    screen.say("first\nsecond", "a-0")
    screen.say("third")
    screen.rows(ROWS, "title")
    screen.close()
    screen.close()
    out, err = capsys.readouterr()
    assert out == "[a-0/0] one\n[a-0/0] [bold]two[/bold] :smile:\n[a-0/0] \n"
    assert err == "[a-1/0] oops\nftrun: [a-0] first\nftrun: [a-0] second\nftrun: third\n"


def test_lines_of_many_threads_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    lines = [f"{number} {'x' * 200}" for number in range(50)]
    threads = [threading.Thread(target=screen.workers, args=(str(n), lines, False)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown = capsys.readouterr().out.splitlines()
    for number in range(8):
        assert [line for line in shown if line.startswith(f"[{number}]")] == [f"[{number}] {line}" for line in lines]
    assert len(shown) == 8 * len(lines)


# ---------------------------------------------------------------- a terminal


@dataclass
class Terminal:
    """A pseudo terminal: `stream` is what a program writes to, `end` returns everything it has written."""

    stream: TextIO
    master: int
    got: bytearray
    reader: threading.Thread

    def end(self) -> str:
        self.stream.close()
        self.reader.join(PATIENCE_S)
        return self.got.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    got = bytearray()

    def read() -> None:
        try:
            while data := os.read(master, 65536):
                got.extend(data)
        except OSError:
            return  # the other side is closed

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    terminal = Terminal(open(slave, "w", encoding="utf-8"), master, got, reader)  # noqa: SIM115 - closed by end()
    yield terminal
    terminal.end()
    os.close(master)


def test_status_lines_stay_below_what_workers_print(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    screen = Screen()
    screen.start()
    assert screen.live
    assert repr(screen) == "Screen(live)"
    screen.rows(ROWS, "1 of 2 groups [in the quorum]")
    screen.workers("a-0/0", ["loss [bold]2.5[/bold] :smile: [/] " + "y" * 150], False)
    screen.workers("a-1/0", ["oops"], True)
    screen.say("restarted", "a-1")
    print("a library of ftrun's own")
    screen.rows(ROWS, "2 of 2 groups")
    screen.close()
    assert not screen.live
    screen.say("over")
    text = terminal.end()
    plain = ESCAPES.sub("", text)
    assert "[a-0/0] loss [bold]2.5[/bold] :smile: [/] " + "y" * 150 + "\r\n" in plain, "as printed; the terminal wraps"
    for line in ("[a-1/0] oops\r\n", "ftrun: [a-1] restarted\r\n", "a library of ftrun's own\r\n", "ftrun: over\r\n"):
        assert line in plain
    assert "1 of 2 groups [in the quorum]" in plain
    assert "waits for [bold]a-0[/bold]" in plain
    assert re.search(r"a-0 +training +12 +3\.2 +0", plain)
    assert re.search(r"a-1 +joining +- +- +2", plain)
    oops = text.index("[a-1/0] oops")
    assert re.search(r"a-0 +training", ESCAPES.sub("", text[oops:])), "the status lines come again below it"
    assert "\x1b[2K" in text, "and are wiped first"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    assert sys.stdout is terminal.stream


def test_a_file_gets_the_workers_lines_although_there_are_status_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ftrun ... > file` on a terminal."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    screen = Screen()
    screen.start()
    assert screen.live
    screen.rows(ROWS, "title")
    screen.workers("a-0/0", ["out"], False)
    screen.workers("a-0/0", ["err"], True)
    screen.close()
    assert file.getvalue() == "[a-0/0] out\n"
    text = terminal.end()
    assert "[a-0/0] err" in text
    assert "[a-0/0] out" not in text


@pytest.mark.parametrize("how", ["dumb", "no rich"])
def test_a_terminal_without_status_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    screen = Screen()
    screen.start()
    assert not screen.live
    screen.say("plain")
    screen.close()
    text = terminal.end()
    assert text.endswith("ftrun: plain\r\n")
    assert ("pip install rich" in text) == (how == "no rich")


def test_a_terminal_that_goes_away(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's connection drops: ftrun has to go on, if only to drain."""
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    screen = Screen()
    screen.start()
    screen.rows(ROWS, "title")

    def gone(_: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal.stream, "write", gone, raising=False)
    screen.rows(ROWS, "title")
    screen.workers("a-0/0", ["x"], False)
    screen.say("x")
    screen.close()


# ---------------------------------------------------------------- streams that break


def pipe() -> tuple[int, TextIO]:
    reading, writing = os.pipe()
    return reading, open(writing, "w", encoding="utf-8")


def test_without_a_reader_of_stdout_stderr_still_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, stream = pipe()
    monkeypatch.setattr(sys, "stdout", stream)
    screen = Screen()
    os.close(reading)
    for _ in range(3):
        screen.workers("a-0/0", ["x" * 100_000], False)
    screen.say("still here")
    screen.workers("a-0/0", ["so is this"], True)
    assert capsys.readouterr().err == "ftrun: still here\n[a-0/0] so is this\n"
    stream.flush()  # the interpreter does so at its end, and complains
    stream.close()


def test_a_reader_of_stdout_that_stands_still_does_not_hold_up_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ftrun ... | less`: ftrun's main thread must be able to say that it drains."""
    reading, stream = pipe()
    monkeypatch.setattr(sys, "stdout", stream)
    screen = Screen()
    writer = threading.Thread(target=screen.workers, args=("a-0/0", ["x" * 1_000_000], False), daemon=True)
    writer.start()
    assert os.read(reading, 1) == b"["
    screen.say("SIGINT: draining")
    assert capsys.readouterr().err == "ftrun: SIGINT: draining\n"
    assert writer.is_alive()
    os.close(reading)
    writer.join(PATIENCE_S)
    stream.close()


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    screen = Screen()

    def full(_: str) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stream, "write", full, raising=False)
        screen.workers("a-0/0", ["lost"], False)
    screen.workers("a-0/0", ["there is room again"], False)
    assert stream.getvalue() == "[a-0/0] there is room again\n"


def test_an_encoding_that_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    screen = Screen()
    screen.workers("a-0/0", ["größe \ud800", "next"], False)
    assert raw.getvalue() == b"[a-0/0] gr\\xf6\\xdfe \\ud800\n[a-0/0] next\n"


def test_a_stream_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    screen = Screen()
    stream.close()
    screen.workers("a-0/0", ["x"], False)
    screen.workers("a-0/0", ["x"], False)
