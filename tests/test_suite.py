"""What the suite does with a test that hangs, or leaves a thread: shown by runs of pytest on small files."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.process


def run(folder: pathlib.Path, *texts: str) -> subprocess.CompletedProcess[str]:
    """pytest with our conftest.py on files of these texts: test_it.py, test_it1.py and so on."""
    for number, text in enumerate(texts):
        (folder / f"test_it{number or ''}.py").write_text(textwrap.dedent(text))
    ini = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-o", f"cache_dir={folder}/cache"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *ini, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50)


HANG = """
    import ctypes, threading
    import pytest
    from tests import hangs
    hangs.GRACE_S = 0.5

    def in_c():
        lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        for _ in range(2):
            libc.pthread_mutex_lock(lock)  # no signal ends the second one
"""


def test_one_that_hangs_in_c_ends_the_run_with_all_stacks(tmp_path: pathlib.Path) -> None:
    """A signal is enough for one that hangs in Python code: that fails, and the run goes on."""
    done = run(tmp_path, HANG + """
    def of_another_thread(begun):
        begun.set()
        threading.Event().wait()

    @pytest.mark.timeout(0.3)
    def test_in_python():
        threading.Event().wait()

    @pytest.mark.timeout(0.3)
    def test_in_c():
        begun = threading.Event()
        threading.Thread(target=of_another_thread, args=(begun,), daemon=True).start()
        begun.wait()
        in_c()
    """)  # fmt: skip
    assert done.returncode == 1
    assert "test_it.py F" in done.stdout, done
    assert "Timeout (0:00:00.800000)!" in done.stderr, done
    assert "in of_another_thread" in done.stderr
    assert "in test_in_c" in done.stderr
    assert "passed" not in done.stdout, "there is no summary: the process has ended"


def test_one_that_hangs_while_it_is_torn_down_ends_the_run(tmp_path: pathlib.Path) -> None:
    """pytest-timeout's timer is off by then."""
    done = run(tmp_path, HANG + """
    @pytest.fixture
    def hangs_in_the_end():
        yield
        threading.Event().wait()

    @pytest.mark.timeout(0.3)
    def test_it(hangs_in_the_end):
        assert not "well"
    """)  # fmt: skip
    assert done.returncode == 1
    assert "in hangs_in_the_end" in done.stderr, done


def test_a_thread_that_the_interpreter_waits_for_ends_the_run(tmp_path: pathlib.Path) -> None:
    """With the status of a failure, after the summary."""
    done = run(tmp_path, HANG + """
    from tests import threads
    threads.END["hung"] = "it does not"

    def test_it():
        threading.Thread(target=in_c, name="hung").start()
    """)  # fmt: skip
    assert "1 passed" in done.stdout, done
    assert (done.returncode, "in in_c" in done.stderr) == (1, True), done


LEAVES = """
    import threading
    import pytest
    from tests import threads
    threads.LEFT_S = 0.1

    def leave(name):
        threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()
"""


def leavers(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """Of each error: what has left something, and the first thread that it left."""
    return re.findall(r"E +AssertionError: this (.*) has left \[<Thread\(([\w -]+),", done.stdout)


def test_one_that_leaves_a_thread_fails(tmp_path: pathlib.Path) -> None:
    """What a process has one of may stay; who has it already may leave no other.

    So does a file whose fixture leaves one, and one that leaves threads of Gloo's, which are not Python's: here one
    that has the name only.
    """
    done = run(tmp_path, LEAVES + """
    def test_first():
        leave("ft-timer")

    def test_second():
        leave("ft-timer")

    def test_third():
        leave("of the test")

    def test_fourth(): ...
    """, LEAVES + """
    @pytest.fixture(scope="module")
    def served():
        leave("serves")

    def test_first(served): ...

    def test_second(served): ...
    """, LEAVES + """
    import ctypes
    threads.LOOPS, threads.END["like one"] = 0, "a daemon"

    def like_one(begun):
        ctypes.CDLL(None).prctl(15, b"gloo_tcp_loop")  # PR_SET_NAME
        begun.set()
        threading.Event().wait()

    def test_it():
        begun = threading.Event()
        threading.Thread(target=like_one, args=(begun,), name="like one", daemon=True).start()
        begun.wait()
    """)  # fmt: skip
    assert done.returncode == 1
    assert "7 passed, 5 errors" in done.stdout, done
    assert leavers(done) == [("test", "ft-timer"), ("test", "of the test"), ("file", "ft-timer"), ("file", "serves")]
    assert "this file has left 1 threads of Gloo's" in done.stdout, done
