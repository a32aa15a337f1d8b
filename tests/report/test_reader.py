"""Event files as they may be found: of another version, cut, damaged, in parts, of several runs."""

from __future__ import annotations

import json
import pathlib

import pytest

from ft_core.events.schema import FTRUN, REPLICA
from ft_core.report.reader import read
from tests.report.jobs import Job


@pytest.fixture
def job() -> Job:
    job = Job()
    job.ftrun(0.5, "run_started", run_id="1", script="s", groups=["a"], total=1, ranks=1, lighthouse="", chaos="")
    job.joins("a", 1.0, 1)
    job.counts("a", 5.0, 10, 10)
    return job


def test_what_was_written_is_read(job: Job, tmp_path: pathlib.Path) -> None:
    job.save(tmp_path / "below" / "it")
    found = read([str(tmp_path)])
    assert found.problems == []
    assert [(log.role, log.source) for log in found.logs] == [(FTRUN, "ftrun"), (REPLICA, "a")]
    assert found.of(REPLICA)[0].events == job.found().of(REPLICA)[0].events
    one = read([str(tmp_path / "below" / "it" / "a.1.0.0.jsonl")])
    assert [log.source for log in one.logs] == ["a"]


def test_another_version_is_left_out_and_the_rest_used(job: Job, tmp_path: pathlib.Path) -> None:
    job.save(tmp_path)
    other = Job()
    other.joins("b", 1.0, 1)
    other.save(tmp_path, version=2)
    found = read([str(tmp_path)])
    assert [log.source for log in found.logs] == ["ftrun", "a"]
    assert found.problems == ["b.1.0.0.jsonl: version 2 of events, this ft-report reads 1; left out"]


def test_a_file_cut_in_the_middle_of_a_line_and_a_damaged_one(job: Job, tmp_path: pathlib.Path) -> None:
    job.save(tmp_path)
    path = tmp_path / "a.1.0.0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    found = read([str(tmp_path)])
    assert found.problems == ["a.1.0.0.jsonl: 1 line is cut or damaged; the rest is used"]
    assert len(found.of(REPLICA)[0].events) == len(job.found().of(REPLICA)[0].events) - 1
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"t":\n', b"\xff\xfe\n", b"[1]\n", b'{"t":1,"kind":"gap"}\n', *lines[1:]]))
    found = read([str(tmp_path)])
    assert found.problems == ["a.1.0.0.jsonl: 4 lines are cut or damaged; the rest is used"]
    assert found.of(REPLICA)[0].events == job.found().of(REPLICA)[0].events


def test_kinds_and_fields_that_a_later_release_added_do_no_harm(job: Job, tmp_path: pathlib.Path) -> None:
    job.save(tmp_path)
    with (tmp_path / "a.1.0.0.jsonl").open("a") as file:
        file.write('{"t":9,"kind":"new"}\n{"t":9,"kind":"closed","more":1}\n')
    found = read([str(tmp_path)])
    assert found.problems == []
    assert found.of(REPLICA)[0].events[-1]["kind"] == "closed"


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (b"", "is empty"),
        (b"hello\n", "no event file"),
        (b'{"t":1,"kind":"closed"}\n', "no event file"),
        (b'{"t":1,"kind":"log","v":1,"role":"cook","source":"a","host":"h","pid":1,"part":0,"release":""}\n',
         "its first line is of an unknown role; left out"),
        (b'{"t":1,"kind":"log","v":1}\n', "its first line is log without role; left out"),
    ],
)  # fmt: skip
def test_what_is_no_event_file(tmp_path: pathlib.Path, first: bytes, problem: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(first)
    (tmp_path / "notes.txt").write_text("not looked at")
    found = read([str(tmp_path)])
    assert found.logs == []
    assert len(found.problems) == 1
    assert problem in found.problems[0]


def test_parts_of_one_process_are_one_log_and_missing_ones_are_told(job: Job, tmp_path: pathlib.Path) -> None:
    job.save(tmp_path)
    head, *rest = (tmp_path / "a.1.0.0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.1.0.0.jsonl").unlink()
    for part, lines in ((10, rest[3:]), (9, rest[:3])):
        (tmp_path / f"a.1.0.{part}.jsonl").write_text(head + "".join(lines))
    found = read([str(tmp_path)])
    assert found.of(REPLICA)[0].events == job.found().of(REPLICA)[0].events
    assert found.problems == ["a.1.0: its oldest 9 files are gone (a log is bounded)"]


def test_of_several_runs_the_last_one_counts(job: Job, tmp_path: pathlib.Path) -> None:
    job.save(tmp_path)
    again = Job()
    again.ftrun(100.0, "run_started", run_id="2", script="s", groups=["a"], total=1, ranks=1, lighthouse="", chaos="")
    again.joins("a", 101.0, 1, pid=2)
    again.save(tmp_path / "more")
    found = read([str(tmp_path)])
    assert min(event["t"] for log in found.logs for event in log.events) == 100.0
    assert found.problems == ["2 runs of ftrun have written here: this is about the last one"]


def test_events_that_were_not_written_are_told(job: Job, tmp_path: pathlib.Path) -> None:
    job.replica("a", 6.0, "dropped", events=7, reason="No space left on device")
    job.save(tmp_path)
    assert read([str(tmp_path)]).problems == ["a (pid 1): 7 events could not be written"]


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        read(["/nowhere/at/all"])


def test_a_line_without_end(tmp_path: pathlib.Path) -> None:
    head = {"t": 1, "kind": "log", "v": 1, "role": "replica", "source": "a", "host": "h", "pid": 1, "part": 0,
            "release": ""}  # fmt: skip
    (tmp_path / "x.jsonl").write_text(json.dumps(head) + "\n" + "x" * 3_000_000)
    assert read([str(tmp_path)]).problems == ["x.jsonl: 3 lines are cut or damaged; the rest is used"]
