"""Several hosts: ft-doctor runs on real machines (namespaces) at once; the bad setups of the docs are made there."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from ft_core.doctor.launchers import PORT
from tests import certificates
from tests.certificates import Authority
from tests.chaos.network import Network, available
from tests.doctor import servers
from tests.doctor.hosts import Host, examine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WHY = available()
pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.skipif(bool(WHY), reason=WHY)]
QUICK = ("--no-bandwidth", "--wait", "60")
PLAIN = Host(options=QUICK)
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="nft (nftables) is the firewall")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["a", "b", "c"]) as made:
        yield made


def installed(folder: Path, name: str, version: str) -> str:
    """A folder for PYTHONPATH in which another version of a package is installed, as far as pip would say."""
    made = folder / f"{name}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def test_healthy_hosts_meet_and_say_the_same(network: Network, tmp_path: Path) -> None:
    host = Host({"FT_TOKEN": "our own secret"}, (*QUICK, "--storage", str(tmp_path)))
    found = examine(network, dict.fromkeys("abc", host))
    a = found["a"]
    assert a.findings == found["b"].findings == found["c"].findings
    assert a.status == 0, a.findings
    assert "3 have come, on 3 machines" in a.about("hosts", "OK")["text"]
    assert "each reaches each other one" in a.about("connections", "OK")["text"]
    assert "is the same on all hosts" in a.all_about("storage", "OK")["all hosts"]
    assert a.all_about("interface", "OK")["b"].startswith(f"others connect to {network.address('b')} (eth0, ")
    assert list(tmp_path.iterdir()) == [], "what was tried there is removed"
    assert "our own secret" not in str(a.findings)


def test_the_bandwidth_between_hosts_is_measured_and_a_slow_one_is_named(network: Network) -> None:
    slow = "tc qdisc add dev eth0 root tbf rate 100mbit burst 64k latency 400ms"
    options = ("--wait", "60")
    found = examine(network, {"a": Host(options=options), "b": Host(options=options, before=slow)})
    told = found["a"].all_about("bandwidth", "WARNING")["b"]
    measured = re.search(r"at (\d+) MB/s \(eth0, ", told)
    assert measured is not None, told
    assert 0 < int(measured[1]) <= 14  # 100 Mbit/s are 12.5 MB/s
    assert found["b"].findings == found["a"].findings


# ------------------------------------------------------------------------------------------------------ what differs


def test_hosts_that_are_set_up_differently(network: Network, tmp_path: Path) -> None:
    """Each mistake is of one host, and is told of that one."""
    usual = {
        "FT_TOKEN": "ours", "FT_NUM_REPLICA_GROUPS": "3", "FT_TIMEOUT_S": "30", "FT_LIGHTHOUSE": "127.0.0.1:1",
        "FT_HOSTNAME": network.address("a"),
    }  # fmt: skip
    b = {
        "FT_TOKEN": "theirs", "FT_NUM_REPLICA_GROUPS": "2", "FT_TIMEOUT_S": "60", "FT_REPLICA_GROUP": "1",
        "PYTHONPATH": installed(tmp_path / "b", "torch", "2.9.1"),
    }  # fmt: skip
    c = {
        "FT_TOKEN": "", "FT_REPLICA_GROUP": "1", "FT_LIGHTHOUSE": "",
        "PYTHONPATH": installed(tmp_path / "c", "protobuf", "4.25.0"),
    }  # fmt: skip
    envs = {
        "a": {**usual, "FT_REPLICA_GROUP": "0"},
        "b": {**usual, **b, "FT_HOSTNAME": network.address("b")},
        "c": {**usual, **c, "FT_HOSTNAME": network.address("c")},
    }
    found = examine(network, {name: Host(env, QUICK) for name, env in envs.items()})["c"]
    assert "torch differs" in found.about("versions", "PROBLEM")["text"]
    assert found.about("versions", "PROBLEM")["where"] == "b/1"
    assert "protobuf differs" in found.all_about("versions", "WARNING")["c/1"]
    assert "FT_NUM_REPLICA_GROUPS (how many groups the job has) differs: 3 on a/0, c/1; 2 on b/1" in found.all_about(
        "settings", "PROBLEM")["b/1"]  # fmt: skip
    assert "FT_TIMEOUT_S differs" in found.all_about("settings", "WARNING")["b/1"]
    assert "FT_REPLICA_GROUP=1 on 2 hosts" in found.all_about("groups", "PROBLEM")["b/1, c/1"]
    assert "not set there" in found.all_about("token", "PROBLEM")["c/1"]
    assert "another value" in found.all_about("token", "PROBLEM")["a/0, b/1"]  # of two nobody is the odd one
    assert "FT_LIGHTHOUSE is not set there" in found.all_about("lighthouse", "PROBLEM")["c/1"]
    for secret in ("ours", "theirs"):
        assert f"'{secret}'" not in str(found.findings)


def test_certificates_that_differ(network: Network, tmp_path: Path) -> None:
    tls, other = (
        Authority().files(tmp_path / name, [network.address(host) for host in "abc"], days=30)
        for name in ("ours", "theirs")
    )
    envs = {"a": certificates.environment(tls), "b": certificates.environment(other)}
    found = examine(network, {name: Host(env, QUICK) for name, env in envs.items()})["a"]
    assert "another file than on the others" in found.about("TLS", "PROBLEM")["text"]
    assert "valid for" in found.all_about("certificates", "OK")["b"]
    envs = {"a": certificates.environment(tls), "b": {}}
    found = examine(network, {name: Host(env, QUICK) for name, env in envs.items()})["a"]
    assert "FT_TLS_* are not set there" in found.about("TLS", "PROBLEM")["text"]
    assert found.about("TLS", "PROBLEM")["where"] == "b"


def test_a_clock_that_is_wrong(network: Network) -> None:
    found = examine(network, {"a": PLAIN, "b": Host(options=QUICK, clock_s=-40), "c": PLAIN})["a"]
    told = found.about("clock", "WARNING")
    assert told["where"] == "b"
    assert re.search(r"its clock is (39\.9|40\.[01]) s behind the others'", told["text"])
    assert "chrony" in told["todo"]


def test_a_lighthouse_name_that_leads_each_host_to_itself(network: Network, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.1.1 head\n")
    host = Host({"FT_LIGHTHOUSE": "head:29510"}, QUICK, before=f"mount --bind {tmp_path / 'hosts'} /etc/hosts")
    found = examine(network, {"a": host, "b": host})["a"]
    told = found.all_about("lighthouse", "PROBLEM")["all hosts"]
    assert "FT_LIGHTHOUSE=head:29510 leads each of these hosts to itself (127.0.1.1)" in told


# ------------------------------------------------------------------------------------------------------ the network


def test_an_address_that_leads_every_host_to_itself(network: Network) -> None:
    """FT_HOSTNAME is a loopback address there."""
    found = examine(network, {"a": PLAIN, "b": Host({"FT_HOSTNAME": "127.0.0.1"}, QUICK)})["a"]
    told = found.about("interface", "PROBLEM")
    assert told["where"] == "b"
    assert "127.0.0.1 (by FT_HOSTNAME=127.0.0.1), which leads every other machine to itself" in told["text"]
    assert "FT_INTERFACE or FT_HOSTNAME" in told["todo"]


def test_an_interface_that_the_others_cannot_reach(network: Network) -> None:
    """A second network of b's, which leads nowhere."""
    second = (
        "ip link add eth1 type veth peer name nowhere && ip address add 10.77.0.1/24 dev eth1 && ip link set eth1 up"
    )
    b = Host({"FT_INTERFACE": "eth1"}, QUICK, before=second)
    found = examine(network, {"a": PLAIN, "b": b, "c": PLAIN})["c"]
    told = found.about("connections", "PROBLEM")
    assert told["where"] == "b"
    assert "no other host reaches 10.77.0.1 there (advertised by FT_INTERFACE=eth1)" in told["text"]
    assert "Network is unreachable" in told["text"]
    assert found.about("interface", "NOTE")["text"].startswith("it connects to the others from 10.199.0.2 (eth0, ")


def test_hosts_that_all_advertise_the_address_of_their_bridge(network: Network) -> None:
    """As docker0, which has the same one everywhere."""
    bridge = "ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
    host = Host({"FT_INTERFACE": "docker0"}, QUICK, before=bridge)
    found = examine(network, {"a": host, "b": host, "c": PLAIN})["c"]
    told = found.about("interface", "PROBLEM")
    assert (told["where"], told["text"]) == ("a, b", "these machines all advertise 172.17.0.1")
    assert "docker0" in told["todo"]


def test_another_mtu(network: Network) -> None:
    found = examine(network, {"a": PLAIN, "b": Host(options=QUICK, before="ip link set eth0 mtu 1400"), "c": PLAIN})[
        "a"
    ]
    told = found.about("interface", "WARNING")
    assert told["where"] == "b"
    assert "MTU differs: 1500 on a, c; 1400 on b" in told["text"]


FIREWALL = (
    "nft add table inet t && nft add chain inet t input '{ type filter hook input priority 0; }' && "
    "nft add rule inet t input %s 'tcp flags & (syn|ack) == syn' drop"
)


@needs_nft
def test_a_firewall_that_lets_nobody_in(network: Network) -> None:
    """Out, it lets everything; so the hosts meet, and the job would not run."""
    found = examine(network, {"a": PLAIN, "b": Host(options=QUICK, before=FIREWALL % ""), "c": PLAIN})["a"]
    told = found.about("connections", "PROBLEM")
    assert told["where"] == "b"
    assert f"no other host reaches {network.address('b')}" in told["text"]
    assert "no answer within" in told["text"]
    assert "open its ports" in told["todo"]


@needs_nft
def test_a_firewall_between_two_of_them_in_one_direction(network: Network) -> None:
    rule = FIREWALL % f"ip saddr {network.address('b')}"
    found = examine(network, {"a": PLAIN, "b": PLAIN, "c": Host(options=QUICK, before=rule)})["a"]
    told = found.about("connections", "PROBLEM")
    assert told["where"] == "b, c"
    assert f"b does not reach c at {network.address('c')}: no answer within" in told["text"]
    assert told["text"].endswith("the other way works")


def test_a_cut_between_two_of_them(network: Network) -> None:
    network.cut("b", "c")
    found = examine(network, {"a": PLAIN, "b": PLAIN, "c": PLAIN})["a"]
    told = found.all_about("connections", "PROBLEM")["b, c"]
    assert "b does not reach c" in told
    assert "c does not reach b" in told
    assert "neither does the other way" in told


def test_a_lighthouse_behind_a_firewall(network: Network) -> None:
    network.cut("b", "c")
    host = Host({"FT_LIGHTHOUSE": f"{network.address('c')}:29510"}, QUICK)
    found = examine(network, {"a": host, "b": host})["a"]
    told = found.all_about("lighthouse", "PROBLEM")
    assert "Connection refused" in told["a"]
    assert "a firewall drops what is sent there" in told["b"]


# ------------------------------------------------------------------------------------------------------ storage


def test_storage_that_is_not_shared(network: Network, tmp_path: Path) -> None:
    options = (*QUICK, "--storage", str(tmp_path))
    own = Host(options=options, before=f"mount -t tmpfs none {tmp_path}")
    found = examine(network, {"a": Host(options=options), "b": own, "c": Host(options=options)})["b"]
    told = found.about("storage", "PROBLEM")
    assert "it is not the same storage" in told["text"]
    assert "mount the shared file system" in told["todo"]


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        ("mount --bind {path} {path} && mount -o remount,bind,ro {path}", "Read-only file system"),
        pytest.param("mount -t tmpfs -o size=4k none {path}", "No space left on device", marks=pytest.mark.long),
        pytest.param("mount -t tmpfs none {path}/..", "No such file or directory", marks=pytest.mark.long),
    ],
)
def test_storage_that_one_host_cannot_write(mount: str, says: str, network: Network, tmp_path: Path) -> None:
    path = tmp_path / "mounted" / "shared"
    path.mkdir(parents=True)
    options = (*QUICK, "--storage", str(path))
    found = examine(network, {"a": PLAIN, "b": Host(options=options, before=mount.format(path=path))})["a"]
    assert says in found.all_about("storage", "PROBLEM")["b"]
    assert "--storage differs" in found.all_about("storage", "WARNING")["all hosts"]


# ------------------------------------------------------------------------------------------------------ the meeting


def test_a_host_that_does_not_come(network: Network) -> None:
    found = examine(network, {"a": Host(options=("--no-bandwidth", "--wait", "2"))}, count=2)["a"]
    told = found.about("hosts", "PROBLEM")
    assert told["text"] == "1 of 2 have come: a"
    assert found.status == 2


def test_a_host_that_cannot_reach_the_meeting(network: Network) -> None:
    network.cut("a", "b")
    found = examine(network, dict.fromkeys("ab", Host(options=("--no-bandwidth", "--wait", "3"))))
    assert found["a"].about("hosts", "PROBLEM")["text"] == "1 of 2 have come: a"
    assert "nobody holds the meeting" in found["b"].about("meeting", "PROBLEM")["text"]
    assert found["b"].about("limits", "OK"), "it looks at itself all the same"


def test_the_meetings_port_is_taken_by_something_else(network: Network) -> None:
    with servers.on(network, "a", PORT):
        found = examine(network, {"a": Host(options=("--no-bandwidth", "--wait", "3"))}, count=2)["a"]
    assert "is no meeting of ft-doctor: name another port" in found.about("meeting", "PROBLEM")["text"]
