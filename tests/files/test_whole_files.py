"""A file or a folder is there whole or not at all, and what a killed process leaves is removed by the next."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from caveat.files import new_folder, umask, whole_file, whole_files
from tests.files.kills import killed_at


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "values.txt"
    with whole_file(path) as temporary:
        temporary.write_text("before")
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()

    def fail() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert path.read_text() == "before"
    assert [p.name for p in path.parent.iterdir()] == ["values.txt"]


def test_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "posterior"
    with new_folder(target) as place:
        (place / "file").write_text("one")
        assert not target.exists()
    assert (target / "file").read_text() == "one"
    with pytest.raises(FileExistsError, match="pass overwrite=True"), new_folder(target):
        pytest.fail("an existing folder must be refused before any work")
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "other") as place:
        (place / "missing" / "file").write_text("two")
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask()


def test_new_folder_replaces_whole(tmp_path: Path) -> None:
    target = tmp_path / "posterior"
    for name in ("old", "new"):
        with new_folder(str(target), overwrite=True) as place:
            (place / name).write_text(name)
    assert [p.name for p in target.iterdir()] == ["new"]
    with pytest.raises(KeyboardInterrupt), new_folder(target, overwrite=True):
        raise KeyboardInterrupt
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["posterior"]


def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path: Path, monkeypatch) -> None:
    target, rename = tmp_path / "posterior", os.rename
    with new_folder(target) as place:
        (place / "old").write_text("old")

    def fail_for_the_new(source: Path, destination: Path) -> None:
        if Path(destination) == target and (Path(source) / "new").exists():
            raise OSError("quota exceeded")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail_for_the_new)
    monkeypatch.setattr(whole_files, "_exchanged", lambda one, other: False)  # as where the system cannot
    with pytest.raises(OSError, match="quota"), new_folder(target, overwrite=True) as place:
        (place / "new").write_text("new")
    assert (target / "old").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["posterior"]


def every_kill(
    folder: Path, before: Callable[[], object], work: Callable[[], object], after: Callable[[], object]
) -> int:
    """Kill `work` before each of its steps on files, and call `after` each time; how many kills there were."""
    kills = 0
    while True:
        before()
        if not killed_at(kills, work, folder):
            return kills
        after()
        kills += 1


def written(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text)


def test_a_file_whose_writer_is_killed_is_the_old_or_the_new_one_and_nothing_is_left_after_the_next(
    tmp_path: Path,
) -> None:
    path, seen = tmp_path / "values[1].txt", set()

    def check() -> None:
        seen.add(path.read_text())
        written(path, "next")
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    kills = every_kill(tmp_path, lambda: written(path, "old"), lambda: written(path, "new"), check)
    assert kills >= 6
    assert seen == {"old", "new"}


def test_a_file_that_a_living_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "values.txt"
    with whole_file(path) as temporary:
        temporary.write_text("slow")
        written(path, "quick")
        assert temporary.exists()
    assert path.read_text() == "slow"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def folder_of(path: Path, text: str) -> None:
    with new_folder(path, overwrite=True) as place:
        (place / "a.txt").write_text(text)
        (place / "b.txt").write_text(text)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_whose_writer_is_killed_is_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Where the system can exchange two folders, one is there at every moment; else from the next call on."""
    path, seen = tmp_path / "posterior", set()
    if not exchange:
        monkeypatch.setattr(whole_files, "_exchanged", lambda one, other: False)

    def check() -> None:
        if exchange:
            texts = {file.read_text() for file in path.iterdir()}
            assert len(texts) == 1
            seen.update(texts)
        with pytest.raises(FileExistsError), new_folder(path):
            pytest.fail("one of the two is there")
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
        assert {file.name for file in path.iterdir()} == {"a.txt", "b.txt"}

    kills = every_kill(tmp_path, lambda: folder_of(path, "old"), lambda: folder_of(path, "new"), check)
    assert kills >= 12
    assert seen == ({"old", "new"} if exchange else set())


def write_folder(place: Path) -> None:
    with new_folder(place) as folder:
        (folder / "plain.txt").write_text("a")
        (folder / "inner").mkdir()
        (folder / "inner" / "deep.txt").write_text("b")


def write_file(place: Path) -> None:
    with whole_file(place) as unfinished:
        unfinished.write_text("a")


@pytest.mark.parametrize(("write", "count"), [(write_folder, 4), (write_file, 1)])
def test_what_is_given_its_name_is_on_disk_before(
    write: Callable[[Path], None], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a machine stops, and not just a process, there would be a name without its bytes."""
    waited: list[tuple[int, bool]] = []  # for which file, and whether what was made had its name by then
    target, fsync = tmp_path / "made", os.fsync

    def noted(handle: int) -> None:
        waited.append((os.fstat(handle).st_ino, target.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    write(target)
    files = [target, *target.rglob("*")]
    assert len(files) == count
    assert {path.stat().st_ino for path in files} <= {number for number, named in waited if not named}
    assert (tmp_path.stat().st_ino, True) in waited, "the name itself, once it was given"
