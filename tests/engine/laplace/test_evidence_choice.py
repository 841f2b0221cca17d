"""The evidence decides the prior precision unless validation rows can tell: what they can, and how much it moves."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Laplace
from caveat.engine.laplace.evidence_choice import nearest_to
from caveat.engine.laplace.prior_precision import NOISES, Tuner, log_evidence
from caveat.engine.run import Run
from tests.engine.laplace.test_prior_precision_noise import FORMS, problem

PLACES = torch.arange(5, dtype=torch.float64).unsqueeze(1)


def losses(means: list[float], noise: float, rows: int = 40) -> Tensor:
    """Losses [K, rows] of these means, whose differences between candidates have this deviation over rows."""
    deviations = torch.randn(len(means), rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deviations = deviations - deviations.mean(1, keepdim=True)
    return torch.tensor(means, dtype=torch.float64)[:, None] + noise * deviations


def test_rows_that_cannot_tell_leave_the_evidence_its_choice() -> None:
    choice = nearest_to(3, PLACES, losses([1.0, 1.1, 1.1, 1.2, 1.5], noise=1.0))
    assert choice.place == choice.anchor == 3
    report = choice.report(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert report["precision_from"] == "evidence"
    assert report["not_told_apart"][0] == 1.0
    assert report["validation_rows"] == 40


def test_rows_that_can_tell_move_it_as_far_as_they_must() -> None:
    choice = nearest_to(4, PLACES, losses([1.0, 1.005, 1.008, 1.2, 1.5], noise=0.01))
    assert choice.place == 2  # .008 nats a row are not worth a word, .2 are twenty standard errors
    report = choice.report(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert report["precision_from"] == "evidence, overruled by validation"
    assert report["evidence_multiple"] == 5.0
    assert report["not_told_apart"] == [1.0, 3.0]


def test_a_few_rows_tell_nothing_and_where_there_is_no_posterior_nothing_is_chosen() -> None:
    assert nearest_to(4, PLACES, losses([1.0, 2.0, 3.0, 4.0, 9.0], noise=0.0, rows=19)).place == 4
    broken = losses([1.0, 1.1, 1.1, 1.2, 1.2], noise=1.0)
    broken[4] = torch.inf
    assert nearest_to(4, PLACES, broken).place == 3


@pytest.mark.parametrize("form", FORMS)
def test_the_evidence_of_noise_and_precision_is_that_of_the_curvature_with_that_noise(form: str) -> None:
    sweep, _ = problem()
    prior = torch.full((sweep.network.n_parameters,), 0.5, dtype=torch.float64)
    weights = torch.cat([value.flatten() for value in sweep.params.values()])
    hypers = [sweep.hyper | {"log_noise": sweep.hyper["log_noise"] + math.log(noise)} for noise in NOISES]
    x, y = sweep.rows.everything()

    def log_likelihood(hyper: dict[str, Tensor]) -> float:
        return float(sweep.network.likelihood.log_prob(sweep.network(sweep.params, x), y, hyper).sum())

    tuner = Tuner(FORMS[form](sweep), prior, weights, log_likelihood(sweep.hyper), Run())
    scales = [0.01, 1.0, 30.0]
    table = tuner._evidence_of_pairs(tuner.curvature.path(prior), scales, hypers, log_likelihood)
    for i in (3, 20, 30):
        for k, scale in enumerate(scales):
            gaussian = FORMS[form](replace(sweep, hyper=hypers[i])).gaussian(scale / NOISES[i] ** 2 * prior)
            exact = log_evidence(log_likelihood(hypers[i]), weights, gaussian.prior, gaussian.log_det())
            assert float(table[i, k]) == pytest.approx(exact, rel=1e-6, abs=1e-5)


def test_the_precision_hardly_moves_between_splits_of_few_validation_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=rng)
    y = (x[:, :1] + x[:, 1:2].sin() + 0.8 * torch.randn(80, 1, generator=rng) > 0).float()
    decades: dict[str, list[float]] = {"auto": [], "validation": []}
    for split in range(4):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
        task = caveat.Task(module, (x, y), caveat.Bernoulli(), validation=0.1, split_seed=split)
        training = caveat.Training(epochs=300, learning_rate=0.01)
        start = caveat.fit(task, caveat.MAP(training=training), progress=False)
        for how, found in decades.items():
            posterior = caveat.fit(task, Laplace(precision=how), start=start, progress=False)  # type: ignore[arg-type]
            found.append(math.log10(posterior.info.diagnostics["prior_precision"]))
            if how == "auto":
                assert not any("end of the range" in text for text in posterior.info.warnings)
                assert posterior.info.diagnostics["precision_from"] == "evidence"
                assert posterior.info.diagnostics["validation_rows"] == 8
    spread = {how: max(found) - min(found) for how, found in decades.items()}
    assert spread["auto"] < 0.3
    assert spread["validation"] > 3


def heart_learned() -> tuple[caveat.Task, caveat.Posterior]:
    """A point that has learned more of its training rows than there is to learn, and validation rows that show it."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(300, 5, generator=rng)
    y = torch.tanh(x @ torch.randn(5, 1, generator=rng)) + 0.5 * torch.randn(300, 1, generator=rng)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 50), nn.ReLU(), nn.Linear(50, 1))
    task = caveat.Task(model, (x, y), caveat.Gaussian(), validation=0.2)
    return task, caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=800)), progress=False)


def test_few_weights_leave_the_noise_that_validation_rows_have_shown() -> None:
    """The evidence of few weights takes the others as known, and gave back the noise of rows learned by heart."""
    task, point = heart_learned()
    for method in (caveat.SubnetworkLaplace(), caveat.SubnetworkLaplace(weights=20), caveat.LastLayerLaplace()):
        found = caveat.fit(task, method, start=point, progress=False)
        assert torch.equal(found.state["hyper"]["log_noise"], point.state["hyper"]["log_noise"])
        assert "noise_multiple" not in found.info.diagnostics
        asked = caveat.fit(task, replace(method, precision="validation"), start=point, progress=False)
        assert "noise_multiple" in asked.info.diagnostics
    assert "noise_multiple" in caveat.fit(task, Laplace(), start=point, progress=False).info.diagnostics
