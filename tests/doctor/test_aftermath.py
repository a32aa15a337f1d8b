"""The first cause of a job's end: of jobs written down by hand, and of real ones that fail."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

import pytest

from ft_core.doctor.advice import OTHERWISE, advice
from ft_core.doctor.aftermath import EVIDENCE_MAX, SURVIVED_MAX, explain
from ft_core.doctor.cli import main
from ft_core.doctor.findings import Level, status
from ft_core.report.account import account
from tests.launch.job import job
from tests.report.jobs import Job, big

if TYPE_CHECKING:
    from ft_core.doctor.findings import Finding

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ["replica-0", "replica-1"]


def found_in(made: Job) -> list[Finding]:
    found = made.found()
    return explain(found, account(found))


def cause(made: Job) -> Finding:
    (one,) = [finding for finding in found_in(made) if finding.check == "first cause"]
    return one


def two_groups() -> Job:
    """They train from the fourth second on."""
    made = Job()
    made.ftrun(0.0, "run_started", run_id="abc", script="train.py", groups=NAMES, total=2, ranks=1, lighthouse="x",
               chaos="")  # fmt: skip
    for name in NAMES:
        made.starts(name, 0.0)
        made.joins(name, 2.0, 1)
        made.counts(name, 4.0, 10, 10)
    return made


def ends(made: Job, t: float, status: int, **hows: str) -> Job:
    for name, how in hows.items():
        made.ftrun(t, "ended", group=name.replace("_", "-"), how=how)
    made.ftrun(t + 0.1, "run_ended", status=status, restarts=0)
    made.ftrun(t + 0.1, "closed")
    return made


def test_a_job_that_ended_well_has_no_cause() -> None:
    made = two_groups()
    for name in NAMES:
        made.leaves(name, 9.0)
    (only,) = found_in(ends(made, 9.5, 0, replica_0="finished", replica_1="finished"))
    assert (only.level, only.check) == (Level.OK, "the job")
    assert "it ended well, 10 steps" in only.text


def test_what_was_survived_is_not_the_cause() -> None:
    """replica-0 dies early and comes back; replica-1 dies much later of something else, again and again."""
    made = two_groups()
    made.fails("replica-0", 5.0)
    made.starts("replica-0", 5.2, restarts=1)
    made.joins("replica-0", 7.0, 2, pid=2, heals=True)
    made.counts("replica-0", 20.0, 100, 90, pid=2)
    made.counts("replica-1", 20.0, 100, 100)
    for nth in range(3):
        made.fails("replica-1", 21.0 + 5 * nth, code=1, error=f"OSError: [Errno 28] No space left on device ({nth})")
        if nth < 2:
            made.starts("replica-1", 22.0 + 5 * nth, restarts=nth + 1)
    made.leaves("replica-0", 40.0, pid=2)
    made = ends(made, 41.0, 1, replica_1="quarantined", replica_0="finished")
    first = cause(made)
    assert first.where == "replica-1"
    assert "No space left on device (0)" in first.text, "the first of the chain, not the last"
    assert "make room" in first.todo
    assert first.evidence
    assert len(first.evidence) <= EVIDENCE_MAX
    shown = json.loads(first.evidence[0].partition(": ")[2])
    assert (shown["kind"], shown["group"]) == ("failed", "replica-1")
    survived = [finding for finding in found_in(made) if finding.check == "survived"]
    assert [finding.where for finding in survived] == ["replica-0"]


def test_the_first_of_all_groups_is_the_cause() -> None:
    made = two_groups()
    made.fails("replica-1", 6.0, code=1, error="ModuleNotFoundError: No module named 'flash_attn'")
    made.fails("replica-0", 7.0, code=1, error="CollectiveError: lost replica-1")
    first = cause(ends(made, 8.0, 1, replica_0="failed", replica_1="failed"))
    assert first.where == "replica-1"
    assert "flash_attn" in first.text
    assert "same packages on every host" in first.todo


def test_a_refusal_is_the_cause() -> None:
    made = two_groups()
    made.lighthouse(6.0, "refused", replica_id="replica-1:00000001", reason="FT_TOKEN differs from the one the "
                    "lighthouse was started with")  # fmt: skip
    made.fails("replica-1", 6.2, code=1, error="RefusedError: FT_TOKEN differs")
    first = cause(ends(made, 8.0, 1, replica_0="finished", replica_1="quarantined"))
    assert first.where == "replica-1"
    assert "FT_TOKEN differs" in first.text
    assert "same value on all hosts" in first.todo


def test_a_job_that_was_stopped_says_why() -> None:
    made = two_groups()
    made.counts("replica-0", 8.0, 30, 30)
    made.ftrun(8.0, "stopping", reason="SIGTERM")
    for name in NAMES:
        made.leaves(name, 8.5, "SIGTERM")
    first = cause(ends(made, 9.0, 143, replica_0="stopped", replica_1="stopped"))
    assert "the job was stopped 8.0 s after" in first.text
    assert "time limit" in first.todo


def test_an_ftrun_that_was_ended_is_told_from_a_failure() -> None:
    made = two_groups()
    made.lighthouse(9.95, "member_lost", quorum_id=1, replica_id="replica-0:00000001",
                    how="its supervisor reported that its process has ended")  # fmt: skip
    for name in NAMES:
        made.counts(name, 9.9, 60, 60)
    first = cause(ends(made, 10.0, 1))
    assert "ftrun was ended at once" in first.text


def test_a_job_that_never_began_says_what_it_waited_for() -> None:
    made = Job()
    made.replica("replica-0", 1.0, "made", replica_id="replica-0:00000001", ranks=1, step=0)
    made.replica("replica-0", 1.1, "asking", reason="joining", failed=False, step=0)
    made.lighthouse(1.2, "no_quorum_yet", reason="waiting for 1 of min_replicas=2")
    made.lighthouse(9.2, "no_quorum_yet", reason="waiting for 1 of 2 groups, replica-1 never came")
    first = cause(made)
    assert "no quorum formed: waiting for 1 of 2 groups, replica-1 never came" in first.text
    assert "FT_NUM_REPLICA_GROUPS" in first.todo
    assert "no_quorum_yet" in first.evidence[0]


def test_a_job_without_replicas_says_so() -> None:
    made = Job()
    made.ftrun(0.0, "run_started", run_id="abc", script="train.py", groups=NAMES, total=2, ranks=1, lighthouse="x",
               chaos="")  # fmt: skip
    first = cause(ends(made, 3.0, 1))
    assert "none got as far as making its Manager" in first.text


def test_an_ftrun_that_wrote_no_end_is_a_warning_and_its_groups_are_looked_at() -> None:
    made = two_groups()
    made.lighthouse(6.0, "member_lost", quorum_id=1, replica_id="replica-1:00000001",
                    how="silent: its lease was not renewed for 3.3 s")  # fmt: skip
    findings = found_in(made)
    assert findings[0].level is Level.WARNING
    assert "SIGKILL with its machine" in findings[0].text
    first = cause(made)
    assert first.where == "replica-1"
    assert "FT_LIVENESS_S" in first.todo


def test_a_takeover_that_was_survived_is_one_sentence_with_what_to_do() -> None:
    made = two_groups()
    made.lighthouse(6.0, "pair", role="active", before="standby", other="host0:29510", contact=False, complete=True,
                    took_over=True)  # fmt: skip
    for name in NAMES:
        made.leaves(name, 9.0)
    found = found_in(ends(made, 9.5, 0, replica_0="finished", replica_1="finished"))
    (told,) = [finding for finding in found if finding.check == "survived"]
    assert told.text.startswith(
        "the lighthouse: taken over 6.0 s after the start of the log: the one that stood by took "
    )
    assert "start it again with --peer" in told.todo


def test_a_takeover_is_not_why_a_job_was_stopped() -> None:
    made = two_groups()
    made.lighthouse(6.0, "pair", role="active", before="standby", other="host0:29510", contact=False, complete=True,
                    took_over=True)  # fmt: skip
    made.ftrun(8.0, "stopping", reason="SIGINT")
    assert (
        "the job was stopped 8.0 s after" in cause(ends(made, 9.0, 130, replica_0="drained", replica_1="drained")).text
    )


def test_many_survived_failures_are_counted() -> None:
    findings = found_in(big(4, 120.0, 3))
    survived = [finding for finding in findings if finding.check == "survived"]
    assert len(survived) == SURVIVED_MAX + 1
    assert "more:" in survived[-1].text
    assert status(findings) == 0


@pytest.mark.parametrize(
    ("told", "todo"),
    [
        ("killed by --chaos: rank 0 (pid 1) was ended by SIGKILL", "asked for"),
        ("rank 0 (pid 1) was ended by SIGKILL", "want of memory"),
        ("rank 0 (pid 1) was ended by SIGBUS", "/dev/shm"),
        ("exited with code 1: torch.OutOfMemoryError: CUDA out of memory", "smaller batch"),
        ("exited with code 1: OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("exited with code 1: ConfigError: timeout=-1", "names the setting"),
        ("exited with code 1: ZeroDivisionError: division by zero", "traceback"),
        ("silent: frozen or cut off (frozen or cut off, replica-1)", "suspended"),
        ("its process did nothing for 9 s (stood still, lighthouse)", "nothing else takes"),
        ("something else", OTHERWISE),
    ],
)
def test_what_to_do(told: str, todo: str) -> None:
    assert todo in advice(told)


# ------------------------------------------------------------------------------------------------------ the command


def test_files_are_read_and_json_is_written(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = two_groups()
    made.fails("replica-0", 6.0, code=1, error="RuntimeError: NCCL error in: x")
    ends(made, 8.0, 1, replica_0="quarantined", replica_1="finished").save(tmp_path)
    (tmp_path / "replica-9.1.0.0.jsonl").write_text('{"t":1,"kind":"log","v":99}\n')
    assert main(["--events", str(tmp_path), "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["status"] == 2
    (first,) = [finding for finding in said["findings"] if finding["check"] == "first cause"]
    assert (first["level"], first["where"]) == ("PROBLEM", "replica-0")
    assert "NCCL" in first["text"]
    assert any("version 99" in finding["text"] for finding in said["findings"])
    assert main(["--events", str(tmp_path)]) == 2
    assert "-> look at the GPUs" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_nothing_to_read_is_an_error_that_says_what_to_do(
    folder: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["--events", str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert "ft-doctor: --events" in said
    assert folder in said


# ------------------------------------------------------------------------------------------------------ real jobs


@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_death_that_ends_a_real_job_is_found(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], forged_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\n"
        "if os.environ['FT_REPLICA_GROUP'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "raise SystemExit(0)\n"
    )
    folder = tmp_path / "events"
    options = ("--replicas", "2", "--max-restarts", "0", "--events", str(folder))
    with job(script, *options) as running:
        assert running.run() == 1, running.text
    capsys.readouterr()
    assert main(["--events", str(folder)]) == 2
    said = capsys.readouterr().out
    assert "replica-1 was killed" in said, said
    assert "was ended by SIGKILL" in said
    assert '"kind":"failed"' in said
