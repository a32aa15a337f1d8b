"""The command `ft-doctor` as a process: what it prints where, and what is left when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ft_core.doctor.cli import main
from ft_core.doctor.facts import HostFacts, as_json
from ft_core.doctor.meeting import Meeting
from ft_core.doctor.member import Member
from tests.chaos.network import available
from tests.control.recorder import wait_until

if TYPE_CHECKING:
    from pathlib import Path

HOME = {"PATH": os.environ["PATH"]}
WHY = available()


def test_the_command_looks_at_this_host(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FT_"):
            monkeypatch.delenv(name)
    assert main([]) < 2, "no problem; a machine may have little shared memory"
    assert "FT_LIGHTHOUSE is not set" in capsys.readouterr().out
    monkeypatch.setenv("FT_TIMEOUT_S", "never")
    assert main(["--json"]) == 2
    assert json.loads(capsys.readouterr().out)["status"] == 2


@pytest.mark.process
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_a_full_disk_for_events_is_a_warning(tmp_path: Path) -> None:
    """An empty file can be made there all the same."""
    full = f"mount -t tmpfs -o size=64k none {tmp_path} && ! dd if=/dev/zero of={tmp_path}/full bs=4k status=none"
    doctor = f"FT_EVENTS={tmp_path} {sys.executable} -m ft_core.doctor.cli --json"
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", f"{full} 2>/dev/null && {doctor}"], capture_output=True, text=True,
        env=HOME, timeout=60, check=False,
    )  # fmt: skip
    (told,) = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "events"]
    assert (told["level"], "No space left" in told["text"]) == ("WARNING", True)


@pytest.mark.process
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_name_that_the_terminal_cannot_show_is_shown_all_the_same(encoding: str) -> None:
    env = {**HOME, "PYTHONIOENCODING": f"{encoding}:strict", "FT_HOSTNAME": "h\u00f6st-\u65e5"}
    done = subprocess.run(
        [sys.executable, "-m", "ft_core.doctor.cli"], capture_output=True, env=env, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, b""), "the address of another machine is a warning"
    assert b"FT_HOSTNAME=h" in done.stdout


@pytest.mark.process
def test_who_is_ended_takes_back_what_it_has_written(tmp_path: Path) -> None:
    """And says so in a line."""
    meeting = Meeting(0, 2, 20.0)
    meeting.start()
    other = Member("127.0.0.1", meeting.port, 20.0)
    command = [sys.executable, "-m", "ft_core.doctor.cli", "--meet", f"127.0.0.1:{meeting.port}", "--hosts", "2",
               "--no-bandwidth", "--storage", str(tmp_path)]  # fmt: skip
    try:
        with subprocess.Popen(command, env=HOME, stderr=subprocess.PIPE, text=True) as doctor:
            other.join()
            for name, value in (
                ("facts", as_json(HostFacts(name="other"))),
                ("clocks", [0, 0]),
                ("reach", {}),
                ("rates", [0, "", ""]),
            ):
                other.round(name, value)
            wait_until(lambda: any(tmp_path.glob(".ft-doctor-*/[01]")), 20)
            doctor.terminate()
            assert "ended before it was done" in doctor.communicate(timeout=60)[1].splitlines()[-1]
            assert doctor.returncode == 130
    finally:
        other.close()
        meeting.close()
    assert list(tmp_path.iterdir()) == []
