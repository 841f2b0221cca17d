"""Our scores as a metric of torchmetrics: fed batch by batch, put together over ranks, logged by Lightning.

metric = PosteriorScores("classification")
for x, y in loader:
metric.update(posterior.predict(x), y)
metric.compute()          # {"accuracy": ..., "nll": ..., "ece": ...}
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from caveat.evaluate.scoring import score
from caveat.predictive import Kind, Predictive

__all__ = ["PosteriorScores"]

_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "classification": ("rows", "targets", "log_prob", "probs", "entropy"),
    "regression": ("rows", "targets", "log_prob", "mean", "crps", "lower_90", "upper_90", "pit"),
}


class PosteriorScores(Metric):
    """Every score that `caveat.evaluate` has for data with targets, from predictions batch by batch.

    Nothing is averaged over batches: the columns of all predictions are kept, and scored together.

    Args:
        kind: of what is predicted, `"classification"` or `"regression"`.
    """

    full_state_update = False

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        if kind not in _COLUMNS:
            raise ValueError(f"kind={kind!r}: must be 'classification' or 'regression'")
        self.kind = kind
        for name in _COLUMNS[kind]:
            self.add_state(f"column_{name}", default=[], dist_reduce_fx="cat")

    def update(self, prediction: Predictive, targets: Tensor) -> None:
        """Take in the prediction of a batch, and its targets."""
        if prediction.kind != self.kind:
            raise ValueError(f"a prediction of {prediction.kind} cannot be scored as {self.kind}")
        columns = prediction.columns(targets)
        seen: list[Tensor] = self._column("rows")
        columns["rows"] = columns["rows"] + (int(seen[-1].max()) + 1 if seen else 0)
        for name in _COLUMNS[self.kind]:
            self._column(name).append(columns[name].detach())

    def compute(self) -> dict[str, Tensor]:
        """The scores of all batches since the last reset."""
        columns: dict[str, Tensor] = {}
        for name in _COLUMNS[self.kind]:
            pieces: Any = self._column(name)
            columns[name] = (torch.cat(pieces) if isinstance(pieces, list) else pieces).cpu()
        return {name: torch.tensor(value.mean) for name, value in score(self.kind, columns).items()}

    def _column(self, name: str) -> Any:
        return getattr(self, f"column_{name}")
