"""Worker processes: cells side by side, each process with its share of the threads.

A worker that dies (out of memory, a crash in native code) costs the cell that it had, not the others: that cell is
recorded as failed and another worker takes its place. concurrent.futures would give up all of them.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

__all__ = ["Died", "in_processes"]

Job = TypeVar("Job")
_PATIENCE = 5.0  # seconds that a worker has to stop


@dataclass(frozen=True)
class Died:
    """The answer to a job whose process ended in the middle of it."""

    reason: str


def in_processes(
    work: Callable[[Any], Any], jobs: Sequence[Job], ready: Callable[[Job], bool], count: int
) -> Iterator[tuple[Job, Any]]:
    """Yields (job, what work(job) gave, or Died) as they finish; a job is begun when it is `ready`.

    Jobs that wait for another are taken up once it was yielded and looked at, so that what the caller writes in between
    is seen by `ready`. When nothing runs and nothing is ready, the rest are begun as they are.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // count)
    pending = list(jobs)
    busy: dict[Connection, Job] = {}
    idle: list[Connection] = []
    workers: dict[Connection, Any] = {}

    def begin() -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, work, threads), daemon=True)
        process.start()
        theirs.close()
        workers[ours] = process
        return ours

    try:
        while pending or busy:
            able = [job for job in pending if ready(job)] or ([] if busy else pending[:])
            while able and len(busy) < count:
                job = able.pop(0)
                pending.remove(job)
                line = idle.pop() if idle else begin()
                line.send(job)
                busy[line] = job
            for line in [line for line in wait(list(busy)) if isinstance(line, Connection)]:
                job = busy.pop(line)
                try:
                    answer = line.recv()
                    idle.append(line)
                except (EOFError, OSError):
                    process = workers.pop(line)
                    process.join()
                    answer = Died(_how(process.exitcode))
                yield job, answer
    finally:
        for line, process in workers.items():
            line.close()
            if line in busy:
                process.terminate()
                process.join(_PATIENCE)
                process.kill()
            process.join()


def _serve(line: Connection, work: Callable[[Any], Any], threads: int) -> None:
    """The life of a worker: do what comes along the line, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started it says when to stop
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order, so that nothing is left behind
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            job = line.recv()
            try:
                answer = work(job)
            except Exception:
                answer = Died(traceback.format_exc())
            line.send(answer)


def _end_with_parent() -> None:
    """A worker whose parent was killed must not go on writing to a cell that the next call will take up."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ": out of memory? Take fewer --jobs" if -code == signal.SIGKILL else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with code {code}"
