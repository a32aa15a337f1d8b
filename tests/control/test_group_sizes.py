"""Replica groups with different numbers of ranks: a clear error before training."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import TCPStore

from ft_core import Manager, ProcessGroupGloo
from ft_core.errors import RefusedError

if TYPE_CHECKING:
    from ft_core.control.lighthouse.server import LighthouseServer


def test_all_ranks_of_a_group_of_another_size_are_told_so(lighthouse: LighthouseServer) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(name: str, **group: Any) -> Manager:
        return Manager(
            ProcessGroupGloo(hostname="127.0.0.1"), lambda _: None, dict, lighthouse_addr=lighthouse.address(),
            replica_id=name, hostname="127.0.0.1", timeout=timedelta(seconds=10), exit_on_drain=False, **group,
        )  # fmt: skip

    def rank_of_b(number: int) -> None:
        manager = make("b", rank=number, world_size=2, store_addr="127.0.0.1", store_port=store.port)
        try:  # rank 1 may have met rank 0 before that one was refused
            manager.start_quorum()
        finally:
            manager.shutdown()

    first = make("a")
    try:
        first.start_quorum()
        assert first.should_commit()
        with ThreadPoolExecutor(2) as threads:
            ranks = [threads.submit(rank_of_b, number) for number in range(2)]
        for rank in ranks:
            assert isinstance(rank.exception(), RefusedError), rank
            assert re.search(r"has 2 ranks, but a:\w+ has 1: .*Start b:\w+ with 1 rank;", str(rank.exception()))
        first.start_quorum()
        assert first.should_commit(), "who was there trains on"
    finally:
        first.shutdown()
