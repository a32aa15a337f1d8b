"""A job whose connections are encrypted: its certificates are replaced while it trains, members come and go.

Real processes. Who joins after the replacement trusts the new authority alone, so all that it reaches has to show the
new certificates: the lighthouse, and a donor of the state that it heals from.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ft_core.certificates import Tls
from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import LighthouseError
from ft_core.launch.control_socket import order_resize
from tests.certificates import Authority, environment, write
from tests.chaos.cluster import ROOT, Cluster, Process
from tests.launch.job import job

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]
WORKER = Path(__file__).with_name("worker.py")
ADDRESSES = ("127.0.0.1",)


def vetoes(*processes: Process) -> list[str]:
    return [line for process in processes for _, line in list(process.lines) if line.startswith("veto")]


def command_lines() -> list[str]:
    """Of all processes below this one, which every user of the machine may read."""
    found, parents = [], {os.getpid()}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):  # it has ended
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) in parents:
                parents.add(int(folder.name))
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def says(process: Process, words: str) -> bool:
    """Whether it has written them to its errors; `Process.wait_for` looks whenever anybody prints."""
    return any(words in line for line in list(process.errors))


def test_certificates_are_replaced_while_a_job_trains(forge: Forge, tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    first, second = old.sign(ADDRESSES), new.sign(ADDRESSES)
    authorities = old.own.pem + new.own.pem
    shared = write(tmp_path / "shared", first.pem, first.key_pem(), authorities)
    fresh = new.files(tmp_path / "fresh", ADDRESSES)
    with Cluster(forge, FT_TOKEN="job", LOG=1, **environment(shared)) as cluster:
        a, b = cluster.start("a"), cluster.start("b")
        for process in (a, b):
            process.wait_step(20)
        before = vetoes(a, b)  # who came second has made its first step alone, which is voted down
        assert cluster.lighthouse is not None
        everybody = (a, b, cluster.lighthouse)

        # Broken on the way: the certificate is there, its key is not yet.
        write(tmp_path / "shared", second.pem, first.key_pem(), authorities)
        for process in (a, b):
            process.wait_for(lambda p=process: says(p, "stays in force"), "said that the new files do not work")  # type: ignore[misc]
        a.wait_for(lambda: says(everybody[2], "stays in force"), "saw the lighthouse keep what it has")
        a.wait_step(a.step() + 20)

        write(tmp_path / "shared", second.pem, second.key_pem(), authorities)
        for process in (a, b):
            process.wait_for(lambda p=process: says(p, "the files have changed"), "read the new files")  # type: ignore[misc]
        a.wait_for(lambda: says(everybody[2], "the files have changed"), "saw the lighthouse read the new files")

        # Whoever trusts the old authority alone does not accept what is shown now.
        where = f"{cluster.host}:{cluster.port}"
        yesterdays = old.files(tmp_path / "old", ADDRESSES)
        with pytest.raises(LighthouseError, match=r"its certificate is none that FT_TLS_CA=.* trusts"):
            LighthouseClient(where, timedelta(seconds=5), token="job", tls=yesterdays)

        newcomer = cluster.start("c", **environment(fresh))
        newcomer.wait_step(1)
        assert newcomer.commits()[0][2] == 3
        newcomer.wait_for(lambda: says(newcomer, "healed"), "said that it was healed")
        a.wait_step(a.step() + 20)

        # What was open before goes on: no lease was opened again, no step was lost.
        assert [p.name for p in (a, b) if says(p, "cannot be reached") or says(p, "again after")] == []
        assert vetoes(a, b) == before
        for process in everybody:
            assert sum("stays in force" in line for line in process.errors) == 1, process.errors

        cluster.kill("b")  # and who returns heals from a, whose own connections are of both kinds
        back = cluster.start("b")
        back.wait_step(1)
        back.wait_for(lambda: says(back, "healed"), "said that it was healed")
        assert len(cluster.wait_ends()) == 1


def test_groups_of_two_ranks_started_by_ftrun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forged_workers: None
) -> None:
    """Encrypted: leases, both group servers, ftrun's own connection, healing. One group goes and comes again."""
    settings = {**environment(Authority().files(tmp_path / "tls", ADDRESSES)), "FT_TOKEN": "job"}
    for name, value in {**settings, "STEPS_FILE": str(tmp_path / "end"), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    answers: list[str] = []

    def resize(groups: int) -> None:
        answers.append(order_resize(groups, "encrypted"))

    def end(found: re.Match[str]) -> None:
        (tmp_path / "end.new").write_text(str(int(found[1]) + 40))
        (tmp_path / "end.new").rename(tmp_path / "end")

    options = ("--replicas", "2:2", "--nproc-per-replica", "2", "--run-id", "encrypted")
    with job(WORKER, *options, env=settings) as running:
        running.when(r"replica-0/0\] commit 30 2", lambda _: resize(1))
        running.when(r"\[replica-1\] drained", lambda _: resize(2))
        running.when(r"replica-1/0\] commit (\d+) 2", end, after=[r"\[replica-1\] drained"])
        assert running.run() == 0, running.text
    assert answers == ["ok: 2 -> 1 groups", "ok: 1 -> 2 groups"]
    assert running.count(r"lighthouse https://127.0.0.1:\d+ \(embedded\)") == 1, running.text
    assert running.count(r"\] veto ") == 0
    digests = re.findall(r"\] done (\w+) (\d)", running.text)
    assert (len(digests), len(set(digests))) == (4, 2), "each rank has a part of its own, equal in both groups"


@pytest.mark.parametrize("knows", [True, False])
def test_ftrun_drains_with_and_without_the_admin_token(
    knows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forged_workers: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own groups, of course: without the token by signals. Its workers never have it, and nothing shows a token."""
    caplog.set_level("INFO", "ft_core")
    events = tmp_path / "events"
    settings = {
        "FT_TOKEN": "secret-job",
        "FT_EVENTS": str(events),
        "STEPS_FILE": str(tmp_path / "end"),
        "OMP_NUM_THREADS": "1",
    }
    if knows:
        settings["FT_ADMIN_TOKEN"] = "secret-chief"
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, runpy, sys\n"
        "print('admin token:', repr(os.environ['FT_ADMIN_TOKEN']), flush=True)\n"
        f"sys.argv = [{str(WORKER)!r}]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    lighthouse = LighthouseServer("127.0.0.1:0", admin_token="secret-chief")
    answers: list[str] = []

    shown: list[str] = []

    def end(_: re.Match[str]) -> None:
        shown.extend(command_lines())
        last = max(int(n) for n in re.findall(r"\] commit (\d+) ", running.text))
        (tmp_path / "end.new").write_text(str(last + 30))
        (tmp_path / "end.new").rename(tmp_path / "end")

    options = ("--replicas", "2", "--run-id", "admin", "--lighthouse", lighthouse.address())
    try:
        with job(script, *options, env=settings) as running:
            running.when(r"replica-0/0\] commit 30 2", lambda _: answers.append(order_resize(1, "admin")))
            running.when(r"\[replica-1\] drained", end)
            assert running.run() == 0, running.text
    finally:
        lighthouse.shutdown()
    assert answers == ["ok: 2 -> 1 groups"]
    assert running.count(r"\] veto ") == 0
    assert running.count("admin token: ''") == 2
    assert [line for line in shown if "worker" in line or "keeper" in line]
    written = [file.read_text() for file in events.rglob("*") if file.is_file()]
    assert len(written) >= 3
    for text in (running.text, caplog.text, *shown, *written):
        assert "secret-" not in text
    ordered = [m for m in caplog.messages if "is asked to drain" in m]
    assert len(ordered) == int(knows)


def test_bad_certificates_end_a_trainer_and_a_lighthouse_at_once(forge: Forge, tmp_path: Path) -> None:
    """Before anything is waited for, in one sentence."""
    expired = Authority().files(tmp_path / "expired", ADDRESSES, days=-0.01)
    good = Authority().files(tmp_path / "good", ADDRESSES)
    mixed = Tls(good.cert, expired.key, good.ca)
    env = {**os.environ, **environment(expired)}
    command = [sys.executable, "-m", "ft_core.lighthouse", "--bind", "127.0.0.1:0"]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert re.search(r"^ft-lighthouse: FT_TLS_CERT='.*cert.pem' has expired: make a new one", ended.stderr), (
        ended.stderr
    )
    with Cluster(forge, FT_TOKEN="job") as cluster:
        for tls, words in (
            (expired, r"FT_TLS_CERT='.*expired/cert.pem' has expired: make a new one"),
            (mixed, r"FT_TLS_CERT=.*FT_TLS_KEY='.*expired/key.pem': the key is not that of the certificate"),
        ):
            one = cluster.start("a", **environment(tls))
            assert one.popen.wait(60) == 1
            for reader in one.readers:
                reader.join(10)
            assert re.search(f"ConfigError: {words}", "\n".join(one.errors)), one.errors
