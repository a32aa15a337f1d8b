"""What workers print, through real pipes: whole lines, progress bars, tracebacks, files, and what must not stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ft_core.launch.output import streams as module
from ft_core.launch.output.streams import MAX_LINE, TAIL, Output, Stream
from ft_core.launch.output.tracebacks import Block, Blocks, Line
from tests.descriptors import descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE_S = 20.0


@dataclass
class Shown:
    """Collects what is shown; `wait` until something is."""

    lines: list[tuple[str, str, bool]] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, label: str, lines: list[str], err: bool) -> None:
        with self.changed:
            self.calls.append(list(lines))
            self.lines += [(label, line, err) for line in lines]
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), self.lines

    def texts(self, label: str = "a-0/0") -> list[str]:
        with self.changed:
            return [line for who, line, _ in self.lines if who == label]


class Worker:
    """The write end of a stream."""

    def __init__(self, output: Output, label: str = "a-0/0", *, err: bool = False, path: str = "") -> None:
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.stream: Stream
        self.stream, self.fd = output.open(label, self.tail, err=err, path=path)

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.fd, data) :]

    def end(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def output(shown: Shown) -> Iterator[Output]:
    out = Output(shown)
    out.start()
    yield out
    out.close()


@pytest.fixture
def worker(output: Output) -> Iterator[Worker]:
    end = Worker(output)
    yield end
    end.end()


def test_lines_come_with_their_worker_and_stream(output: Output, shown: Shown) -> None:
    one, two = Worker(output, "a-0/0"), Worker(output, "a-1/3", err=True)
    one.write(b"x\n\ny\n")
    output.settle(PATIENCE_S)
    two.write("größe\n".encode())
    output.settle(PATIENCE_S)
    assert shown.lines == [("a-0/0", "x", False), ("a-0/0", "", False), ("a-0/0", "y", False), ("a-1/3", "größe", True)]
    assert repr(output) == "Output(2 streams)"
    one.end()
    two.end()
    output.settle(PATIENCE_S)
    assert repr(output) == "Output(0 streams)"


def test_a_stream_may_change_its_name(output: Output, shown: Shown, worker: Worker) -> None:
    worker.write(b"warm\n")
    output.settle(PATIENCE_S)
    worker.stream.label = "a-7/0"
    worker.write(b"work\n")
    output.settle(PATIENCE_S)
    assert shown.lines == [("a-0/0", "warm", False), ("a-7/0", "work", False)]


def test_two_workers_never_mix_a_line(output: Output, shown: Shown) -> None:
    workers = [Worker(output, f"a-{index}/0") for index in range(2)]
    text = b"".join(b"%d " % number + b"x" * (number % 300) + b"\n" for number in range(2000))

    def write(index: int) -> None:
        step = 97 + index  # never where a line ends
        for at in range(0, len(text), step):
            workers[index].write(text[at : at + step])
        workers[index].end()

    threads = [threading.Thread(target=write, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output.settle(PATIENCE_S)
    wanted = text.decode().splitlines()
    assert shown.texts("a-0/0") == wanted
    assert shown.texts("a-1/0") == wanted


def test_a_line_without_end_is_shown_at_the_end(output: Output, shown: Shown, worker: Worker) -> None:
    worker.write(b"one\nlast words")
    worker.end()
    output.settle(PATIENCE_S)
    assert shown.texts() == ["one", "last words"]
    assert list(worker.tail) == ["one", "last words"]


def test_a_line_without_end_is_shown_if_nothing_follows(
    output: Output, shown: Shown, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker that hangs one wants to see what it was about to do."""
    monkeypatch.setattr(module, "HELD_S", 0.02)
    worker.write(b"loading ...")
    shown.wait(lambda: bool(shown.lines))
    worker.write(b"\n")
    worker.write(b"next\n")
    output.settle(PATIENCE_S)
    assert shown.texts() == ["loading ...", "next"], "its late end is no line of its own"


def test_progress_bars_show_every_few_seconds(output: Output, shown: Shown, worker: Worker) -> None:
    for percent in range(100):
        worker.write(b"\r%3d%%|####" % percent)
    worker.write(b"\r100%|done\nafter\n")
    output.settle(PATIENCE_S)
    lines = shown.texts()
    assert lines[-2:] == ["100%|done", "after"]
    assert len(lines) <= 4
    assert not any("\r" in line for line in lines)


def test_progress_bars_with_the_return_at_the_end(output: Output, shown: Shown, worker: Worker) -> None:
    for percent in range(50):
        worker.write(b"%3d%%\r" % percent)
        output.settle(PATIENCE_S)  # every one is read alone
    worker.write(b"done\n")
    output.settle(PATIENCE_S)
    lines = shown.texts()
    assert lines[-1] == "done"
    assert len(lines) <= 4
    assert not any("\r" in line or not line for line in lines)


def test_line_breaks_of_windows_wherever_they_are_cut(output: Output, shown: Shown, worker: Worker) -> None:
    for part in (b"one\r\n", b"two\r", b"\n", b"three", b"\r\n", b"a\rfour\r\r\n"):
        worker.write(part)
        output.settle(PATIENCE_S)
    worker.end()
    output.settle(PATIENCE_S)
    assert shown.texts() == ["one", "two", "three", "four"]


def test_very_long_lines_come_in_pieces(output: Output, shown: Shown, worker: Worker) -> None:
    text = "ü€😀x" * 50_000
    worker.write(text.encode() + b"\nend\n")
    output.settle(PATIENCE_S)
    *pieces, last = shown.texts()
    assert last == "end"
    assert "".join(pieces) == text, "no character is cut in two"
    assert max(len(piece.encode()) for piece in pieces) <= 2 * MAX_LINE
    assert len(worker.stream.partial) <= MAX_LINE


def test_what_is_not_utf8(output: Output, shown: Shown, worker: Worker) -> None:
    worker.write(b"a\xff\xfeb\xe2\x82\n\0\x80\x80\x80\x80\n")
    worker.write(b"\x80" * (MAX_LINE + 5) + b"\n")
    worker.end()
    output.settle(PATIENCE_S)
    lines = shown.texts()
    assert lines[:2] == ["a��b�", "\0����"]
    assert set("".join(lines[2:])) == {"�"}


TRACEBACK = """Traceback (most recent call last):
  File "/x/train.py", line {line}, in main
    step()
ValueError: rank {rank} has a bad batch
"""


def test_a_traceback_comes_in_one_piece_and_only_once(output: Output, shown: Shown) -> None:
    workers = [Worker(output, f"a-{index}/0", err=True) for index in range(3)]
    for index, worker in enumerate(workers):
        text = TRACEBACK.format(line=3 if index < 2 else 4, rank=index).encode()
        worker.write(b"before\n" + text[:50])
        output.settle(PATIENCE_S)
        worker.write(text[50:] + b"after\n")
        output.settle(PATIENCE_S)
        worker.end()
    output.settle(PATIENCE_S)
    full = TRACEBACK.format(line=3, rank=0).splitlines()
    assert shown.texts("a-0/0") == ["before", *full, "after"]
    assert [*full, "after"] in shown.calls, "in one call, so that nothing comes between"
    same = "the same error as [a-0/0]: ValueError: rank 1 has a bad batch"
    assert shown.texts("a-1/0") == ["before", same, "after"]
    assert list(workers[1].tail)[1:-1] == TRACEBACK.format(line=3, rank=1).splitlines(), "the report has all of it"
    assert len(shown.texts("a-2/0")) == 6, "another place is another error"


def test_a_traceback_is_shown_when_nothing_follows(
    output: Output, shown: Shown, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELD_S", 0.02)
    worker.write(TRACEBACK.format(line=3, rank=0).encode())
    shown.wait(lambda: len(shown.lines) == 4)


def test_files_get_every_byte(output: Output, shown: Shown, tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"earlier\n")
    worker = Worker(output, path=str(path))
    data = b"10%\r20%\r\nx\xff\n" + TRACEBACK.encode() + b"no end"
    worker.write(data)
    output.settle(PATIENCE_S)
    assert path.read_bytes() == b"earlier\n" + data, "at once, not when a buffer is full"
    worker.end()


def test_a_full_disk_does_not_stop_the_output(output: Output, shown: Shown) -> None:
    worker = Worker(output, path="/dev/full")
    worker.write(b"one\n")
    output.settle(PATIENCE_S)
    worker.write(b"two\n")
    worker.end()
    output.settle(PATIENCE_S)
    told, *lines = shown.texts()
    assert told == "(no longer into /dev/full: No space left on device)"
    assert lines == ["one", "two"]


def test_a_file_that_cannot_be_opened_leaves_nothing_open(output: Output, tmp_path: Path) -> None:
    before = descriptors()
    with pytest.raises(OSError, match="Is a directory"):
        output.open("a-0/0", deque(), err=False, path=str(tmp_path))
    assert descriptors() - before == set()


def test_the_tail_is_of_both_streams_and_bounded(output: Output) -> None:
    tail: deque[str] = deque(maxlen=TAIL)
    ends = [output.open("a-0/0", tail, err=err)[1] for err in (False, True)]
    for number in range(3 * TAIL):
        os.write(ends[number % 2], b"%d\n" % number)
        output.settle(PATIENCE_S)
    assert list(tail) == [str(number) for number in range(2 * TAIL, 3 * TAIL)]
    for end in ends:
        os.close(end)


def test_settle_does_not_wait_for_those_who_live(output: Output, shown: Shown, worker: Worker) -> None:
    """A restart must not wait because the other groups go on."""
    ended = Worker(output, "a-1/0")
    ended.write(b"z" * 60_000 + b"\nlast words")
    ended.end()
    output.settle(PATIENCE_S)  # returns: the time limit of the test is the assertion
    assert shown.texts("a-1/0")[-1] == "last words"
    assert repr(output) == "Output(1 streams)"


def test_settle_from_many_threads(output: Output, worker: Worker) -> None:
    def settle() -> None:
        for _ in range(50):
            worker.write(b"x\n")
            output.settle(PATIENCE_S)

    threads = [threading.Thread(target=settle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


def test_settle_is_bounded_by_a_screen_that_stands_still() -> None:
    go = threading.Event()
    output = Output(lambda *_: void(go.wait(PATIENCE_S)))
    output.start()
    worker = Worker(output)
    worker.write(b"x\n")
    output.settle(0.05)
    go.set()
    worker.end()
    output.close()


def void(_: object) -> None:
    """For the type checker."""


@pytest.mark.process
def test_a_child_that_keeps_the_pipe_is_heard_until_it_ends(output: Output, shown: Shown) -> None:
    worker = Worker(output)
    command = "(read x; echo child) & echo worker"
    process = subprocess.Popen(["sh", "-c", f"exec 3<&0; {command.replace('read x', 'read x <&3')}"],
                               stdin=subprocess.PIPE, stdout=worker.fd)  # fmt: skip
    worker.end()
    process.wait(PATIENCE_S)
    output.settle(PATIENCE_S)
    assert shown.texts() == ["worker"]
    process.communicate(b"go\n")
    shown.wait(lambda: shown.texts() == ["worker", "child"])


def test_close_shows_what_is_there_and_may_be_repeated(shown: Shown) -> None:
    before = descriptors()
    output = Output(shown)
    output.start()
    worker = Worker(output)
    worker.write(TRACEBACK.encode() + b"z" * 60_000 + b"\nlast")
    output.close()
    output.close()
    output.settle(PATIENCE_S)  # returns at once
    assert shown.texts()[-1] == "last"
    assert len(shown.texts()) == 6
    with pytest.raises(BrokenPipeError):
        worker.write(b"too late")
    worker.end()
    assert descriptors() - before == set()


# ---------------------------------------------------------------- ftrun as a whole


@pytest.mark.process
def test_training_goes_on_when_nobody_reads(tmp_path: Path) -> None:
    """`ftrun ... | head -1`: the reader goes, the job ends well, and nobody complains."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "print('first', flush=True)\n"
        f"open({str(tmp_path / 'go')!r}).read()\n"  # a fifo: until the reader is gone
        "for number in range(3000):\n"
        "    print('x' * 100)\n"
        "print('end', file=sys.stderr)\n"
    )
    os.mkfifo(tmp_path / "go")
    ftrun = subprocess.Popen(
        [sys.executable, "-m", "ft_core.launch", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert ftrun.stdout is not None
        assert ftrun.stderr is not None
        assert ftrun.stdout.readline() == "[replica-0/0] first\n"
        ftrun.stdout.close()
        (tmp_path / "go").write_text("on")
        told = ftrun.stderr.read()
        assert ftrun.wait(PATIENCE_S) == 0, told
        assert "[replica-0/0] end\n" in told
        assert "1 finished" in told
        assert "Broken pipe" not in told
        assert "BrokenPipeError" not in told
    finally:
        with contextlib.suppress(ProcessLookupError):
            ftrun.send_signal(signal.SIGKILL)
        ftrun.wait()
        ftrun.stderr.close()  # type: ignore[union-attr]


def test_what_cannot_be_shown_is_left_out_and_the_rest_is_read(
    output: Output, shown: Shown, worker: Worker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody reads the pipes any more, and all workers stand still as soon as these are full."""
    feed = Blocks.feed

    def fails(self: Blocks, line: str) -> list[Block | Line]:
        if line == "bad":
            raise ValueError("a mistake of ours")
        return feed(self, line)

    monkeypatch.setattr(Blocks, "feed", fails)
    worker.write(b"bad\n")
    output.settle(PATIENCE_S)
    worker.write(b"good\n")
    output.settle(PATIENCE_S)
    assert shown.texts() == ["good"]
    assert "some output of a-0/0 could not be shown" in caplog.text
