"""What groups over Gloo, here and in a child, add to the life cycle of all (test_life_cycle.py): where they listen, the
words of their errors, works that Gloo loses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.errors import CollectiveError, ConfigError, UsageError
from tests.process_group.ranks import (
    AT_ONCE_S,
    HOST_KINDS,
    Kind,
    Store,
    formed_groups,
    set_aside_lost_groups,
    wait_until,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work


pytestmark = pytest.mark.parametrize("kind", HOST_KINDS)


def pending(group: Any, numel: int = 1000) -> Work:
    return group.allreduce([torch.ones(numel)])  # type: ignore[no-any-return]


def test_constructor_refuses_what_cannot_work(kind: Kind, store: Store) -> None:
    with pytest.raises(ConfigError, match="timeout="):
        kind(timedelta(0))
    with pytest.raises(ConfigError, match="one of them"):
        kind(hostname="localhost", interface="lo")
    for wrong in (kind(interface="nosuch0"), kind(hostname="203.0.113.77")):
        with pytest.raises(ConfigError, match=r"nosuch0|203\.0\.113\.77"):
            wrong.configure(store.fresh(), "replica0", 0, 1)


def test_the_environment_chooses_the_place(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_INTERFACE", "lo")
    monkeypatch.setenv("FT_HOSTNAME", "203.0.113.77")
    group = kind()
    group.configure("", "replica0", 0, 1)
    group.shutdown()


def test_calls_out_of_order_are_refused(kind: Kind, store: Store) -> None:
    group = kind()
    with pytest.raises(UsageError, match="configure"):
        pending(group)
    group.abort()  # nothing to abort
    assert group.errored() is None
    group.shutdown()
    group.shutdown()
    with pytest.raises(UsageError, match="after shutdown"):
        group.configure(store.fresh(), "replica0", 0, 1)


def test_abort_ends_pending_work_here_and_on_peers(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 3, store) as groups:
        works = [pending(groups[0]), pending(groups[1])]
        begin = time.monotonic()
        groups[2].abort()
        for work in works:
            with pytest.raises(CollectiveError, match="allreduce on the Gloo group of 'replica"):
                work.wait()
        assert time.monotonic() - begin < AT_ONCE_S


def test_a_failure_shows_in_the_future(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 2, store) as groups:
        future = pending(groups[0]).get_future()
        groups[1].abort()
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            future.wait()
        assert wait_until(lambda: isinstance(groups[0].errored(), CollectiveError))


@pytest.mark.parametrize("by", ["wait", pytest.param("future", marks=pytest.mark.long)])
def test_an_abort_ends_work_also_where_gloo_loses_a_send(kind: Kind, store: Store, by: str) -> None:
    """Gloo's thread writing to the connection in the moment it breaks; without help one of ten waits its timeout."""

    def train(group: Any) -> float:
        try:
            while True:
                work = pending(group)
                _ = work.wait() if by == "wait" else work.get_future().wait()
        except CollectiveError:
            return time.monotonic()
        except RuntimeError:  # what a future raises is the error, but c10d may have made another type of it
            return time.monotonic()

    for turn in range(40):
        with formed_groups(kind, 2, store, timedelta(seconds=6)) as groups, ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(train, group) for group in groups]
            time.sleep(turn % 8 / 8000)  # the moment of the abort, not a synchronisation
            groups[0].abort()
            aborted_at = time.monotonic()
            ends = [futures[0].result(5)]
            if by == "future":
                groups[1].abort()  # nobody waits there, so nobody looks at the connections
            ends.append(futures[1].result(5))
            assert max(ends) - aborted_at < AT_ONCE_S
    set_aside_lost_groups()
