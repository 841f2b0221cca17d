"""The Fisher information of every likelihood, its factor, its trace and noise of its covariance."""

import math

import numpy as np
import pytest
import torch

from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from tests.likelihood_cases import ALL, DOUBLE, SEQUENCE, case, normal


def enumerated(likelihood, hyper):
    """Targets of one row with weights, so that sums over them are exact expectations: by enumeration or quadrature."""
    if isinstance(likelihood, Categorical):
        return lambda output: (torch.arange(len(output)), output.softmax(0))
    if isinstance(likelihood, Bernoulli):
        return lambda output: _grid(output, torch.tensor([0.0, 1.0], dtype=DOUBLE), likelihood, hyper)
    if isinstance(likelihood, Poisson):
        return lambda output: _grid(output, torch.arange(60, dtype=DOUBLE), likelihood, hyper)
    nodes, weights = (torch.from_numpy(array) for array in np.polynomial.hermite_e.hermegauss(8))

    def quadrature(output):
        heteroscedastic = isinstance(likelihood, HeteroscedasticGaussian)
        mean, log_std = output.chunk(2) if heteroscedastic else (output, hyper["log_noise"])
        std = (log_std / 2 if heteroscedastic else log_std).exp()
        z = torch.cartesian_prod(nodes, nodes)
        targets = (mean + std * z) * hyper["target_scale"] + hyper["target_mean"]
        return targets, torch.cartesian_prod(weights, weights).prod(1) / (2 * math.pi)

    return quadrature


def _grid(output, values, likelihood, hyper):
    targets = torch.cartesian_prod(*[values] * len(output))
    return targets, likelihood.log_prob(output.expand(len(targets), -1), targets, hyper).exp()


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_fisher_factor_against_the_mean_outer_product_of_scores(likelihood):
    outputs, targets, hyper = case(likelihood, 3)
    factor = likelihood.fisher_factor(outputs, targets, hyper)
    rank = outputs.shape[1] - isinstance(likelihood, Categorical)  # softmax does not see a shift of all logits
    assert factor.shape == (3, outputs.shape[1], rank)
    expectation = enumerated(likelihood, hyper)
    for row in range(3):
        possible, weights = expectation(outputs[row])
        assert float(weights.sum()) == pytest.approx(1.0)
        at = outputs[row].repeat(len(possible), 1).requires_grad_()
        (scores,) = torch.autograd.grad(likelihood.log_prob(at, possible, hyper).sum(), at)
        torch.testing.assert_close(factor[row] @ factor[row].T, (scores * weights[:, None]).T @ scores)


HESSIANS = [
    Categorical(),
    SEQUENCE,
    Categorical(class_weights=(0.5, 1.0, 2.0, 0.0), ignore_index=1),
    Bernoulli(),
    Gaussian(),
    Gaussian(noise=0.5, standardise=True),
    Poisson(),
]


@pytest.mark.parametrize("positions", [(1,), (1, 3, 2)], ids=["row", "pixels"])
@pytest.mark.parametrize("likelihood", HESSIANS, ids=repr)
def test_fisher_information_is_the_hessian_where_they_coincide(likelihood, positions):
    outputs, targets, hyper = case(likelihood, *positions)
    axis = likelihood.output_axis
    last = outputs.movedim(axis, -1)  # [1, ..., C]
    hessian = torch.func.hessian(lambda o: -likelihood.log_prob(o.movedim(-1, axis), targets, hyper).sum())(last)
    factor = likelihood.fisher_factor(outputs, targets, hyper).flatten(0, -3)  # [positions, C, rank]
    expected = torch.block_diag(*(factor @ factor.mT))  # positions carry information independently
    torch.testing.assert_close(expected, hessian.reshape(last.numel(), last.numel()))


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


@pytest.mark.parametrize("likelihood", [*ALL, HESSIANS[2]], ids=repr)
def test_noise_is_a_factor_times_standard_normals_in_the_outputs_layout(likelihood):
    outputs, targets, hyper = case(likelihood, 5, 3, 2)
    noise = likelihood.sample_noise(outputs, targets, hyper, torch.Generator().manual_seed(3))
    assert noise.shape == outputs.shape
    axis = likelihood.output_axis
    e = normal(*outputs.movedim(axis, -1).shape, seed=3)
    factor = likelihood.fisher_factor(outputs, targets, hyper)
    if isinstance(likelihood, Categorical):  # the symmetric square factor, which needs no basis
        p, root_weight = likelihood._probs_and_weight(outputs, targets)
        square = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)
        square = square * root_weight[..., None, None]
        torch.testing.assert_close(square @ square.mT, factor @ factor.mT)
        factor = square
    torch.testing.assert_close(noise.movedim(axis, -1), (factor @ e.unsqueeze(-1)).squeeze(-1))


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_covariance_of_the_noise_is_the_fisher_information(likelihood):
    outputs, targets, hyper = case(likelihood, 1)
    n = 40_000
    many = outputs.expand(n, -1), targets.expand(n, *targets.shape[1:])
    noise = likelihood.sample_noise(*many, hyper, torch.Generator().manual_seed(0))
    factor = likelihood.fisher_factor(outputs, targets, hyper)[0]
    fisher = factor @ factor.T
    # The standard error of an entry of a sample covariance is at most sqrt(2 F_ii F_jj / n).
    allowed = 5 * (2 * torch.outer(fisher.diagonal(), fisher.diagonal()) / n).sqrt()
    assert ((noise.T @ noise / n - fisher).abs() <= allowed).all()


@pytest.mark.parametrize("positions", [(4,), (4, 3, 2)], ids=["row", "pixels"])
@pytest.mark.parametrize("likelihood", [*ALL, HESSIANS[2]], ids=repr)
def test_the_trace_is_that_of_the_fisher_information(likelihood, positions):
    outputs, targets, hyper = case(likelihood, *positions)
    factor = likelihood.fisher_factor(outputs, targets, hyper)
    torch.testing.assert_close(likelihood.fisher_trace(outputs, targets, hyper), factor.square().flatten(1).sum(1))
