"""Orders to a running ftrun: over real sockets, in a base folder of the test's own."""

from __future__ import annotations

import errno
import json
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_core.errors import ConfigError
from ft_core.launch import control_socket
from ft_core.launch.__main__ import main
from ft_core.launch.control_socket import MAX_SOCKET_NAME, Remote, base_folder, order_resize

PATIENCE_S = 20.0
Reply = Callable[[str], None]


@pytest.fixture
def short() -> Iterator[str]:
    """A directory with a name short enough for sockets below it."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        yield folder


@pytest.fixture
def base(short: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base folder in a TMPDIR of the test's own."""
    monkeypatch.setattr("tempfile.tempdir", short)
    return Path(base_folder())


@pytest.fixture
def running(base: Path) -> Iterator[Callable[..., Remote]]:
    """Starts listeners as ftrun does, in run directories called <run id>.<word>."""
    started: list[Remote] = []

    def start(run_id: str, resize: Callable[[int, Reply], None] | None = None) -> Remote:
        folder = tempfile.mkdtemp(prefix=f"{run_id}.", dir=base)
        listening = Remote(folder, resize or (lambda n, reply: reply(f"ok: {run_id} -> {n} groups")))
        listening.start()
        started.append(listening)
        return listening

    yield start
    for listening in started:
        listening.close()


def address(listening: Remote) -> str:
    return repr(listening)[len("Remote(") : -1]


def send(listening: Remote, data: bytes) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(address(listening))
        connection.sendall(data)
        with connection.makefile() as answer:
            return answer.readline()


def test_an_order_goes_there_and_its_answer_back(running: Callable[..., Remote]) -> None:
    orders: queue.SimpleQueue[tuple[int, Reply]] = queue.SimpleQueue()
    running("job7", lambda n, reply: orders.put((n, reply)))

    def main_thread() -> None:
        wanted, reply = orders.get(timeout=PATIENCE_S)
        reply(f"ok: 2 -> {wanted} groups")

    thread = threading.Thread(target=main_thread)
    thread.start()
    assert order_resize(4, "") == "ok: 2 -> 4 groups"
    thread.join()


def test_several_are_told_apart_by_their_run_id(running: Callable[..., Remote]) -> None:
    running("a.b")
    running("c")
    assert order_resize(3, "a.b") == "ok: a.b -> 3 groups"
    assert order_resize(3, "c") == "ok: c -> 3 groups"
    with pytest.raises(ConfigError, match=r"several are running, name one by --run-id: a\.b, c"):
        order_resize(3, "")
    with pytest.raises(ConfigError, match=r"no ftrun with --run-id d is running .*\(running: a\.b, c\)"):
        order_resize(3, "d")
    running("c")
    with pytest.raises(ConfigError, match="2 ftruns with --run-id c are running here: none was told"):
        order_resize(3, "c")
    assert order_resize(3, "a.b") == "ok: a.b -> 3 groups", "those that were only looked at still listen"


def test_none_is_running(base: Path, running: Callable[..., Remote]) -> None:
    with pytest.raises(ConfigError, match="no ftrun is running as this user here"):
        order_resize(3, "")
    with pytest.raises(ConfigError, match="no ftrun with --run-id x is running"):
        order_resize(3, "x")
    (base / "left.behind").mkdir()
    (base / "file").write_text("")
    running("x").close()
    with pytest.raises(ConfigError, match="no ftrun is running"):
        order_resize(3, "")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"hello\n", "does not understand"), (b"\xff\n", "does not understand"), (b"[1]\n", "does not understand"),
        (b"4\n", "does not understand"), (b'{"grow": 3}\n', "does not understand"),
        (b"[" * 4000, "does not understand"), (b'{"resize": "4"}\n', "'4' is not a number of groups"),
        (b'{"resize": true}\n', "True is not a number of groups"),
        (b'{"resize": 1.5}\n', "1.5 is not a number of groups"),
    ],
)  # fmt: skip
def test_wrong_orders(running: Callable[..., Remote], data: bytes, says: str) -> None:
    listening = running("x", lambda *_: pytest.fail("carried out"))
    answer = send(listening, data)
    assert answer.startswith("error: ")
    assert says in answer
    assert "does not understand" in send(listening, b"{}"), "it still listens"


def test_an_order_that_nobody_carries_out(running: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "ANSWER_S", 0.05)
    late: list[Reply] = []
    listening = running("x", lambda n, reply: late.append(reply))
    assert send(listening, b'{"resize": 3}') == "error: ftrun did not answer within 0.05 s\n"
    late[0]("ok: late")
    assert send(listening, b'{"resize": 3}') == "error: ftrun did not answer within 0.05 s\n", "not the late one's"


def test_close_answers_who_waits_and_does_not_wait_itself(running: Callable[..., Remote]) -> None:
    taken = threading.Event()
    listening = running("x", lambda *_: taken.set())
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: answers.put(order_resize(3, "x")))
    thread.start()
    assert taken.wait(PATIENCE_S)
    listening.close()
    assert answers.get(timeout=PATIENCE_S) == "error: this ftrun is ending"
    thread.join()
    listening.close()


def test_close_with_somebody_who_connects_and_says_nothing(running: Callable[..., Remote]) -> None:
    listening = running("x")
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as second:
        silent.connect(address(listening))
        second.connect(address(listening))
        listening.close()  # the time limit of the test is the assertion: ANSWER_S is not waited for
    assert "ftrun-remote" not in [thread.name for thread in threading.enumerate()]


def test_close_without_start(tmp_path: Path) -> None:
    Remote(str(tmp_path), lambda *_: None).close()


def test_one_that_ends_without_an_answer(base: Path) -> None:
    folder = base / "x.1"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "control"))
        door.listen(1)

        def hang_up() -> None:
            connection, _ = door.accept()
            with connection:
                assert json.loads(connection.recv(100)) == {"resize": 3}

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert order_resize(3, "x") == "error: that ftrun ended before it answered"
        thread.join()


# ---------------------------------------------------------------- where the sockets are


def test_the_base_folder_is_private(base: Path) -> None:
    assert base.stat().st_mode & 0o777 == 0o700
    assert base_folder() == str(base), "again"
    base.chmod(0o755)
    with pytest.raises(ConfigError, match=r"not a private directory of this user \(mode 700\).*TMPDIR"):
        base_folder()


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_something_else_in_its_place(base: Path, kind: str) -> None:
    base.rmdir()
    if kind == "file":
        base.write_text("")
    else:
        other = base.parent / "other"
        if kind == "link":
            other.mkdir(mode=0o700)
        base.symlink_to(other)
    with pytest.raises(ConfigError, match="not a private directory"):
        base_folder()


def test_a_temporary_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    with pytest.raises(ConfigError, match=r"no directory for ftrun's sockets .*set TMPDIR"):
        base_folder()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 60)))
    (tmp_path / ("x" * 60)).mkdir()
    with pytest.raises(ConfigError, match="too long a name for the sockets in it: set TMPDIR"):
        base_folder()


def test_the_longest_name_that_is_accepted_works(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = MAX_SOCKET_NAME - len(f"{short}/x/ftrun-{os.getuid()}/{'r' * 40}.12345678/standby") + 1
    folder = os.path.join(short, "x" * spare)
    os.mkdir(folder)
    monkeypatch.setattr("tempfile.tempdir", folder)
    run = tempfile.mkdtemp(prefix="r" * 40 + ".", dir=base_folder())
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(os.path.join(run, "standby"))
    monkeypatch.setattr("tempfile.tempdir", folder + "y")
    os.mkdir(folder + "y")
    with pytest.raises(ConfigError, match="too long"):
        base_folder()


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("words", [["4"], ["4", "--run-id", "j"], ["--run_id=j", "4"], ["--rdzv-id", "j", "4"]])
def test_the_command(running: Callable[..., Remote], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    running("j")
    assert main(["resize", *words]) == 0
    assert capsys.readouterr() == ("ftrun: ok: j -> 4 groups\n", "")


def test_an_order_that_is_refused(running: Callable[..., Remote], capsys: pytest.CaptureFixture[str]) -> None:
    running("j", lambda n, reply: reply(f"error: resize {n} is out of range"))
    assert main(["resize", "9"]) == 1
    assert capsys.readouterr() == ("", "ftrun: error: resize 9 is out of range\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "how many groups? usage: ftrun resize N [--run-id ID]"), (["x"], "x is not understood"),
        (["-1"], "-1 is not understood"), (["²"], "² is not understood"), (["3", "4"], "4 is not understood"),
        (["3", "--run-id"], "--run-id needs a value"), (["3=4"], "3 is not understood"),
        (["3"], "no ftrun is running as this user here"),
    ],
)  # fmt: skip
def test_the_command_used_wrongly(base: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resize", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resize", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ftrun resize N [--run-id ID]")


def test_an_order_that_cannot_be_taken_is_said_and_the_next_one_is_carried_out(
    running: Callable[..., Remote], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a free descriptor `accept` fails as it does when the door is closed, and that is no reason to end."""
    listening = running("job7")
    door, failed = listening._door, threading.Event()

    class Door:
        """Has no descriptor for the next one."""

        def accept(self) -> tuple[socket.socket, object]:
            listening._door = door
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")

    listening._door = Door()  # type: ignore[assignment]
    assert order_resize(3, "") == "ok: job7 -> 3 groups"  # it was waited for at the real door
    assert failed.wait(PATIENCE_S)
    assert order_resize(4, "") == "ok: job7 -> 4 groups"
    assert "an order to resize could not be taken" in caplog.text
