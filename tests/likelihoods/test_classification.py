"""Categorical and Bernoulli: labels of any type, ignored labels, class weights, and extreme logits."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caveat.likelihoods import Bernoulli, Categorical
from tests.likelihoods.likelihood_cases import DOUBLE, LONG, case, labels, normal


@pytest.mark.parametrize("class_axis", [1, -1])
def test_ignored_labels_and_class_weights(class_axis):
    likelihood = Categorical(class_axis=class_axis, ignore_index=-1, class_weights=(0.5, 1.0, 2.0, 0.0))
    outputs, targets, _ = case(likelihood, 7, 5)
    targets[0], targets[1, 2:] = -1, -1
    likelihood.check(outputs, targets)
    log_softmax = outputs.movedim(class_axis, -1).log_softmax(-1)
    expected = torch.zeros(7, dtype=DOUBLE)
    for row, position in itertools.product(range(7), range(5)):
        label = int(targets[row, position])
        if label != -1:
            expected[row] += likelihood.class_weights[label] * log_softmax[row, position, label]
    torch.testing.assert_close(likelihood.log_prob(outputs, targets, {}), expected)
    assert expected[0] == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_integer_type_of_labels_is_taken_at_its_value(dtype):
    # As a uint8, -100 is 156: a comparison in that type would leave label 156 out.
    likelihood = Categorical(class_weights=tuple(1.0 + i for i in range(200)))
    outputs, targets = normal(3, 200), torch.tensor([0, 100, 156 if dtype == torch.uint8 else 199])
    given = targets.to(dtype)
    likelihood.check(outputs, given)
    weights = 1.0 + targets
    expected = weights * outputs.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(likelihood.log_prob(outputs, given, {}), expected)
    assert likelihood.baseline(given) == pytest.approx(likelihood.baseline(targets))
    factor = likelihood.fisher_factor(outputs, given, {})
    torch.testing.assert_close(factor, likelihood.fisher_factor(outputs, targets, {}), rtol=0, atol=0)
    prediction = likelihood.predictive(outputs.unsqueeze(0), {})
    torch.testing.assert_close(prediction.log_prob(given), expected / weights)
    assert len(prediction.columns(given)["targets"]) == 3


@pytest.mark.parametrize("class_axis", [1, -1])
def test_probabilities_are_no_logits(class_axis):
    logits = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    likelihood, labels = Categorical(class_axis=class_axis), torch.zeros(2, 3, dtype=LONG)
    likelihood.check(logits, labels)
    likelihood.check(logits.log_softmax(class_axis), labels)
    with pytest.raises(ValueError, match="Categorical takes logits: leave the softmax"):
        likelihood.check(logits.softmax(class_axis), labels)


@settings(max_examples=25, deadline=None)
@given(classes=st.integers(1, 6), rows=st.integers(1, 4), scale=st.floats(0, 100), seed=st.integers(0, 99))
def test_softmax_carries_no_information_along_the_constant(classes, rows, scale, seed):
    outputs, targets = scale * normal(rows, classes, seed=seed), labels(classes, rows, seed=seed)
    factor = Categorical().fisher_factor(outputs, targets, {})
    torch.testing.assert_close(factor.sum(-2), torch.zeros(rows, classes - 1, dtype=DOUBLE), rtol=0, atol=1e-12)
    shifted = Categorical().log_prob(outputs + 7, targets, {})
    torch.testing.assert_close(shifted, Categorical().log_prob(outputs, targets, {}), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("extreme", [1e3, 1e30])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=repr)
def test_extreme_float32_logits_give_no_nan(likelihood, extreme):
    outputs, targets, _ = case(likelihood, 6, dtype=torch.float32)
    outputs = extreme * outputs.sign()
    for tensor in (
        likelihood.log_prob(outputs, targets, {}),
        likelihood.fisher_factor(outputs, targets, {}),
        likelihood.sample_noise(outputs, targets, {}, torch.Generator().manual_seed(0)),
        *likelihood.predictive(outputs.expand(3, *outputs.shape), {}).columns(targets).values(),
    ):
        assert tensor.isfinite().all()
