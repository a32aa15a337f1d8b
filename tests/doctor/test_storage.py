"""Storage that is shared, and storage that is not what it seems to be."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING

import pytest

from ft_core.doctor import storage

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SEEN_S", 0.2)


def test_two_hosts_with_the_same_storage(tmp_path: Path) -> None:
    folder = storage.folder_of(str(tmp_path), "abc")
    assert storage.begin(folder, 0) == storage.begin(folder, 1) == ""
    for index in (0, 1):
        seen = storage.look(folder, index, {1 - index})
        assert (seen.missing, seen.torn, seen.error) == ([], [], "")
    storage.end(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_host_is_not_there(tmp_path: Path) -> None:
    folder = storage.folder_of(str(tmp_path), "abc")
    storage.begin(folder, 0)
    assert storage.look(folder, 0, {3, 1}).missing == [1, 3]


def test_a_file_that_is_written_in_place_is_seen_half_written(tmp_path: Path) -> None:
    """What a file system shows that has no atomic rename."""
    folder = storage.folder_of(str(tmp_path), "abc")
    storage.begin(folder, 0)
    storage.begin(folder, 1)
    (tmp_path / ".ft-doctor-abc" / "1").write_text("1 0\n1 1\n")
    assert storage.look(folder, 0, {1}).torn == [1]


@pytest.mark.parametrize("text", ["", "1 0\n", "1 0\n" * (storage.LINES - 1) + "1 1\n", "2 0\n" * storage.LINES])
def test_what_is_not_one_whole_version(text: str) -> None:
    assert not storage.whole(text, 1)
    assert storage.whole("1 7\n" * storage.LINES, 1)


def test_one_host_alone(tmp_path: Path) -> None:
    found = storage.alone(str(tmp_path))
    assert (found.error, found.free_mb > 0) == ("", True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert storage.alone(str(tmp_path / "file")).error == "Not a directory"
    assert storage.alone(str(tmp_path / "missing")).error == "No such file or directory"
    assert storage.begin(storage.folder_of(str(tmp_path / "file"), "x"), 0) == "Not a directory"
    assert storage.begin(storage.folder_of(str(tmp_path / "missing"), "x"), 0) == "No such file or directory"
    assert not (tmp_path / "missing").exists(), "what is not mounted is not made"


def test_a_file_system_that_hangs_is_not_waited_for() -> None:
    mended = threading.Event()
    error, found = storage.bounded(lambda: mended.wait(30), limit_s=0.1)
    assert (error, found) == ("no answer within 0.1 s: the file system, or its server, hangs", None)
    mended.set()
    assert storage.bounded(lambda: 5) == ("", 5)


def test_hosts_that_try_the_same_path_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers their processes have the same number."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    inside, wrote = threading.Barrier(2, timeout=10), storage.write

    def write(folder: str, index: int, version: int) -> None:
        inside.wait()
        wrote(folder, index, version)
        inside.wait()

    monkeypatch.setattr(storage, "write", write)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert [found.error for found in threads.map(storage.alone, [str(tmp_path)] * 2)] == ["", ""]
    assert list(tmp_path.iterdir()) == []
