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


def test_several_replicas_write_the_same_in_place(tmp_path: pathlib.Path) -> None:
    """After training; one is whole before another one is, which finds its own file all the same."""
    file = PlacedFile(str(tmp_path / "final.pt"), 0)

    def another_meanwhile(path: str) -> None:
        pathlib.Path(path).write_text("the sa")
        file.write_in_place(lambda other: pathlib.Path(other).write_text("the same"))
        assert (tmp_path / "final.pt").read_text() == "the same"
        pathlib.Path(path).write_text("the same")

    file.write_in_place(another_meanwhile)
    assert (tmp_path / "final.pt").read_text() == "the same"

    def fails(path: str) -> None:
        pathlib.Path(path).write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        file.write_in_place(fails)
    assert [path.name for path in tmp_path.iterdir()] == ["final.pt"]


def test_folders_of_two_writers(tmp_path: pathlib.Path) -> None:
    """A former leader's group, and another start of the same group, write to folders of their own."""
    folder = PlacedFolder(str(tmp_path), "step", 3)
    stages = [folder.begin(str, first=True) for _ in range(2)]
    assert stages[0] != stages[1]
    assert folder.begin(lambda _: stages[0], first=False) == stages[0]  # another rank
    for stage in stages:
        pathlib.Path(stage).mkdir()
        (pathlib.Path(stage) / "file").write_text(stage)
        folder.complete(stage)
    assert (pathlib.Path(folder.beside) / "file").read_text() == stages[1]
    folder.discard()
    assert list(tmp_path.iterdir()) == []


def test_the_next_writer_sweeps_away_what_a_killed_one_left(tmp_path: pathlib.Path) -> None:
    def left_by(name: str, pid: int) -> pathlib.Path:
        return tmp_path / f".{name}.some-host-{pid}-0.writing"

    left_by("step", 1).mkdir()
    (left_by("step", 1) / "file").touch()
    left_by("a.pt", 1).touch()
    others = {left_by("step.2", 1), left_by("b.pt", 1), tmp_path / ".step.3.partial", tmp_path / "step"}
    for path in others:
        path.touch()
    file = PlacedFile(str(tmp_path / "a.pt"), 3)
    file.write(lambda path: pathlib.Path(path).touch())
    PlacedFolder(str(tmp_path), "step", 3).begin(str, first=True)
    assert set(tmp_path.iterdir()) == others | {pathlib.Path(file.beside)}


def test_a_writer_that_was_swept_away_spoils_nothing(tmp_path: pathlib.Path) -> None:
    """It was frozen, and its successor took it for dead."""
    file = PlacedFile(str(tmp_path / "a.pt"), 3)

    def frozen(path: str) -> None:
        pathlib.Path(path).touch()
        pathlib.Path(path).unlink()

    with pytest.raises(FileNotFoundError, match="another one writes"):
        file.write(frozen)
    file.place()
    assert list(tmp_path.iterdir()) == []
