"""Predict every data set, write the predictions, score them: `predictions/*.npz` and `metrics.json`."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from caveat.evaluate.feature_distance import FeatureDistance
from caveat.evaluate.fidelity import ReferenceSet, fidelity_on
from caveat.evaluate.metrics import Baseline, Columns, gain_over_marginals
from caveat.evaluate.predictions import file_stem, prediction_arrays, row_blocks
from caveat.evaluate.scoring.scores import Scored, Scores, score, score_ood
from caveat.likelihoods import Bernoulli, Categorical, Likelihood
from caveat.methods import method_name
from caveat.posterior import Posterior
from caveat.predictive import BernoulliPredictive
from caveat.rows import Data, Rows
from caveat.storage import FORMAT, encode, write_arrays, write_json

__all__ = ["evaluate"]


def evaluate(
    posterior: Posterior,
    data: Mapping[str, Data | Mapping[float, Data]],
    *,
    ood: Mapping[str, Data] | None = None,
    training: Data | None = None,
    reference: Posterior | ReferenceSet | None = None,
    folder: str | Path | None = None,
    label: str | None = None,
    class_names: tuple[str, ...] = (),
    target: str = "",
    draws: int | None = None,
    seed: int = 0,
    keep_samples: bool = False,
    progress: bool = True,
) -> Scores:
    """Score a posterior on data sets: clean, shifted, and out of distribution.

    Where predictions are not clearly better than the marginals of the targets, `scores["clean"].warnings` says so.

    Args:
        posterior: what to score.
        data: data with targets by name; a mapping of severity to data makes a family of shifts, as in
            `{"clean": test, "rotated": {15: rotated_15, 30: rotated_30}}`. The first is what `ood` is told apart from.
        ood: out-of-distribution data, whose targets (if any) are not read.
        training: the training rows; `ood` is then also told apart by distances from them in feature space (Mahalanobis,
            k nearest neighbours), as baselines for the posterior's own uncertainty.
        reference: also score fidelity to it, see `caveat.fidelity`; a stored set, on those data whose rows it has.
        folder: where to write `predictions/*.npz` and `metrics.json`; nothing is written without it.
        label: what to call the run; the method's class name unless given.
        class_names: of the classes, one for each, for the report; those of the likelihood unless given.
        target: what the target is called, with its unit, for the axes of the report.
        draws: posterior draws a prediction; the method's default unless given.
        seed: of the draws.
        keep_samples: also write every draw's prediction.
        progress: show progress of anything over a second on standard error.
    """
    known = posterior.network.class_names
    class_names = class_names or known
    conditions = _conditions(data, ood or {}, known)
    _check_class_names(posterior, conditions[0].rows, class_names)
    compared = [] if reference is None else _known_to(reference, conditions)
    place = None if folder is None else Path(folder)
    kind = posterior.network.likelihood.kind
    distance = None if training is None or not ood else FeatureDistance.of(posterior, Rows(training, names=known), seed)
    inside: Columns = {}
    scored: list[Scored] = []
    compared_with: dict[str, Any] = {}
    files: dict[str, dict[str, np.ndarray]] = {}
    total = sum(len(condition.rows) for condition in conditions)
    seconds = 0.0
    first, _ = next(conditions[0].rows.batches([torch.arange(min(2, len(conditions[0].rows)))]))
    posterior.predict(first, draws=draws, seed=seed)  # what is made once is no part of what a row takes
    name = label or type(posterior.method).__name__
    with tqdm(total=total, unit="row", desc=f"{name}: predict", delay=1.0, disable=not progress, leave=False) as bar:
        for condition in conditions:
            is_test = condition.role == "test"
            began = time.perf_counter()
            arrays = prediction_arrays(
                posterior,
                condition.rows,
                bar,
                has_targets=is_test,
                draws=draws,
                seed=seed,
                keep_samples=keep_samples,
                of_rows=distance,
            )
            seconds += time.perf_counter() - began
            file = f"predictions/{file_stem(condition.name)}.npz"
            files[file] = arrays
            columns = {name: torch.from_numpy(array) for name, array in arrays.items()}  # what is kept is scored
            inside = inside or columns
            metrics = score(kind, columns) if is_test else score_ood(kind, inside, columns)
            if reference is not None and condition in compared:
                closeness = fidelity_on(posterior, reference, condition.rows, draws, seed)
                metrics |= closeness.scores
                compared_with = {"chains": closeness.chains, "draws": closeness.draws, "notes": list(closeness.notes)}
            facts = condition.name, condition.family, condition.severity, condition.role
            warnings = _against_marginals(posterior, condition.rows, columns) if is_test else ()
            scored.append(Scored(*facts, len(arrays["rows"]), metrics, file, warnings))
    content = _metrics_file(posterior, name, class_names, target, scored)
    content["predict_seconds_per_row"] = seconds / total
    if compared_with:
        content["reference"] = compared_with
    if place is not None:  # once everything has been scored, so that a failure leaves earlier results as they are
        for file, arrays in files.items():
            write_arrays(place / file, arrays)
        write_json(place / "metrics.json", content)
        for stale in set((place / "predictions").glob("*.npz")) - {place / file for file in files}:
            stale.unlink()  # of an earlier evaluation, which this one replaces
    return Scores(name, kind, scored, content, tuple(compared_with.get("notes", ())))


@dataclass(frozen=True)
class _Condition:
    """A data set to predict: `role` is "test" (with targets) or "ood" (out of distribution, without)."""

    name: str
    family: str
    severity: float | None
    role: Literal["test", "ood"]
    rows: Rows


def _conditions(data: Mapping[str, Any], ood: Mapping[str, Data], class_names: tuple[str, ...]) -> list[_Condition]:
    """Every data set in the order given, families unfolded."""
    if not isinstance(data, Mapping) or not data:
        raise ValueError("evaluate needs at least one data set with targets, as in {'clean': test_loader}")
    conditions: list[_Condition] = []
    for name, value in data.items():
        if isinstance(value, Mapping):
            conditions += [
                _Condition(f"{name} {severity:g}", name, float(severity), "test", Rows(shifted, names=class_names))
                for severity, shifted in value.items()
            ]
        else:
            conditions.append(_Condition(name, name, None, "test", Rows(value, names=class_names)))
    conditions += [_Condition(name, name, None, "ood", Rows(value, False, class_names)) for name, value in ood.items()]
    stems = [file_stem(condition.name) for condition in conditions]
    for condition, stem in zip(conditions, stems, strict=True):
        if stems.count(stem) > 1:
            raise ValueError(f"data set names must differ in letters and digits, {condition.name!r} does not")
    return conditions


def _against_marginals(posterior: Posterior, rows: Rows, columns: Columns) -> tuple[str, ...]:
    """A warning where predictions are not clearly better than the marginals of their targets.

    Classes that are weighted are not to be predicted as often as they come.
    """
    if getattr(posterior.network.likelihood, "class_weights", None) is not None:
        return ()
    baseline = _baseline(posterior.network.likelihood, rows)
    gain = gain_over_marginals(columns["log_prob"], columns["targets"], columns["rows"], baseline)
    return () if gain is None or gain.warning is None else (gain.warning,)


def _baseline(likelihood: Likelihood, rows: Rows) -> Baseline:
    """The likelihood's own `baseline` of targets as they stand in a column: labels one below the other."""
    if likelihood.kind == "regression":
        return likelihood.baseline
    if not isinstance(likelihood, Bernoulli):
        return Categorical().baseline
    _, y = next(iter(row_blocks(rows, 1)))
    width = y.shape[-1] if y.ndim > 1 else 1
    return lambda labels: likelihood.baseline(labels.reshape(-1, width)) / width


def _check_class_names(posterior: Posterior, rows: Rows, names: Sequence[str]) -> None:
    """Refuse names that are not one for each class; independent labels may be named, or their no and yes."""
    if not names or posterior.network.likelihood.kind != "classification":
        return
    x, _ = next(iter(row_blocks(rows, 1)))
    prediction = posterior.predict(x, draws=1)
    count = prediction.samples.shape[-1]
    fitting = {count, 2} if isinstance(prediction, BernoulliPredictive) else {count}
    if len(names) not in fitting:
        given = f"{len(names)} name{'' if len(names) == 1 else 's'} ({', '.join(map(str, names))})"
        raise ValueError(f"class_names has {given}, but the posterior tells {count} classes apart")


def _known_to(reference: Posterior | ReferenceSet, conditions: list[_Condition]) -> list[_Condition]:
    """The data with targets that a reference can be asked about: of a stored set those whose rows it has."""
    tests = [condition for condition in conditions if condition.role == "test"]
    if not isinstance(reference, ReferenceSet):
        return tests
    known = [condition for condition in tests if reference.find(condition.rows) is not None]
    if not known:
        reference.part_of(tests[0].rows)  # refuses, and says which rows it has
    return known


def _metrics_file(
    posterior: Posterior, label: str, class_names: tuple[str, ...], target: str, scored: list[Scored]
) -> dict[str, Any]:
    """What metrics.json holds."""
    return {
        "format": FORMAT,
        "label": label,
        "method": {"name": method_name(posterior.method), "fields": _plain(encode(posterior.method, {}, "method"))},
        "kind": posterior.network.likelihood.kind,
        "class_names": list(class_names),
        "target": target,
        "info": dataclasses.asdict(posterior.info),
        "data": [
            dataclasses.asdict(one)
            | {
                "metrics": {
                    name: {"mean": _finite(score.mean), "stderr": _finite(score.stderr)}
                    for name, score in one.metrics.items()
                }
            }
            for one in scored
        ],
    }


def _plain(value: Any) -> Any:
    """An encoded dataclass as a plain nested mapping, for people."""
    if isinstance(value, dict) and "fields" in value:
        return {name: _plain(item) for name, item in value["fields"].items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
