"""The estimators, by scikit-learn's own checks and by what they promise beside them."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import caveat
from caveat.integrations.sklearn import CaveatClassifier, CaveatRegressor

SHORT = caveat.Training(epochs=30, learning_rate=0.03, batch_size=64)
EACH = pytest.mark.parametrize("estimator", [CaveatClassifier, CaveatRegressor])


def classes(rows=120):
    x, y = make_classification(rows, 6, n_informative=4, n_classes=3, random_state=0)
    return 100 * x + 7, np.array(["ash", "elm", "oak"])[y]


def numbers(rows=120):
    x, y = make_regression(rows, 4, noise=20.0, random_state=0)
    return x, y + 1000


def checked(estimator):
    """What scikit-learn's checks say that is not passed; one needs an array library that is not switched on."""
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    assert len(results) > 50
    return [r for r in results if r["status"] != "passed" and r["check_name"] != "check_array_api_input"]


@EACH
@pytest.mark.filterwarnings("default")  # some checks warn on purpose
def test_checks_of_estimators_pass(estimator):
    assert checked(estimator(caveat.MAP(training=SHORT), hidden=(16,))) == []


@EACH
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_checks_of_estimators_pass_with_every_knob_as_it_is(estimator):
    assert checked(estimator()) == []


def test_labels_of_any_type_and_inputs_of_any_scale_are_learned():
    x, y = classes()
    model = CaveatClassifier(start=caveat.MAP(training=SHORT), random_state=0).fit(x, y)
    assert model.score(x, y) > 0.8
    assert list(model.classes_) == ["ash", "elm", "oak"]
    assert type(model.posterior_.method) is caveat.LastLayerLaplace
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1)
    with pytest.raises(ValueError, match="one class, 'ash'"):
        CaveatClassifier().fit(x, np.full(len(x), "ash"))


def test_a_standard_deviation_comes_back_in_the_units_of_the_targets():
    x, y = numbers()
    model = CaveatRegressor(start=caveat.MAP(training=SHORT), random_state=0).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == y.shape
    assert np.array_equal(mean, model.predict(x))
    assert 5 < np.median(std) < 100
    assert model.score(x, y) > 0.7


def test_a_share_of_rows_makes_intervals_and_sets_hold():
    x, y = numbers(600)
    model = CaveatRegressor(caveat.MAP(training=SHORT), calibration=0.3, random_state=0).fit(x[:400], y[:400])
    assert model.posterior_.calibration.rows == 120
    lower, upper = model.predict_interval(x[400:], 0.8).T
    assert abs(((lower <= y[400:]) & (y[400:] <= upper)).mean() - 0.8) < 0.1
    x, y = classes(600)
    model = CaveatClassifier(caveat.MAP(training=SHORT), calibration=0.3, random_state=0).fit(x[:400], y[:400])
    sets = model.predict_set(x[400:], 0.8)
    assert abs(sets[np.arange(200), np.searchsorted(model.classes_, y[400:])].mean() - 0.8) < 0.1
    with pytest.raises(ValueError, match="leave none of 600 rows to fit to"):
        CaveatClassifier(calibration=0.95).fit(x, y)


def test_a_module_of_ones_own_and_a_search_over_knobs():
    x, y = classes()

    def wide(features: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 30), nn.Tanh(), nn.Linear(30, outputs))

    model = CaveatClassifier(caveat.MAP(training=SHORT), module=wide, random_state=0)
    assert clone(model).fit(x, y).posterior_.network.module[0].weight.shape == (30, 6)
    assert model.fit(x, y).posterior_.network.input_dtype == torch.float32
    pipeline = make_pipeline(StandardScaler(), CaveatClassifier(caveat.MAP(training=SHORT), random_state=0))
    grid = GridSearchCV(pipeline, {"caveatclassifier__hidden": [(), (8,)]}, cv=2).fit(x, y)
    assert grid.best_score_ > 0.6


def test_copies_predict_the_same_and_seeds_decide():
    x, y = numbers(80)
    knobs = {"start": caveat.MAP(training=SHORT), "draws": 5}
    model = CaveatRegressor(caveat.SWAG(training=caveat.SWAG.quick.training), **knobs, random_state=3).fit(x, y)
    before = model.predict(x, return_std=True)
    np.testing.assert_array_equal(before, pickle.loads(pickle.dumps(model)).predict(x, return_std=True))
    other = CaveatRegressor(caveat.SWAG(training=caveat.SWAG.quick.training), **knobs, random_state=4).fit(x, y)
    assert not np.array_equal(before[0], other.predict(x))
