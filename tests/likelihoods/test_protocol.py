"""What every likelihood promises: densities, Fisher information, noise, baselines, checks and mixtures of draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from tests.likelihoods.likelihood_cases import ALL, DOUBLE, LONG, NAN, SEQUENCE, case, normal, reference


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("positions", [(5,), (5, 3), (5, 3, 2)], ids=["rows", "sequence", "pixels"])
@pytest.mark.parametrize("likelihood", ALL[:7], ids=repr)
def test_log_prob_equals_torch_distributions_summed_over_a_row(likelihood, positions, dtype):
    outputs, targets, hyper = case(likelihood, *positions, dtype=dtype)
    likelihood.check(outputs, targets)
    expected = reference(likelihood, outputs, targets, hyper).reshape(5, -1).sum(1).to(dtype)
    found = likelihood.log_prob(outputs, targets, hyper)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Gaussian(), Poisson()], ids=repr)
def test_one_target_a_row_may_come_without_its_last_axis(likelihood):
    outputs, targets, _ = case(likelihood, 6)
    outputs, targets = outputs[:, :1], targets[:, 0]
    likelihood.check(outputs, targets)
    hyper = likelihood.initial_hyper(targets)
    expected = reference(likelihood, outputs, targets, hyper).squeeze(1)
    torch.testing.assert_close(likelihood.log_prob(outputs, targets, hyper), expected)
    predicted = likelihood.predictive(outputs.unsqueeze(0), hyper).log_prob(targets)
    torch.testing.assert_close(predicted.flatten(), expected)


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_an_empty_batch_has_no_rows(likelihood):
    outputs, targets, hyper = case(likelihood, 4, 3)
    likelihood.check(outputs[:0], targets[:0])
    assert likelihood.log_prob(outputs[:0], targets[:0], hyper).shape == (0,)
    assert len(likelihood.fisher_factor(outputs[:0], targets[:0], hyper)) == 0
    assert likelihood.sample_noise(outputs[:0], targets[:0], hyper, torch.Generator()).shape == outputs[:0].shape


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


def optimised_baseline(likelihood, targets, width, hyper):
    """Mean log likelihood of the best constant outputs (and noise), by LBFGS."""
    constant = torch.zeros(width, dtype=DOUBLE, requires_grad=True)
    log_noise = torch.zeros(targets.shape[-1], dtype=DOUBLE, requires_grad=True)
    learned = isinstance(likelihood, Gaussian) and likelihood.noise is None
    options = {"max_iter": 500, "tolerance_grad": 1e-12, "tolerance_change": 1e-15, "line_search_fn": "strong_wolfe"}
    optimiser = torch.optim.LBFGS([constant, log_noise], **options)
    positions = targets.shape if isinstance(likelihood, Categorical) else targets.shape[:-1]
    axis = likelihood.class_axis if isinstance(likelihood, Categorical) else -1

    def loss():
        optimiser.zero_grad()
        outputs = constant.expand(*positions, width).movedim(-1, axis)
        own = hyper | {"log_noise": log_noise} if learned else hyper
        value = -likelihood.log_prob(outputs, targets, own).mean()
        value.backward()
        return value

    optimiser.step(loss)
    return -float(loss().detach())


WEIGHTED = Categorical(class_weights=(0.5, 1.0, 2.0, 3.0), ignore_index=-1)


@pytest.mark.parametrize("positions", [(40,), (10, 3, 2)], ids=["rows", "pixels"])
@pytest.mark.parametrize("likelihood", [*ALL, WEIGHTED], ids=repr)
def test_baseline_is_the_best_constant_prediction(likelihood, positions):
    outputs, targets, hyper = case(likelihood, *positions)
    if likelihood is WEIGHTED:
        targets[0], targets[3] = -1, 0
    axis = likelihood.class_axis if isinstance(likelihood, Categorical) else -1
    best = optimised_baseline(likelihood, targets, outputs.movedim(axis, -1).shape[-1], hyper)
    assert likelihood.baseline(targets) == pytest.approx(best, abs=1e-7)


def test_baselines_at_the_edge_are_finite():
    assert Poisson().baseline(torch.zeros(5, 1)) == 0
    assert Bernoulli().baseline(torch.ones(5, dtype=torch.bool)) == 0
    assert Categorical().baseline(torch.full((5,), 3)) == 0
    assert Categorical().baseline(torch.full((5,), -100)) == 0  # nothing to predict
    assert Bernoulli().baseline(torch.tensor([0, 1])) == pytest.approx(-math.log(2))  # targets [B] are one label


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "parts"),
    [
        (Categorical(), (3, 2), torch.tensor([0, 1, 2]), ["from 0 to 2", "2 outputs", "give the network 3 outputs"]),
        (Categorical(), (2, 2), torch.tensor([-1, 1]), ["from -1 to 1", "labels 0 to 1", "ignore_index=-1"]),
        (Categorical(), (2, 2), torch.tensor([0.0, 1.0]), ["integer class labels", "float32", "targets.long()"]),
        (Categorical(), (2, 2), torch.tensor([True, False]), ["integer class labels", "torch.bool", "Bernoulli()"]),
        (Categorical(), (2, 3), torch.zeros(2, 1, dtype=LONG), [r"\(2, 3\)", r"\(2,\)", r"got \(2, 1\)", "reshape"]),
        (Categorical(), (2, 5, 3), torch.zeros(2, 5, dtype=LONG), [r"shape \(2, 3\)", r"got \(2, 5\)", "class_axis"]),
        (Categorical(), (2,), torch.zeros(2, dtype=LONG), ["class_axis=1", r"got \(2,\)", "change"]),
        (Categorical(class_axis=0), (2, 2), torch.zeros(2, dtype=LONG), ["class_axis=0", r"got \(2, 2\)", "change"]),
        (
            Categorical(class_weights=(1.0,)),
            (2, 2),
            torch.tensor([0, 1]),
            ["1 class weights", "2 outputs", "one weight"],
        ),
        (Bernoulli(), (3, 1), torch.tensor([0.0, 2.0, NAN]), ["0 or 1", "2, nan", "Categorical"]),
        (Bernoulli(), (1, 1), torch.tensor([0.3]), ["0 or 1", "0.3", "clean"]),
        (Bernoulli(), (3,), torch.tensor([0, 1, 1]), ["one output", r"\(3,\) need outputs \(3, 1\)", "last layer"]),
        (Bernoulli(), (2, 3), torch.zeros(2, 2), [r"\(2, 2\)", r"got \(2, 3\)", "reshape"]),
        (Gaussian(), (2, 1), torch.tensor([1, 2]), ["real targets", "int64", r"targets\.float\(\)"]),
        (Gaussian(), (3, 1), torch.tensor([0.0, 1.0, NAN]), ["finite targets", "row 2 holds nan", "leave out"]),
        (Gaussian(), (2, 2), torch.tensor([[0.0, 1.0], [math.inf, 1.0]]), ["row 1 holds inf", "clean"]),
        (Gaussian(), (2, 2), torch.zeros(2, 1), [r"need outputs \(2, 1\)", r"got \(2, 2\)", "last layer"]),
        (Gaussian(), (2, 3, 4), torch.zeros(2, 4, 3), [r"need outputs \(2, 4, 3\)", r"got \(2, 3, 4\)", "reshape"]),
        (Gaussian(), (2, 3, 1), torch.zeros(2, 3), [r"need outputs \(2, 3\)", r"got \(2, 3, 1\)", "reshape"]),
        (
            HeteroscedasticGaussian(),
            (2, 1),
            torch.zeros(2, 1),
            ["mean and a log variance", r"\(2, 2\)", r"got \(2, 1\)"],
        ),
        (HeteroscedasticGaussian(), (2, 3), torch.zeros(2), [r"need outputs \(2, 2\)", r"got \(2, 3\)", "last layer"]),
        (HeteroscedasticGaussian(), (2, 2), torch.tensor([NAN, 0.0]), ["row 0 holds nan", "clean"]),
        (
            Poisson(),
            (5, 1),
            torch.tensor([0.0, -1, 0.5, NAN, 7.5]),
            ["counts", r"-1, 0\.5, nan, \.\.\. \(4", "Gaussian"],
        ),
        (Poisson(), (2, 2), torch.zeros(2, 3), [r"\(2, 3\)", r"got \(2, 2\)", "reshape"]),
    ],
)
def test_check_says_what_is_wrong_what_was_given_and_what_to_do(likelihood, outputs, targets, parts):
    with pytest.raises(ValueError, match=parts[0]) as caught:
        likelihood.check(torch.zeros(outputs), targets)
    for part in parts[1:]:
        caught.match(part)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"Gaussian\(noise=0\.0\): must be above 0 or None"):
        Gaussian(noise=0.0)
    with pytest.raises(ValueError, match=r"class_weights=\(1\.0, -1\.0\)\): must be at least 0 in every entry"):
        Categorical(class_weights=(1.0, -1.0))
    with pytest.raises(ValueError, match="must be a tuple"):
        Categorical(class_weights=[1.0, 1.0])
    with pytest.raises(ValueError, match="must be a bool"):
        HeteroscedasticGaussian(standardise="yes")
    for likelihood in (Gaussian(standardise=True), HeteroscedasticGaussian(standardise=True)):
        with pytest.raises(ValueError, match=r"output 1 are all 0\.1: leave that output out"):
            likelihood.initial_hyper(torch.stack([torch.arange(7.0), torch.full((7,), 0.1)], 1))


SHAPE = {"log_noise": (2,), "target_mean": (2,), "target_scale": (2,), "temperature": ()}


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("positions", [(4,), (4, 4)], ids=["rows", "sequence"])  # as many as draws: no luck in shapes
@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_hyper_may_have_a_draw_axis(likelihood, positions, dtype):
    outputs, targets, hyper = case(likelihood, *positions, dtype=dtype)
    names = [*hyper, "temperature"] if likelihood.tempered else [*hyper]
    own = {name: normal(4, *SHAPE[name], seed=i).exp() for i, name in enumerate(names)}
    many = torch.stack([outputs + s for s in range(4)])
    together = likelihood.predictive(many, own)
    each = [likelihood.predictive(many[s : s + 1], {name: v[s] for name, v in own.items()}) for s in range(4)]
    torch.testing.assert_close(together.samples, torch.cat([one.samples for one in each]))
    log_probs = torch.stack([one.log_prob(targets) for one in each])
    found = together.log_prob(targets)
    assert found.dtype == together.samples.dtype == together.epistemic.dtype == together.aleatoric.dtype == dtype
    torch.testing.assert_close(found, log_probs.logsumexp(0) - math.log(4))
    if likelihood.kind == "regression":
        torch.testing.assert_close(together.aleatoric, torch.stack([one.aleatoric for one in each]).mean(0))


def test_a_temperature_divides_logits_and_multiplies_noise_variance():
    hot = {"temperature": torch.tensor(2.0, dtype=DOUBLE)}
    for likelihood in (Categorical(), SEQUENCE, Bernoulli()):
        outputs, targets, _ = case(likelihood, 5, 3)
        tempered = likelihood.predictive(outputs.unsqueeze(0), hot).log_prob(targets)
        torch.testing.assert_close(tempered, likelihood.predictive(outputs.unsqueeze(0) / 2, {}).log_prob(targets))
    for likelihood in (Gaussian(standardise=True), HeteroscedasticGaussian()):
        outputs, _, hyper = case(likelihood, 5)
        cold = likelihood.predictive(outputs.unsqueeze(0), hyper)
        tempered = likelihood.predictive(outputs.unsqueeze(0), hyper | hot)
        torch.testing.assert_close(tempered.variance, 2 * cold.variance)
        torch.testing.assert_close(tempered.mean, cold.mean)


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
@settings(max_examples=15, deadline=None)
@given(draws=st.integers(1, 4), positions=st.lists(st.integers(1, 3), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_the_mixture_of_draws_is_the_mean_of_their_probabilities(likelihood, draws, positions, seed):
    outputs, targets, hyper = case(likelihood, *positions)
    many = outputs + 0.3 * normal(draws, *outputs.shape, seed=seed)
    # Classification scores labels, regression joint rows: in one draw both sum to the row's log likelihood.
    alone = torch.stack([likelihood.log_prob(o, targets, hyper) for o in many])
    parts = torch.stack([likelihood.predictive(o.unsqueeze(0), hyper).log_prob(targets) for o in many])
    torch.testing.assert_close(parts.reshape(draws, positions[0], -1).sum(-1), alone)
    mixture = likelihood.predictive(many, hyper).log_prob(targets)
    torch.testing.assert_close(mixture, parts.logsumexp(0) - math.log(draws))


@pytest.mark.parametrize("positions", [(4,), (4, 3, 2)], ids=["row", "pixels"])
@pytest.mark.parametrize("likelihood", [*ALL, HESSIANS[2]], ids=repr)
def test_the_trace_is_that_of_the_fisher_information(likelihood, positions):
    outputs, targets, hyper = case(likelihood, *positions)
    factor = likelihood.fisher_factor(outputs, targets, hyper)
    torch.testing.assert_close(likelihood.fisher_trace(outputs, targets, hyper), factor.square().flatten(1).sum(1))
