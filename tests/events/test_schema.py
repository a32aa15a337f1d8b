"""The schema itself, and that the page about it says the same."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from ft_core.events.schema import ADDED, EVERYBODY, KINDS, ROLES, VERSION, check, lacks

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "events.md"
UNITLESS = {"v", "pid", "part", "events", "ranks", "step", "quorum_id", "attempts", "commits", "vetoes", "broken",
            "min_replicas", "total", "restarts", "rank", "code", "before", "groups", "status", "bytes"}  # fmt: skip
"""Numbers that count or name something."""


def test_the_page_has_every_kind_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ", PAGE.read_text(), re.MULTILINE)
    told = {kind: set(re.findall(r"`(\w+)`", fields)) for kind, fields in rows}
    assert told == {name: set(kind.fields) for name, kind in KINDS.items()}
    assert f"version {VERSION}" in PAGE.read_text()


def test_numbers_have_units() -> None:
    fields = {(name, field) for name, kind in KINDS.items() for field, t in kind.fields.items() if t in (int, float)}
    assert [f for f in sorted(fields) if not f[1].endswith("_s") and f[1] not in UNITLESS] == []
    assert {kind.role for kind in KINDS.values()} == {EVERYBODY, *ROLES}


GOOD = {"t": 1.0, "kind": "gap", "cause": "veto", "detail": "", "seconds_s": 1, "usual_s": 0.5, "step": 3}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, ""),
        ({"kind": "made up"}, "of an unknown kind 'made up'"),
        ({"t": "noon"}, "without a time"),
        ({"step": "3"}, "gap with step='3', which is no int"),
        ({"usual_s": True}, ""),
        ({"more": 1}, "gap with a field 'more' that is not in the schema"),
    ],
)
def test_check(change: dict[str, Any], wrong: str) -> None:
    assert check(GOOD | change) == wrong


def test_older_files_of_this_version_may_lack_what_was_added() -> None:
    for kind, field in ADDED:
        assert field in KINDS[kind].fields
    values: dict[type, Any] = {int: 1, str: "", float: 1.0, bool: False, list: []}
    for kind in {kind for kind, _ in ADDED}:
        old = {name: values[t] for name, t in KINDS[kind].fields.items() if (kind, name) not in ADDED}
        assert lacks({"t": 1.0, "kind": kind, **old}) == ""
        assert check({"t": 1.0, "kind": kind, **old}).startswith(f"{kind} without ")


def test_check_misses_a_field() -> None:
    assert check({key: value for key, value in GOOD.items() if key != "cause"}) == "gap without cause"
