"""Store clients connect within their time, are reused, and can be cut off."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from ft_core.errors import ConfigError, PeerError
from ft_core.process_group import ProcessGroupGloo, create_store_client, rendezvous, socket_table, warm_store
from ft_core.process_group import store_pool as stores
from ft_core.process_group.socket_table import Endpoint
from ft_core.process_group.store_pool import parse_store_addr
from tests.process_group.ranks import Store, gloo_groups, in_threads, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.held_ports import Hold


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.StorePool]:
    mine = stores.StorePool()
    monkeypatch.setattr(stores, "pool", mine)
    yield mine
    mine.clear()


def address_of(store: Store) -> Endpoint:
    return Endpoint("127.0.0.1", store.server.port)


def test_a_client_reads_and_writes_under_its_prefix(store: Store) -> None:
    client = create_store_client(f"127.0.0.1:{store.server.port}/some/prefix", timedelta(seconds=20))
    client.set("key", "value")
    assert store.server.get("some/prefix/key") == b"value"


@pytest.mark.parametrize("wrong", ["", "host", "host/prefix", ":29500/x", "host:port/x", "host:0/x", "host:70000/x"])
def test_a_malformed_address_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="host:port/prefix"):
        create_store_client(wrong, timedelta(seconds=1))


def test_addresses_are_taken_apart() -> None:
    assert stores.parse_store_addr("[::1]:5/a/b") == (Endpoint("::1", 5), "a/b")
    assert stores.parse_store_addr("name:5") == (Endpoint("name", 5), "")
    assert stores.parse_store_addr("fdaa::2:3:29521/a/0") == (Endpoint("fdaa::2:3", 29521), "a/0"), "as others write it"


def test_nobody_there_is_told_at_once(hold: Hold) -> None:
    (port,) = hold()
    begin = time.monotonic()
    with pytest.raises(PeerError, match=f"no store answers at 127.0.0.1:{port}"):
        create_store_client(f"127.0.0.1:{port}/x", timedelta(seconds=10))
    assert time.monotonic() - begin < 1
    with pytest.raises(PeerError, match=r"nosuch\.invalid"):
        create_store_client("nosuch.invalid:1/x", timedelta(seconds=1))


def test_a_host_that_drops_packets_costs_no_more_than_the_timeout() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        filling = [socket.socket() for _ in range(3)]  # with the queue full, further SYNs are dropped
        for one in filling:
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        begin = time.monotonic()
        with pytest.raises(PeerError, match="no store answers"):
            create_store_client(f"127.0.0.1:{server.getsockname()[1]}/x", timedelta(seconds=0.3))
        assert 0.2 < time.monotonic() - begin < 1
        for one in filling:
            one.close()


def test_a_frozen_server_costs_no_more_than_the_timeout() -> None:
    """It accepts (the kernel does) and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        begin = time.monotonic()
        with pytest.raises(PeerError, match="cannot open a client"):
            create_store_client(f"127.0.0.1:{server.getsockname()[1]}/x", timedelta(seconds=0.3))
        assert 0.2 < time.monotonic() - begin < 1


def test_the_clients_socket_is_found_also_when_many_connect_at_once(store: Store) -> None:
    clients = in_threads(8, lambda _: stores.connect(address_of(store), 40))
    found = {client.fd for client in clients}
    assert None not in found
    assert len(found) == 8
    clients[0].cut()
    assert [client.is_alive() for client in clients] == [False] + [True] * 7
    for client in clients[1:]:
        client.store.set("still", "here")


def test_a_clients_socket_with_the_number_of_another_one_is_not_taken_for_a_third(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are used again at once: the client's may be one that was there before it."""
    make, address = stores._make_client, address_of(store)
    others = [socket.create_connection(address)]

    def make_once_beside_others(*arguments: Any) -> Any:
        if len(others) == 1:
            others.append(socket.create_connection(address))
            others[0].close()
        return make(*arguments)

    monkeypatch.setattr(stores, "_make_client", make_once_beside_others)
    client = stores.connect(address, 20)
    assert client.fd not in (None, others[1].fileno())
    others[1].close()
    client.cut()
    assert not client.is_alive()


def test_cutting_ends_a_blocked_call(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    client = stores.connect(address_of(store), 20)
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(client.store.get, "never set")
        begin = time.monotonic()
        while not blocked.running():
            pass
        client.cut()
        with pytest.raises(RuntimeError):
            blocked.result(5)
        assert time.monotonic() - begin < 1
    capfd.readouterr()  # c10d prints a stack trace


def test_configure_uses_a_warm_client_and_gives_it_back(store: Store, pool: stores.StorePool) -> None:
    warm_store(store.fresh(), timedelta(seconds=20), connections=2)
    assert pool.idle(address_of(store)) == 2
    warm_store(store.fresh(), timedelta(seconds=20), connections=2)
    assert pool.idle(address_of(store)) == 2
    assert repr(pool) == "StorePool(2 idle)"
    before = connected_to(store)
    with gloo_groups(2, store) as groups:
        in_threads(2, lambda rank: groups[rank].allreduce([torch.ones(1)]).wait())
        assert pool.idle(address_of(store)) == 2
    assert connected_to(store) == before


def connected_to(store: Store) -> int:
    return sum(1 for _ in socket_table.connections(lambda connection: connection.peer.port == store.server.port))


def test_a_client_has_its_takers_timeout(store: Store, pool: stores.StorePool) -> None:
    """One that somebody in a hurry has opened would fail the next group that forms."""

    def timeout_s(client: stores.StoreClient) -> float:
        return float(client.store.timeout.total_seconds())  # type: ignore[attr-defined]  # not in torch's stub

    hurried = pool.take(address_of(store), 0.25)
    assert timeout_s(hurried) == 0.25
    pool.give_back(hurried)
    assert pool.take(address_of(store), 20) is hurried
    assert timeout_s(hurried) == 20
    pool.give_back(hurried)
    assert timeout_s(pool.take(address_of(store), -1)) == stores.MIN_TIMEOUT_S


def test_a_dead_idle_client_is_not_used(pool: stores.StorePool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = Endpoint("127.0.0.1", server.port)
    warm_store(f"{address}/x", timedelta(seconds=20))
    idle = pool.take(address, 20)
    pool.give_back(idle)
    idle.cut()
    fresh = pool.take(address, 20)
    assert fresh is not idle
    assert fresh.is_alive()
    pool.give_back(idle)
    assert pool.idle(address) == 0


def test_the_connections_to_a_store_that_has_ended_are_closed_with_the_next_one_that_is_given_back(
    store: Store, pool: stores.StorePool
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = Endpoint("127.0.0.1", server.port)
    warm_store(f"{address}/x", timedelta(seconds=20), connections=2)
    warm_store(store.fresh(), timedelta(seconds=20))
    living = pool.take(address_of(store), 20)
    del server
    assert wait_until(lambda: not any(client.is_alive() for client in pool._idle.values()))
    assert pool.idle(address) == 2
    pool.give_back(living)
    assert (pool.idle(address), pool.idle(address_of(store))) == (0, 1)
    assert not any(socket_table.connections(lambda connection: connection.peer == address))


def test_the_pool_is_bounded(store: Store, pool: stores.StorePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_IDLE", 2)
    clients = [stores.connect(address_of(store), 20) for _ in range(3)]
    for client in clients:
        pool.give_back(client)
    assert pool.idle(address_of(store)) == 2
    assert pool.take(address_of(store), 5) is clients[2]


def test_records_of_ended_groups_are_deleted(store: Store) -> None:
    """A store may outlive thousands of quorums; what it holds must not grow with them."""
    groups = [ProcessGroupGloo(timedelta(seconds=20)) for _ in range(3)]

    def quorum(size: int) -> int:
        address = store.fresh()
        in_threads(size, lambda rank: groups[rank].configure(address, f"replica{rank}", rank, size))
        return int(store.server.num_keys())

    nothing = store.server.num_keys()
    first = quorum(3)
    assert first == nothing, "who reads them last deletes them"
    assert quorum(3) == first
    assert [quorum(3) for _ in range(10)] == [first] * 10
    # One that did not form: rank 0 and 1 wrote their records, rank 2 never came.
    address = store.fresh()
    with ThreadPoolExecutor(2) as threads:
        forming = [threads.submit(groups[rank].configure, address, "r", rank, 3) for rank in range(2)]
        assert wait_until(lambda: store.server.add(f"{parse_store_addr(address)[1]}/count", 0) == 2)
        groups[0].abort()
        groups[1].abort()
        for one in forming:
            with pytest.raises(PeerError):
                one.result(10)
    assert quorum(3) == first
    for group in groups:
        group.shutdown()
    groups = [ProcessGroupGloo(timedelta(seconds=20)) for _ in range(3)]
    assert quorum(3) == first  # those of a group that was shut down, too
    for group in groups:
        group.shutdown()


def test_what_waits_to_be_deleted_is_bounded() -> None:
    left = rendezvous.LeftRecords()
    here, elsewhere = Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2)
    for number in range(2 * rendezvous.MAX_LEFT):
        left.add(elsewhere, str(number))
    left.add(here, "mine")
    assert repr(left) == f"LeftRecords({rendezvous.MAX_LEFT} groups)"
    held = HashStore()
    for key in ("mine/records", "mine/count", "other"):
        held.set(key, "x")
    left.delete(here, held)
    assert held.num_keys() == 1
    assert repr(left) == f"LeftRecords({rendezvous.MAX_LEFT - 1} groups)"
