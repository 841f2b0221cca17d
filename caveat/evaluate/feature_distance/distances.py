"""Distances of features from those of training rows: to the nearest class, and to the k-th nearest row."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from caveat.batches import Inputs
from caveat.evaluate.feature_distance.last_layer_inputs import LastLayerInputs
from caveat.posterior import Posterior
from caveat.rows import Rows

__all__ = ["DISTANCES", "FeatureDistance"]

DISTANCES = ("mahalanobis", "knn")
MOST_ROWS = 10_000  # training rows that are looked at, evenly spaced
NEIGHBOUR = 10  # the k of the k-th nearest, or as many as there are rows
RIDGE = 1e-6  # of the mean variance, added to each, so that features that never vary have one
AT_ONCE = 2**24  # numbers in a matrix of distances


@dataclass(frozen=True)
class FeatureDistance:
    """What is known of the training rows' features."""

    inputs: LastLayerInputs
    means: Tensor  # [C, F], of each class; of all rows where targets are numbers
    whitening: Tensor  # [F, F], whitening @ whitening.T = inverse of the covariance within classes
    directions: Tensor  # [N, F], the features over their lengths

    @classmethod
    def of(cls, posterior: Posterior, rows: Rows, seed: int = 0) -> "FeatureDistance":
        """The statistics of training rows, at a posterior's own features."""
        inputs = LastLayerInputs(posterior, seed)
        features, labels = [], []
        for x, y in rows.some(MOST_ROWS).ordered(max(rows.batch_size, 1024)):
            features.append(inputs(x))
            labels.append(y.flatten(1)[:, 0] if y.ndim > 1 else y)
        whole = torch.cat(features)
        is_class = posterior.network.likelihood.kind == "classification"
        return cls.from_features(inputs, whole, torch.cat(labels) if is_class else torch.zeros(len(whole)))

    @classmethod
    def from_features(cls, inputs: LastLayerInputs, features: Tensor, labels: Tensor) -> "FeatureDistance":
        """The statistics of features [N, F] of rows with labels [N]."""
        classes, index = labels.unique(return_inverse=True)
        index = index.to(features.device)
        counts = index.bincount(minlength=len(classes)).unsqueeze(1)
        sums = features.new_zeros(len(classes), features.shape[1]).index_add(0, index, features)
        means = sums / counts
        centred = features - means[index]
        covariance = centred.T @ centred / len(features)
        ridge = RIDGE * covariance.diagonal().mean().clamp_min(torch.finfo(features.dtype).tiny)
        values, vectors = torch.linalg.eigh(covariance)
        whitening = vectors * (values.clamp_min(0) + ridge).rsqrt()
        return cls(inputs, means, whitening, F.normalize(features, dim=1))

    def __call__(self, x: Inputs) -> dict[str, Tensor]:
        """Both distances of each row of the inputs, [rows]; farther is more likely out of distribution."""
        return self.of_features(self.inputs(x))

    def of_features(self, features: Tensor) -> dict[str, Tensor]:
        """Both distances of features [rows, F]."""
        from_means = torch.cdist(features @ self.whitening, self.means @ self.whitening)  # [rows, C]
        k = min(NEIGHBOUR, len(self.directions))
        pieces = F.normalize(features, dim=1).split(max(1, AT_ONCE // len(self.directions)))
        nearest = [torch.cdist(piece, self.directions).kthvalue(k, dim=1).values for piece in pieces]
        return {"mahalanobis": from_means.amin(1).square(), "knn": torch.cat(nearest)}
