"""Files: written whole or not at all, through a temporary neighbour that takes their place; and functions in them."""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["named_function", "names_function", "umask", "whole_file"]


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


def named_function(reference: str) -> Callable[..., Any]:
    """The function that `file.py:function` names; the file is run to find it."""
    path, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise FileNotFoundError(f"{reference}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{reference}: {path} has no function {name}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def names_function(reference: str) -> bool:
    """Whether a text is of the form `file.py:function`."""
    return reference.rpartition(":")[0].endswith(".py")
