import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caveat.priors import (
    EmpCovPrior,
    GaussianMixturePrior,
    GaussianPrior,
    LaplacePrior,
    LogisticPrior,
    StudentTPrior,
)

DOUBLE = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=seeded(seed), dtype=DOUBLE).to(dtype)


class Mixture:
    """Zero-mean Gaussians with the weights given, as scipy would write it."""

    def __init__(self, stds, weights):
        self.parts = [(w / sum(weights), scipy.stats.norm(0, s)) for s, w in zip(stds, weights, strict=True)]

    def logpdf(self, x):
        return np.log(sum(w * part.pdf(x) for w, part in self.parts))

    def cdf(self, x):
        return sum(w * part.cdf(x) for w, part in self.parts)

    def var(self):
        return sum(w * part.var() for w, part in self.parts)


FAMILIES = [
    (GaussianPrior(4.0), scipy.stats.norm(0, 0.5)),
    (LaplacePrior(0.7), scipy.stats.laplace(0, 0.7)),
    (StudentTPrior(0.7, degrees=6.0), scipy.stats.t(6.0, 0, 0.7)),
    (StudentTPrior(2.0, degrees=1.0), scipy.stats.cauchy(0, 2.0)),
    (LogisticPrior(0.7), scipy.stats.logistic(0, 0.7)),
    (GaussianMixturePrior((0.1, 1.0, 3.0), (2.0, 1.0, 1.0)), Mixture((0.1, 1.0, 3.0), (2.0, 1.0, 1.0))),
]
every_family = pytest.mark.parametrize(("prior", "reference"), FAMILIES, ids=[repr(prior) for prior, _ in FAMILIES])


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_log_prob_against_scipy(prior, reference, dtype):
    params = {
        "a": 3 * normal(4, 3, dtype=dtype),
        "b": normal(2, seed=1, dtype=dtype),
        "c": torch.tensor(0.0, dtype=dtype),
    }
    expected = sum(float(reference.logpdf(w.double().numpy()).sum()) for w in params.values())
    found = prior.log_prob(params)
    assert found.dtype == dtype
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-12)


@every_family
def test_log_prob_is_normalised(prior, reference):
    half = torch.logspace(-12, 6, 200_001, dtype=DOUBLE)
    density = torch.func.vmap(lambda w: prior.log_prob({"w": w}))(half).exp()
    assert 2 * torch.trapezoid(density, half).item() == pytest.approx(1.0, abs=2e-5)


@every_family
def test_samples_follow_the_distribution(prior, reference):
    drawn = prior.sample({"a": torch.zeros(100, 150, dtype=DOUBLE), "b": torch.zeros(5000, dtype=DOUBLE)}, seeded())
    together = torch.cat([w.flatten() for w in drawn.values()]).numpy()
    assert scipy.stats.kstest(together, reference.cdf).pvalue > 0.01
    if math.isfinite(reference.var()):
        assert together.var() == pytest.approx(reference.var(), rel=0.06)
        assert abs(together.mean()) < 5 * math.sqrt(reference.var() / len(together))
    halves = np.array([together[:10_000], together[10_000:]])
    assert abs(scipy.stats.spearmanr(halves[0], halves[1]).statistic) < 0.05  # neighbours and layers share no noise


@pytest.mark.parametrize("degrees", [0.05, 3.0])
def test_heavy_tails_are_drawn_without_infinities(degrees):
    drawn = StudentTPrior(1.0, degrees=degrees).sample({"w": torch.zeros(2000)}, seeded())["w"]
    assert drawn.isfinite().all()


EMPCOV = EmpCovPrior("conv.weight", torch.tensor([[2.0, 0.3], [0.3, 1.0]]), alpha=0.5, epsilon=0.1, precision=4.0)


@pytest.mark.parametrize("prior", [*(prior for prior, _ in FAMILIES), EMPCOV], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_draw_is_shaped_as_the_weights_and_set_by_the_generator(prior, dtype):
    like = {"conv.weight": torch.zeros(3, 1, 2, 1, dtype=dtype), "bias": torch.zeros(4, dtype=dtype)}
    like |= {"scale": torch.zeros((), dtype=dtype)}
    state = torch.random.get_rng_state()
    first, again, other = (prior.sample(like, seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, w in like.items():
        assert first[name].shape == w.shape
        assert first[name].dtype == dtype
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("prior", [*(prior for prior, _ in FAMILIES), EMPCOV], ids=repr)
def test_gradients_inside_torch_func_are_those_of_finite_differences(prior):
    w, others = normal(3, 2), {"bias": normal(4, seed=1)}

    def log_prob(value):
        return prior.log_prob({"conv.weight": value} | others)

    inside = torch.func.vmap(torch.func.grad(log_prob))(w.expand(5, 3, 2))[0]  # as many chains at once would call it
    step = 1e-6
    for index in np.ndindex(3, 2):
        move = torch.zeros_like(w)
        move[index] = step
        slope = (log_prob(w + move) - log_prob(w - move)) / (2 * step)
        assert inside[index].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(torch.func.grad(log_prob)(w), inside)


def test_gaussian_precisions_by_pattern_and_by_weight():
    own = normal(3, 2, seed=5).exp()
    prior = GaussianPrior({"fc1.weight": own, "fc1.*": 2.0, "*": 8.0})
    params = {"fc1.weight": normal(3, 2), "fc1.bias": normal(3, seed=1), "fc2.weight": normal(1, 3, seed=2)}
    half, eighth = torch.tensor([1 / 2, 1 / 8], dtype=DOUBLE).sqrt()
    stds = {"fc1.weight": own.rsqrt(), "fc1.bias": half, "fc2.weight": eighth}
    expected = sum(torch.distributions.Normal(0.0, stds[name]).log_prob(w).sum() for name, w in params.items())
    torch.testing.assert_close(prior.log_prob(params), expected)
    torch.testing.assert_close(prior.of("fc1.weight", params["fc1.weight"]), own)
    assert prior.of("fc1.bias", params["fc1.bias"].float()).dtype == torch.float32
    drawn = prior.sample(params, seeded(7))
    again = seeded(7)
    for name, w in params.items():
        noise = torch.randn(w.shape, generator=again, dtype=DOUBLE)
        torch.testing.assert_close(drawn[name], noise * stds[name])


def test_the_first_pattern_that_matches_counts_and_none_is_an_error():
    weight = torch.zeros(2)
    assert GaussianPrior({"*": 1.0, "a": 2.0}).of("a", weight).item() == 1.0
    assert GaussianPrior({"a": 2.0, "*": 1.0}).of("a", weight).item() == 2.0
    assert GaussianPrior(torch.tensor(3.0)).of("a", weight).item() == 3.0
    with pytest.raises(ValueError, match=r"no precision for 'b': its patterns are \['a'\]; add one, or '\*'"):
        GaussianPrior({"a": 2.0}).log_prob({"b": weight})
    with pytest.raises(ValueError, match=r"shape \(2,\) for 'a', which has shape \(2, 2\): give a number, or one"):
        GaussianPrior({"a": torch.ones(2)}).log_prob({"a": torch.zeros(2, 2)})


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "1", None, {"*": -2.0}, {"*": torch.tensor([1.0, 0.0])}])
def test_a_precision_that_is_no_positive_number_is_refused(bad):
    with pytest.raises(ValueError, match=r"GaussianPrior\(precision=.*\): must be .*finite and above 0"):
        GaussianPrior(bad)


@pytest.mark.parametrize("family", [LaplacePrior, StudentTPrior, LogisticPrior])
def test_bad_scales_are_refused(family):
    with pytest.raises(ValueError, match=rf"{family.__name__}\(scale=-1.0\): must be above 0"):
        family(-1.0)


def test_bad_mixtures_are_refused():
    with pytest.raises(ValueError, match="has 2 stds and 1 weights: give one of each"):
        GaussianMixturePrior((0.1, 1.0), (1.0,))
    with pytest.raises(ValueError, match="at least one component"):
        GaussianMixturePrior((), ())
    with pytest.raises(ValueError, match="above 0 in every entry"):
        GaussianMixturePrior((0.1, 0.0), (1.0, 1.0))
    with pytest.raises(ValueError, match="must be a tuple"):
        GaussianMixturePrior([0.1, -1.0], (1.0, 1.0))


def singular_covariance(d, rank, seed=0):
    factor = normal(d, rank, seed=seed)
    return factor @ factor.T


def empcov(d, rank, seed=0):
    return EmpCovPrior("first", singular_covariance(d, rank, seed), alpha=0.7, epsilon=0.05, precision=4.0)


@given(d=st.integers(1, 6), rank=st.integers(0, 6), filters=st.integers(1, 4), seed=st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_whitening_is_undone_by_unwhitening_and_scales_every_other_weight(d, rank, filters, seed):
    prior, params = empcov(d, rank, seed), {"first": normal(filters, d, seed=seed), "other": normal(3, seed=seed + 1)}
    there_and_back = prior.unwhiten(prior.whiten(params))
    back_and_there = prior.whiten(prior.unwhiten(params))
    for name, w in params.items():
        torch.testing.assert_close(there_and_back[name], w)
        torch.testing.assert_close(back_and_there[name], w)
    torch.testing.assert_close(prior.whiten(params)["other"], 2 * params["other"])


@pytest.mark.parametrize("rank", [0, 2, 4], ids=["zero", "singular", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_empcov_log_prob_against_the_multivariate_normal(rank, dtype):
    prior = empcov(4, rank)
    params = {"first": normal(5, 1, 2, 2, dtype=dtype), "bias": normal(5, seed=1, dtype=dtype)}
    covariance = 0.7 * singular_covariance(4, rank) + 0.05 * torch.eye(4, dtype=DOUBLE)
    filters = torch.distributions.MultivariateNormal(torch.zeros(4, dtype=DOUBLE), covariance)
    expected = filters.log_prob(params["first"].double().reshape(5, 4)).sum()
    expected += torch.distributions.Normal(0.0, torch.tensor(0.5, dtype=DOUBLE)).log_prob(params["bias"].double()).sum()
    found = prior.log_prob(params)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=1e-9)


def test_covariance_of_empcov_draws():
    prior, n = empcov(3, 2), 40_000
    drawn = prior.sample({"first": torch.zeros(n, 3, dtype=DOUBLE), "other": torch.zeros(n, dtype=DOUBLE)}, seeded())
    expected = 0.7 * singular_covariance(3, 2) + 0.05 * torch.eye(3, dtype=DOUBLE)
    allowed = 5 * (2 * torch.outer(expected.diagonal(), expected.diagonal()) / n).sqrt()
    assert ((drawn["first"].T @ drawn["first"] / n - expected).abs() <= allowed).all()
    assert drawn["other"].var().item() == pytest.approx(1 / 4, rel=0.05)


def test_the_covariance_of_input_rows():
    x = normal(30, 2, 20) @ normal(20, 20, seed=1)
    prior = EmpCovPrior.from_inputs("w", torch.zeros(7, 40), x, alpha=2.0, epsilon=0.3, precision=5.0)
    assert (prior.layer, prior.alpha, prior.epsilon, prior.precision) == ("w", 2.0, 0.3, 5.0)
    expected = np.cov(x.reshape(30, 40).numpy().T, bias=True)
    torch.testing.assert_close(prior.covariance, torch.from_numpy(expected))
    positions = EmpCovPrior.from_inputs("w", torch.zeros(7, 20), x)  # a layer that is applied to every position
    expected = np.cov(x.reshape(-1, 20).numpy().T, bias=True)
    torch.testing.assert_close(positions.covariance, torch.from_numpy(expected))


def test_a_covariance_is_measured_piece_by_piece_without_losing_digits():
    n, size = 8000, 12  # more patches than are unfolded at once
    x = normal(n, 1, size, size) + torch.linspace(0, 3, n, dtype=DOUBLE)[:, None, None, None] + 1e5  # pieces differ
    prior = EmpCovPrior.from_inputs("w", torch.zeros(4, 1, 3, 3), x)
    windows = np.lib.stride_tricks.sliding_window_view(x.numpy()[:, 0] - 1e5, (3, 3), axis=(1, 2)).reshape(-1, 9)
    torch.testing.assert_close(prior.covariance, torch.from_numpy(np.cov(windows.T, bias=True)), rtol=1e-9, atol=1e-9)


def test_the_covariance_of_patches_is_that_of_what_a_convolution_multiplies():
    x, weight = normal(6, 2, 5, 4, dtype=torch.float32), torch.zeros(8, 2, 3, 2)
    prior = EmpCovPrior.from_inputs("conv.weight", weight, x)
    patches = [x[n, :, i : i + 3, j : j + 2].reshape(-1) for n in range(6) for i in range(3) for j in range(3)]
    expected = np.cov(torch.stack(patches).double().numpy().T, bias=True)
    torch.testing.assert_close(prior.covariance, torch.from_numpy(expected))
    # The variance of a response is w^T Sigma w: the filter's weights and the patch are in the same order.
    filters = normal(8, 2, 3, 2, seed=3, dtype=torch.float32)
    responses = torch.nn.functional.conv2d(x, filters).transpose(0, 1).reshape(8, -1).double()
    flat = filters.reshape(8, -1).double()
    by_prior = (flat @ prior.covariance * flat).sum(1)
    torch.testing.assert_close(responses.var(1, correction=0), by_prior, rtol=1e-5, atol=1e-5)
    assert prior.sample({"conv.weight": weight}, seeded())["conv.weight"].shape == weight.shape


def test_pixels_that_never_vary_get_weights_of_standard_deviation_root_epsilon():
    x = normal(50, 3, dtype=torch.float32)
    x[:, 1] = 7.0
    prior = EmpCovPrior.from_inputs("w", torch.zeros(1, 3), x, epsilon=1e-4)
    drawn = prior.sample({"w": torch.zeros(5000, 3)}, seeded())["w"]
    assert drawn[:, 1].std().item() == pytest.approx(1e-2, rel=0.05)
    assert drawn[:, 0].std().item() == pytest.approx(math.sqrt(x[:, 0].var(correction=0).item() + 1e-4), rel=0.05)


@pytest.mark.parametrize(
    ("weight", "inputs"),
    [
        (torch.zeros(4, 2, 3), torch.zeros(5, 2, 9)),  # a one-dimensional convolution
        (torch.zeros(4, 1, 3, 3), torch.zeros(5, 2, 6, 6)),  # a grouped convolution
        (torch.zeros(4, 6), torch.zeros(6, 4)),
    ],
)
def test_layers_whose_inputs_do_not_fit_are_refused(weight, inputs):
    with pytest.raises(ValueError, match=r"inputs of shape .* do not fit a weight of shape .* give the covariance"):
        EmpCovPrior.from_inputs("w", weight, inputs)


def test_bad_covariances_are_refused():
    for bad in (
        torch.zeros(2, 3),
        torch.zeros(3),
        torch.tensor([[1.0, 0.5], [0.0, 1.0]]),
        torch.full((2, 2), math.nan),
    ):
        with pytest.raises(ValueError, match=r"symmetric covariance \[d, d\] without NaN.*from_inputs"):
            EmpCovPrior("w", bad)
    with pytest.raises(ValueError, match="lowest eigenvalue is -1:"):
        EmpCovPrior("w", torch.diag(torch.tensor([2.0, -1.0])))
    with pytest.raises(ValueError, match=r"EmpCovPrior\(epsilon=0\): must be above 0"):
        EmpCovPrior("w", torch.eye(2), epsilon=0)
    with pytest.raises(ValueError, match="covariance of size 2, but a filter of 'w' has 3 weights"):
        EmpCovPrior("w", torch.eye(2)).log_prob({"w": torch.zeros(4, 3)})
    with pytest.raises(ValueError, match=r"about 'w', which is not among the weights \['v'\]"):
        EmpCovPrior("w", torch.eye(2)).sample({"v": torch.zeros(4, 2)}, seeded())
