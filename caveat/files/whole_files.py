"""Files and folders that are there whole or not at all: made beside their place, put on disk, then moved into it.

A process that is killed leaves what it was making behind, under a hidden name: the next one that writes the same file
or folder removes it.
"""

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caveat.files.folder_locks import is_unlocked, lock, sole_use

__all__ = [
    "new_folder",
    "put_on_disk",
    "regular_file",
    "remove_folder",
    "remove_unfinished",
    "staged_folder",
    "umask",
    "whole_file",
]

_UNFINISHED = ".new"  # the ending of what is being made
_RETIRED = ".old"  # the ending of a folder that holds what is being replaced


@contextmanager
def whole_file(path: Path, *, tidy: bool = True) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place only when everything went well.

    With `tidy` those that killed processes left are removed. Not where the file is written by a program that makes it
    anew, as linkers do: the new one is not locked, and another process would remove it under that program's hands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in path.parent.glob(f".{_literal(path.name)}.????????{_UNFINISHED}") if tidy else ():
        if unfinished.is_file() and is_unlocked(unfinished):  # of a process that was killed
            unfinished.unlink(missing_ok=True)
    handle, temporary = _temporary_file(path)
    try:
        yield temporary
        put_on_disk(temporary)
        temporary.chmod(0o666 & ~umask())
        temporary.replace(path)
        put_on_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def _temporary_file(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, locked while it is open, so that nobody takes it for one that was left behind."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED)
        with contextlib.suppress(OSError):  # no locks here: then nobody can think that it is unlocked
            lock(handle)
        if Path(name).exists():  # else it was taken for such a one before it was locked
            return handle, Path(name)
        os.close(handle)


@contextmanager
def new_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder that appears at `path` only when the block ends well; an existing one is refused or replaced whole."""
    with sole_use(Path(path)), staged_folder(Path(path), overwrite) as place:
        yield place


@contextmanager
def staged_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """The same for a folder that the caller holds, see `sole_use`."""
    remove_unfinished(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another folder, or pass overwrite=True to replace it")
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED))
    try:
        temporary.chmod(0o777 & ~umask())
        yield temporary
        for entry in sorted(temporary.rglob("*")):
            put_on_disk(entry)
        put_on_disk(temporary)
        if path.exists():
            _replace_folder(path, temporary)
        else:
            temporary.rename(path)
        put_on_disk(path.parent)
    finally:
        if temporary.is_symlink():  # in whose place the new folder is now
            temporary.unlink()
        shutil.rmtree(temporary, ignore_errors=True)


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes left of a folder that the caller holds; put back one that was being replaced."""
    for retired in path.parent.glob(f".{_literal(path.name)}.????????{_RETIRED}"):
        if (retired / path.name).exists() and not path.exists():
            (retired / path.name).rename(path)
        shutil.rmtree(retired)
    for unfinished in path.parent.glob(f".{_literal(path.name)}.????????{_UNFINISHED}"):
        if unfinished.is_dir():
            shutil.rmtree(unfinished)


def remove_folder(path: Path) -> None:
    """Remove a folder that the caller holds; it is gone at once, and `remove_unfinished` finds what a kill leaves."""
    doomed = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED))
    path.rename(doomed / path.name)
    shutil.rmtree(doomed)


def _replace_folder(path: Path, new: Path) -> None:
    """Put a new folder in the place of an old one, which comes back when that fails."""
    if _exchanged(path, new):
        return  # the old one is removed under the name of the new
    retired = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=_RETIRED))
    path.rename(retired / path.name)
    try:
        new.rename(path)
    except OSError:
        (retired / path.name).rename(path)
        raise
    finally:
        shutil.rmtree(retired)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that there is one at every moment; False where the system cannot."""
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    library: Any = None if sys.platform == "win32" else ctypes.CDLL(None)
    if hasattr(library, "renameat2"):  # Linux: AT_FDCWD, RENAME_EXCHANGE
        return bool(library.renameat2(-100, names[0], -100, names[1], 2) == 0)
    if hasattr(library, "renamex_np"):  # macOS: RENAME_SWAP
        return bool(library.renamex_np(*names, 2) == 0)
    return False


def put_on_disk(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on disk; where folders cannot be waited for, do not."""
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _literal(name: str) -> str:
    """A name as a pattern that matches it alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def regular_file(path: Path) -> Path:
    """The path, once it is known to be a file of bytes: a pipe or a device could be read for ever."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file (a folder, a pipe or a device?)")
    return path


def umask() -> int:
    """The permissions that new files are not to have."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
