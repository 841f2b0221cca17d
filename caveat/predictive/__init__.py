"""What a prediction says: the mixture over posterior draws, split into what is noise and what is not known.

Classification, draws p_s(y | x):   probs = mean_s p_s;   entropy H[probs] = aleatoric mean_s H[p_s] + epistemic (the
mutual information of label and weights). Regression: variance = aleatoric mean_s Var_s[y] + epistemic Var_s[E_s[y]].
`log_prob(y)` is the log density of the mixture, never the mean of log densities. The sample axis comes first, classes
last. `columns(targets)` flattens all of it to one row a decision: what is written to disk and scored.

Regression is scored by the continuous ranked probability score, in the units of the target:
CRPS(F, y) = integral (F(t) - 1[y <= t])^2 dt = E|Y - y| - E|Y - Y'| / 2 with Y, Y' ~ F independent.

A prediction of a calibrated posterior carries the calibration, by which its intervals and sets of labels are made.
"""

from caveat.predictive.calibration import Calibration, ConformalScore, Conformity, Kind
from caveat.predictive.classification import BernoulliPredictive, CategoricalPredictive
from caveat.predictive.named_columns import named_columns, percent
from caveat.predictive.next_labels import next_labels
from caveat.predictive.protocol import Predictive
from caveat.predictive.regression import GaussianPredictive, PoissonPredictive, RegressionPredictive

__all__ = [
    "BernoulliPredictive",
    "Calibration",
    "CategoricalPredictive",
    "ConformalScore",
    "Conformity",
    "GaussianPredictive",
    "Kind",
    "PoissonPredictive",
    "Predictive",
    "RegressionPredictive",
    "named_columns",
    "next_labels",
    "percent",
]
