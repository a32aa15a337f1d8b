"""Abort and at-fork closing hit the sockets of one group, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core.errors import CollectiveError, UsageError
from ft_core.process_group import ProcessGroupGloo, create_store_client, fork_safety, socket_table
from ft_core.process_group import reaper as reaping
from ft_core.process_group.socket_table import Connection, Endpoint
from tests.process_group import ranks
from tests.process_group.ranks import Store, configure_all, gloo_groups, in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


def still_connected(pair: tuple[socket.socket, socket.socket]) -> bool:
    for sender, receiver in (pair, pair[::-1]):
        sender.sendall(b"x")
        if receiver.recv(1) != b"x":
            return False
    return True


def allreduce_all(groups: list[ProcessGroupGloo]) -> None:
    in_threads(len(groups), lambda rank: groups[rank].allreduce([torch.ones(1000)]).wait())


def test_abort_leaves_everything_else_alone(store: Store, tcp_pair: tuple[socket.socket, socket.socket]) -> None:
    local = socket.socketpair()
    client = create_store_client(store.fresh(), timedelta(seconds=5))
    client.set("key", "value")
    with gloo_groups(3, store) as kept, gloo_groups(3, store) as aborted:
        for group in aborted:
            group.abort()
        allreduce_all(kept)
    assert still_connected(tcp_pair)
    assert still_connected(local)
    assert client.get("key") == b"value"
    for end in local:
        end.close()
    with gloo_groups(2, store):  # the store's server still accepts
        pass


def test_aborts_while_other_threads_form_groups_and_open_sockets(store: Store) -> None:
    """Every other thread's groups and connections must survive a thread that forms and aborts all the time."""
    stop = threading.Event()
    aborted = 0

    def form_and_abort() -> None:
        nonlocal aborted
        while not stop.is_set():
            with gloo_groups(2, store) as groups:
                for group in groups:
                    group.abort()
            aborted += 1

    def form_and_use() -> None:
        for _ in range(10):
            with gloo_groups(2, store) as groups:
                allreduce_all(groups)

    def connect_and_use() -> None:
        for _ in range(200):
            with socket.create_server(("127.0.0.1", 0)) as server:
                client = socket.create_connection(server.getsockname())
                accepted, _ = server.accept()
                with client, accepted:
                    assert still_connected((client, accepted))

    aborter = threading.Thread(target=form_and_abort)
    aborter.start()
    try:
        in_threads(3, lambda index: (form_and_use, form_and_use, connect_and_use)[index]())
    finally:
        stop.set()
        aborter.join()
    assert aborted > 0


def test_shut_down_never_touches_a_listening_socket(tcp_pair: tuple[socket.socket, socket.socket]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = Endpoint(*server.getsockname())
        client = socket.create_connection(place)
        accepted, _ = server.accept()
        assert socket_table.shut_down(lambda connection: connection.local == place) == 1
        assert client.recv(1) == b""
        client.close()
        accepted.close()
        with socket.create_connection(place):
            server.accept()[0].close()
    assert still_connected(tcp_pair)


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_addresses_are_read_right(host: str, family: socket.AddressFamily) -> None:
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        place = Endpoint(host, server.getsockname()[1])
        assert socket_table.connection_of(client.fileno()) == Connection(Endpoint(*client.getsockname()[:2]), place)
        assert socket_table.connection_of(server.fileno()) is None
        assert (server.fileno(), place) in list(socket_table.listeners())
        assert place.is_loopback
        assert socket_table.fds_on_port(place.port) == [server.fileno()]
    assert str(Endpoint("::1", 5)) == "[::1]:5"
    assert str(Endpoint("10.0.0.1", 5)) == "10.0.0.1:5"


def test_a_server_holds_no_connection_that_only_has_its_port() -> None:
    """At another address: the kernel may give one that this process opens the number of a server of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        same_port = socket.create_connection(other.getsockname(), source_address=("127.0.0.2", port))
        with same_port, socket.create_connection(server.getsockname()):
            accepted, _ = server.accept()
            with accepted:
                assert sorted(socket_table.fds_on_port(port)) == sorted([server.fileno(), accepted.fileno()])
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            with accepted:
                assert accepted.fileno() in socket_table.fds_on_port(port)


def test_a_default_timeout_of_the_user_does_not_change_anyones_blocking_mode(store: Store) -> None:
    socket.setdefaulttimeout(5)
    try:
        reader, writer = os.pipe()
        plain = socket.socketpair()
        for end in plain:
            end.setblocking(True)
        with gloo_groups(2, store) as groups:
            groups[0].abort()
        assert [os.get_blocking(end.fileno()) for end in plain] == [True, True]
        os.close(reader)
        os.close(writer)
        for end in plain:
            end.close()
    finally:
        socket.setdefaulttimeout(None)


# ---------------------------------------------------------------------------------------------------------------- fork


def report_from_child(names: list[str]) -> dict[str, str]:
    """In a worker: fork, and return what the child saw."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        lines = []
        for name in names:
            group = ranks._groups[name]
            assert group._incarnation is not None
            try:
                group.allreduce([torch.ones(1)])
            except CollectiveError as error:
                lines.append(f"{name}={'forked' in str(error)}")
        lines.append(f"connections={sum(1 for _ in socket_table.connections(lambda _: True))}")
        lines.append(f"listeners={sum(1 for _ in socket_table.listeners())}")
        os.write(writer, ";".join(lines).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return dict(part.split("=") for part in answer.split(";"))


@pytest.mark.process
def test_a_forked_child_has_none_of_the_sockets_and_the_parent_all(store: Store) -> None:
    with ranks.workers(2) as members:
        for name in ("one", "two"):
            address = store.fresh()
            ranks.configure_workers(members, name, address)
        seen = members[0].call(report_from_child, ["one", "two"])
        assert seen == {"one": "True", "two": "True", "connections": "0", "listeners": "0"}
        for name in ("one", "two"):
            assert [member.answer() for member in ranks.start_all(members, ranks.allreduce, name)] == [2.0] * 2


def child_drops_the_works_of(name: str) -> int:
    """In a worker whose group was destroyed: fork; the status of a child that starts threads and drops old works."""
    ranks._groups.pop(name).shutdown()
    assert reaping.gloo.wait_empty(10.0)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # it may also wait for ever
        end = threading.Event()
        for _ in range(4):  # they take over the stacks of the threads that are not here
            threading.Thread(target=end.wait, daemon=True).start()
        ranks._works.clear()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.process
def test_a_forked_child_can_drop_works_of_a_group_that_was_destroyed(store: Store) -> None:
    """A DataLoader worker that is started while another group is lost."""
    with ranks.workers(2) as members:
        ranks.configure_workers(members, "lost", store.fresh())
        for member in members:
            member.start(ranks.launch, "lost")
        for member in members:
            member.answer()
        for member in members:
            member.call(ranks.wait_for_failure, "lost")
        assert members[0].call(child_drops_the_works_of, "lost") == 0


def server_in_child() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        take_back = fork_safety.close_in_child(lambda: socket_table.fds_on_port(port))
        first = report_from_child([])
        take_back()
        second = report_from_child([])
        return first["listeners"] + second["listeners"]


@pytest.mark.process
def test_other_modules_can_have_their_sockets_closed_too() -> None:
    with ranks.workers(1) as members:
        assert members[0].call(server_in_child) == "01"


def test_providers_are_held_weakly_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def fds(self) -> list[int]:
            return []

    monkeypatch.setattr(fork_safety, "_providers", {})
    owner = Owner()
    fork_safety.close_in_child(owner.fds)
    assert len(fork_safety._providers) == 1
    del owner
    assert len(fork_safety._providers) == 0
    monkeypatch.setattr(fork_safety, "MAX_PROVIDERS", 2)
    for _ in range(2):
        fork_safety.close_in_child(list)
    with pytest.raises(UsageError, match="more than 2 providers"):
        fork_safety.close_in_child(list)


def test_sockets_are_not_inherited_by_started_programs(store: Store) -> None:
    groups = [ProcessGroupGloo() for _ in range(2)]
    configure_all(groups, store.fresh())
    incarnation = groups[0]._incarnation
    assert incarnation is not None
    fds = list(incarnation.connections.fds())
    assert len(fds) >= 2
    assert not any(os.get_inheritable(fd) for fd in fds)
    for group in groups:
        group.shutdown()
