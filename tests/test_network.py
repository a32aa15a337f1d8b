"""Which address is advertised, with this machine's real interfaces and a name service that says what a test wants."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from ft_core import network
from ft_core.errors import ConfigError
from ft_core.network import advertised_host, is_here, is_loopback
from ft_core.rpc.channel import split_bind
from ft_core.settings import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names that resolve; addresses resolve to themselves."""
    known: dict[str, list[str]] = {}

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in known and not host.replace(".", "").isdigit() and ":" not in host:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in known.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Address of a peer -> this machine's address on the way there."""
    known: dict[str, str] = {}
    monkeypatch.setattr(network, "_way_to", lambda there: known.get(there, ""))
    return known


def test_what_the_user_says_wins(ways: dict[str, str]) -> None:
    assert advertised_host("node7", "nosuch", "10.0.0.1") == "node7"
    assert advertised_host(None, "lo", "10.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match="FT_INTERFACE='nosuch'"):
        advertised_host(None, "nosuch")


@pytest.mark.parametrize(
    ("towards", "here"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.0.1"),
        ("::1", "::1"),
        ("10.0.0.1", "10.0.0.9"),
        ("fd00::1", "fd00::9"),
        ("both", "fd00::9"),
        ("second", "10.0.0.9"),
        ("myself", "172.16.0.9"),
        ("unknown", "172.16.0.9"),
        ("", "172.16.0.9"),
    ],
)
def test_the_way_to_the_lighthouse(names: dict[str, list[str]], ways: dict[str, str], towards: str, here: str) -> None:
    ways.update({"10.0.0.1": "10.0.0.9", "fd00::1": "fd00::9", "192.0.2.1": "172.16.0.9", "127.0.1.1": "127.0.0.1"})
    names["both"] = ["fd00::1", "10.0.0.1"]
    names["second"] = ["fd99::1", "10.0.0.1"]  # no way to its first address
    names["myself"] = ["127.0.1.1"]  # how Debian resolves a machine's own name: of no use to others
    assert advertised_host(None, None, towards) == here


@pytest.mark.parametrize(
    ("towards", "here"),
    [
        (("10.0.0.1", "fd00::1"), "10.0.0.9"),
        (("unknown", "fd00::1"), "fd00::9"),
        (("localhost", "10.0.0.1"), "10.0.0.9"),  # the first runs here, the second on another machine
        (("myself", "10.0.0.1"), "10.0.0.9"),
        (("localhost", "127.0.0.1"), "127.0.0.1"),
        (("::1", "localhost"), "::1"),
        (("unknown", "nameless"), "172.16.0.9"),
        ((), "172.16.0.9"),
    ],
)
def test_the_way_to_two_lighthouses(
    names: dict[str, list[str]], ways: dict[str, str], towards: tuple[str, ...], here: str
) -> None:
    ways.update({"10.0.0.1": "10.0.0.9", "fd00::1": "fd00::9", "192.0.2.1": "172.16.0.9", "127.0.1.1": "127.0.0.1"})
    names["myself"] = ["127.0.1.1"]
    assert advertised_host(None, None, *towards) == here


def test_a_machine_without_a_network(names: dict[str, list[str]], ways: dict[str, str]) -> None:
    assert advertised_host(None, None, "10.0.0.1") == "127.0.0.1"


def test_a_way_is_found_without_sending_anything() -> None:
    assert network._way_to("127.0.0.1") == "127.0.0.1"
    assert network._way_to("fe80::1") == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert advertised_host(None, None, server.getsockname()[0]) == "127.0.0.1"


def test_is_here(names: dict[str, list[str]], ways: dict[str, str]) -> None:
    ways.update({"10.0.0.1": "10.0.0.9", "10.0.0.9": "10.0.0.9"})
    names.update({"me": ["10.0.0.9"], "you": ["10.0.0.1"], "myself": ["127.0.1.1"]})
    assert [host for host in ("me", "you", "myself", "localhost", "10.0.0.1", "unknown") if is_here(host)] == [
        "me", "myself", "localhost",
    ]  # fmt: skip
    assert is_loopback("::1")
    assert not is_loopback("localhost.example.org")


@pytest.mark.parametrize("host", ["trainer0..example", "a" * 64, ".example", "h\udcff"])
@pytest.mark.parametrize("split", [parse_address, split_bind])
def test_a_name_that_nothing_can_have_is_an_error(host: str, split: Callable[[str, str], object]) -> None:
    """Resolving it would raise no OSError."""
    with pytest.raises(ConfigError, match=r"FT_LIGHTHOUSE=.* can be no host's name"):
        split(f"{host}:29510", "FT_LIGHTHOUSE")


@pytest.mark.parametrize("address", ["host:\u00b2", "host:x"])
@pytest.mark.parametrize("split", [parse_address, split_bind])
def test_a_port_is_a_decimal_number(address: str, split: Callable[[str, str], object]) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        split(address, "FT_LIGHTHOUSE")


@pytest.mark.parametrize("host", ["trainer0", "trainer0.example.", "h\u00f6st", "fe80::1%eth0", "::1", "10.0.0.1"])
def test_names_and_addresses_are_taken_as_they_are(host: str) -> None:
    text = f"[{host}]:1" if ":" in host else f"{host}:1"
    assert parse_address(text, "FT_LIGHTHOUSE") == split_bind(text, "FT_LIGHTHOUSE") == (host, 1)
