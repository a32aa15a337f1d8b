"""A pair of lighthouse servers in one process: who serves, what clients are told, what goes from one to the other."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.control.lighthouse.cli import main
from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.control.lighthouse.partner_link import PartnerLink
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError, LighthouseError
from ft_core.protocol.lighthouse.pair import Report, Role
from ft_core.protocol.lighthouse.partner import Proposal, Told
from ft_core.protocol.types import Basis, Version
from ft_core.rpc import codec
from tests.control.recorder import wait_until
from tests.held_ports import HeldPorts

if TYPE_CHECKING:
    from collections.abc import Iterator


class Two:
    """A pair of lighthouses that can be ended and started again."""

    def __init__(self, **settings: Any) -> None:
        self._held = HeldPorts(2)
        self.addresses = [f"127.0.0.1:{port}" for port in self._held.numbers]
        self.settings: dict[str, Any] = {"liveness_ms": 1000, "token": ""} | settings
        self.servers: list[LighthouseServer | None] = [None, None]

    def begin(self, index: int, **more: Any) -> LighthouseServer:
        there = self.addresses[1 - index]
        server = LighthouseServer(self.addresses[index], **({"peer": there} | self.settings | more))
        self.servers[index] = server
        return server

    def end(self, index: int) -> None:
        server, self.servers[index] = self.servers[index], None
        assert server is not None
        server.shutdown()

    def close(self) -> None:
        """End what still runs."""
        for server in self.servers:
            if server is not None:
                server.shutdown()
        self._held.close()

    def serving(self) -> list[int]:
        """Which of them serve."""
        return [i for i, s in enumerate(self.servers) if s is not None and (p := s._partner) is not None and p.serves]

    def settled(self) -> int:
        """Wait until one serves and the other one stands by; returns which serves."""
        wait_until(lambda: len(self.serving()) == 1 and self.in_contact())
        return self.serving()[0]

    def in_contact(self) -> bool:
        links = [s._partner for s in self.servers if s is not None]
        return len(links) == 2 and all(link is not None and link._pair.contact for link in links)


@pytest.fixture
def two() -> Iterator[Two]:
    pair = Two()
    yield pair
    pair.close()


def client(address: str) -> LighthouseClient:
    return LighthouseClient(address, connect_timeout=timedelta(seconds=5))


def test_one_serves_and_the_other_says_who_does(two: Two) -> None:
    two.begin(0), two.begin(1)
    index = two.settled()
    assert client(two.addresses[index]).status is not None
    with pytest.raises(LighthouseError, match=r"standby: .* is active"):
        client(two.addresses[1 - index]).heartbeat("a", timeout=timedelta(seconds=1))


def test_the_other_one_takes_over_and_the_first_stands_by_when_it_is_back(two: Two) -> None:
    two.begin(0), two.begin(1)
    index = two.settled()
    two.end(index)
    wait_until(lambda: two.serving() == [1 - index])
    two.begin(index)
    assert two.settled() == 1 - index


def test_one_alone_serves_after_a_second_and_knows_that_it_was_not_told(two: Two) -> None:
    server = two.begin(0)
    wait_until(lambda: two.serving() == [0])
    assert server._partner is not None
    assert not server._partner._pair.partner.informed
    two.begin(1)
    assert two.settled() == 0
    wait_until(lambda: server._partner is not None and server._partner._pair.partner.informed)


def test_a_partner_that_knows_of_no_pair_is_said(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    two.begin(0)
    with caplog.at_level(logging.WARNING, "ft_core.lighthouse"):
        two.begin(1, peer="")
        wait_until(lambda: "start it with --peer" in caplog.text)


def test_a_wrong_token_is_said(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ft_core.lighthouse"):
        two.begin(0, token="one")
        two.begin(1, token="other")
        wait_until(lambda: "refuses this one: FT_TOKEN differs" in caplog.text)


def test_a_connection_that_ended_while_this_one_was_frozen_is_no_refusal(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes before it has read that the connection has ended, and gRPC's words for that explain nothing."""
    first = two.begin(0)
    two.begin(1)
    two.settled()
    frozen, thawed = threading.Event(), threading.Event()

    def freeze() -> None:
        frozen.set()
        assert thawed.wait(20)
        assert first._partner is not None
        first._partner._report(complete=True)

    caplog.clear()
    first._server.post(freeze)
    assert frozen.wait(20)
    two.end(1)
    thawed.set()
    wait_until(lambda: bool(caplog.records))
    said = f"the other lighthouse, {two.addresses[1]}, cannot be reached: the connection ended while a report"
    assert caplog.messages[0].startswith(said)


@pytest.mark.parametrize("where", ["_report", "_converse", "_act", "_perform"])
def test_a_mistake_of_ours_is_said_and_the_connection_is_opened_again(
    two: Two, where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its tasks ends silently: a lighthouse that dials or reports no more looks to the other one as if it were
    gone."""
    failing = [True]
    works = getattr(PartnerLink, where)

    def fails(self: PartnerLink, *arguments: Any, **more: Any) -> Any:
        if failing and self.address == two.addresses[1]:
            raise ValueError("a mistake of ours")
        return works(self, *arguments, **more)

    monkeypatch.setattr(PartnerLink, where, fails)
    two.begin(0), two.begin(1)
    wait_until(lambda: "a mistake of this lighthouse's own, in its connection to" in caplog.text)
    assert "ValueError: a mistake of ours" in caplog.text, "with its stack"
    failing.clear()
    two.settled()
    caplog.clear()  # the stacks hold what gRPC waits for at its end


@pytest.mark.parametrize(
    ("bind", "peer", "says"),
    [
        ("127.0.0.1:0", "127.0.0.1:29510", "bind to one that is not 0"),
        ("127.0.0.1:29599", "127.0.0.1:29599", "is this lighthouse itself"),
        ("127.0.0.1:29599", "nowhere", "host:port"),
        ("127.0.0.1:29599", "https://other:29510", "FT_TLS_CA"),
    ],
)
def test_a_peer_that_cannot_be_is_an_error(bind: str, peer: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=says):
        LighthouseServer(bind, peer=peer, token="")
    assert main(["--bind", bind, "--peer", peer]) == 2
    assert "--peer" in capsys.readouterr().err


def test_a_report_travels_as_it_is() -> None:
    basis = Basis(5 << 32 | 1, ("a:1", "b:1"))
    told = Told(
        "job", 5 << 32 | 2, ("a:1",), True, (basis,), 7, "it is over", Version(7, 5 << 32 | 1), (3, 4), 5 << 32 | 1,
        900.0, (basis,),
    )  # fmt: skip
    proposal = Proposal("job", 9, ("a:1",), (basis,), (1, 2), True, float("inf"), 3, 5 << 32 | 1)
    report = Report(2**64 - 1, Role.STANDBY, 7, True, 12, (told,), True, (proposal,), ((9, True), (10, False)))
    assert codec.decode_report(codec.encode_report(report, "0.1.0")) == report
