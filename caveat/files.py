"""A file is written whole or not at all: to a temporary neighbour, which then takes its place."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["umask", "whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place only when everything went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def umask() -> int:
    """The permissions that new files are not to have."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
