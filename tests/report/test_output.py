"""Text, picture, page and command: what they show, and what they do with what is missing or in the way."""

from __future__ import annotations

import html.parser
import io
import pathlib
import sys
from typing import TYPE_CHECKING

import pytest

from ft_core.report import cells as cells_module
from ft_core.report.account import account
from ft_core.report.cells import STATES, cells, members_over_time, ticks
from ft_core.report.cli import HTML, PNG, main
from ft_core.report.page import render as page
from ft_core.report.story import Segment, State
from ft_core.report.text import clock, duration, table
from ft_core.report.text import render as text
from tests.report.jobs import Job, big
from tests.report.test_account import killed

if TYPE_CHECKING:
    from ft_core.report.account import Account


@pytest.fixture
def result() -> Account:
    return account(killed().found())


def test_the_text_has_every_part(result: Account) -> None:
    told = text(result, ["x.jsonl: 1 line is cut"])
    for part in ("2 replica groups", "170 steps committed", "goodput since the first commit", "where every second went",
                 "waited for", "gaps between commits", "failures", "note: x.jsonl: 1 line is cut"):  # fmt: skip
        assert part in told
    (row,) = [line for line in told.splitlines() if " killed " in line]
    assert row.split() == ["10.0", "s", "b", "killed", "4", "ms", "400", "ms", "5.0", "s", "rank", "0", "(pid", "1)",
                           "was", "ended", "by", "SIGKILL"]  # fmt: skip
    assert max(map(len, told.splitlines())) < 200


def test_a_long_table_is_cut_and_says_so() -> None:
    lines = table(("n",), [(str(number),) for number in range(80)], "r").splitlines()
    assert len(lines) == 52
    assert lines[-1].strip() == "... and 30 more"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0.0123, "12 ms"), (1.0, "1.0 s"), (119.0, "119.0 s"), (180.0, "3.0 min"), (7200.0, "2.0 h"),
     (864000.0, "10.0 days")],
)  # fmt: skip
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_the_axis_has_few_round_numbers() -> None:
    for span in (0.05, 3.0, 40.0, 171.0, 3000.0, 90_000.0, 3 * 7 * 86400.0, 1e9):
        at = ticks(span)
        assert 1 <= len(at) <= 11
        assert len({clock(tick, span) for tick in at}) == len(at)
    assert [clock(tick, 171.0) for tick in ticks(171.0)][:3] == ["0:00 min", "0:30 min", "1:00 min"]


class Parser(html.parser.HTMLParser):
    """Counts tags, and what a page asks other places for."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.links: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]


def test_the_page_stands_alone_and_escapes_what_it_was_given() -> None:
    job = killed()
    job.fails("a", 18.0, code=1, error="<script>alert('x')</script> & more")
    made = page(account(job.found()), ["<b>note</b>"])
    parser = Parser()
    parser.feed(made)
    assert parser.links == []
    assert "http:" not in made
    assert "https:" not in made
    assert parser.tags["script"] == 1
    assert "&lt;script&gt;alert" in made
    assert "&lt;b&gt;note" in made
    assert parser.tags["svg"] == 1
    for colour, _ in (STATES[State.TRAINING], STATES[State.RESTARTING], STATES[State.HEALING]):
        assert f"fill={colour}" in made


def test_a_job_of_64_groups_is_drawn_with_all_its_rows(tmp_path: pathlib.Path) -> None:
    big(64, 120.0, 5).save(tmp_path)
    assert main([str(tmp_path)]) == 0
    made = (tmp_path / HTML).read_text()
    assert all(f">replica-{number}<" in made for number in range(64))
    assert len(made) < 3_000_000
    assert (tmp_path / PNG).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_row_of_many_segments_is_drawn_in_columns(result: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "COLUMNS", 10)
    result.begin, result.end = 0.0, 100.0
    story = result.stories[0]
    story.segments = [
        Segment(float(t), t + 1.0, State.LOST if t % 10 == 3 else State.TRAINING) for t in range(0, 50)
    ] + [Segment(60.0, 100.0, State.RESTARTING)]  # fmt: skip
    assert [(cell.begin, cell.end, cell.state) for cell in cells(result, story)] == [
        (0.0, 50.0, State.TRAINING), (60.0, 100.0, State.RESTARTING),
    ]  # fmt: skip
    story.segments = story.segments[-3:]
    assert cells(result, story) == story.segments


def test_members_over_time(result: Account) -> None:
    steps = members_over_time(result)
    assert steps[0] == (0.0, 0)
    assert steps[1] == (1.9, 2)
    assert steps[-1][1] == 2


# ---------------------------------------------------------------- the command


def test_the_command_draws_beside_the_events(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed().save(tmp_path / "events")
    assert main([str(tmp_path / "events")]) == 0
    told = capsys.readouterr()
    assert f"timeline: {tmp_path / 'events' / PNG}, {tmp_path / 'events' / HTML}" in told.out
    assert told.err == ""
    assert main([str(tmp_path / "events"), "--out", str(tmp_path / "elsewhere" / "new")]) == 0
    assert (tmp_path / "elsewhere" / "new" / HTML).exists()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_are_no_orders_to_the_terminal_and_fit_into_it(
    tmp_path: pathlib.Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed().save(tmp_path / "events")
    for file in (tmp_path / "events").iterdir():
        file.write_text(file.read_text().replace("was ended by", "r\\u001b[2J\\u00fc\\ud800"))
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert main([str(tmp_path / "events"), "--out", str(tmp_path / "out")]) == 0
    out.seek(0)
    told = out.read()
    assert "\x1b" not in told
    assert "r\\x1b[2J" in told


def test_without_matplotlib_there_is_a_sentence_and_the_page(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed().save(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "ft-training[report]" in told.err
    assert f"timeline: {tmp_path / HTML}\n" in told.out
    assert not (tmp_path / PNG).exists()


def test_no_pictures(tmp_path: pathlib.Path) -> None:
    killed().save(tmp_path)
    assert main([str(tmp_path), "--no-pictures"]) == 0
    assert not (tmp_path / HTML).exists()


def test_an_unwritable_folder_costs_the_pictures_only(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed().save(tmp_path)
    assert main([str(tmp_path), "--out", str(tmp_path / "a.1.0.0.jsonl")]) == 0
    told = capsys.readouterr()
    assert "170 steps committed" in told.out
    assert "no pictures in" in told.err
    assert "--out" in told.err


def test_nothing_to_report_on(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "missing")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "no events in" in capsys.readouterr().err
    job = Job()
    job.joins("a", 1.0, 1)
    job.save(tmp_path, version=9)
    assert main([str(tmp_path)]) == 2
    assert "version 9 of events" in capsys.readouterr().err
