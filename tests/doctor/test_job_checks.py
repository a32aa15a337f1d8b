"""What the facts of several hosts mean: who is named, and what is not said of hosts that are fine."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.doctor import crossings
from ft_core.doctor.facts import Gpu, GpuFacts, HostFacts, Interface, Probe, Seen, TlsFacts, index_of, number_of
from ft_core.doctor.findings import EVERYWHERE, Finding, Level, status
from ft_core.doctor.job_checks import check
from ft_core.doctor.job_facts import JobFacts
from tests.doctor.test_host import about, healthy

if TYPE_CHECKING:
    from collections.abc import Callable


def host(index: int) -> HostFacts:
    """Of a healthy job, each on a machine of its own."""
    made = healthy()
    made.name, made.machine, made.address = f"host{index}", f"m{index}", f"10.0.0.{index + 1}"
    made.interfaces = [Interface("eth0", made.address, 1500, 10000, True)]
    made.settings = {"FT_REPLICA_GROUP": str(index), "FT_NUM_REPLICA_GROUPS": "4", "FT_LIGHTHOUSE": "10.0.0.1:29510"}
    made.lighthouse.address, made.lighthouse.resolves = "10.0.0.1:29510", ["10.0.0.1"]
    made.lighthouse.greeting, made.lighthouse.release = "\0\0\0\4\0\0\0\0\0", "0.1.0"
    made.token = "digest"
    return made


def job(count: int = 4, **changes: Callable[[HostFacts], object]) -> JobFacts:
    """A healthy job; `host2=...` changes that host."""
    made = JobFacts(count, {index: host(index) for index in range(count)})
    for index, facts in made.hosts.items():
        others = [other for other in range(count) if other != index]
        made.reach[index] = {other: Probe("", 0.001, facts.address) for other in others}
        made.clocks[index] = 0.0001 * index, 0.0001
        made.rates[index] = 1e9, ""
    for name, change in changes.items():
        change(made.hosts[int(name.removeprefix("host"))])
    return made


def unreached(made: JobFacts, *pairs: tuple[int, int]) -> list[Finding]:
    for one, other in pairs:
        made.reach[one][other] = Probe("no answer within 3 s")
    return check(made)


def bad(findings: list[Finding]) -> list[tuple[str, str, str]]:
    """Everything worse than a note, without its text."""
    return [(f.level.value, f.check, f.where) for f in findings if status([f])]


def test_a_healthy_job_has_nothing_worse_than_ok() -> None:
    found = check(job())
    assert {f.level for f in found} == {Level.OK}
    assert "1000 to 1000 MB/s" in about(found, "bandwidth", Level.OK).text
    assert about(found, "bandwidth", Level.OK).text.endswith("over eth0")


@pytest.mark.parametrize("name", ["ft-training", "torch"])
def test_one_version_that_has_to_be_the_same(name: str) -> None:
    made = job(host2=lambda facts: facts.versions.update({name: "9.9"}))
    for facts in made.hosts.values():
        facts.lighthouse.release = facts.versions["ft-training"]
    found = about(check(made), "versions", Level.PROBLEM)
    assert found.where == "host2"
    assert f"{name} differs" in found.text
    assert "9.9 on host2" in found.text


def test_versions_that_should_be_the_same() -> None:
    made = job(host1=lambda facts: facts.versions.update(python="3.12.1"))
    assert bad(check(made)) == [("WARNING", "versions", "host1")]
    made = job(host1=lambda facts: facts.versions.update(python="3.11.2"))
    assert bad(check(made)) == [], "patch releases of Python work together"


def test_of_two_that_differ_both_are_named() -> None:
    made = job(2, host1=lambda facts: facts.versions.update(torch="2.9"))
    assert bad(check(made)) == [("PROBLEM", "versions", EVERYWHERE)]
    assert "2.13.0 on host0; 2.9 on host1" in about(check(made), "versions", Level.PROBLEM).text


def test_hosts_are_listed_as_people_count() -> None:
    made = job(12)
    assert made.names([10, 2, 1]) == "host1, host2, host10"
    assert made.names(range(12)) == EVERYWHERE
    assert made.names([77]) == "host 77"


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [("FT_NUM_REPLICA_GROUPS", "5", "PROBLEM"), ("FT_FROM_SCRATCH", "1", "PROBLEM"),
     ("FT_FENCE", "cpu", "PROBLEM"), ("WORLD_SIZE", "2", "PROBLEM"),
     ("FT_LIVENESS_S", "2", "WARNING"), ("FT_MIN_REPLICAS", "2", "WARNING")],
)  # fmt: skip
def test_a_setting_that_differs(variable: str, value: str, level: str) -> None:
    made = job(host3=lambda facts: facts.settings.update({variable: value}))
    assert bad(check(made)) == [(level, "settings", "host3")]


def test_hosts_of_one_group_have_its_number_and_places_in_it() -> None:
    def second(facts: HostFacts) -> None:
        facts.settings |= {"FT_REPLICA_GROUP": "0", "GROUP_RANK": "1"}

    assert bad(check(job(host1=second))) == []
    made = job(host1=lambda facts: facts.settings.update(FT_REPLICA_GROUP="0"))
    assert bad(check(made)) == [("PROBLEM", "groups", "host0, host1")]


def test_tokens() -> None:
    def none(facts: HostFacts) -> None:
        facts.token = ""

    def other(facts: HostFacts) -> None:
        facts.token = "another digest"

    assert bad(check(job(host1=none))) == [("PROBLEM", "token", "host1")]
    assert bad(check(job(host1=other))) == [("PROBLEM", "token", "host1")]
    assert bad(check(job(host1=none, host2=other))) == [("PROBLEM", "token", "host1"), ("PROBLEM", "token", "host2")]
    everywhere = job(2, host0=none, host1=none)
    assert bad(check(everywhere)) == [("WARNING", "token", EVERYWHERE)]
    for facts in everywhere.hosts.values():
        facts.tls = TlsFacts(configured=True, mutual=True, days_left=90.0)
    assert bad(check(everywhere)) == [], "who they are is shown by certificates"
    everywhere = job(2, host0=none, host1=none)
    everywhere.hosts[1].machine = everywhere.hosts[0].machine
    assert bad(check(everywhere)) == [], "on one machine it is not needed"


def test_lighthouses_that_differ() -> None:
    def another(facts: HostFacts) -> None:
        facts.lighthouse.address = "10.0.0.9:29510"

    assert bad(check(job(host2=another))) == [("WARNING", "lighthouse", "host2")]


def test_gpus_that_differ() -> None:
    made = job()
    for facts in made.hosts.values():
        facts.gpus = GpuFacts([Gpu("H200", 141000, 5)], "550", 1, "12.8", "2.27.5")
    assert bad(check(made)) == []
    made.hosts[1].gpus = GpuFacts([Gpu("A100", 81000, 5)], "535", 1, "12.8", "2.26.2")
    found = [f for f in check(made) if f.check == "GPUs" and f.level is Level.WARNING]
    assert {f.where for f in found} == {"host1"}
    told = " ".join(f.text for f in found)
    for text in ("the kind of GPU differs: H200 on", "NVIDIA's driver differs: 550 on", "NCCL differs: 2.27.5 on"):
        assert text in told


def test_who_reaches_whom_is_told_by_rows_and_columns() -> None:
    deaf = unreached(job(), (0, 2), (1, 2), (3, 2))
    assert bad(deaf) == [("PROBLEM", "connections", "host2")]
    assert "no other host reaches 10.0.0.3" in about(deaf, "connections", Level.PROBLEM).text
    mute = unreached(job(), (2, 0), (2, 1), (2, 3))
    assert "it reaches no other host" in about(mute, "connections", Level.PROBLEM).text
    pair = unreached(job(), (0, 1))
    assert bad(pair) == [("PROBLEM", "connections", "host0, host1")]
    assert "the other way works" in about(pair, "connections", Level.PROBLEM).text
    nobody = unreached(job(3), *((one, other) for one in range(3) for other in range(3) if one != other))
    assert bad(nobody) == [("PROBLEM", "connections", f"host{index}") for index in range(3)]


def test_a_fast_interface_that_is_not_used_and_two_directions() -> None:
    def two(facts: HostFacts) -> None:
        facts.interfaces.append(Interface("ib0", "10.1.0.2", 4092, 200000, True))
        facts.interfaces.append(Interface("docker0", "172.17.0.1", 1500, 400000, False))

    made = job(host1=two)
    found = about(check(made), "interface", Level.NOTE)
    assert (found.where, found.todo.split()[1]) == ("host1", "FT_INTERFACE=ib0")
    assert "10.1.0.2 (ib0, 200000 Mbit/s, MTU 4092)" in found.text
    made = job(host1=two)
    made.hosts[1].interfaces[0] = dataclasses.replace(made.hosts[1].interfaces[0], speed_mbit=0)
    assert not [f for f in check(made) if f.check == "interface" and f.level is Level.NOTE], "who knows how fast it is?"
    made.reach[1] = {other: Probe("", 0.001, "10.1.0.2") for other in (0, 2, 3)}
    assert "the two directions take different interfaces" in about(check(made), "interface", Level.NOTE).text


def test_an_address_that_two_machines_have() -> None:
    def docker(facts: HostFacts) -> None:
        facts.address = "172.17.0.1"

    made = job(host1=docker, host2=docker)
    assert ("PROBLEM", "interface", "host1, host2") in bad(check(made))
    made.hosts[2].machine = made.hosts[1].machine
    assert ("PROBLEM", "interface", "host1, host2") not in bad(check(made)), "two groups of one machine"


@pytest.mark.parametrize(
    ("offset", "wrong", "level"), [(3.0, 0.01, "WARNING"), (-3.0, 0.01, "WARNING"), (3.0, 4.0, "")]
)
def test_clocks(offset: float, wrong: float, level: str) -> None:
    made = job()
    made.clocks[2] = offset, wrong
    assert bad(check(made)) == ([(level, "clock", "host2")] if level else [])
    made = job(host2=lambda _: None)
    made.clocks = dict.fromkeys(range(3), (100.0, 0.001)) | {3: (0.0, 0.0)}
    found = about(check(made), "clock", Level.WARNING)
    assert (found.where, "100.0 s behind" in found.text) == ("host3", True), (
        "the meeting's own clock may be the wrong one"
    )


def test_bandwidth() -> None:
    made = job()
    made.rates[2] = 2e8, ""
    found = about(check(made), "bandwidth", Level.WARNING)
    assert found.where == "host2"
    assert "at 200 MB/s (eth0, 10000 Mbit/s, MTU 1500), usual is 1000: 1 GB of gradients takes 5 s" in found.text
    made.rates = dict.fromkeys(range(4), (1e7, ""))
    assert [f[2] for f in bad(check(made))] == ["host0, host1, host2, host3"] or len(bad(check(made))) == 4
    made.rates, made.rates_skipped = {}, "a job of 3 members runs at this lighthouse, and is not to be disturbed"
    assert "not measured: a job of 3" in about(check(made), "bandwidth", Level.NOTE).text


def test_storage() -> None:
    made = job()
    for facts in made.hosts.values():
        facts.storage.path, facts.storage.free_mb = "/shared", 1 << 20
    made.stored = {index: Seen() for index in range(4)}
    assert bad(check(made)) == []
    made.stored[1] = Seen(missing=[0, 2, 3])
    found = about(check(made), "storage", Level.PROBLEM)
    assert (found.where, "host0, host2, host3 wrote" in found.text) == ("host1", True)
    made.stored[1] = Seen(torn=[3])
    assert "half written" in about(check(made), "storage", Level.WARNING).text
    made.stored[1] = Seen(late_s=2.5)
    assert "2.5 s late" in about(check(made), "storage", Level.NOTE).text
    made.stored[1] = Seen(error="Stale file handle")
    assert "Stale file handle" in about(check(made), "storage", Level.PROBLEM).text


def test_hosts_that_did_not_come_or_did_not_stay() -> None:
    made = job(3)
    made.expected, made.left = 4, [1]
    assert bad(check(made)) == [("PROBLEM", "hosts", "-"), ("PROBLEM", "hosts", "host1")]


def test_what_holds_for_all_hosts_is_said_once() -> None:
    made = job()
    for facts in made.hosts.values():
        facts.files_soft = 300
    assert bad(check(made)) == [("WARNING", "limits", EVERYWHERE)]
    made.hosts[0].files_soft = 65536
    assert bad(check(made)) == [("WARNING", "limits", "host1, host2, host3")]


def test_one_host_alone_meets_nobody_and_is_fine() -> None:
    assert bad(check(job(1))) == []
    assert crossings.clocks(JobFacts(1)) is not None


@pytest.mark.parametrize("found", [None, "x", [], float("nan"), float("inf"), True, {}])
def test_what_another_host_sends_is_a_number_or_none(found: Any) -> None:
    assert number_of(found) == 0.0
    assert index_of(found) == -1
    assert (number_of(3), number_of(0.5), index_of("12"), index_of(3)) == (3.0, 0.5, 12, 3)


def test_nonsense_of_another_host_is_no_error() -> None:
    sent = json.loads('{"error": 7, "seconds": "soon", "local": null, "missing": ["x", 2], "torn": 1, "late_s": NaN}')
    assert Probe.from_json(sent) == Probe("7", 0.0, "None")
    assert Seen.from_json(sent) == Seen([2], [], 0.0, "7")
    assert Probe.from_json([]).error == Seen.from_json(3).error == "nothing was reported"
