"""Functions in files: `file.py:function`, and which files may be run to find them.

A Python file is run where a person names it: on a command line, or in an experiment file. A posterior's folder may
name one as well, but whoever made the folder is not whoever reads it, so that such a file is run only if this user
had it run before, by naming it, and it has not changed since.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caveat.files.whole_files import whole_file

__all__ = ["named_function", "names_function", "was_run_before"]


def named_function(reference: str) -> Callable[..., Any]:
    """The function that `file.py:function` names; the file is run to find it."""
    path, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise FileNotFoundError(f"{reference}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _remember(Path(path))
    if not hasattr(module, name):
        raise ValueError(f"{reference}: {path} has no function {name}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def was_run_before(reference: str) -> bool:
    """Whether this user named the file of `file.py:function` before, so that it was run, and it is the same still."""
    path = Path(reference.rpartition(":")[0])
    return path.is_file() and _files_run().get(str(path.resolve())) == _digest(path)


def _remember(path: Path) -> None:
    """Note that this file, as it is, was run because a person named it; where that cannot be kept, it is not known."""
    files, key, digest = _files_run(), str(path.resolve()), _digest(path)
    if files.get(key) != digest:
        with contextlib.suppress(OSError), whole_file(_record()) as temporary:
            temporary.write_text(json.dumps(files | {key: digest}, indent=1))


def _files_run() -> dict[str, str]:
    """Digests of the files that were run, by their paths from the root."""
    try:
        content = json.loads(_record().read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _record() -> Path:
    """Where it is kept: among this user's own files, out of reach of a folder that somebody hands them."""
    places = (os.environ.get("XDG_STATE_HOME"), os.environ.get("LOCALAPPDATA"), Path.home() / ".local" / "state")
    return Path(next(place for place in places if place)) / "caveat" / "files_run.json"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names_function(reference: str) -> bool:
    """Whether a text is of the form `file.py:function`."""
    return reference.rpartition(":")[0].endswith(".py")
