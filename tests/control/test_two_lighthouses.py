"""Clients of two lighthouses, one of which stands by or has gone: real servers, real processes."""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse.client import LighthouseClient, Quorum, rooms
from ft_core.control.lighthouse.deliveries import end_all
from ft_core.control.lighthouse.lease_client import look_elsewhere
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.coordination import ManagerClient, ManagerServer
from ft_core.errors import ConfigError, LighthouseError, QuorumTimeoutError, RefusedError
from ft_core.protocol.types import UNTRAINED
from ft_core.rpc.channel import CLIENT_KEEPALIVE_S, CLIENT_KEEPALIVE_TIMEOUT_S
from ft_core.rpc.lasting_stream import STEADY_S, is_silent
from tests.control.processes import start_lighthouse
from tests.control.recorder import BUDGET, Replica, wait_until
from tests.control.standby import Standby

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.control.processes import Child

SOON = timedelta(seconds=5)
CONNECT_S = 1.0
"""`rpc.channel.CONNECT_ATTEMPT_S`."""


@pytest.fixture
def standby() -> Iterator[Standby]:
    server = Standby()
    yield server
    server.shutdown()


@pytest.fixture
def both(standby: Standby, lighthouse: LighthouseServer) -> str:
    """One that stands by in the first place, and the one that is active."""
    return f"{standby.address()},{lighthouse.address()}"


# ------------------------------------------------------------ one stands by


def test_a_lease_is_opened_at_the_one_that_is_active(
    both: str, standby: Standby, replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = replica("a:1", both)
    one.lease.wait_connected(5)
    one.ask()
    assert one.answer().ids == ("a:1",)
    assert standby.calls == ["Lease"]
    assert [r.levelname for r in caplog.records if "standby: " in r.getMessage()] == ["INFO"]
    (warned,) = [r.getMessage() for r in caplog.records if r.levelno > logging.INFO]
    assert "runs without --peer" in warned


def test_a_goodbye_and_the_ask_after_it_stay_with_the_one_that_took_the_lease(
    both: str, standby: Standby, replica: Callable[..., Replica]
) -> None:
    one = replica("a:1", both)
    one.lease.wait_connected(5)
    one.ask()
    one.answer()
    one.ask(room="other")
    one.answer()
    assert one.lease.leave("done", finished=False, version=UNTRAINED, agreed=True, timeout_s=5)
    one.ask()
    one.answer()
    assert standby.calls == ["Lease"]


def test_every_call_reaches_the_one_that_is_active(
    both: str, standby: Standby, replica: Callable[..., Replica]
) -> None:
    client = LighthouseClient(both, SOON, token="")
    assert client.quorum("a:1", SOON).participants[0].replica_id == "a:1"
    client.heartbeat("a:1")
    assert [room.room for room in client.status().rooms] == ["default"]
    assert client.report_ended("a:1")
    assert not client.reopen()
    assert standby.calls == ["Status"], "what took the first call is asked from then on"
    for status in client.watch():
        assert status.rooms
        break
    client.close()
    known = rooms(both)
    assert known is not None
    assert [room.room for room in known] == ["default"]


def test_a_call_goes_on_when_the_one_it_went_to_stands_by_from_now_on(
    standby: Standby, lighthouse: LighthouseServer
) -> None:
    client = LighthouseClient(f"{lighthouse.address()},{standby.address()}", SOON, token="")
    client._channel._turn = replace(client._channel._turn, index=1)
    client._channel.renew()
    client.heartbeat("a:1")
    assert standby.calls == ["Heartbeat"]
    assert [r.replica_id for r in client.status().rooms[0].replicas] == ["a:1"]
    client.close()


def test_a_call_that_waits_where_another_call_has_gone_on_is_made_again(lighthouse: LighthouseServer) -> None:
    """The one that it waits at has become one that stands by."""
    was_active = Standby(holds="Quorum")
    client = LighthouseClient(f"{lighthouse.address()},{was_active.address()}", SOON, token="")
    client._channel._turn = replace(client._channel._turn, index=1)
    client._channel.renew()
    quorums: list[Quorum] = []
    asking = threading.Thread(target=lambda: quorums.append(client.quorum("a:1", SOON)))
    asking.start()
    with was_active.called:
        assert was_active.called.wait_for(lambda: was_active.calls == ["Quorum"], 5)
    client.heartbeat("a:1")
    asking.join(5)
    assert [member.replica_id for member in quorums[0].participants] == ["a:1"]
    assert was_active.calls == ["Quorum", "Heartbeat"]
    client.close()
    was_active.shutdown()


def test_a_group_of_several_ranks_has_its_lease_at_the_one_that_is_active(both: str, standby: Standby) -> None:
    server = ManagerServer("g:1", both, "127.0.0.1", "127.0.0.1:0", "store:1", connect_timeout=SOON)
    rank = ManagerClient(server.address(), SOON)
    assert rank.quorum(0, SOON).participants[0].replica_id == "g:1"
    assert standby.calls == ["Lease"]
    rank.shutdown()
    server.shutdown()
    with pytest.raises(ConfigError, match="addr='a:1,b:1': expected host:port"):
        ManagerClient("a:1,b:1", SOON)  # nobody stands by for a leader


def test_a_final_refusal_of_the_active_one_is_final(standby: Standby) -> None:
    server = LighthouseServer("127.0.0.1:0", token="secret")
    both = f"{standby.address()},{server.address()}"
    one = Replica(both, "a:1", token="wrong")
    with pytest.raises(RefusedError, match="FT_TOKEN differs") as caught:
        one.lease.wait_connected(5)
    assert f"({server.address()})" in str(caught.value), "which of the two it was"
    one.close()
    with pytest.raises(RefusedError, match="FT_TOKEN differs"):
        LighthouseClient(both, SOON, token="wrong")
    assert standby.calls == ["Lease", "Status"]
    server.shutdown()


def test_two_that_stand_by_are_tried_with_pauses_and_named(standby: Standby, caplog: pytest.LogCaptureFixture) -> None:
    other = Standby("127.0.0.1:1")
    both = f"{standby.address()},{other.address()}"
    one = Replica(both, "a:1")
    with pytest.raises(LighthouseError, match=f"{standby.address()}: standby: .*; {other.address()}: standby: 127"):
        one.lease.wait_connected(1.5)
    one.close()
    tried = len(standby.calls) + len(other.calls)
    assert 4 < tried < 2 * (5 + 1.5 / BUDGET.reconnect_s)
    assert [r.levelname for r in caplog.records if "standby: " in r.getMessage()] == ["WARNING"], "once it lasts"
    with pytest.raises(LighthouseError, match=r"no lighthouse answered within connect_timeout=2 s: .*; "):
        LighthouseClient(both, timedelta(seconds=2), token="")
    other.shutdown()


# ------------------------------------------------------------ one is gone


def test_nobody_at_the_first_address(
    nobody: str, lighthouse: LighthouseServer, replica: Callable[..., Replica]
) -> None:
    one = replica("a:1", f"{nobody},{lighthouse.address()}")
    one.lease.wait_connected(5)
    client = LighthouseClient(f"{nobody},{lighthouse.address()}", SOON, token="")
    assert client.active == lighthouse.address()
    client.close()


def test_both_gone_and_one_returns(nobody: str, replica: Callable[..., Replica]) -> None:
    server = LighthouseServer("127.0.0.1:0", token="")
    address = server.address()
    one = replica("a:1", f"{nobody},{address}")
    one.lease.wait_connected(5)
    client = LighthouseClient(f"{nobody},{address}", SOON, token="")
    server.shutdown()
    wait_until(lambda: nobody in one.lease.last_reason and address in one.lease.last_reason)
    with pytest.raises(LighthouseError, match=f"{nobody}: .*"):
        client.heartbeat("a:1")
    server = LighthouseServer(address.removeprefix("http://"), token="")
    one.ask()
    assert one.answer().ids == ("a:1",)
    wait_until(lambda: heard(client))
    client.close()
    server.shutdown()


def heard(client: LighthouseClient) -> bool:
    try:
        client.heartbeat("b:1")
    except LighthouseError:
        return False
    return True


@pytest.mark.parametrize("addresses", ["{0},{0}", "{0},", "{0},b", "{0},b:1,c:1"])
def test_lists_that_cannot_work(lighthouse: LighthouseServer, addresses: str) -> None:
    with pytest.raises(ConfigError, match=r"^addr='"):
        LighthouseClient(addresses.format(lighthouse.address()), SOON)
    with pytest.raises(ConfigError, match=r"^lighthouse_addr \(FT_LIGHTHOUSE\)='"):
        Replica(addresses.format(lighthouse.address()), "a:1", start=False)


def test_two_that_are_no_pair_are_warned_of(
    lighthouse: LighthouseServer, replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    """A job of three, of which one group lost its connection for a moment, trained apart under either."""
    both = f"{lighthouse.address()},{lighthouse.address().rpartition(':')[0]}:1"
    one = replica("a:1", both)
    one.lease.wait_connected(5)
    one.ask()
    assert one.answer().ids == ("a:1",)
    (told,) = [text for text in caplog.messages if "--peer" in text]
    assert told.startswith(f"a:1: the lighthouse at {lighthouse.address()} runs without --peer")
    assert both in told


# ------------------------------------------------------------ processes


@pytest.mark.process
def test_a_killed_lighthouse_costs_its_clients_milliseconds(
    child: Callable[..., Child], lighthouse: LighthouseServer, replica: Callable[..., Replica]
) -> None:
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0", "--http", "off")
    both = f"{address},{lighthouse.address()}"
    began = time.monotonic()
    ones = [replica(f"{name}:1", both) for name in "abc"]
    for one in ones:
        one.lease.wait_connected(5)
    connect_s = time.monotonic() - began
    client = LighthouseClient(both, SOON, token="")
    seen: list[float] = []
    stream = client.watch()
    following = threading.Thread(target=lambda: seen.extend(time.monotonic() for _ in stream))
    following.start()
    wait_until(lambda: bool(seen))
    pictures = len(seen)
    killed = time.monotonic()
    process.process.kill()
    wait_until(lambda: all(len(one.recorder.of("welcome")) == 2 for one in ones))
    took_s = time.monotonic() - killed
    assert all(one.lease.connected for one in ones)
    client.heartbeat("d:1")
    wait_until(lambda: len(seen) > pictures)
    stream.cancel()
    following.join(5)
    client.close()
    assert not following.is_alive()
    for one in ones:
        one.ask(step=1)
    assert {one.answer().ids for one in ones} == {("a:1", "b:1", "c:1")}
    assert took_s < 0.05 + 5 * connect_s, "30 ms, as the first time, where nothing else runs"


@pytest.mark.process
def test_a_frozen_lighthouse_in_the_first_place_costs_one_attempt_to_connect(
    child: Callable[..., Child], lighthouse: LighthouseServer, replica: Callable[..., Replica]
) -> None:
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0", "--http", "off")
    process.stop()
    both = f"{address},{lighthouse.address()}"
    began = time.monotonic()
    one = replica("a:1", both)
    one.lease.wait_connected(5)
    took_s = time.monotonic() - began
    client = LighthouseClient(both, SOON, token="")
    assert time.monotonic() - began - took_s < CONNECT_S + 2
    client.close()
    assert 0.5 * CONNECT_S < took_s < CONNECT_S + 2
    assert process.process.poll() is None


@pytest.mark.process
def test_one_that_freezes_is_left_when_the_other_one_is_active(
    child: Callable[..., Child], lighthouse: LighthouseServer, replica: Callable[..., Replica],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0", "--http", "off")
    both = f"{address},{lighthouse.address()}"
    one = replica("a:1", both)
    one.lease.wait_connected(5)
    client = LighthouseClient(both, SOON, token="")
    frozen = time.monotonic()
    process.stop()
    with pytest.raises(QuorumTimeoutError):
        client.heartbeat("b:1", timedelta(seconds=0.2))
    client.heartbeat("b:1", timedelta(seconds=0.2))
    wait_until(lambda: len(one.recorder.of("welcome")) == 2)
    assert time.monotonic() - frozen < 0.5 * (CLIENT_KEEPALIVE_S + CLIENT_KEEPALIVE_TIMEOUT_S)
    (told,) = [text for text in caplog.messages if "cannot be reached" in text]  # nor was the frozen one tried again
    assert f"and {lighthouse.address()} is active" in told
    client.close()


@pytest.mark.process
def test_one_that_freezes_for_a_while_loses_nobody_while_the_other_one_stands_by(
    child: Callable[..., Child], standby: Standby, replica: Callable[..., Replica]
) -> None:
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0", "--http", "off")
    one = replica("a:1", f"{address},{standby.address()}")
    one.lease.wait_connected(5)
    process.stop()
    with standby.called:
        assert standby.called.wait_for(lambda: standby.calls == ["Status"] * 2, 10), "asked again"
    heard_at = one.lease.heard_at
    process.process.send_signal(signal.SIGCONT)
    wait_until(lambda: one.lease.heard_at > heard_at)
    one.ask()
    one.answer()
    assert len(one.recorder.of("welcome")) == 1
    assert set(standby.calls) == {"Status"}


@pytest.mark.parametrize(
    ("silent_s", "since_look_s", "looks"),
    [(1.6, 9.0, True), (1.4, 9.0, False), (1.6, 0.9, False), (9.0, 1.0, True)],
)
def test_when_the_other_one_is_asked(silent_s: float, since_look_s: float, looks: bool) -> None:
    """Two renewals of half a second, and half a second more, without an answer."""
    assert look_elsewhere(100.0, 100.0 - silent_s, 0.5, 100.0 - since_look_s) is looks


def test_one_that_never_opens_the_lease_is_left_for_the_one_that_is_active(
    lighthouse: LighthouseServer, replica: Callable[..., Replica]
) -> None:
    """It froze after the connection was there."""
    stuck = Standby(holds="Lease")
    one = replica("a:1", f"{stuck.address()},{lighthouse.address()}")
    one.lease.wait_connected(5)
    assert stuck.calls == ["Lease"]
    stuck.shutdown()


@pytest.mark.process
def test_a_lease_that_breaks_is_opened_again_at_once_while_the_other_ones_machine_is_silent(
    child: Callable[..., Child], lighthouse: LighthouseServer, replica: Callable[..., Replica]
) -> None:
    """Whoever is back within the grace costs the others nothing; an attempt at a silent machine takes CONNECT_S."""
    silent, address = start_lighthouse(child, "--bind", "127.0.0.1:0", "--http", "off")
    silent.stop()
    one = replica("a:1", f"{lighthouse.address()},{address}")
    one.lease.wait_connected(5)
    opened = one.lease.heard_at
    wait_until(lambda: one.lease.heard_at > opened + STEADY_S)  # else it never stood
    broke = time.monotonic()
    (room,) = lighthouse._rooms.chosen("")
    lighthouse._server.call(lambda: end_all(room, "the connection was reset"), 5)
    wait_until(lambda: len(one.recorder.of("welcome")) == 2)
    assert time.monotonic() - broke < 0.5 * CONNECT_S


@pytest.mark.parametrize(
    ("silent_s", "renew_s", "silent"), [(0.9, 0.25, False), (1.1, 0.25, True), (1.1, 0.5, False), (1.6, 0.5, True)]
)
def test_when_a_lighthouse_has_not_answered_until_the_connection_broke(
    silent_s: float, renew_s: float, silent: bool
) -> None:
    """Then its machine is gone, perhaps: the other one is tried first."""
    assert is_silent(100.0, 100.0 - silent_s, renew_s) is silent
