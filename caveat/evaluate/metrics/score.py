"""The value of a metric over a data set, and the columns that metrics are computed from."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Columns", "Score"]

Columns = dict[str, Tensor]  # as `Predictive.columns` gives them and the prediction files hold them: one row a decision


@dataclass(frozen=True)
class Score:
    """A metric over a data set; the standard error is None where the metric is not a mean over rows."""

    mean: float
    stderr: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.stderr is None else f"{self.mean:.4g} ± {self.stderr:.2g}"
