import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize

from caveat.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    PoissonPredictive,
    regression,
)

DOUBLE = torch.float64


def normal(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def categorical(*shape, seed=0, dtype=DOUBLE):
    return CategoricalPredictive((2 * normal(*shape, seed=seed, dtype=dtype)).log_softmax(-1))


def gaussian(*shape, seed=0, dtype=DOUBLE):
    variances = normal(*shape, seed=seed + 1, dtype=dtype).exp()
    return GaussianPredictive(2 * normal(*shape, seed=seed, dtype=dtype), variances, variances.mean(0))


def poisson(*shape, seed=0, dtype=DOUBLE):
    return PoissonPredictive((1 + normal(*shape, seed=seed, dtype=dtype)).exp())


def labels(classes, *shape, seed=1):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def every_prediction(rows, dtype=DOUBLE, draws=3):
    """One prediction of each class for sequences of two positions, with targets."""
    real = normal(rows, 2, 2, seed=9, dtype=dtype)
    return [
        (categorical(draws, rows, 2, 4, dtype=dtype), labels(4, rows, 2)),
        (BernoulliPredictive(normal(draws, rows, 2, dtype=dtype)), labels(2, rows, 2)),
        (gaussian(draws, rows, 2, 2, dtype=dtype), real),
        (poisson(draws, rows, 2, 2, dtype=dtype), labels(9, rows, 2, 2).to(dtype)),
    ]


@given(
    draws=st.integers(1, 5), classes=st.integers(1, 6), positions=st.lists(st.integers(0, 3), min_size=1, max_size=3)
)
@settings(max_examples=40, deadline=None)
def test_probabilities_sum_to_one_and_entropy_splits_in_two(draws, classes, positions):
    prediction = categorical(draws, *positions, classes)
    probs = prediction.samples.mean(0)
    torch.testing.assert_close(prediction.probs, probs)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(positions, dtype=DOUBLE))
    entropies = torch.from_numpy(scipy.stats.entropy(prediction.samples.numpy(), axis=-1)).reshape(draws, *positions)
    torch.testing.assert_close(prediction.aleatoric, entropies.mean(0))
    entropy = torch.from_numpy(np.asarray(scipy.stats.entropy(probs.numpy(), axis=-1))).reshape(positions)
    torch.testing.assert_close(prediction.entropy, entropy)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.entropy)
    assert (prediction.epistemic >= 0).all()
    assert torch.equal(prediction.label, probs.argmax(-1))


def test_one_draw_knows_nothing_of_its_ignorance():
    for prediction, _ in every_prediction(5, torch.float32, draws=1):
        assert (prediction.epistemic == 0).all()


def test_small_disagreement_is_resolved_in_float32():
    # A difference of entropies would be lost in rounding at 1e-7; the divergence from the mixture is not.
    logits = torch.tensor([[4.0, 0.0], [4.0, 0.01]])[:, None]  # [S, 1, C]
    small = CategoricalPredictive(logits.log_softmax(-1)).epistemic
    exact = CategoricalPredictive(logits.double().log_softmax(-1)).epistemic
    assert float(exact) < 1e-6
    torch.testing.assert_close(small.double(), exact, rtol=1e-3, atol=0)
    variances = torch.full((2, 1, 1), 1e6)
    prediction = GaussianPredictive(torch.tensor([-0.01, 0.01])[:, None, None], variances, variances.mean(0))
    assert float(prediction.epistemic) == pytest.approx(1e-4)


@given(draws=st.integers(1, 5), rows=st.integers(0, 4), classes=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_log_prob_of_a_label_is_that_of_the_mixture(draws, rows, classes, seed):
    prediction, targets = categorical(draws, rows, classes, seed=seed), labels(classes, rows, seed=seed)
    mixture = torch.distributions.Categorical(probs=prediction.samples.mean(0))
    torch.testing.assert_close(prediction.log_prob(targets), mixture.log_prob(targets))
    assert (
        prediction.log_prob(targets)
        >= prediction.log_samples.gather(-1, targets.expand(draws, rows)[..., None]).mean(0)[:, 0] - 1e-12
    ).all()


def test_ignored_labels_have_no_log_prob_and_no_row():
    prediction = CategoricalPredictive(normal(2, 3, 2, 4).log_softmax(-1), ignore_index=-1)
    targets = torch.tensor([[0, -1], [-1, 3], [2, 1]])
    found = prediction.log_prob(targets)
    assert found[0, 1] == found[1, 0] == 0
    assert (found[targets != -1] < 0).all()
    table = prediction.columns(targets)
    assert table["targets"].tolist() == [0, 3, 2, 1]
    kept = targets != -1
    torch.testing.assert_close(table["probs"], prediction.probs[kept])
    torch.testing.assert_close(table["log_prob"], found[kept])
    for name in ("entropy", "aleatoric", "epistemic"):
        torch.testing.assert_close(table[name], getattr(prediction, name)[kept])
    assert len(prediction.columns()["probs"]) == 6
    assert len(prediction.columns(torch.full((3, 2), -1))["targets"]) == 0


def test_yes_or_no_is_a_choice_of_two_classes():
    logits, targets = normal(4, 5, 3), labels(2, 5, 3)
    prediction = BernoulliPredictive(logits)
    two = CategoricalPredictive(torch.stack([torch.zeros_like(logits), logits], -1).log_softmax(-1))
    torch.testing.assert_close(prediction.samples, logits.sigmoid())
    torch.testing.assert_close(prediction.probs, logits.sigmoid().mean(0))
    assert torch.equal(prediction.label, (prediction.probs > 0.5).long())
    for name in ("entropy", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(prediction, name), getattr(two, name))
    expected = torch.distributions.Bernoulli(logits.sigmoid().mean(0)).log_prob(targets.double())
    for given_targets in (targets, targets.bool(), targets.double()):
        torch.testing.assert_close(prediction.log_prob(given_targets), expected)
        table = prediction.columns(given_targets)
        assert table["probs"].shape == (15, 2)
        torch.testing.assert_close(table["probs"][:, 1], prediction.probs.flatten())
        assert torch.equal(table["targets"], targets.flatten())
        torch.testing.assert_close(table["log_prob"], expected.flatten())


@given(draws=st.integers(1, 5), rows=st.integers(1, 4), width=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_gaussian_moments_and_joint_log_density(draws, rows, width, seed):
    prediction, targets = gaussian(draws, rows, width, seed=seed), normal(rows, width, seed=seed + 2)
    components = torch.distributions.Normal(prediction.means.movedim(0, 1), prediction.variances.movedim(0, 1).sqrt())
    equal = torch.distributions.Categorical(probs=torch.ones(rows, draws, dtype=DOUBLE))
    mixture = torch.distributions.MixtureSameFamily(equal, torch.distributions.Independent(components, 1))
    torch.testing.assert_close(prediction.mean, mixture.mean)
    torch.testing.assert_close(prediction.variance, mixture.variance)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.variance)
    torch.testing.assert_close(prediction.epistemic, prediction.means.var(0, correction=0))
    torch.testing.assert_close(prediction.log_prob(targets), mixture.log_prob(targets))


def test_what_a_component_has_beside_noise_is_epistemic():
    # A closed-form method gives one component: the variance of the function and of the noise together.
    prediction = GaussianPredictive(torch.zeros(1, 2, 1), torch.full((1, 2, 1), 5.0), torch.full((2, 1), 2.0))
    assert prediction.epistemic.flatten().tolist() == [3.0, 3.0]
    assert prediction.variance.flatten().tolist() == [5.0, 5.0]
    one_noise = GaussianPredictive(torch.zeros(1, 2, 1), torch.full((1, 2, 1), 5.0), torch.tensor([2.0]))
    assert one_noise.columns()["aleatoric"].tolist() == [[2.0], [2.0]]


def test_joint_covariance_is_that_of_the_draws():
    prediction = gaussian(7, 3, 2)
    expected = np.cov(prediction.means.reshape(7, 6).numpy().T, bias=True)
    torch.testing.assert_close(prediction.joint_covariance(), torch.from_numpy(expected))
    torch.testing.assert_close(prediction.joint_covariance().diagonal().reshape(3, 2), prediction.epistemic)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.999999])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_interval_of_one_gaussian_against_scipy(level, dtype):
    prediction = gaussian(1, 6, 2, dtype=dtype)
    expected = scipy.stats.norm.interval(level, prediction.means[0].double(), prediction.variances[0].double().sqrt())
    for found, bound in zip(prediction.interval(level), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, torch.from_numpy(bound).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_interval_of_a_mixture_inverts_its_distribution_function(dtype):
    prediction = gaussian(5, 4, 2, dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for bound, share in zip(prediction.interval(0.8), (0.1, 0.9), strict=True):
        assert (prediction.cdf(bound).double() - share).abs().max() < tolerance
        means, stds = (t[:, 1, 1].double().numpy() for t in (prediction.means, prediction.variances.sqrt()))
        root = optimize.brentq(lambda y, m=means, s=stds, p=share: scipy.stats.norm.cdf(y, m, s).mean() - p, -50, 50)
        assert float(bound[1, 1]) == pytest.approx(root, rel=1e-5 if dtype == torch.float32 else 1e-9)


def test_interval_of_a_mixture_by_monte_carlo():
    prediction = gaussian(3, 2, 1)
    draws = prediction.means + prediction.variances.sqrt() * normal(60_000, 3, 2, 1)
    inside = (draws >= prediction.interval(0.9)[0]) & (draws <= prediction.interval(0.9)[1])
    assert inside.double().mean((0, 1)).flatten().tolist() == pytest.approx(
        [0.9, 0.9], abs=5 * math.sqrt(0.09 / 180_000)
    )


@pytest.mark.parametrize("level", [0, 1, 1.5, 90])
def test_a_level_that_is_no_share_is_refused(level):
    for prediction in (gaussian(2, 2, 1), poisson(2, 2, 1)):
        with pytest.raises(ValueError, match=f"level={level}.*above 0 and below 1"):
            prediction.interval(level)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("level", [0.2, 0.9, 0.999, 0.9999999])
def test_interval_of_one_poisson_is_exactly_that_of_scipy(level, dtype):
    rates = torch.tensor([1e-9, 0.01, 0.5, 1.0, 7.3, 100.0, 12_345.6, 1e6], dtype=dtype)[None, :, None]
    expected = scipy.stats.poisson.interval(level, rates[0].double())
    for found, bound in zip(PoissonPredictive(rates).interval(level), expected, strict=True):
        assert found.dtype == dtype
        assert found.flatten().tolist() == bound.flatten().tolist()


def test_interval_and_distribution_function_of_a_poisson_mixture():
    prediction = poisson(4, 5, 2)
    counts = torch.arange(-2, 60.0, dtype=DOUBLE)
    table = torch.stack([prediction.cdf(torch.full((5, 2), float(k), dtype=DOUBLE)) for k in counts])
    expected = scipy.stats.poisson.cdf(counts[:, None, None, None].numpy(), prediction.rates.numpy()).mean(1)
    torch.testing.assert_close(table, torch.from_numpy(expected))
    torch.testing.assert_close(prediction.cdf(torch.full((5, 2), 3)), table[5])  # whole numbers of an integer type
    for bound, share in zip(prediction.interval(0.9), (0.05, 0.95), strict=True):
        first = counts[(expected >= share).argmax(0)]
        assert torch.equal(bound, first)


def test_poisson_moments_and_log_prob():
    prediction, targets = poisson(4, 5, 2), labels(9, 5, 2)
    assert torch.equal(prediction.samples, prediction.rates)
    per_draw = scipy.stats.poisson.logpmf(targets.numpy(), prediction.rates.numpy()).sum(-1)
    expected = torch.from_numpy(per_draw).logsumexp(0) - math.log(4)
    torch.testing.assert_close(prediction.log_prob(targets), expected)
    counts = np.arange(400)
    pmf = scipy.stats.poisson.pmf(counts[:, None, None, None], prediction.rates.numpy()).mean(1)
    mean = (counts[:, None, None] * pmf).sum(0)
    torch.testing.assert_close(prediction.mean, torch.from_numpy(mean))
    torch.testing.assert_close(
        prediction.variance, torch.from_numpy((counts[:, None, None] ** 2 * pmf).sum(0) - mean**2)
    )


def test_crps_against_numerical_integration():
    prediction, targets = gaussian(4, 3, 2), 2 * normal(3, 2, seed=5)
    scores = prediction.crps(targets)
    assert scores.shape == (3, 2)
    for row, output in np.ndindex(3, 2):
        means, stds = prediction.means[:, row, output].numpy(), prediction.variances[:, row, output].sqrt().numpy()
        y = float(targets[row, output])

        def cdf(x, means=means, stds=stds):
            return scipy.stats.norm.cdf(x, means, stds).mean()

        below, _ = integrate.quad(lambda x, cdf=cdf: cdf(x) ** 2, y - 40, y, epsabs=1e-11, limit=200)
        above, _ = integrate.quad(lambda x, cdf=cdf: (1 - cdf(x)) ** 2, y, y + 40, epsabs=1e-11, limit=200)
        assert float(scores[row, output]) == pytest.approx(below + above, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_crps_of_one_gaussian_is_the_known_closed_form(dtype):
    prediction, targets = gaussian(1, 50, 1, dtype=dtype), 2 * normal(50, 1, seed=5, dtype=dtype)
    scale = prediction.variances[0].double().sqrt()
    z = ((targets - prediction.means[0]).double() / scale).numpy()
    norm = scipy.stats.norm
    expected = scale * torch.from_numpy(z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    torch.testing.assert_close(prediction.crps(targets), expected.to(dtype))


@given(draws=st.integers(1, 7), rows=st.integers(0, 5), width=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_crps_equals_the_sum_over_all_pairs(draws, rows, width, seed):
    prediction, targets = gaussian(draws, rows, width, seed=seed), 2 * normal(rows, width, seed=seed + 2)
    means, variances = prediction.means, prediction.variances

    def mean_absolute(m, v):
        return (2 * v / math.pi).sqrt() * torch.exp(-(m**2) / (2 * v)) + m * torch.erf(m / (2 * v).sqrt())

    pairs = mean_absolute(means[:, None] - means[None], variances[:, None] + variances[None]).mean(dim=(0, 1))
    expected = mean_absolute(targets - means, variances).mean(dim=0) - pairs / 2
    torch.testing.assert_close(prediction.crps(targets), expected)


def test_crps_of_point_masses_is_that_of_the_empirical_distribution():
    means, nothing = torch.tensor([0.0, 0.0, 3.0])[:, None, None], torch.zeros(1, 1)
    score = GaussianPredictive(means, torch.zeros(3, 1, 1), nothing).crps(torch.tensor([[1.0]]))
    assert score.item() == pytest.approx((1 + 1 + 2) / 3 - (4 * 3) / (2 * 9))
    assert GaussianPredictive(means[:1], torch.zeros(1, 1, 1), nothing).crps(torch.tensor([[-2.0]])).item() == 2


def test_crps_broadcasts_one_variance_a_draw_and_does_not_depend_on_the_pieces(monkeypatch):
    prediction, targets = gaussian(6, 11, 2), normal(11, 2, seed=5)
    one_a_draw = prediction.variances[:, :1]
    whole = GaussianPredictive(prediction.means, one_a_draw, one_a_draw.mean(0)).crps(targets)
    spread_out = GaussianPredictive(prediction.means, one_a_draw.expand(6, 11, 2), one_a_draw.mean(0))
    torch.testing.assert_close(whole, spread_out.crps(targets), rtol=0, atol=0)
    monkeypatch.setattr(regression, "CRPS_ELEMENTS", 30)
    torch.testing.assert_close(whole, spread_out.crps(targets))


def poisson_crps(rates, y):
    counts = np.arange(int(max(rates) + 40 * math.sqrt(max(rates)) + y) + 60)
    cdf = scipy.stats.poisson.cdf(counts[:, None], rates).mean(1)
    return ((cdf - (y <= counts)) ** 2).sum()


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_poisson_crps_is_the_sum_over_all_counts(dtype):
    rates = torch.tensor(
        [[0.0, 1e-9, 0.3, 4.0, 50.0, 2.0, 900.0], [0.0, 0.01, 0.9, 7.0, 90.0, 300.0, 1000.0]], dtype=dtype
    )
    for shift in (0, 5, 400):  # targets inside, just above and far above what is predicted
        y = rates.mean(0).round() + shift
        expected = [poisson_crps(rates[:, i].double().numpy(), float(y[i])) for i in range(rates.shape[1])]
        found = PoissonPredictive(rates[..., None]).crps(y[:, None])
        assert found.dtype == dtype
        assert found.flatten().tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    far_below = PoissonPredictive(rates[:, -1:, None]).crps(torch.zeros(1, 1))
    assert far_below.item() == pytest.approx(poisson_crps(rates[:, -1].double().numpy(), 0.0), rel=1e-6)


def test_poisson_crps_of_huge_rates_is_that_of_gaussians(monkeypatch):
    rates = torch.tensor([3.0, 2e6], dtype=DOUBLE)[None, :, None].expand(2, 2, 1)
    y = rates[0] + torch.tensor([[1.0], [1500.0]], dtype=DOUBLE)
    found = PoissonPredictive(rates).crps(y)
    gaussians = GaussianPredictive(rates, rates, rates[0]).crps(y)
    assert found[0].item() == pytest.approx(poisson_crps(np.array([3.0]), 4.0))
    assert found[1].item() == gaussians[1].item()
    monkeypatch.setattr(regression, "CRPS_COUNTS", 20_000)
    assert PoissonPredictive(rates).crps(y)[1].item() == pytest.approx(gaussians[1].item(), rel=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("index", range(4), ids=["categorical", "bernoulli", "gaussian", "poisson"])
def test_columns_hold_one_row_a_decision_in_the_type_of_the_outputs(index, dtype):
    prediction, targets = every_prediction(5, dtype)[index]
    table, without = prediction.columns(targets.double()), prediction.columns()
    assert set(table) - set(without) >= {"targets", "log_prob"}
    widths = {"probs"} if prediction.kind == "classification" else set(table) - {"log_prob"}
    rows = table.pop("rows")  # which row of the batch a decision belongs to
    assert torch.equal(rows, torch.arange(5).repeat_interleave(len(rows) // 5))
    assert torch.equal(without.pop("rows"), rows)
    for name, column in table.items():
        assert column.shape[0] == targets.numel() // (targets.shape[-1] if prediction.kind == "regression" else 1)
        assert column.ndim == (2 if name in widths else 1)
        assert column.dtype == (torch.int64 if name == "targets" and prediction.kind == "classification" else dtype)
        if name in without:
            torch.testing.assert_close(without[name], column)
    for name in ("aleatoric", "epistemic"):
        torch.testing.assert_close(table[name].flatten(), getattr(prediction, name).flatten())
    assert table["log_prob"].sum().item() == pytest.approx(prediction.log_prob(targets).sum().item(), rel=1e-5)
    assert torch.equal(table["targets"].flatten().to(dtype), targets.flatten().to(dtype))


def test_regression_columns_are_the_scores_by_name():
    for prediction, targets in every_prediction(5)[2:]:
        table, rows = prediction.columns(targets), (10, 2)
        lower, upper = prediction.interval(0.9)
        expected = {"mean": prediction.mean, "variance": prediction.variance, "lower_90": lower, "upper_90": upper}
        expected |= {"crps": prediction.crps(targets)}
        for name, value in expected.items():
            torch.testing.assert_close(table[name], value.reshape(rows))
        below = targets - 1 if isinstance(prediction, PoissonPredictive) else targets
        pit = (prediction.cdf(targets) + prediction.cdf(below)) / 2
        torch.testing.assert_close(table["pit"], pit.reshape(rows))
        joint = prediction.log_prob(targets)  # shared by the two positions of a row
        torch.testing.assert_close(table["log_prob"].reshape(5, 2), (joint / 2)[:, None].expand(5, 2))


@pytest.mark.parametrize("index", range(4), ids=["categorical", "bernoulli", "gaussian", "poisson"])
def test_an_empty_batch_has_empty_columns(index):
    prediction, targets = every_prediction(0)[index]
    table = prediction.columns(targets)
    assert set(table) == set(every_prediction(2)[index][0].columns(every_prediction(2)[index][1]))
    assert all(len(column) == 0 for column in table.values())


@pytest.mark.parametrize("extreme", [1e4, 1e38])
def test_extreme_float32_logits_stay_finite(extreme):
    logits = torch.tensor([[extreme, 0.0, -extreme], [0.0, 0.0, 0.0]]).expand(2, 2, 3)
    prediction = CategoricalPredictive(logits.log_softmax(-1))
    for target in range(3):
        assert all(column.isfinite().all() for column in prediction.columns(torch.full((2,), target)).values())
    assert prediction.entropy.tolist() == pytest.approx([0.0, math.log(3)])
    yes_or_no = BernoulliPredictive(logits)
    assert all(column.isfinite().all() for column in yes_or_no.columns(torch.ones(2, 3)).values())
    assert yes_or_no.log_prob(torch.ones(2, 3))[0, 2].item() == pytest.approx(-extreme)


def test_impossible_classes_have_no_share_in_the_entropy():
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])[:, None]  # [S, 1, C]
    prediction = CategoricalPredictive(probs.log())
    mixture = [0.75, 0.25, 0.0]
    assert prediction.probs[0].tolist() == pytest.approx(mixture)
    assert prediction.entropy.item() == pytest.approx(scipy.stats.entropy(mixture))
    assert prediction.aleatoric.item() == pytest.approx(math.log(2) / 2)
    assert prediction.epistemic.item() == pytest.approx(scipy.stats.entropy(mixture) - math.log(2) / 2)
    assert prediction.log_prob(torch.tensor([1])).item() == pytest.approx(math.log(0.25))
    assert prediction.log_prob(torch.tensor([2])).item() == -math.inf  # every draw says that it cannot be


def test_a_far_target_has_a_finite_log_density():
    prediction = gaussian(3, 2, 1, dtype=torch.float32)
    assert prediction.log_prob(torch.full((2, 1), 1e15)).isfinite().all()
    assert PoissonPredictive(torch.full((2, 1, 1), 1e-30)).log_prob(torch.full((1,), 1000)).isfinite().all()


@pytest.mark.parametrize("index", range(4), ids=["categorical", "bernoulli", "gaussian", "poisson"])
def test_targets_of_another_shape_are_refused(index):
    # With as many draws as rows, [B, 1] would broadcast without a word.
    prediction, targets = every_prediction(3)[index]
    for wrong in (targets[:2], targets.unsqueeze(1), targets[..., :1], targets.movedim(0, 1)):
        with pytest.raises(ValueError, match=r"predictions of shape \(3, 2.* need targets of that shape, got"):
            prediction.log_prob(wrong)
