"""Distance from the training rows in the space of a network's features: baselines for out-of-distribution scores.

    f(x) = what the last layer takes in
    mahalanobis   min_c (f - mean_c)^T C^-1 (f - mean_c), C the covariance within classes    (Lee et al., 2018)
    knn           distance of f / |f| from its k-th nearest among the training rows'         (Sun et al., 2022)

They ask how unlike the training rows an input is, of one network, and not how sure a posterior is; a posterior's
entropy has to compare. What they need of the training rows is computed for an evaluation and is part of no posterior.

Called by `evaluate.scoring`.
"""

from caveat.evaluate.feature_distance.distances import DISTANCES, FeatureDistance
from caveat.evaluate.feature_distance.last_layer_inputs import LastLayerInputs

__all__ = ["DISTANCES", "FeatureDistance", "LastLayerInputs"]
