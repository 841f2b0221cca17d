"""Scores from flat columns: what `Predictive.columns` gives and the prediction files hold, one row a decision."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from caveat.evaluate.feature_distance import DISTANCES
from caveat.evaluate.metrics import (
    Columns,
    Score,
    accuracy,
    brier,
    interval_coverage,
    joint_nll,
    marginal_calibration_error,
    mean_and_stderr,
    ood_scores,
    pit_calibration_error,
    risk_coverage_area,
    rmse,
    set_coverage,
    squared_error,
    top_label_ece,
)
from caveat.notebooks import facts_html, notes_html, table_html
from caveat.predictive import Kind

__all__ = ["Scored", "Scores", "score", "score_ood"]


@dataclass(frozen=True)
class Scored:
    """One data set's scores: `scored["nll"].mean`."""

    name: str
    family: str
    severity: float | None
    role: Literal["test", "ood"]
    rows: int
    metrics: dict[str, Score]
    file: str | None = None  # where the predictions are, relative to the run's folder
    warnings: tuple[str, ...] = ()  # such as that predictions are worse than the marginals of the targets

    def __str__(self) -> str:
        line = f"{self.name}: " + ", ".join(f"{name} {value}" for name, value in self.metrics.items())
        return "\n    ".join([line, *(f"warning: {warning}" for warning in self.warnings)])

    def _repr_html_(self) -> str:
        facts = {name: str(score) for name, score in self.metrics.items()}
        return facts_html(f"{self.name}, {self.rows:,} rows", facts, notes_html(self.warnings))

    def __getitem__(self, metric: str) -> Score:
        if metric not in self.metrics:
            raise KeyError(f"no metric {metric!r} of {self.name!r}: there are {', '.join(self.metrics)}")
        return self.metrics[metric]


@dataclass(frozen=True)
class Scores:
    """A posterior's scores on several data sets: `scores["clean"]["nll"].mean`. Printing shows them as a table."""

    label: str
    kind: Kind
    data: list[Scored]
    content: dict[str, Any] = field(repr=False, default_factory=dict)  # as written to metrics.json
    notes: tuple[str, ...] = ()  # what beside the method differs from the reference

    def __getitem__(self, name: str) -> Scored:
        for scored in self.data:
            if scored.name == name:
                return scored
        raise KeyError(f"no data set {name!r}: there are {', '.join(s.name for s in self.data)}")

    def __str__(self) -> str:
        return "\n".join([self.label, *(f"  {scored}" for scored in self.data), *(f"  note: {n}" for n in self.notes)])

    def _repr_html_(self) -> str:
        metrics = list(dict.fromkeys(name for scored in self.data for name in scored.metrics))
        rows = [
            (scored.name, *(str(scored.metrics[name]) if name in scored.metrics else "" for name in metrics))
            for scored in self.data
        ]
        warnings = [f"{scored.name}: {warning}" for scored in self.data for warning in scored.warnings]
        return table_html(self.label, ["", *metrics], rows, notes_html([*warnings, *self.notes]))

    def to_frame(self) -> Any:
        """A frame of pandas, one row a number that was measured, under the names that `results.csv` has."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError('to_frame() makes a frame of pandas: pip install "caveat[frames]"') from error
        rows = [
            (one.name, one.family, one.severity, one.role, one.rows, name, score.mean, score.stderr)
            for one in self.data
            for name, score in one.metrics.items()
        ]
        columns = ["data", "family", "severity", "role", "rows", "metric", "mean", "stderr"]
        return pandas.DataFrame(rows, columns=columns)


def score(kind: Kind, columns: Columns) -> dict[str, Score]:
    """Compute every metric of data with targets, from the columns [N, ...] of their predictions."""
    rows, targets = columns["rows"], columns["targets"]

    def mean(scores: Tensor) -> Score:
        return Score(*mean_and_stderr(scores, rows))

    nll = mean(-columns["log_prob"])
    if kind == "regression":
        return {
            "rmse": Score(*rmse(squared_error(columns["mean"], targets), rows)),
            "nll": nll,
            "crps": mean(columns["crps"]),
            "coverage_90": mean(interval_coverage(columns["lower_90"], columns["upper_90"], targets)),
            "calibration_error": Score(pit_calibration_error(columns["pit"])),
        }
    probs = columns["probs"]
    right = accuracy(probs, targets)
    sets = columns.get("set_90")  # of a calibrated posterior
    of_sets = (
        {}
        if sets is None
        else {"set_coverage_90": mean(set_coverage(sets, targets)), "set_size_90": mean(sets.sum(1).double())}
    )
    joint = {"joint_nll": Score(joint_nll(columns["joint_log_prob"]))} if "joint_log_prob" in columns else {}
    return of_sets | {
        "accuracy": mean(right),
        "nll": nll,
        **joint,
        "brier": mean(brier(probs, targets)),
        "ece": Score(top_label_ece(probs, targets)),
        "marginal_calibration_error": Score(marginal_calibration_error(probs, targets)),
        "risk_coverage_area": Score(risk_coverage_area(columns["entropy"], 1 - right)),
    }


def score_ood(kind: Kind, inside: Columns, ood: Columns) -> dict[str, Score]:
    """Compute how well uncertainty tells out-of-distribution data apart, by all of it and by its epistemic part alone.

    And by distances in feature space, where they are among the columns [N, ...] of predictions that both arguments are.
    """
    by = [
        "entropy" if kind == "classification" else "variance",
        "epistemic",
        *(name for name in DISTANCES if name in ood),
    ]
    metrics: dict[str, Score] = {}
    for name in by:
        scores = ood_scores(_per_row(inside[name]), _per_row(ood[name]))
        metrics |= {f"{metric}_{name}": Score(value) for metric, value in scores.items()}
    return metrics


def _per_row(column: Tensor) -> Tensor:
    return column if column.ndim == 1 else column.sum(-1)
