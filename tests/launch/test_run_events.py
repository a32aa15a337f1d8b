"""Where the events of a run go, and what ftrun, its lighthouse and its workers write there."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.events.schema import check
from ft_core.launch import run_events
from ft_core.launch.options import parse
from ft_core.launch.run_events import folder_for, prepare
from ft_core.metrics.exposition import MISSING
from tests.launch.job import job

if TYPE_CHECKING:
    import re


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    """Writes down which folder it was given, and waits until it is told to end."""
    path = tmp_path / "worker.py"
    path.write_text(
        "import os, pathlib, sys, threading\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "print('given', os.environ['FT_EVENTS'] or 'nothing')\n"
        "while not (folder / 'end').exists(): threading.Event().wait(0.01)\n"
    )
    return path


def test_the_folder_is_the_named_one_or_one_of_the_run(tmp_path: pathlib.Path) -> None:
    usual = os.path.join(tempfile.gettempdir(), f"ftrun-events-{os.getuid()}", "abc")
    assert folder_for(None, "", "abc", {}) == usual
    assert folder_for(None, "/logs", "abc", {}) == "/logs/abc/events"
    assert folder_for(None, "/logs", "abc", {"FT_EVENTS": "/shared"}) == "/shared"
    assert folder_for("/named", "/logs", "abc", {"FT_EVENTS": "/shared"}) == "/named"
    assert folder_for("off", "", "abc", {"FT_EVENTS": "/shared"}) == ""
    assert folder_for(None, "", "abc", {"FT_EVENTS": "off"}) == ""
    assert folder_for("here", "", "abc", {}) == os.path.abspath("here")


def test_the_option_reaches_the_workers(script: pathlib.Path) -> None:
    spec = parse(["--events", "/named", str(script)], {})
    assert spec.environment(0, "x", 1)["FT_EVENTS"] == "/named"
    assert "events in /named" in spec.announcement("x")[0]


def test_old_runs_beside_it_are_forgotten(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_events, "KEPT_RUNS", 3)
    above = tmp_path / f"ftrun-events-{os.getuid()}"
    for number in range(6):
        (above / f"run{number}").mkdir(parents=True)
        os.utime(above / f"run{number}", (number, number))
    assert prepare(str(above / "new")) == ""
    assert sorted(path.name for path in above.iterdir()) == ["new", "run4", "run5"]
    (tmp_path / "mine" / "other").mkdir(parents=True)
    for number in range(6):
        assert prepare(str(tmp_path / "mine" / f"{number}")) == ""
    assert len(list((tmp_path / "mine").iterdir())) == 7, "a folder that the user named is the user's"


def test_a_run_that_still_writes_is_never_forgotten(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three weeks, beside which many short ones have come and gone; its folder is older than all of theirs."""
    monkeypatch.setattr(run_events, "KEPT_RUNS", 3)
    above = tmp_path / f"ftrun-events-{os.getuid()}"
    for number in range(6):
        (above / f"run{number}").mkdir(parents=True)
        (above / f"run{number}" / "events").touch()
        os.utime(above / f"run{number}" / "events", (100 + number, 100 + number))
    (above / "weeks").mkdir()
    (above / "weeks" / "events").touch()
    os.utime(above / "weeks", (1, 1))
    assert prepare(str(above / "new")) == ""
    assert sorted(path.name for path in above.iterdir()) == ["new", "run5", "weeks"]


def test_runs_that_vanish_while_they_are_looked_at_do_no_harm(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by two tests side by side: another run had begun to forget the same ones."""
    monkeypatch.setattr(run_events, "KEPT_RUNS", 1)
    above = tmp_path / f"ftrun-events-{os.getuid()}"
    for number in range(3):
        (above / f"run{number}").mkdir(parents=True)
        os.utime(above / f"run{number}", (number, number))
    look = run_events._last_written

    def looks(run: os.DirEntry[str]) -> float:
        if run.name == "run1":
            os.rmdir(run.path)
        return look(run)

    monkeypatch.setattr(run_events, "_last_written", looks)
    assert prepare(str(above / "new")) == ""
    assert [path.name for path in above.iterdir()] == ["new"]


@pytest.mark.process
def test_a_kill_a_restart_and_the_end_are_written(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def kill(found: re.Match[str]) -> None:
        os.kill(int(found[1]), signal.SIGKILL)

    def end(_: re.Match[str]) -> None:
        (tmp_path / "end").touch()

    folder = tmp_path / "events"
    with job(script, "--replicas", "2", "--events", str(folder)) as running:
        running.when(r"\[replica-1\] started \(pid (\d+)\)", kill)
        running.when(r"\[replica-1\] started", end, after=[r"\[replica-1\] rank 0 .* was ended by SIGKILL"])
        assert running.run() == 0, running.text
    assert running.count(f"given {folder}") >= 1
    sources = {path.name.partition(".")[0]: path for path in folder.iterdir()}
    assert sorted(sources) == ["ftrun-replica-0-1", "lighthouse"]
    events = [json.loads(line) for line in sources["ftrun-replica-0-1"].read_text().splitlines()]
    assert [check(event) for event in events] == [""] * len(events)
    of: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of.setdefault(event["kind"], []).append(event)
    (failed,) = of["failed"]
    assert (failed["group"], failed["code"], failed["excuse"]) == ("replica-1", -signal.SIGKILL, "")
    assert failed["sentence"].endswith("was ended by SIGKILL")
    assert [event["restarts"] for event in of["started"] if event["group"] == "replica-1"] == [0, 1]
    assert {(event["group"], event["how"]) for event in of["ended"]} == {
        ("replica-0", "finished"), ("replica-1", "finished"),
    }  # fmt: skip
    assert (of["run_ended"][0]["status"], of["run_ended"][0]["restarts"]) == (0, 1)
    assert events[-1]["kind"] == "closed"


@pytest.mark.process
def test_an_unwritable_folder_is_one_line_and_the_job_runs(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "end").touch()
    with job(script, "--replicas", "2", "--events", str(script / "events")) as running:
        assert running.run() == 0, running.text
    assert running.count("events cannot be written to") == 1
    assert running.count("given nothing") == 2


@pytest.mark.process
def test_a_port_of_metrics_that_is_taken_ends_ftrun_before_anything_starts(script: pathlib.Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = subprocess.run(
            [sys.executable, "-m", "ft_core.launch", "--events", "off", "--metrics", where, str(script)],
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
    assert ran.returncode == 2
    assert f"--metrics {where}: metrics cannot be served there: Address already in use" in ran.stderr + ran.stdout
    assert "given" not in ran.stdout


@pytest.mark.process
def test_without_the_library_ftrun_says_so_once_and_goes_on(
    script: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "missing", lambda: MISSING)
    with job(script, "--replicas", "2", "--events", "off", "--metrics", "127.0.0.1:1") as running:
        running.when("given nothing", lambda _: (script.parent / "end").touch(), after=["given nothing"])
        assert running.run() == 0, running.text
    assert running.count("no metrics are served: prometheus_client is not installed") == 1
