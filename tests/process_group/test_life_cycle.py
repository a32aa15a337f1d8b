"""The life cycle that every kind of group has: forming, aborting, failing, forming again. Gloo's own: test_gloo.py,
test_contract.py; devices': test_device_groups.py.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core.errors import CollectiveError, ConfigError, UsageError
from ft_core.process_group.device import incarnation as device
from ft_core.process_group.gloo import incarnation as gloo
from tests.process_group.ranks import (
    ALL_KINDS,
    AT_ONCE_S,
    GROUP_TIMEOUT,
    KINDS,
    Store,
    configure_all,
    group_of,
    groups_of,
    in_threads,
    nothing_is_left,
    wait_until,
)

if TYPE_CHECKING:
    from torch.distributed import Work

    from ft_core.process_group import ProcessGroup


@pytest.fixture(params=ALL_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pending(group: ProcessGroup, numel: int = 1000) -> Work:
    return group.allreduce([torch.ones(numel)])


def test_a_group_of_one_needs_no_store(kind: str) -> None:
    group = group_of(kind)
    group.configure("nowhere.invalid:1/x", "replica0", 0, 1)
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
    assert (group.rank(), group.size()) == (0, 1)
    group.shutdown()


@pytest.mark.parametrize(
    ("store_addr", "rank", "world_size", "complaint"),
    [
        ("127.0.0.1:1/x", 2, 2, "rank=2, world_size=2"),
        ("127.0.0.1:1/x", -1, 2, "rank=-1"),
        ("127.0.0.1:1/x", 0, 0, "world_size=0"),
        ("127.0.0.1/x", 0, 2, "host:port/prefix"),
        ("127.0.0.1:x/x", 0, 2, "host:port/prefix"),
        ("127.0.0.1:99999/x", 0, 2, "host:port/prefix"),
    ],
)
def test_configure_refuses_what_cannot_work(
    kind: str, store_addr: str, rank: int, world_size: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        group_of(kind).configure(store_addr, "replica0", rank, world_size)


def test_after_an_abort_collectives_raise_until_configured_again(store: Store, kind: str) -> None:
    with groups_of(kind, 2, store) as groups:
        work = pending(groups[0])
        groups[0].abort()
        groups[0].abort()
        assert isinstance(groups[0].errored(), CollectiveError)
        with pytest.raises(CollectiveError, match=r"abort\(\) was called"):
            pending(groups[0])
        with pytest.raises(CollectiveError):
            groups[0].barrier()
        configure_all(groups, store.fresh())
        assert [group.errored() for group in groups] == [None, None]
        with pytest.raises(CollectiveError):
            work.wait()  # of the group before: it stays failed, and does not touch the new one
        assert [group.errored() for group in groups] == [None, None]
        in_threads(2, lambda rank: pending(groups[rank]).wait())


def test_a_failure_nobody_waited_for_shows_in_errored(store: Store, kind: str) -> None:
    with groups_of(kind, 2, store) as groups:
        work = pending(groups[0])
        groups[1].abort()
        assert wait_until(lambda: groups[0].errored() is not None)
        assert wait_until(work.is_completed)
        assert isinstance(work.exception(), CollectiveError)
        assert not work.is_success()
        assert "failed" in repr(work)


def test_point_to_point_failures_are_errors_of_the_group(store: Store, kind: str) -> None:
    with groups_of(kind, 2, store) as groups:
        work = groups[0].recv([torch.zeros(2)], 1)
        groups[1].abort()
        with pytest.raises(CollectiveError, match=r"recv|a collective on" if kind == "nccl" else "recv"):
            work.wait()
        assert isinstance(groups[0].errored(), CollectiveError)


def test_collectives_time_out_after_set_timeout(store: Store, kind: str) -> None:
    with groups_of(kind, 2, store) as groups:
        groups[0].set_timeout(timedelta(milliseconds=50))
        begin = time.monotonic()
        with pytest.raises(CollectiveError, match=r"(?i)timed out"):
            pending(groups[0]).wait()
        assert 0.04 < time.monotonic() - begin < AT_ONCE_S
        with pytest.raises(CollectiveError):
            pending(groups[1]).wait()  # learns of it
        assert time.monotonic() - begin < AT_ONCE_S


def test_a_wait_that_runs_out_of_its_own_time_breaks_nothing(store: Store, kind: str) -> None:
    with groups_of(kind, 2, store) as groups:
        work = pending(groups[0])
        with pytest.raises(CollectiveError):
            work.wait(timedelta(milliseconds=10))
        assert groups[0].errored() is None
        pending(groups[1]).wait()
        assert work.wait()


def test_abort_ends_a_configure_that_waits_for_a_rank(store: Store, kind: str) -> None:
    group = group_of(kind)
    address = store.fresh()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(group.configure, address, "replica0", 0, 2)
        assert wait_until(lambda: store.server.check([f"{address.partition('/')[2]}/records"]))
        begin = time.monotonic()
        group.abort()
        with pytest.raises(CollectiveError, match=r"abort\(\) was called"):
            future.result(5)
        assert time.monotonic() - begin < AT_ONCE_S
    with pytest.raises(CollectiveError):
        pending(group)
    others = [group, group_of(kind)]
    configure_all(others, store.fresh())
    in_threads(2, lambda rank: pending(others[rank]).wait())
    for each in others:
        each.shutdown()
    assert nothing_is_left()


@pytest.mark.parametrize("end", ["configure", "shutdown"])
def test_a_later_call_wins_over_a_configure_in_progress(store: Store, kind: str, end: str) -> None:
    group = group_of(kind)
    address = store.fresh()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(group.configure, address, "replica0", 0, 2)
        assert wait_until(lambda: store.server.check([f"{address.partition('/')[2]}/records"]))
        if end == "configure":
            group.configure("", "replica0", 0, 1)
        else:
            group.shutdown()
        with pytest.raises(CollectiveError, match=rf"{end}\(\) was called"):
            future.result(5)
    if end == "configure":
        pending(group).wait()
    group.shutdown()


def test_ranks_that_do_not_agree_are_told(store: Store, kind: str) -> None:
    address = store.fresh()
    groups = [group_of(kind) for _ in range(2)]

    def configure(rank: int) -> str:
        try:
            groups[rank].configure(address, f"replica{rank}", rank, 2 + rank)
        except CollectiveError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(configure, rank) for rank in range(2)]
        assert "configures a group of 3 ranks" in futures[0].result(5)
        groups[1].abort()  # waits for a third
        futures[1].result(5)


def test_garbage_in_the_store_is_told(store: Store, kind: str) -> None:
    address = store.fresh()
    store.server.set(f"{address.partition('/')[2]}/records", "garbage")
    with pytest.raises(CollectiveError, match="not our records"):
        group_of(kind).configure(address, "replica0", 0, 2)


def test_forming_times_out_and_says_for_what(store: Store, kind: str) -> None:
    group = group_of(kind, timedelta(seconds=1))
    begin = time.monotonic()
    with pytest.raises(CollectiveError, match="did not form in time: rank 1 did not come"):
        group.configure(store.fresh(), "replica0", 0, 2)
    assert 1.0 <= time.monotonic() - begin < 1.0 + AT_ONCE_S  # every other limit of forming is 5 s or more
    group.shutdown()


def test_threads_that_abort_and_configure_at_once_do_no_harm(
    store: Store, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything against everything; ends usable. Fewer turns than groups that may be stuck forming (MAX_FORMING).

    Short limits: constructors that are abandoned, and works that Gloo loses (test_gloo.py), last until theirs.
    """
    monkeypatch.setattr(gloo, "MAX_CONNECT_S", 0.5)
    groups = [group_of(kind, timedelta(seconds=2)) for _ in range(2)]
    stop = threading.Event()

    def disturb(rank: int) -> None:
        while not stop.wait(random.random() / 50):
            groups[rank].abort()

    def train(address: str, rank: int) -> None:
        try:
            groups[rank].configure(address, f"replica{rank}", rank, 2)
            for _ in range(20):
                pending(groups[rank]).wait()
        except (CollectiveError, UsageError):
            groups[rank].abort()

    disturbers = [threading.Thread(target=disturb, args=(rank,)) for rank in range(2)]
    for thread in disturbers:
        thread.start()
    for _ in range(20):
        in_threads(2, partial(train, store.fresh()))
    stop.set()
    for thread in disturbers:
        thread.join()
    monkeypatch.undo()
    for group in groups:
        group.set_timeout(GROUP_TIMEOUT)
    configure_all(groups, store.fresh())
    in_threads(2, lambda rank: pending(groups[rank]).wait())
    for group in groups:
        group.shutdown()
    assert nothing_is_left()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_formed_while_the_process_exits(store: Store, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is about to form when the interpreter ends would abort the process from inside Gloo."""
    monkeypatch.setattr(gloo if kind == "gloo" else device, "_exiting", True)
    before = set(threading.enumerate())
    group = group_of(kind, timedelta(seconds=5))
    with pytest.raises(CollectiveError, match="the process is exiting"):
        group.configure(store.fresh(), "replica0", 0, 2)
    assert not [
        t for t in set(threading.enumerate()) - before if t.name == f"ft-{'gloo' if kind == 'gloo' else 'device'}-form"
    ]
