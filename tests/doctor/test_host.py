"""One host alone: each bad setup is recognised, with real servers, certificates and limits where there are any."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ft_core.coordination import LighthouseServer
from ft_core.doctor import facts as facts_
from ft_core.doctor import host
from ft_core.doctor.facts import Gpu, GpuFacts, HostFacts, as_json, from_json
from ft_core.doctor.findings import Finding, Level, problem, status
from ft_core.doctor.greetings import is_grpc, kind
from ft_core.doctor.host import collect, token_digest
from ft_core.doctor.host_checks import check
from ft_core.doctor.text import render
from tests import certificates
from tests.certificates import Authority
from tests.doctor import servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.held_ports import Hold


HOME = {"PATH": os.environ["PATH"]}


def about(findings: list[Finding], what: str, level: Level) -> Finding:
    """The one finding about this of this level."""
    (one,) = [f for f in findings if f.check == what and f.level is level]
    return one


def look(**variables: str) -> list[Finding]:
    return check(collect({**HOME, **variables}))


def healthy() -> HostFacts:
    """A host with nothing wrong, as a collector would describe it."""
    made = HostFacts(name="host0", machine="m0", address="10.0.0.1", address_from="the route", host_name="host0")
    made.host_resolves, made.cores, made.files_soft = ["10.0.0.1"], 4, 65536
    made.shm_total_mb = made.shm_free_mb = 8192
    made.versions = {"python": "3.11.7", "torch": "2.13.0", "ft-training": "0.1.0"}
    return made


def changed(**fields: object) -> list[Finding]:
    return check(dataclasses.replace(healthy(), **fields))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ settings


def test_a_healthy_host_has_nothing_worse_than_a_note() -> None:
    assert {f.level for f in check(healthy())} == {Level.OK, Level.NOTE}
    assert status(check(healthy())) == 0


def test_a_misspelt_variable_is_named_with_what_was_meant() -> None:
    found = about(look(FT_LIGTHOUSE="host0:29510"), "settings", Level.WARNING)
    assert "FT_LIGTHOUSE" in found.text
    assert found.todo == "write FT_LIGHTHOUSE"


def test_variables_of_a_kubernetes_service_are_told_from_misspelt_ones() -> None:
    found = about(look(FT_LIGHTHOUSE_SERVICE_HOST="10.1.2.3"), "settings", Level.NOTE)
    assert "enableServiceLinks" in found.todo


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"FT_TIMEOUT_S": "soon"}, "FT_TIMEOUT_S='soon' is not a number"),
        ({"FT_LIVENESS_S": "90"}, "liveness_s=90"),
        ({"FT_TOKEN": "secret\n"}, "FT_TOKEN must consist of printable"),
        ({"FT_INTERFACE": "nowhere7"}, "FT_INTERFACE='nowhere7' has no IPv4 address"),
    ],
)
def test_a_value_that_cannot_work_is_a_problem(variables: dict[str, str], says: str) -> None:
    found = about(look(**variables), "settings", Level.PROBLEM)
    assert says in found.text


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"FT_MIN_REPLICAS": "4", "FT_NUM_REPLICA_GROUPS": "2"}, "none ever forms"),
        ({"FT_REPLICA_GROUP": "2", "FT_NUM_REPLICA_GROUPS": "2"}, "numbered from 0 to 1"),
    ],
)
def test_numbers_of_groups_that_cannot_work(variables: dict[str, str], says: str) -> None:
    assert says in about(look(**variables), "groups", Level.PROBLEM).text


def test_the_token_is_not_among_the_facts() -> None:
    facts = collect({**HOME, "FT_TOKEN": "hunter2hunter2"})
    assert facts.token == "set"
    assert "hunter2" not in json.dumps(as_json(facts))
    assert token_digest("a", "x") != token_digest("b", "x")
    assert token_digest("a", "x") != token_digest("a", "y")
    assert token_digest("", "x") == ""
    assert token_digest("a\udcff", "x"), "bytes of the environment that are no text"


def test_facts_come_back_from_json_and_nonsense_is_left_out() -> None:
    made = healthy()
    made.gpus = GpuFacts([Gpu("H200", 141000, 3)], "550", 1, "12.8", "2.27")
    made.ports = [4, 5]
    assert from_json(json.loads(json.dumps(as_json(made)))) == made
    wild = from_json(
        {"name": 7, "cores": "many", "ports": ["x", 3], "tls": [], "settings": {"a": 1}, "address": "x" * 999}
    )
    assert (wild.name, wild.cores, wild.ports, wild.settings) == ("", 0, [3], {"a": "1"})
    assert len(wild.address) == facts_.TEXT_MAX
    assert from_json([1]) == HostFacts()


# ------------------------------------------------------------------------------------------------------ the host


def test_a_name_that_leads_to_loopback_is_noted() -> None:
    found = about(changed(host_resolves=["127.0.1.1"]), "names", Level.NOTE)
    assert "127.0.1.1" in found.text
    assert "FT_HOSTNAME" in found.todo
    assert "cannot be resolved" in about(changed(host_resolves=[]), "names", Level.NOTE).text


def test_an_address_of_another_machine_is_a_warning() -> None:
    found = about(look(FT_HOSTNAME="192.0.2.77"), "interface", Level.WARNING)
    assert "FT_HOSTNAME=192.0.2.77" in found.text


def test_a_low_limit_of_files_is_read_and_named() -> None:
    """In a process of its own, which really has the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > 300

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))

    done = subprocess.run([sys.executable, "-m", "ft_core.doctor.cli", "--json"], preexec_fn=lower, env=HOME,
                          capture_output=True, text=True, timeout=50, check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    (found,) = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "limits"]
    assert (found["level"], "300 files" in found["text"]) == ("WARNING", True)
    assert "ulimit -n" in found["todo"]


def test_many_groups_need_more_files() -> None:
    assert not [f for f in changed(files_soft=1024) if f.check == "limits" and f.level is not Level.OK]
    about(changed(files_soft=1024, settings={"FT_NUM_REPLICA_GROUPS": "200"}), "limits", Level.WARNING)


@pytest.mark.parametrize(("total", "free"), [(64, 64), (8192, 10), (-1, -1)])
def test_small_shared_memory_is_a_warning(total: int, free: int) -> None:
    found = about(changed(shm_total_mb=total, shm_free_mb=free), "shared memory", Level.WARNING)
    assert found.todo


def test_threads_on_many_cores_are_a_note() -> None:
    assert "64 threads" in about(changed(cores=64), "threads", Level.NOTE).text
    assert not [f for f in changed(cores=64, settings={"OMP_NUM_THREADS": "8"}) if f.check == "threads"]


def test_a_proxy_is_a_note_and_does_not_stand_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LighthouseServer("127.0.0.1:0", token="")
    try:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        found = look(FT_LIGHTHOUSE=server.address(), **{n: os.environ[n] for n in ("http_proxy", "grpc_proxy")})
        assert "http_proxy, grpc_proxy" in about(found, "proxies", Level.NOTE).text
        about(found, "lighthouse", Level.OK)
    finally:
        server.shutdown()


def test_events_that_cannot_be_written_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = about(look(FT_EVENTS=str(tmp_path / "file" / "events")), "events", Level.WARNING)
    assert "Not a directory" in found.text


def test_a_folder_for_events_is_not_made(tmp_path: Path) -> None:
    """The job makes it."""
    assert not [f for f in look(FT_EVENTS=str(tmp_path / "new" / "events")) if f.check == "events"]
    assert list(tmp_path.iterdir()) == []


def test_a_port_for_metrics_that_another_process_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = about(look(FT_METRICS=f"127.0.0.1:{port}"), "metrics", Level.WARNING)
        assert "Address already in use" in found.text
        assert "name another" in found.todo
    for free in (f"127.0.0.1:{port}", "[::1]:0", ":0", "off", "nonsense"):
        assert not [f for f in look(FT_METRICS=free) if f.check == "metrics"], free
    assert "Cannot assign" in about(look(FT_METRICS="192.0.2.1:9300"), "metrics", Level.WARNING).text


def test_without_torch_there_is_a_problem() -> None:
    assert "pip install torch" in about(changed(versions={"python": "3.11.7"}), "versions", Level.PROBLEM).todo


def said(gpus: GpuFacts, backend: str = "") -> list[str]:
    """What is said of the group of the gradients, if FT_BACKEND is that."""
    found = changed(gpus=gpus, settings={"FT_BACKEND": backend} if backend else {})
    return [finding.text for finding in found if finding.check == "gradients"]


def test_gpus() -> None:
    two = [Gpu("H200", 141000, 5), Gpu("H200", 141000, 90000)]
    assert "none on this host" in about(changed(), "GPUs", Level.OK).text
    cuda = {"python": "3.11.7", "torch": "2.13.0+cu128"}
    good = changed(gpus=GpuFacts(two, "550", 2, "12.8", "2.27.5"), versions=cuda)
    assert "uses 2, NCCL 2.27.5" in about(good, "GPUs", Level.OK).text
    assert "GPU 1 is taken" in about(good, "GPUs", Level.WARNING).text
    about(changed(gpus=GpuFacts(two[:1], "550", 0, "12.8"), versions=cuda), "GPUs", Level.PROBLEM)
    about(changed(gpus=GpuFacts(two[:1], "550", 0, "")), "GPUs", Level.WARNING)
    broken = about(changed(gpus=GpuFacts(error="nvidia-smi: no answer within 5 s")), "GPUs", Level.PROBLEM)
    assert "no answer within 5 s" in broken.text


def test_what_carries_the_gradients_is_said_by_the_rule_that_the_job_asks() -> None:
    gpus = GpuFacts([Gpu("H200", 141000, 5)], "550", 1, "12.8", "2.27.5")
    assert said(gpus) == ["those on this host's devices travel over nccl between replicas"]
    assert said(gpus, "baby-nccl") == ["those on this host's devices travel over baby-nccl between replicas"]
    assert said(gpus, "gloo") == ["those on this host's devices travel over gloo through host memory, which is slow"]
    assert said(dataclasses.replace(gpus, nccl="")) == [
        "those on this host's devices travel over gloo through host memory, which is slow"
    ]
    assert said(gpus, "xccl")[0].startswith("FT_BACKEND=xccl: torch finds no xpu device")
    assert said(GpuFacts()) == said(GpuFacts(), "gloo") == []
    assert said(GpuFacts(), "nccl") == [
        "FT_BACKEND=nccl: torch 2.13.0 is built without CUDA: install a CUDA build of it; or leave out FT_BACKEND=nccl"
        ": then the device decides"
    ]


SMI = """#!/bin/sh
echo 'NVIDIA H200, 143771, 4, 550.90.07'
echo 'NVIDIA H200, 143771, 90000, 550.90.07'
"""
"""What nvidia-smi prints with the query that it is asked."""


def smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with NVIDIA's device file, and this as nvidia-smi; torch is the one that is installed here."""
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(host, "GPU_FILES", (str(folder),))


def test_gpus_are_read_from_nvidias_tool_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, SMI, monkeypatch)
    found = host.gpus()
    assert found.devices == [Gpu("NVIDIA H200", 143771, 4), Gpu("NVIDIA H200", 143771, 90000)]
    assert (found.driver, found.error) == ("550.90.07", "")
    import torch

    assert (found.cuda, found.torch_devices) == (torch.version.cuda or "", torch.cuda.device_count())


def test_a_driver_that_hangs_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "TORCH", "print('[1, 2, 3]')")
    smi(tmp_path, "#!/bin/sh\nexec sleep 60\n", monkeypatch)
    monkeypatch.setattr(host, "TOOL_S", 0.2)
    assert host.gpus().error == "nvidia-smi: no answer within 0.2 s"
    monkeypatch.setattr(host, "TOOL_S", 20.0)
    smi(tmp_path, "#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver' >&2\nexit 9\n", monkeypatch)
    assert host.gpus().error == "nvidia-smi: NVIDIA-SMI has failed: no driver"
    smi(tmp_path, "#!/bin/sh\necho 'No devices were found'\n", monkeypatch)
    assert host.gpus().error.startswith("nvidia-smi: ")


# ------------------------------------------------------------------------------------------------------ lighthouse


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", token="ours")
    yield server
    server.shutdown()


def test_a_lighthouse_that_lets_us_in(lighthouse: LighthouseServer) -> None:
    found = about(look(FT_LIGHTHOUSE=lighthouse.address(), FT_TOKEN="ours"), "lighthouse", Level.OK)
    assert "without TLS" in found.text


@pytest.mark.parametrize(("token", "says"), [("", "needs a token"), ("theirs", "FT_TOKEN differs")])
def test_a_wrong_or_missing_token(token: str, says: str, lighthouse: LighthouseServer) -> None:
    found = about(look(FT_LIGHTHOUSE=lighthouse.address(), FT_TOKEN=token), "token", Level.PROBLEM)
    assert says in found.text
    assert "same value" in found.todo


@pytest.mark.parametrize(
    ("unasked", "asked", "says"),
    [
        (servers.SSH, b"", "an SSH server (SSH-2.0-OpenSSH_9.2p1 Debian)"),
        (b"", servers.HTTP, "a web server (HTTP/1.1 400 Bad Request)"),
        (b"", b"what?", "a server of another kind (it begins with 'what?')"),
        (b"", b"", "a server that says nothing"),
    ],
)
def test_somebody_elses_port(unasked: bytes, asked: bytes, says: str) -> None:
    with servers.server(unasked, asked) as where:
        found = about(look(FT_LIGHTHOUSE=where), "lighthouse", Level.PROBLEM)
    assert says in found.text
    assert "correct host and port" in found.todo


def test_a_port_where_nobody_listens(hold: Hold) -> None:
    (port,) = hold()
    found = about(look(FT_LIGHTHOUSE=f"127.0.0.1:{port}"), "lighthouse", Level.PROBLEM)
    assert "Connection refused" in found.text
    assert "start ft-lighthouse" in found.todo


def test_an_address_that_is_none_and_a_name_that_nobody_knows() -> None:
    assert "expected host:port" in about(look(FT_LIGHTHOUSE="host0"), "lighthouse", Level.PROBLEM).text
    found = about(look(FT_LIGHTHOUSE="nobody.invalid:29510"), "lighthouse", Level.PROBLEM)
    assert "cannot be resolved" in found.text
    assert "write an address" in found.todo


def test_a_lighthouse_of_another_release_and_a_finished_one() -> None:
    made = healthy()
    made.lighthouse.address, made.lighthouse.greeting, made.lighthouse.release = "h:1", "\0\0\0\4\0\0\0\0\0", "0.0.9"
    assert "release 0.0.9" in about(check(made), "lighthouse", Level.WARNING).text
    made.lighthouse.closed = "training in room 'default' finished"
    assert "lets no new job in" in about(check(made), "lighthouse", Level.WARNING).text


@pytest.mark.parametrize("greeting", ["", "SSH-", "HTTP/1.1 200 OK", "\x15\x03\x03\x00\x02\x02\x16"])
def test_what_is_not_grpc(greeting: str) -> None:
    assert not is_grpc(greeting)
    assert kind(greeting)
    assert kind("\0\0\x12\4\0\0\0\0\0rest") == ""


# ------------------------------------------------------------------------------------------------------ certificates


def test_a_certificate_that_works(tmp_path: Path) -> None:
    env = {**certificates.environment(Authority().files(tmp_path, days=30)), "FT_HOSTNAME": "127.0.0.1"}
    assert "valid for 127.0.0.1 and 30 more days" in about(look(**env), "certificates", Level.OK).text
    env = certificates.environment(Authority().files(tmp_path / "short", days=0.1))
    found = about(look(**env, FT_HOSTNAME="127.0.0.1"), "certificates", Level.WARNING)
    assert "expires in 0.1 days" in found.text


@pytest.mark.parametrize(
    ("days", "begins", "names", "says"),
    [
        (-1, -2, ("127.0.0.1",), "has expired: make a new one"),
        (30, 20, ("127.0.0.1",), "is this machine's clock right"),
        (30, -1, ("elsewhere",), "is not made for 127.0.0.1, which the others connect to"),
    ],
)
def test_a_certificate_that_does_not_hold(
    days: float, begins: float, names: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    authority = Authority(days=60)
    signed = authority.sign(names, days, begins)
    tls = certificates.write(tmp_path, signed.pem, signed.key_pem(), authority.own.pem)
    found = about(look(**certificates.environment(tls), FT_HOSTNAME="127.0.0.1"), "certificates", Level.PROBLEM)
    assert says in found.text


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    tls, other = Authority().files(tmp_path / "a"), Authority().files(tmp_path / "b")
    good = {**certificates.environment(tls), "FT_HOSTNAME": "127.0.0.1"}
    for change, says in (
        ({"FT_TLS_CA": other.ca}, "is not signed by FT_TLS_CA="),
        ({"FT_TLS_KEY": other.key}, "the key is not that of the certificate"),
        ({"FT_TLS_KEY": tls.cert, "FT_TLS_CERT": tls.key}, "swapped"),
        ({"FT_TLS_KEY": ""}, "a certificate and its key belong together"),
        ({"FT_TLS_KEY": str(tmp_path / "no.pem")}, "cannot be read: No such file"),
        ({"FT_TLS_KEY": "", "FT_TLS_CERT": ""}, "alone encrypts only the way to the lighthouse"),
    ):
        found = about(look(**{**good, **change}), "certificates", Level.PROBLEM)
        assert says in found.text, found


@pytest.mark.parametrize(("here", "there", "says"), [(True, False, "does not use TLS"), (False, True, "it uses TLS")])
def test_tls_on_one_side_only(here: bool, there: bool, says: str, tmp_path: Path) -> None:
    tls = Authority().files(tmp_path)
    server = LighthouseServer("127.0.0.1:0", token="", tls=tls if there else None)
    try:
        where = server.address().partition("://")[2]
        ours = certificates.environment(tls) if here else {}
        found = about(look(FT_LIGHTHOUSE=where, FT_HOSTNAME="127.0.0.1", **ours), "TLS", Level.PROBLEM)
        assert says in found.text
        assert "FT_TLS_CA" in found.todo
        both = {**certificates.environment(tls), "FT_HOSTNAME": "127.0.0.1"}
        if there:
            assert "with TLS" in about(look(FT_LIGHTHOUSE=where, **both), "lighthouse", Level.OK).text
    finally:
        server.shutdown()


def test_a_lighthouse_whose_certificate_is_of_another_authority(tmp_path: Path) -> None:
    theirs, ours = (Authority().files(tmp_path / name) for name in ("theirs", "ours"))
    server = LighthouseServer("127.0.0.1:0", token="", tls=theirs)
    try:
        env = {**certificates.environment(ours), "FT_LIGHTHOUSE": server.address(), "FT_HOSTNAME": "127.0.0.1"}
        found = about(look(**env), "TLS", Level.PROBLEM)
        assert "its certificate is none that FT_TLS_CA=" in found.text
    finally:
        server.shutdown()


def test_a_door_that_stands_open(tmp_path: Path) -> None:
    """Other machines reach this host, and nobody would be asked who they are: the job refuses to begin."""
    env = {"FT_LIGHTHOUSE": "127.0.0.1:1", "FT_HOSTNAME": "192.0.2.1"}
    found = about(look(**env), "token", Level.PROBLEM)
    assert "this host without FT_TOKEN" in found.text
    assert "FT_INSECURE=1" in found.text
    mutual = certificates.environment(Authority().files(tmp_path, ("192.0.2.1",)))
    for fine in ({"FT_TOKEN": "ours"}, {"FT_INSECURE": "1"}, {"FT_HOSTNAME": "127.0.0.1"}, mutual):
        assert not [f for f in look(**{**env, **fine}) if f.check == "token"], fine


def test_an_admin_token_that_is_the_jobs() -> None:
    found = about(look(FT_TOKEN="ours", FT_ADMIN_TOKEN="ours"), "settings", Level.PROBLEM)
    assert "FT_ADMIN_TOKEN is equal to FT_TOKEN" in found.text
    facts = collect({**HOME, "FT_TOKEN": "ours", "FT_ADMIN_TOKEN": "theirs"})
    assert "theirs" not in json.dumps(as_json(facts))
    assert facts.settings["FT_ADMIN_TOKEN"] == "set"


# ------------------------------------------------------------------------------------------------------ what is shown


def test_the_table_has_the_worst_first_and_fits_its_width() -> None:
    made = dataclasses.replace(healthy(), shm_total_mb=64, shm_free_mb=64, errors=["FT_TIMEOUT_S='x' is not a number"])
    text = render(check(made), 80)
    lines = text.splitlines()
    assert lines[0].startswith("PROBLEM  settings")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "1 problem, 1 warning, 1 note"
    hostile = render(
        [
            problem(
                "x",
                "a\x1b[2Jb",
                "c\x07\x9bd\u202e",
                "e\x1b]0;f\x07",
            )
        ]
    )
    assert "a\\x1b[2Jb" in hostile
    assert not set("\x1b\x07\x9b\u202e") & set(hostile), "nothing is an order to the terminal"
    assert render([]) == "nothing was looked at\n"
