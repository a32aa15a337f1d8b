"""One host that names two lighthouses: what is wrong with either, and with the two together."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from ft_core.coordination import LighthouseServer
from ft_core.doctor.facts import HostFacts, as_json, from_json
from ft_core.doctor.findings import Level
from ft_core.doctor.host import collect
from ft_core.doctor.launchers import place
from ft_core.doctor.lighthouse_checks import lighthouse as check_lighthouse
from tests.control.standby import Standby
from tests.doctor import servers
from tests.doctor.test_host import HOME

if TYPE_CHECKING:
    from collections.abc import Iterator

Told = list[tuple[Level, str]]


def look(*addresses: str) -> Told:
    facts = collect({**HOME, "FT_LIGHTHOUSE": ",".join(addresses)})
    facts = from_json(as_json(facts))  # as the others have it
    return [(found.level, found.text) for found in check_lighthouse(facts)]


@pytest.fixture
def active() -> Iterator[str]:
    server = LighthouseServer("127.0.0.1:0", token="")
    yield server.address()
    server.shutdown()


@pytest.fixture
def standby() -> Iterator[str]:
    server = Standby()
    yield server.address()
    server.shutdown()


@pytest.fixture
def nobody() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("first", ["active", "standby"])
def test_one_is_active_and_one_stands_by(active: str, standby: str, first: str) -> None:
    both = (active, standby) if first == "active" else (standby, active)
    assert sorted(text.partition(" answers in")[0] for _, text in look(*both)) == sorted(
        [active, f"{standby} stands by"]
    )
    assert {level for level, _ in look(*both)} == {Level.OK}


def test_one_that_is_gone_is_a_warning_while_the_other_one_is_active(active: str, nobody: str) -> None:
    (bad, good) = look(nobody, active)
    assert bad[0] is Level.WARNING
    assert bad[1] == f"FT_LIGHTHOUSE={nobody}: Connection refused: should {active} end, this host would be cut off"
    assert good[0] is Level.OK


def test_somebody_elses_port_beside_the_active_one_is_a_warning(active: str) -> None:
    with servers.server(servers.SSH, b"") as where:
        levels = {level for level, text in look(active, where) if where in text}
    assert levels == {Level.WARNING}


def test_both_gone_is_a_problem_of_each(nobody: str) -> None:
    host, _, port = nobody.rpartition(":")
    told = look(nobody, f"localhost:{port}")
    assert [level for level, _ in told] == [Level.PROBLEM, Level.PROBLEM]
    assert host in told[0][1]


def test_two_that_are_both_active_do_not_stand_by_for_each_other(active: str) -> None:
    other = LighthouseServer("127.0.0.1:0", token="")
    told = [text for level, text in look(active, other.address()) if level is Level.PROBLEM]
    other.shutdown()
    assert told == [
        f"{active} and {other.address()} are both active: they do not stand by for each other, and groups that cannot "
        "reach the first train apart from the others"
    ]


def test_two_that_both_stand_by_take_no_job(standby: str) -> None:
    other = Standby()
    told = [text for level, text in look(standby, other.address()) if level is Level.PROBLEM]
    other.shutdown()
    assert told == [f"{standby} and {other.address()} both stand by: neither takes a job"]


def test_one_that_stands_by_alone_is_not_enough(standby: str) -> None:
    ((level, text),) = look(standby)
    assert level is Level.PROBLEM
    assert "stands by for another one" in text


def test_a_list_that_cannot_work_is_a_problem() -> None:
    ((level, text),) = look("a:1", "b:1", "c:1")
    assert level is Level.PROBLEM
    assert text.startswith("FT_LIGHTHOUSE='a:1,b:1,c:1' names 3 lighthouses")


def test_the_host_of_the_first_is_where_groups_meet_and_both_are_what_the_route_leads_to() -> None:
    env = {"FT_NUM_REPLICA_GROUPS": "2", "FT_REPLICA_GROUP": "0", "FT_LIGHTHOUSE": "127.0.0.1:1,127.0.0.2:1"}
    found = place(None, None, env)
    assert found is not None
    assert (found.host, found.at_lighthouse) == ("127.0.0.1", True)
    facts = collect({**HOME, **env})
    assert facts.address_from == "the route to the lighthouse (127.0.0.1, 127.0.0.2)"
    assert facts.lighthouse_addresses == env["FT_LIGHTHOUSE"]
    assert HostFacts().lighthouses == []
