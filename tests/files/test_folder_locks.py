"""One process works on a folder at a time, and a lock ends with its process."""

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from caveat.files import FolderInUse, folder_locks, sole_use
from tests.files.kills import killed_at


def test_a_second_user_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "posterior"
    with sole_use(folder):
        told = rf"posterior is in use by process {os.getpid()} on .*: wait until"
        with pytest.raises(FolderInUse, match=told), sole_use(folder):
            pytest.fail("held twice")
        with sole_use(tmp_path / "other"):
            pass
    with sole_use(folder) as warnings:
        assert warnings == []
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "posterior"

    def held_and_ended() -> None:
        with sole_use(folder):
            os.kill(os.getpid(), 9)

    assert killed_at(1000, held_and_ended, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".posterior.lock"]
    with sole_use(folder):
        pass
    assert list(tmp_path.iterdir()) == []


def one_more(folder: Path) -> None:
    count = folder.with_name("count")
    for _ in range(50):
        while True:
            try:
                with sole_use(folder):
                    count.write_text(str(int(count.read_text()) + 1))
                break
            except FolderInUse:
                pass


def test_processes_that_contend_take_turns(tmp_path: Path) -> None:
    """Each lets go by removing the file that the others may have opened already: nobody gets in beside another."""
    (tmp_path / "count").write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=one_more, args=(tmp_path / "folder",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (tmp_path / "count").read_text() == "200"


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_locks, "lock", none)
    with sole_use(tmp_path / "posterior") as warnings:
        assert "the file system has no locks (No locks available)" in warnings[0]
