"""Managers made one after the other in the processes of a group of several ranks: the ranks of each meet."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore

from ft_core import Manager, ProcessGroupGloo

if TYPE_CHECKING:
    from ft_core.control.lighthouse.server import LighthouseServer

LIMIT_S = 20.0


def test_the_second_one_does_not_find_the_first(lighthouse: LighthouseServer) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    commits: list[tuple[int, str, bool]] = []
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            for nth in range(2):
                manager = Manager(
                    ProcessGroupGloo(hostname="127.0.0.1"), lambda _: None, dict, rank=number, world_size=2,
                    store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse.address(),
                    replica_id="g", hostname="127.0.0.1", timeout=timedelta(seconds=10), exit_on_drain=False,
                )  # fmt: skip
                try:
                    manager.start_quorum(room_id=f"fit-{nth}")
                    commits.append((nth, manager.replica_id, manager.should_commit()))
                    manager.leave("done", finished=True)
                finally:
                    manager.shutdown()
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert errors == []
    assert all(commit for _, _, commit in commits)
    assert [len({name for nth, name, _ in commits if nth == n}) for n in range(2)] == [1, 1]
    assert len(commits) == 4
