"""Connections between hosts: what answers, what does not, and how much arrives."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from ft_core.doctor import links
from ft_core.doctor.facts import HostFacts
from tests.doctor import servers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.held_ports import Hold


@contextlib.contextmanager
def listening(index: int, nonce: str = "meeting") -> Iterator[HostFacts]:
    """A host that listens, as it tells the others."""
    listener = links.Listener(index, nonce)
    try:
        yield HostFacts(address="127.0.0.1", ports=[listener.start()])
        assert repr(listener) == f"Listener({index})"
    finally:
        listener.close()
        listener.close()  # idempotent


def test_a_host_that_answers() -> None:
    with listening(1) as one, listening(2) as two:
        found = links.probe_all({0: HostFacts(), 1: one, 2: two}, 0, "meeting")
    assert {index: probe.error for index, probe in found.items()} == {1: "", 2: ""}
    assert found[1].local == "127.0.0.1"
    assert 0 < found[1].seconds < links.PROBE_S


def test_another_host_answers_there() -> None:
    with listening(1) as one:
        assert links.probe(one, 2, "meeting").error == "another host answers there: number 1"
        assert links.probe(one, 1, "another meeting").error == "something else answers there"
        assert links.transfer(one, "another meeting")[0] == 0.0


@pytest.mark.parametrize("unasked", [servers.SSH, b"{}\n", b"[]\n", b"x" * 10_000])
def test_something_else_answers_there(unasked: bytes) -> None:
    with servers.server(unasked) as where:
        host = HostFacts(address="127.0.0.1", ports=[int(where.rpartition(":")[2])])
        assert "answers there" in links.probe(host, 1, "meeting").error
        rate, why = links.transfer(host, "meeting")
    assert rate == 0.0
    assert why


def test_nobody_answers_there_and_there_is_no_there(hold: Hold) -> None:
    (port,) = hold()
    assert links.probe(HostFacts(address="127.0.0.1", ports=[port]), 1, "x").error == "Connection refused"
    assert links.probe(HostFacts(address="127.0.0.1"), 1, "x").error
    assert "no address" in links.probe(HostFacts(ports=[port]), 1, "x").error
    assert links.probe(HostFacts(address="nobody.invalid", ports=[port]), 1, "x").error


def test_what_is_sent_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "TRANSFER_S", 0.4)
    monkeypatch.setattr(links, "WARM_UP_S", 0.1)
    with listening(1) as one:
        rate, why = links.transfer(one, "meeting")
    assert why == ""
    assert rate > 1e6


def test_a_stranger_that_stays_does_not_keep_the_listener() -> None:
    with listening(1) as one, socket.create_connection(("127.0.0.1", one.ports[0]), 5) as stranger:
        stranger.sendall(b"{")
        assert links.probe(one, 1, "meeting").error == ""


@pytest.mark.parametrize("count", [1, 2, 5, links.PROBES_MAX + 1, 1000])
def test_in_a_big_job_every_host_is_probed_as_often_and_by_few(count: int) -> None:
    probed = [0] * count
    for me in range(count):
        others = links.chosen(range(count), me)
        assert me not in others
        assert len(set(others)) == len(others) <= links.PROBES_MAX
        for other in others:
            probed[other] += 1
    assert len(set(probed)) == 1
    assert probed[0] == count - 1 or count > links.PROBES_MAX
