"""Candidates: several fits that could stand for a method, of which validation rows choose one.

Each is fitted in a folder of its own, candidates/<number>, and its mean NLL on the validation rows is written to
candidates.json. When all are there, the best one's folder becomes the cell's posterior and the others go. A candidate
that fails (a learning rate at which training diverges) is passed over; its error stands in place of its NLL.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from caveat.bench.plan import Cell, Choice
from caveat.engine.distributed import current_ranks
from caveat.evaluate import evaluate
from caveat.posterior import Posterior
from caveat.storage import FORMAT, read_json, write_json
from caveat.task import Task

__all__ = ["chosen_candidate", "fit_best"]

_FILE = "candidates.json"
_DIVERGED = (ValueError, ArithmeticError)


def fit_best(
    cell: Cell, folder: Path, device: torch.device, fit: Callable[[Choice, Path], tuple[Task, Posterior]]
) -> None:
    """Fit every candidate that is not done yet, and leave the best one in folder/posterior.

    Args:
        cell: what the candidates are of.
        folder: the cell's folder.
        device: where is computed.
        fit: fits a choice in a folder, or reads what is there; returns the task and the posterior.
    """
    ranks = current_ranks(device)
    for number, choice in enumerate(cell.candidates):
        if choice.knobs in _scores(folder):
            continue
        try:
            task, posterior = fit(choice, folder / "candidates" / str(number))
        except _DIVERGED as error:
            outcome: float | str = f"{type(error).__name__}: {error}"
        else:
            outcome = _validation_nll(task, posterior, cell.seed) if ranks.first else 0.0
        if ranks.first:
            scores = _scores(folder) | {choice.knobs: outcome}
            write_json(folder / _FILE, {"format": FORMAT, "validation_nll": scores})
        ranks.wait()
    best = chosen_candidate(folder)
    if not isinstance(_scores(folder)[best], float):
        raise RuntimeError(f"every candidate failed: {_scores(folder)}")
    number = [choice.knobs for choice in cell.candidates].index(best)
    if ranks.first:
        (folder / "candidates" / str(number)).rename(folder / "posterior")
        shutil.rmtree(folder / "candidates")
    ranks.wait()


def chosen_candidate(folder: Path) -> str:
    """The candidate with the lowest validation NLL, in words; nothing for a cell that had no choice."""
    scores = _scores(folder)
    return min(scores, key=lambda knobs: _order(scores[knobs]), default="")


def _order(outcome: float | str) -> float:
    return outcome if isinstance(outcome, float) else math.inf


def _scores(folder: Path) -> dict[str, float | str]:
    path = folder / _FILE
    content: dict[str, Any] = read_json(path) if path.exists() else {"validation_nll": {}}
    scores: dict[str, float | str] = content["validation_nll"]
    return scores


def _validation_nll(task: Task, posterior: Posterior, seed: int) -> float | str:
    if task.validation is None:
        raise RuntimeError("there are no validation rows to choose a candidate by")
    batches = list(task.validation.ordered(len(task.validation)))
    scores = evaluate(posterior, {"validation": batches[0]}, seed=seed, progress=False)["validation"]
    nll = scores["nll"].mean
    return nll if nll is not None and math.isfinite(nll) else f"NLL {nll}"
