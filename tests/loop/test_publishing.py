"""Files and folders beside their places."""

from __future__ import annotations

import pathlib

import pytest

from ft_core.loop.publishing import PlacedFile, PlacedFolder


def test_a_former_leader_that_wakes_up_in_a_write_spoils_nothing(tmp_path: pathlib.Path) -> None:
    """It was frozen before it opened the file; its successor writes a later step under the same name meanwhile."""
    old, new = PlacedFile(str(tmp_path / "latest.pt"), 3), PlacedFile(str(tmp_path / "latest.pt"), 7)

    def frozen(path: str) -> None:
        def successors(path: str) -> None:
            with open(path, "w") as file:
                file.write("begin 7, ")
                file.flush()
                pathlib.Path(frozen_path[0]).write_text("3, whole")
                file.write("end 7")

        frozen_path = [path]
        new.write(successors)
        new.place()

    old.write(frozen)
    assert (tmp_path / "latest.pt").read_text() == "begin 7, end 7"
    old.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["latest.pt"]


def test_a_new_leader_places_what_the_former_one_wrote_whole(tmp_path: pathlib.Path) -> None:
    PlacedFile(str(tmp_path / "a.pt"), 3).write(lambda path: pathlib.Path(path).write_text("whole"))
    assert not (tmp_path / "a.pt").exists()
    PlacedFile(str(tmp_path / "a.pt"), 3).place()
    assert (tmp_path / "a.pt").read_text() == "whole"


def test_a_write_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def fails(path: str) -> None:
        pathlib.Path(path).write_text("half")
        raise OSError("no space left on device")

    file = PlacedFile(str(tmp_path / "made" / "a.pt"), 3)
    with pytest.raises(OSError, match="no space"):
        file.write(fails)
    file.place()
    assert list((tmp_path / "made").iterdir()) == []


def test_folders_of_two_groups(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A former leader's group, and another start of the same group, write to folders of their own."""
    monkeypatch.setenv("FT_GROUP_ATTEMPT", "1")
    first, other = (PlacedFolder(str(tmp_path), "step", 3, group) for group in (0, 1))
    assert first.writing != other.writing
    before = first.writing
    monkeypatch.setenv("FT_GROUP_ATTEMPT", "2")
    assert first.writing != before
    for folder, text in (first, "first"), (other, "other"):
        folder.begin()
        pathlib.Path(folder.writing).mkdir()
        (pathlib.Path(folder.writing) / "file").write_text(text)
        folder.complete()
    assert (pathlib.Path(first.beside) / "file").read_text() == "other"
    first.discard()
    assert list(tmp_path.iterdir()) == []
