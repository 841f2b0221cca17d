import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from caveat.evaluate.metrics import detection, ood_scores

SCORES = st.lists(st.integers(0, 6), min_size=1, max_size=40)  # few distinct values: many ties


def reference(inside, ood):
    labels = np.r_[np.zeros(len(inside)), np.ones(len(ood))]
    scores = np.r_[inside, ood]
    false_positive, true_positive, _ = roc_curve(labels, scores, drop_intermediate=False)
    return {
        "auroc": roc_auc_score(labels, scores),
        "aupr": average_precision_score(labels, scores),
        "fpr95": false_positive[true_positive >= 0.95 - 1e-12].min(),
    }


@given(inside=SCORES, ood=SCORES)
@settings(max_examples=100, deadline=None)
def test_against_scikit_learn_with_many_ties(inside, ood):
    scores = ood_scores(torch.tensor(inside, dtype=torch.float32), torch.tensor(ood, dtype=torch.float32))
    assert scores == pytest.approx(reference(inside, ood), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_scikit_learn_without_ties(dtype):
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(700, generator=generator, dtype=dtype)
    ood = torch.randn(300, generator=generator, dtype=dtype) + 1
    assert ood_scores(inside, ood) == pytest.approx(reference(inside.numpy(), ood.numpy()), abs=1e-12)


@given(inside=SCORES, ood=SCORES, seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_row_order_does_not_matter_and_swapping_the_sets_mirrors_auroc(inside, ood, seed):
    a, b = torch.tensor(inside).float(), torch.tensor(ood).float()
    generator = torch.Generator().manual_seed(seed)
    shuffled = ood_scores(
        a[torch.randperm(len(a), generator=generator)], b[torch.randperm(len(b), generator=generator)]
    )
    assert shuffled == ood_scores(a, b)
    assert ood_scores(b, a)["auroc"] == pytest.approx(1 - ood_scores(a, b)["auroc"])


def test_perfect_separation_and_none():
    assert ood_scores(torch.zeros(3), torch.ones(5)) == {"auroc": 1.0, "aupr": 1.0, "fpr95": 0.0}
    assert ood_scores(torch.ones(3), torch.zeros(1)) == {"auroc": 0.0, "aupr": 0.25, "fpr95": 1.0}
    assert ood_scores(torch.zeros(3), torch.zeros(1)) == {"auroc": 0.5, "aupr": 0.25, "fpr95": 1.0}


def test_fpr95_takes_exactly_ninety_five_percent():
    ood = torch.arange(100.0)  # 95% are found at a threshold of 5
    assert ood_scores(torch.tensor([4.0, 4.9, 5.0, 6.0]), ood)["fpr95"] == 0.5


def test_infinite_scores_keep_their_order():
    scores = ood_scores(torch.tensor([-math.inf, 0.0]), torch.tensor([math.inf, 0.0]))
    assert scores == {"auroc": 0.875, "aupr": pytest.approx(0.5 + 0.5 * 2 / 3), "fpr95": 0.5}


@pytest.mark.parametrize(
    ("inside", "ood", "message"),
    [
        (torch.zeros(0), torch.zeros(2), "inside must be"),
        (torch.zeros(2), torch.zeros(0), "ood must be"),
        (torch.zeros(2, 1), torch.zeros(2), r"given shape \[2, 1\]"),
        (torch.zeros(2), torch.tensor([0.0, math.nan]), "1 of 2 values of ood are NaN"),
    ],
)
def test_bad_input_is_refused(inside, ood, message):
    with pytest.raises(ValueError, match=message):
        ood_scores(inside, ood)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_area_under_the_roc_curve_is_the_auroc(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inside, ood = rng.integers(0, 6, 50), rng.integers(2, 9, 40)  # with ties
    false_alarms, noticed = detection.roc_curve(inside, ood)
    assert (false_alarms[0], noticed[0], false_alarms[-1], noticed[-1]) == (0, 0, 1, 1)
    counted = (ood[:, None] > inside).mean() + 0.5 * (ood[:, None] == inside).mean()
    assert np.trapezoid(noticed, false_alarms) == pytest.approx(counted)
