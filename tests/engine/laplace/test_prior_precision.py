"""The prior precision: evidence against exact marginal likelihoods and grids, validation against brute force."""

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from caveat import Bernoulli, Categorical, Gaussian, GaussianPrior, Network
from caveat.engine.golden_section import golden_section
from caveat.engine.laplace import output_draws, prior_precision
from caveat.engine.laplace.gaussians import Curvature, FullCurvature
from caveat.engine.laplace.output_draws import drawn_outputs
from caveat.engine.laplace.prior_precision import SCALES, Tuner, log_evidence
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.run import Run
from caveat.rows import Rows

FORMS: dict[str, Callable[[Sweep], Curvature]] = {
    "full": lambda sweep: sweep.full(None)[0],
    "rows": lambda sweep: sweep.stacked(None)[0],
    "diagonal": lambda sweep: sweep.diagonal()[0],
    "kronecker": lambda sweep: sweep.kronecker()[0],
}
EXACT = ["full", "rows"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at(module: nn.Module, likelihood: Any, x: Tensor, y: Tensor) -> Sweep:
    network = Network(module.double(), likelihood)
    return Sweep(network, network.params(), likelihood.initial_hyper(y), Rows((x, y)), Run())


def classifier(weight: float = 1.0) -> Sweep:
    torch.manual_seed(0)
    x = normal(30, 3)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(weight)
    return at(module, Categorical(), x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5))


def tuner(sweep: Sweep, form: str = "full", prior: Tensor | None = None) -> Tuner:
    weights = torch.cat([sweep.params[name].flatten() for name in sweep.network.names])
    x, y = sweep.rows.everything()
    fit = float(sweep.network.likelihood.log_prob(sweep.network(sweep.params, x), y, sweep.hyper).sum())
    prior = torch.full_like(weights, 0.5) if prior is None else prior
    return Tuner(FORMS[form](sweep), prior, weights, fit, Run())


def by_hand(found: Tuner, prior: Tensor, ggn: Tensor) -> Tensor:
    """The evidence with dense determinants, differentiable in the prior."""
    fit = (prior * found.weights.square()).sum()
    return found.log_likelihood - 0.5 * (fit - prior.log().sum() + (ggn + prior.diag()).logdet())


def dense_ggn(sweep: Sweep, dense: Any, form: str) -> Tensor:
    ggn = dense(sweep.network, sweep.params, sweep.hyper).ggn(*sweep.rows.everything())
    if form == "kronecker":  # as it is: its own factors have their test
        prior = torch.ones(len(ggn), dtype=torch.float64)
        unit = sweep.kronecker()[0].gaussian(prior)
        draws = unit.weights(torch.eye(len(ggn), dtype=torch.float64))  # rows: the basis in which it is diagonal
        return draws.T @ torch.cat([p - 1 for _, _, p in unit.precisions()]).diag() @ draws
    return ggn if form in EXACT else ggn.diagonal().diag()


@pytest.mark.parametrize("form", EXACT)
@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("n", [3, 20])
def test_evidence_is_the_marginal_likelihood_of_linear_regression(form: str, standardise: bool, n: int) -> None:
    x, y = normal(n, 3), 5 + 3 * normal(n, 1, seed=1)
    sweep = at(nn.Linear(3, 1), Gaussian(noise=0.7, standardise=standardise), x, y)
    features = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    prior = torch.tensor([0.3, 1.0, 4.0, 0.1], dtype=torch.float64)
    noise = float(sweep.hyper["log_noise"].exp())
    scale, shift = sweep.hyper["target_scale"], sweep.hyper["target_mean"]
    precision = features.T @ features / noise**2 + prior.diag()
    weights = torch.linalg.solve(precision, features.T @ ((y - shift) / scale) / noise**2).flatten()
    sweep.params.update({"weight": weights[None, :3], "bias": weights[3:]})
    covariance = (features / prior) @ features.T + noise**2 * torch.eye(n, dtype=torch.float64)
    marginal = torch.distributions.MultivariateNormal(shift * torch.ones(n, dtype=torch.float64), covariance * scale**2)
    found = tuner(sweep, form, prior).given().report["log_marginal_likelihood"]
    assert found == pytest.approx(float(marginal.log_prob(y[:, 0])), rel=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_the_evidence_is_at_its_maximum(form: str, dense: Any) -> None:
    sweep = classifier()
    found, ggn = tuner(sweep, form), dense_ggn(sweep, dense, form)
    tuned = found.evidence()
    scale = tuned.report["prior_precision_multiple"]
    grid = torch.logspace(-5, 6, 4001, dtype=torch.float64)
    values = torch.stack([by_hand(found, s * found.prior, ggn) for s in grid])
    assert math.log(scale) == pytest.approx(math.log(float(grid[values.argmax()])), abs=0.01)
    assert tuned.report["log_marginal_likelihood"] >= float(values.max()) - 1e-9
    refactored = by_hand(found, scale * found.prior, ggn)
    assert tuned.report["log_marginal_likelihood"] == pytest.approx(float(refactored), rel=1e-10)
    assert tuned.report["prior_precision"] == pytest.approx(0.5 * scale)
    torch.testing.assert_close(tuned.gaussian.prior, scale * found.prior)
    assert not found.run.warnings


@pytest.mark.parametrize("form", FORMS)
def test_layers_precisions_are_a_stationary_point_of_the_evidence(form: str, dense: Any) -> None:
    sweep = classifier(3.0)
    found, ggn = tuner(sweep, form), dense_ggn(sweep, dense, form)
    groups = [("0", torch.arange(16)), ("2", torch.arange(16, 31))]
    tuned = found.layers(groups)
    assert set(tuned.report["prior_precision"]) == {"0", "2"}
    logs = torch.tensor([math.log(v) for v in tuned.report["prior_precision"].values()], requires_grad=True)
    sizes = torch.tensor([16, 15])
    by_hand(found, logs.double().exp().repeat_interleave(sizes), ggn).backward()
    start = torch.zeros(2, requires_grad=True)
    by_hand(found, 0.5 * start.double().exp().repeat_interleave(sizes), ggn).backward()
    assert logs.grad is not None
    assert start.grad is not None
    assert float(logs.grad.abs().max()) < 0.01 < 0.1 * float(start.grad.abs().max())
    precisions = logs.detach().double().exp().repeat_interleave(sizes)
    torch.testing.assert_close(tuned.gaussian.prior, precisions, rtol=1e-5, atol=0)
    assert not found.run.warnings
    found.layers(groups, steps=1)
    assert found.run.warnings == ["the layers' precisions were still moving after 1 updates"]


def test_ends_of_the_range_are_warned_of() -> None:
    nothing = tuner(classifier())
    nothing.weights = torch.zeros_like(nothing.weights)
    assert nothing.evidence().report["prior_precision_multiple"] > 1e5
    assert "evidence is best at the end of the range" in nothing.run.warnings[0]
    large = tuner(classifier())
    large.weights = torch.full_like(large.weights, 1e4)
    assert large.evidence().report["prior_precision_multiple"] < 1e-4
    assert "best at the end" in large.run.warnings[0]


# On validation rows


def expected_nll(mean: Tensor, variance: Tensor, y: Tensor, noise: float | None) -> Tensor:
    """-log E p(y | f) with f ~ N(mean, variance), by quadrature."""
    nodes, weights = (torch.from_numpy(v) for v in numpy.polynomial.hermite_e.hermegauss(200))
    f = mean + variance.sqrt() * nodes.reshape(-1, 1, 1)
    if noise is None:
        log_p = nn.functional.logsigmoid(f * (2 * y - 1))
    else:
        log_p = -0.5 * ((y - f) / noise) ** 2 - math.log(noise) - 0.5 * math.log(2 * math.pi)
    weights = (weights / weights.sum()).log().reshape(-1, 1, 1)
    return -torch.logsumexp(log_p + weights, 0)


@pytest.mark.parametrize("form", ["full", "rows", "kronecker"])
@pytest.mark.parametrize("likelihood", [Gaussian(noise=0.5), Bernoulli()], ids=repr)
def test_validation_takes_the_best_of_all_scales(
    monkeypatch: pytest.MonkeyPatch, dense: Any, likelihood: Any, form: str
) -> None:
    monkeypatch.setattr(prior_precision, "DRAWS", 4000)
    torch.manual_seed(1)
    x, new = normal(12, 2), 2 * normal(40, 2, seed=3)
    noise = 0.5 if isinstance(likelihood, Gaussian) else None

    def targets(x: Tensor, seed: int) -> Tensor:
        signal = x[:, :1].sin() + 0.5 * normal(len(x), 1, seed=seed)
        return signal if noise else (signal > 0).double()

    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    with torch.no_grad():  # as if trained, and too sure of itself
        module[0].weight[0] = torch.tensor([1.0, 0.0])
        module[2].weight[0, 0] = 1.0 if noise else 6.0
    sweep = at(module, likelihood, x, targets(x, 1))
    found, ggn = tuner(sweep, form), dense_ggn(sweep, dense, form)
    y = targets(new, 2)
    tuned = found.validation(sweep.jacobian(), Rows((new, y)), sweep.hyper)
    j, mean = dense(sweep.network, sweep.params, sweep.hyper).jacobian(new), sweep.network(sweep.params, new)
    nll = []
    for scale in SCALES:
        covariance = j @ (ggn + scale * found.prior.diag()).inverse() @ j.mT
        nll.append(float(expected_nll(mean, covariance[:, 0], y, noise).mean()))
    chosen = SCALES.index(tuned.report["prior_precision_multiple"])
    assert 0 < chosen < len(SCALES) - 1, "the test is to have its optimum inside"
    assert nll[chosen] <= min(nll) + 2e-3 < max(nll) - 0.05
    assert tuned.report["validation_nll"] == pytest.approx(nll[chosen], abs=0.01)
    torch.testing.assert_close(tuned.gaussian.prior, SCALES[chosen] * found.prior)


def test_the_same_noise_gives_near_outputs_for_near_covariances() -> None:
    # Eigenvectors of equal eigenvalues turn freely, and those of any change their sign: a root by them would jump.
    base = torch.diag(torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64))
    change = normal(4, 4)
    near = base + 1e-9 * (change @ change.T)
    noise, together = normal(64, 1, 1, 4, seed=2), torch.arange(4).unsqueeze(0)
    first, second = (drawn_outputs(normal(1, 4), c.expand(1, 1, 4, 4), noise, together) for c in (base, near))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-7)
    torch.testing.assert_close(first - normal(1, 4), noise[:, :, 0] * base.diagonal().sqrt())


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_many_positions_take_each_positions_own_covariance(
    monkeypatch: pytest.MonkeyPatch, form: str, dense: Any
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1))
    x = normal(4, 1, 2, 3)
    sweep = at(module, Categorical(class_axis=1), x, (x[:, 0] > 0).long() + (x[:, 0] > 1))
    found, ggn = tuner(sweep, form), dense_ggn(sweep, dense, form)
    new, y = normal(3, 1, 2, 3, seed=5), torch.arange(18).reshape(3, 2, 3) % 3
    covariance_of = []
    sampled = prior_precision.drawn_outputs

    def watched(mean: Tensor, covariance: Tensor, noise: Tensor, together: Tensor) -> Tensor:
        covariance_of.append(covariance)
        return sampled(mean, covariance, noise, together)

    monkeypatch.setattr(prior_precision, "drawn_outputs", watched)
    tuned = found.validation(sweep.jacobian(), Rows((new, y)), sweep.hyper)
    j = dense(sweep.network, sweep.params, sweep.hyper).jacobian(new).unflatten(1, (3, 6)).transpose(1, 2)  # [B, P, C]
    by_scale = [j @ (ggn + scale * found.prior.diag()).inverse() @ j.mT for scale in SCALES]
    torch.testing.assert_close(
        torch.stack(covariance_of), torch.stack(by_scale[-len(covariance_of) :]), rtol=1e-6, atol=0
    )
    at_once = tuned.report["validation_nll"]
    monkeypatch.setattr(output_draws, "AT_ONCE", 7)  # two positions
    again = found.validation(sweep.jacobian(), Rows((new, y)), sweep.hyper)
    assert again.report["validation_nll"] == pytest.approx(at_once, rel=1e-10)


def test_a_row_of_too_many_outputs_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 10**6)
    sweep = at(nn.Linear(2, 100), Gaussian(noise=1.0), normal(4, 2), normal(4, 100))
    with pytest.raises(MemoryError, match=r"covariance of 100 outputs .* precision='evidence'"):
        tuner(sweep).validation(sweep.jacobian(), Rows((normal(2, 2), normal(2, 100))), sweep.hyper)


def test_validation_by_draws_takes_the_best_and_warns_at_the_end() -> None:
    sweep = classifier()
    found, rows, seen = tuner(sweep), Rows((normal(20, 3), torch.arange(20) % 3)), []

    def outputs(gaussian: Any, x: Tensor, rng: torch.Generator) -> Tensor:
        seen.append(gaussian)
        scale = float((gaussian.prior / found.prior)[0])  # the log of the scale is off by its distance from 10
        return torch.full((2, len(x), 3), 0.0) + (math.log10(scale) - 1) ** 2 * torch.tensor([-1.0, 0.0, 1.0])

    tuned = found.validation_by_draws(outputs, Categorical(), rows, {})
    assert tuned.report["prior_precision_multiple"] == pytest.approx(10)
    assert tuned.report["validation_nll"] == pytest.approx(math.log(3))
    assert len(seen) == len(SCALES[::3])
    assert not found.run.warnings
    worse = {"best": 0}

    def at_the_end(gaussian: Any, x: Tensor, rng: torch.Generator) -> Tensor:
        worse["best"] += 1
        return torch.full((1, len(x), 3), float("nan")) if worse["best"] == 3 else torch.zeros(1, len(x), 3)

    found.validation_by_draws(at_the_end, Categorical(), rows, {})
    assert "validation likelihood is best at the end" in found.run.warnings[0]


def test_scales_at_which_there_is_no_posterior_are_passed_over() -> None:
    found, rows = tuner(classifier()), Rows((normal(20, 3), torch.arange(20) % 3))
    assert isinstance(found.curvature, FullCurvature)
    rounding = 1e-3 * torch.eye(31, dtype=torch.float64)  # as it may be left
    found.curvature = FullCurvature(found.curvature.ggn - rounding)
    tried = []

    def outputs(gaussian: Any, x: Tensor, rng: torch.Generator) -> Tensor:
        tried.append(float(gaussian.prior[0]))
        return len(tried) * torch.tensor([-1.0, 0.0, 1.0]).expand(1, len(x), 3)  # the first is the best

    tuned = found.validation_by_draws(outputs, Categorical(), rows, {})
    assert 1e-3 < tuned.report["prior_precision"] == tried[0]
    assert len(tried) < len(SCALES[::3])


def test_a_report_of_several_precisions_is_their_range() -> None:
    sweep = classifier()
    prior = torch.cat([torch.full((16,), 2.0), torch.full((15,), 0.5)]).double()
    report = tuner(sweep, prior=prior).given(3.0).report
    assert report["prior_precision"] == [1.5, 6.0]
    assert report["prior_precision_multiple"] == 3.0


def test_log_evidence_is_the_laplace_approximation_of_the_integral() -> None:
    # One weight with a Gaussian likelihood exp(-(w - 1)^2): the approximation is the integral over w.
    d, mode = 0.5, 2 / 2.5
    exact = math.log(math.sqrt(d / (2 * math.pi)) * math.sqrt(2 * math.pi / (2 + d)) * math.exp(-(1 - mode)))
    weights, prior = torch.tensor([mode]), torch.tensor([d])
    assert log_evidence(-((mode - 1) ** 2), weights, prior, math.log(2 + d)) == pytest.approx(exact, rel=1e-6)
    prior_log_prob = float(GaussianPrior(d).log_prob({"w": weights}))
    by_prior = -((mode - 1) ** 2) + prior_log_prob + 0.5 * math.log(2 * math.pi) - 0.5 * math.log(2 + d)
    assert by_prior == pytest.approx(exact, rel=1e-6)


def test_golden_section_finds_a_minimum_inside_and_at_the_ends() -> None:
    assert golden_section(lambda t: (t - 0.3) ** 2, -2, 5) == pytest.approx(0.3, abs=1e-5)
    assert golden_section(lambda t: t, -2, 5) == pytest.approx(-2, abs=1e-5)
    assert golden_section(lambda t: -t, -2, 5) == pytest.approx(5, abs=1e-5)
