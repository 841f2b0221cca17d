"""A folder that one process works on at a time.

The lock is one of the system's (`flock`) on a hidden file beside the folder, so that it ends with its process, however
that ends, and nothing has to be cleaned up before the next one can begin. Windows has no such locks: there two
processes are not kept apart.
"""

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["FolderInUse", "is_unlocked", "lock", "lock_file", "sole_use"]

_HELD = (errno.EAGAIN, errno.EACCES)  # what the system says of a lock that another process has


class FolderInUse(RuntimeError):  # noqa: N818 - the name says what is wrong
    """A folder that another process works on."""


def lock_file(folder: Path) -> Path:
    """The hidden file beside a folder that is locked in its stead."""
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def sole_use(folder: Path, file: Path | None = None) -> Iterator[list[str]]:
    """Hold a folder for this process alone until the block ends; a `FolderInUse` says who else has it.

    Args:
        folder: what is held; it need not exist.
        file: what is locked in its stead, `lock_file(folder)` unless given.

    Gives what a person should be warned of: that the file system has no locks.
    """
    file = lock_file(folder) if file is None else file
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, warnings = _held(folder, file)
    try:
        yield warnings
    finally:
        # Removed before it is let go: whoever has opened it meanwhile sees that it is no longer there, and begins anew.
        if sys.platform != "win32":
            file.unlink(missing_ok=True)
        os.close(handle)


def _held(folder: Path, file: Path) -> tuple[int, list[str]]:
    """The locked file, opened, and warnings."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not lock(handle):
                raise FolderInUse(
                    f"{folder} is in use by {_holder(handle)}: wait until it is done, or choose another folder"
                )
            supported: list[str] = []
        except OSError as error:
            supported = [
                f"{folder}: the file system has no locks ({error.strerror}), so a second process in it is not noticed"
            ]
        except BaseException:
            os.close(handle)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), file.stat()):
                os.truncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return handle, supported
        os.close(handle)  # its holder removed it between our opening and our locking it


def _holder(handle: int) -> str:
    return os.pread(handle, 200, 0).decode(errors="replace") or "another process"


def lock(handle: int) -> bool:
    """Lock an open file; False where another has it, an OSError where the file system has no locks."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def is_unlocked(file: Path) -> bool:
    """Whether nobody holds a file, as far as the system can tell: whoever made it has ended."""
    if sys.platform == "win32":
        return False
    try:
        handle = os.open(file, os.O_RDWR)
    except OSError:
        return False
    try:
        return lock(handle)
    except OSError:
        return False
    finally:
        os.close(handle)
