"""Whether a posterior predicts worse than the point that it starts from.

    d_i = log p(y_i | x_i, posterior) - log p(y_i | x_i, point)

for a row i, in nats. A Gaussian around a trained point may be so wide that the network is lost in it: its linearised
outputs then say little, and nothing else in a fit shows it. What is lost is measured by what the point has to lose, its
own gain over the marginals. On training rows a point looks better
than it is: the warning says which rows these are.
"""

import math

from torch import Tensor

__all__ = ["point_is_better"]

MAY_LOSE = 0.1  # of what the point gains over the marginals
STANDARD_ERRORS = 2.0  # of the mean difference, that must be on the point's side


def point_is_better(gains: Tensor, of_point: Tensor, rows: str) -> str | None:
    """A warning where gains [R] over the marginals are clearly below those of the point on the same rows."""
    differences, possible = gains - of_point, float(of_point.mean())
    lost, error = -float(differences.mean()), float(differences.std()) / math.sqrt(len(gains))
    if len(gains) < 2 or not possible > 0 or lost < max(MAY_LOSE * possible, STANDARD_ERRORS * error):
        return None
    return (
        f"predictions are worse than those of the point that the fit starts from: by {lost:.3g} ± {error:.2g} nats a "
        f"row on {len(gains)} {rows} rows, where the point gains {possible:.3g} over the label marginals. The "
        "posterior is wider than this network bears: give the task validation rows that the network was not trained "
        "on, by which Laplace methods choose their precision (SampledLaplace(temperature='validation') its width), "
        "choose a narrower one (SWAG(scale=1.0), a larger prior precision), or keep the point, MAP(temperature=True)"
    )
