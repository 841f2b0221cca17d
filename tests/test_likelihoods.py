"""Every likelihood against torch's distributions, its units and its refusals."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions

from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from tests.likelihood_cases import ALL, DOUBLE, GIVEN_NOISE, SEQUENCE, case, labels, normal, reference


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


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_an_empty_batch_has_no_rows(likelihood):
    outputs, targets, hyper = case(likelihood, 4, 3)
    likelihood.check(outputs[:0], targets[:0])
    assert likelihood.log_prob(outputs[:0], targets[:0], hyper).shape == (0,)
    assert len(likelihood.fisher_factor(outputs[:0], targets[:0], hyper)) == 0
    assert likelihood.sample_noise(outputs[:0], targets[:0], hyper, torch.Generator()).shape == outputs[:0].shape


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


NAN, LONG = math.nan, torch.long


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


@pytest.mark.parametrize("class_axis", [1, -1])
def test_probabilities_are_no_logits(class_axis):
    logits = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    likelihood, labels = Categorical(class_axis=class_axis), torch.zeros(2, 3, dtype=LONG)
    likelihood.check(logits, labels)
    likelihood.check(logits.log_softmax(class_axis), labels)
    with pytest.raises(ValueError, match="Categorical takes logits: leave the softmax"):
        likelihood.check(logits.softmax(class_axis), labels)


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
