"""One cell: fit, predict, save, load on a fresh module, predict again; in a process of its own, within a time limit.

The process is a fork, so that packages are imported once. What comes back is a row: how far it got, what was said.
"""

import contextlib
import multiprocessing
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import caveat

from .cases import CASES, Case
from .settings import settings

FIELDS = ("network", "setting", "outcome", "stage", "seconds", "fit_seconds", "peak_mib", "stored_bytes", "weights",
          "said", "warnings")  # fmt: skip
REFUSALS = (ValueError, TypeError, MemoryError)  # what a refusal may be; anything else is a fault


def run_cell(network: str, setting: str, points: Path, limit: float) -> dict[str, Any]:
    """The row of a cell; `points` has the trained points of networks by name.

    The limit is in seconds of the processor, since others may compute beside it; a process that waits is given ten
    times as long.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    begin = time.perf_counter()
    child = context.Process(target=_in_a_child, args=(network, setting, points, theirs, limit), daemon=True)
    child.start()
    theirs.close()
    row: dict[str, Any] = {"outcome": "died", "stage": "start"}
    waiting = 10 * limit
    while (left := waiting - (time.perf_counter() - begin)) > 0 and ours.poll(left):
        try:
            row |= ours.recv()
        except EOFError:
            break
    else:
        row |= {"outcome": "over the time limit", "said": f"more than {waiting:.0f} s"}
        child.kill()
    child.join()
    if child.exitcode == -signal.SIGXCPU:
        row |= {"outcome": "over the time limit", "said": f"more than {limit:.0f} s of the processor"}
    row |= {"network": network, "setting": setting, "seconds": round(time.perf_counter() - begin, 2)}
    return {name: row.get(name, "") for name in FIELDS}


def _in_a_child(network: str, setting: str, points: Path, pipe: Connection, limit: float) -> None:
    """Send the row piece by piece: the stage that is begun, and how it ended."""
    torch.set_num_threads(1)
    whole = max(1, round(limit))
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 5))
    row: dict[str, Any] = {"stage": "build"}
    folder = Path(tempfile.mkdtemp())
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(None):
            warnings.simplefilter("always")
            for stage in _stages(network, setting, points, folder):
                row |= stage
                pipe.send(row)
        ours = [str(w.message) for w in caught if "caveat" in w.filename]
        row["warnings"] = " | ".join(dict.fromkeys([*row.get("warnings", "").split(" | "), *ours])).strip(" |")
        row["outcome"] = "ok" if row["equal"] else "loaded one predicts otherwise"
    except REFUSALS as error:
        row |= {"outcome": "refused", "said": " ".join(str(error).split())}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        row |= {"outcome": "fault", "said": " ".join(text.split())}
    shutil.rmtree(folder, ignore_errors=True)
    row["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
    pipe.send(row)
    pipe.close()


def _stages(network: str, setting: str, points: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """What is known after each stage of a cell, with the stage that comes next."""
    case = CASES[network].made()
    method = settings()[setting]
    task = case.task()
    yield {"stage": "fit", "weights": task.network.n_parameters}
    posterior = _fitted(network, case, task, method, points)
    told = " | ".join(posterior.info.warnings)
    yield {"stage": "predict", "fit_seconds": round(posterior.info.seconds, 2), "warnings": told}
    before = posterior.predict(case.new_inputs, seed=1)
    for value in (before.samples, before.epistemic, before.aleatoric):
        if not bool(torch.isfinite(value).all()):
            raise ArithmeticError("the prediction is not finite")
    yield {"stage": "save"}
    posterior.save(folder / "posterior")
    stored = sum(file.stat().st_size for file in (folder / "posterior").rglob("*") if file.is_file())
    yield {"stage": "load", "stored_bytes": stored}
    loaded = caveat.load(folder / "posterior", CASES[network].made().module)
    after = loaded.predict(case.new_inputs, seed=1)
    yield {"stage": "done", "equal": torch.equal(before.samples, after.samples)}


def _fitted(network: str, case: Case, task: caveat.Task, method: Any, points: Path) -> caveat.Posterior:
    """The posterior; from the network's trained point where the method starts from one."""
    if method.starts_from != "trained" and not isinstance(method, caveat.MAP):
        return caveat.fit(task, method, progress=False)
    place = points / "".join(letter if letter.isalnum() else "_" for letter in network)
    if not place.exists():
        training = caveat.Training(epochs=case.epochs, learning_rate=case.learning_rate)
        caveat.fit(task, caveat.MAP(training=training), folder=place, progress=False)
    point = caveat.load(place, case.module)
    return point if isinstance(method, caveat.MAP) else caveat.fit(task, method, start=point, progress=False)
