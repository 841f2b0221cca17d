"""Gaussian, heteroscedastic and Poisson likelihoods: learned noise, standardised targets, extreme outputs."""

import itertools
import math

import pytest
import torch
from torch import distributions

from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from tests.likelihoods.likelihood_cases import DOUBLE, GIVEN_NOISE, case


def test_the_heteroscedastic_hessian_is_indefinite_while_the_fisher_information_is_not():
    likelihood, outputs, targets = (
        HeteroscedasticGaussian(),
        torch.zeros(1, 2, dtype=DOUBLE),
        torch.zeros(1, dtype=DOUBLE),
    )
    hyper = likelihood.initial_hyper(targets)
    hessian = torch.func.hessian(lambda o: -likelihood.log_prob(o, targets + 3, hyper).sum())(outputs).reshape(2, 2)
    assert torch.linalg.eigvalsh(hessian)[0] < 0
    factor = likelihood.fisher_factor(outputs, targets, hyper)[0]
    torch.testing.assert_close(factor @ factor.T, torch.diag(torch.tensor([1.0, 0.5], dtype=DOUBLE)))


@pytest.mark.parametrize("standardise", [False, True])
def test_hyper_is_maximum_likelihood(standardise):
    likelihood = Gaussian(standardise=standardise)
    outputs, targets, _ = case(likelihood, 50)
    hyper = likelihood.initial_hyper(targets)
    assert hyper["log_noise"].shape == (2,)
    assert all(value.dtype == DOUBLE for value in hyper.values())
    constant = torch.zeros_like(outputs) if standardise else targets.mean(0).expand_as(targets)
    for predicted, found in ((constant, hyper), (outputs, likelihood.fitted_hyper(outputs, targets, hyper))):
        best = likelihood.log_prob(predicted, targets, found).sum()
        for output, step in itertools.product(range(2), (-1e-2, 1e-2)):
            moved = found["log_noise"].clone()
            moved[output] += step
            assert likelihood.log_prob(predicted, targets, found | {"log_noise": moved}).sum() < best


def test_a_given_noise_is_kept_and_a_perfect_fit_leaves_a_finite_one():
    outputs, targets, hyper = case(GIVEN_NOISE, 5)
    assert GIVEN_NOISE.fitted_hyper(outputs, targets, hyper) == hyper
    torch.testing.assert_close(hyper["log_noise"].exp(), torch.tensor([0.5, 0.5], dtype=DOUBLE))
    for likelihood in (Categorical(), Bernoulli(), HeteroscedasticGaussian(), Poisson()):
        outputs, targets, hyper = case(likelihood, 5)
        assert likelihood.fitted_hyper(outputs, targets, hyper) is hyper
    constant = torch.full((4, 1), 2.0)
    hyper = Gaussian().initial_hyper(constant)
    assert math.isfinite(Gaussian().fitted_hyper(constant, constant, hyper)["log_noise"])
    assert math.isfinite(hyper["log_noise"])


def test_the_learned_noise_has_a_gradient():
    outputs, targets, hyper = case(Gaussian(), 9, dtype=torch.float32)
    hyper["log_noise"].requires_grad_()
    Gaussian().log_prob(outputs, targets, hyper).sum().backward()
    z = (targets - outputs).double() / hyper["log_noise"].detach().exp()
    torch.testing.assert_close(hyper["log_noise"].grad, (z.square() - 1).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("likelihood", [Gaussian(standardise=True), Gaussian(noise=0.7, standardise=True)], ids=repr)
def test_standardised_scores_are_in_the_targets_own_units(likelihood):
    outputs, targets, _ = case(likelihood, 8)
    hyper = likelihood.initial_hyper(targets)
    shift, scale = targets.mean(0), targets.std(0, correction=0)
    noise = torch.tensor([0.7, 0.7], dtype=DOUBLE) if likelihood.noise else scale  # initially the whole spread
    by_hand = distributions.Normal(outputs * scale + shift, noise)
    torch.testing.assert_close(
        likelihood.log_prob(outputs, targets, hyper), by_hand.log_prob(targets).sum(1), msg="log likelihood"
    )
    prediction = likelihood.predictive(outputs.unsqueeze(0), hyper)
    torch.testing.assert_close(prediction.mean, by_hand.mean)
    torch.testing.assert_close(prediction.variance, by_hand.variance)
    torch.testing.assert_close(prediction.aleatoric, by_hand.variance)
    torch.testing.assert_close(prediction.log_prob(targets), by_hand.log_prob(targets).sum(1))
    raw = Gaussian(noise=likelihood.noise)  # the same prediction of a network that works in the targets' units
    raw_hyper = raw.initial_hyper(targets)
    torch.testing.assert_close(raw.log_prob(by_hand.mean, targets, raw_hyper), by_hand.log_prob(targets).sum(1))
    assert raw.baseline(targets) == pytest.approx(likelihood.baseline(targets))


def test_standardised_heteroscedastic_scores_are_in_the_targets_own_units():
    likelihood = HeteroscedasticGaussian(standardise=True)
    outputs, targets, _ = case(likelihood, 8, 3)
    hyper = likelihood.initial_hyper(targets)
    shift, scale = targets.flatten(0, 1).mean(0), targets.flatten(0, 1).std(0, correction=0)
    mean, log_variance = outputs.chunk(2, -1)
    by_hand = distributions.Normal(mean * scale + shift, (log_variance / 2).exp() * scale)
    expected = by_hand.log_prob(targets).sum((1, 2))
    torch.testing.assert_close(likelihood.log_prob(outputs, targets, hyper), expected)
    prediction = likelihood.predictive(outputs.unsqueeze(0), hyper)
    torch.testing.assert_close(prediction.variance, by_hand.variance)
    torch.testing.assert_close(prediction.log_prob(targets), expected)


@pytest.mark.parametrize("extreme", [-1e3, -100.0, 85.0, 1e3])
@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), Poisson()], ids=repr)
def test_extreme_float32_log_rates_and_log_variances_give_no_nan(likelihood, extreme):
    outputs, targets, hyper = case(likelihood, 3, dtype=torch.float32)
    outputs[..., -2:] = extreme
    table = likelihood.predictive(outputs.expand(3, *outputs.shape), hyper).columns(targets)
    assert not any(column.isnan().any() for column in table.values())
    assert all(column.isfinite().all() for name, column in table.items() if name != "log_prob")
    if extreme > 0 or isinstance(likelihood, Poisson):
        assert table["log_prob"].isfinite().all()


def test_large_counts_keep_their_digits_in_float32():
    outputs, targets = torch.tensor([[math.log(1e5)]]), torch.tensor([100_300])
    exact = distributions.Poisson(outputs.double().exp()).log_prob(targets.reshape(1, 1).double())
    for found in (Poisson().log_prob(outputs, targets, {}), Poisson().predictive(outputs[None], {}).log_prob(targets)):
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(float(exact), rel=1e-4)
