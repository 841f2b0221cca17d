"""Kills at chosen moments: a process that is ended by SIGKILL before the n-th step that it takes on files."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate", "os.listdir"}


def killed_at(step: int, work: Callable[[], object], folder: Path, counted: Path | None = None) -> bool:
    """Whether a copy of this process was killed before that step of its work in a folder; False where it got through.

    A step is what Python tells audit hooks of: a file opened, renamed, removed. An error in the work is raised here.
    How many steps it took when it got through is written to `counted`.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            taken = _kill_before(step, folder)
            work()
            if counted is not None:
                counted.write_text(str(taken()))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return False


def _kill_before(step: int, folder: Path) -> Callable[[], int]:
    left = step
    place = str(folder.resolve())

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        path = arguments[0] if event in STEPS and arguments else None
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(place):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(watch)
    return lambda: step - left
