"""Which peers a rank can connect to, on real sockets; and two of three replicas that are cut off from each other."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ft_core.protocol.rank import events as on
from ft_core.protocol.types import Member, Quorum, Version
from ft_core.runtime import peer_links
from ft_core.runtime.collective_limits import CollectiveLimits
from ft_core.runtime.collective_timeout import Watchdog
from ft_core.runtime.peer_links import Links

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from tests.held_ports import Hold


def quorum(**ports: int) -> Quorum:
    """A quorum whose members have their state servers at these ports."""
    return Quorum(
        1,
        tuple(
            Member(name, Version(0, 0), 1, heal_addresses=(f"http://127.0.0.1:{port}",) if port else ("",))
            for name, port in sorted(ports.items())
        ),
    )


@contextlib.contextmanager
def listener(backlog: int = 8) -> Iterator[int]:
    """A port at which somebody listens and nobody accepts."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)
        yield server.getsockname()[1]


@contextlib.contextmanager
def silence() -> Iterator[int]:
    """A port that answers no handshake, as behind a broken link: its queue is full, the kernel drops what comes."""
    with listener(0) as port, contextlib.ExitStack() as held:
        for _ in range(4):
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield port


def test_who_answers_a_handshake_is_reached_and_who_is_silent_is_told_from_who_refuses(hold: Hold) -> None:
    links = Links()
    with listener() as up, silence() as cut:
        links.entered(quorum(me=1, up=up, cut=cut, dead=hold()[0], nowhere=0), "me", 0)
        started = time.monotonic()
        assert links.probe(0.3) == ("cut",)
        assert time.monotonic() - started < 2.0
        assert links.statement == (("cut", "dead"), ("up",))
    assert repr(links) == "Links(3 peers, unreachable: cut, dead)"


def test_a_frozen_peer_is_reached() -> None:
    """Its kernel answers; nobody accepts here either."""
    links = Links()
    with listener() as port:
        links.entered(quorum(me=1, frozen=port), "me", 0)
        assert links.probe(0.3) == ()
        assert links.statement == ((), ("frozen",))


def test_a_new_quorum_begins_with_nothing_known_but_who_was_cut_off_is_looked_at_still() -> None:
    links = Links()
    with silence() as cut, listener() as up:
        links.entered(quorum(me=1, cut=cut), "me", 0)
        links.probe(0.2)
        links.entered(quorum(me=1, up=up), "me", 0)
        assert repr(links) == "Links(2 peers, unreachable: none)"
        links.probe(0.2)
        assert links.statement == (("cut",), ("up",))


def test_what_is_found_while_the_next_quorum_forms_is_told_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reaches everybody has looked at once, breaks the quorum, and all are in the next one before others know."""
    links = Links()
    look = peer_links._connect_all

    def forms_meanwhile(peers: dict[str, tuple[str, int]], timeout_s: float) -> Any:
        found = look(peers, timeout_s)
        links.entered(quorum(me=1, cut=cut, up=up, moved=cut), "me", 0)
        return found

    monkeypatch.setattr(peer_links, "_connect_all", forms_meanwhile)
    with silence() as cut, listener() as up, listener() as moved:
        links.entered(quorum(me=1, cut=cut, up=up, moved=moved), "me", 0)
        assert links.probe(0.2) == ("cut",)
        assert links.statement == (("cut",), ("up",))


def test_a_wait_that_has_ended_while_the_network_was_looked_at_ends_no_later_quorum() -> None:
    said: list[on.Event] = []
    place: Any = SimpleNamespace(quorum_id=7, aborted=0)

    def enters_the_next(_: float) -> tuple[str, ...]:
        place.quorum_id = 8
        return ()

    place.abort = lambda quorum_id: vars(place).update(aborted=quorum_id)
    rank: Any = SimpleNamespace(overdue=lambda *_: None, settings=SimpleNamespace(replica_id="a"))
    links: Any = SimpleNamespace(probe=enters_the_next, statement=((), ()))
    works: Any = SimpleNamespace(all_ended=lambda: False)
    limits = CollectiveLimits(rank, threading.RLock(), place, works, links, said.append, 6.0)
    assert limits._overdue() is None
    assert [event.quorum_id for event in said if isinstance(event, on.CollectiveFailed)] == [7]
    assert place.aborted == 7


def test_the_watchdog_looks_into_a_long_wait_before_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_core.runtime.collective_timeout.IDLE_S", 0.05)
    looked, fired = threading.Event(), threading.Event()
    watchdog = Watchdog("me", fired.set, looked.set)
    try:
        watchdog.start()
        watchdog.arm(time.monotonic() + 60.0)
        assert looked.wait(5.0)
        assert not fired.is_set()
    finally:
        watchdog.stop()


def test_a_process_without_descriptors_claims_nothing_about_its_peers() -> None:
    links = Links()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listener() as port:
        links.entered(quorum(a=0, b=port), "a", 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert links.probe() == ()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [links.statement] == [((), ())]  # mypy would take it for its type from here on
        links.probe()
        assert links.statement == ((), ("b",))
