"""A death is known early also in a container's surroundings: other PID namespaces, no /proc, a read-only one."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from ft_core.launch.processes.keeper import Keeper
from ft_core.witness import robust_mutex
from tests.witness.test_death_notice import Watched, until

if TYPE_CHECKING:
    from collections.abc import Iterator


def namespaces() -> bool:
    """This user may make PID and mount namespaces, and there is `unshare`."""
    try:
        done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


pytestmark = [
    pytest.mark.process, pytest.mark.timeout(60),
    pytest.mark.skipif(not robust_mutex.SUPPORTED, reason="no robust mutexes here"),
    pytest.mark.skipif(not namespaces(), reason="this user may make no namespaces"),
]  # fmt: skip


@pytest.fixture
def keeper(tmp_path: pathlib.Path) -> Iterator[Keeper]:
    """A witness of another PID namespace than the subject's."""
    keeper = Keeper(str(tmp_path))
    try:
        yield keeper
    finally:
        keeper.close()


def only_child(pid: int) -> int:
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    until(lambda: bool(path.read_text()), "a child")
    return int(path.read_text().split()[0])


def test_a_witness_in_another_pid_namespace(keeper: Keeper) -> None:
    """No number of a process means anything to it: it is given files of /proc that mean the right one."""
    watched = Watched("unshare", "--pid", "--fork", "--mount-proc", FT_WITNESS=keeper.witness_address)
    try:
        watched.do("hold", "linked")
        threads = pathlib.Path(f"/proc/{keeper.process.pid}/task")
        until(lambda: len(list(threads.iterdir())) == 3, "a thread of the keeper that waits")
        watched.do("fork")
        assert not watched.ends_within(0.2)
        os.kill(only_child(watched.process.pid), signal.SIGKILL)
        assert watched.ends_within(5.0)
    finally:
        watched.close()


@pytest.mark.parametrize("how", ["umount -l /proc", "mount -o remount,ro /proc"], ids=["none", "read-only"])
def test_a_process_without_a_proc_of_its_own(keeper: Keeper, how: str) -> None:
    script = f'{how} && exec "$@"'
    watched = Watched("unshare", "--mount", "sh", "-c", script, "sh", FT_WITNESS=keeper.witness_address)
    try:
        watched.do("hold", "linked")
        threads = pathlib.Path(f"/proc/{keeper.process.pid}/task")
        until(lambda: len(list(threads.iterdir())) == 3, "a thread of the keeper that waits")
        watched.process.kill()
        assert watched.ends_within(5.0)
    finally:
        watched.close()
