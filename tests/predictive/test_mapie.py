"""MAPIE makes the same intervals and sets from our arrays."""

import numpy as np
import pytest
import torch

from caveat.predictive import Calibration, CategoricalPredictive, Conformity, GaussianPredictive
from caveat.predictive.calibration import label_scores

pytest.importorskip("mapie", reason="needs MAPIE")

from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, ResidualNormalisedScore
from mapie.regression import SplitConformalRegressor
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

N = 200  # to calibrate with, and as many to test on; MAPIE rounds its rank up a second time, which is the same here


class Column(RegressorMixin, BaseEstimator):
    """Predicts a column of the inputs."""

    def __init__(self, column=0):
        self.column = column
        self.fitted_ = True

    def fit(self, X, y=None):
        return self

    def predict(self, X):
        return X[:, self.column]


class Probabilities(ClassifierMixin, BaseEstimator):
    """Its inputs are its probabilities."""

    def __init__(self, classes=2):
        self.classes = classes
        self.classes_ = np.arange(classes)

    def fit(self, X, y=None):
        return self

    def predict_proba(self, X):
        return X

    def predict(self, X):
        return X.argmax(1)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_intervals_are_the_same():
    std = torch.rand(2 * N, 1, generator=rng(1), dtype=torch.float64) + 0.2
    mean = torch.randn(2 * N, 1, generator=rng(2), dtype=torch.float64)
    y = mean + 3 * std * torch.randn(2 * N, 1, generator=rng(3), dtype=torch.float64)
    conformity = Conformity("deviation")

    def prediction(rows, calibration=None):
        return GaussianPredictive(mean[None, rows], std[None, rows].square(), std[rows].square(), calibration)

    scores = prediction(slice(N)).calibration_scores(y[:N], conformity, rng())
    lower, upper = prediction(slice(N, None), Calibration.of(conformity, [scores])).interval(0.9)

    arrays = np.hstack([mean.numpy(), std.numpy()])
    score = ResidualNormalisedScore(Column(1), prefit=True)
    theirs = SplitConformalRegressor(Column(0), 0.9, score, prefit=True).conformalize(arrays[:N], y[:N, 0].numpy())
    _, intervals = theirs.predict_interval(arrays[N:])
    np.testing.assert_allclose(intervals[:, :, 0], torch.cat([lower, upper], 1).numpy(), rtol=1e-12)


def labels_and_log_probs():
    logits = 2 * torch.randn(2 * N, 6, generator=rng(4), dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=rng(5)).squeeze(1)
    return y, (2 * logits).log_softmax(-1)


def test_sets_by_probability_are_the_same():
    y, log_probs = labels_and_log_probs()
    conformity = Conformity("probability")
    scores = CategoricalPredictive(log_probs[None, :N]).calibration_scores(y[:N], conformity, rng())
    calibration = Calibration.of(conformity, [scores])
    ours = CategoricalPredictive(log_probs[None, N:], calibration=calibration).label_set(0.9).numpy()

    probs = log_probs.exp().numpy()
    theirs = SplitConformalClassifier(Probabilities(6), 0.9, "lac", prefit=True)
    _, sets = theirs.conformalize(probs[:N], y[:N].numpy()).predict_set(probs[N:])
    np.testing.assert_array_equal(ours, sets[:, :, 0])


def test_adaptive_sets_are_the_same_with_the_same_chance():
    """Their uniform numbers, drawn from the seed for calibration and again for prediction, are 1 - u of ours."""
    y, log_probs = labels_and_log_probs()
    u = torch.from_numpy(1 - np.random.RandomState(0).uniform(size=N))
    conformity = Conformity("aps", randomised=True)
    scores = label_scores(log_probs[:N], conformity, u).gather(1, y[:N, None])
    bound = Calibration.of(conformity, [scores]).bound(0.9)
    ours = (label_scores(log_probs[N:], conformity, u) <= bound).numpy()

    probs = log_probs.exp().numpy()
    theirs = SplitConformalClassifier(Probabilities(6), 0.9, APSConformityScore(), prefit=True, random_state=0)
    theirs.conformalize(probs[:N], y[:N].numpy())
    _, sets = theirs.predict_set(probs[N:], {"include_last_label": "randomized"})
    np.testing.assert_array_equal(ours, sets[:, :, 0])
    assert 0.8 < ours[np.arange(N), y[N:]].mean() < 0.97
