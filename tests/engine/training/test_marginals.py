"""Every fit is compared with the marginals of the targets, on rows that it has not learned where there are some."""

import math

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Training
from tests.test_contract import METHODS, short

SAID = "no better than the label marginals"


def noise_task(rows: int = 120, validation: float | None = 0.5) -> caveat.Task:
    """Targets that have nothing to do with the inputs, and a network that can learn them by heart."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, 8, generator=rng), torch.randn(rows, 1, generator=rng)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    return caveat.Task(model, (x, y), caveat.Gaussian(), caveat.GaussianPrior(1e-3), validation=validation)


def learnable_task(likelihood: caveat.Likelihood, validation: float | None) -> caveat.Task:
    x = torch.randn(120, 2, generator=torch.Generator().manual_seed(1))
    kinds = {
        "Categorical": (2, (x[:, 0] > 0).long()),
        "Bernoulli": (1, (x[:, :1] > 0).float()),
        "Gaussian": (1, x[:, :1] * 3 + 100),
        "HeteroscedasticGaussian": (2, x[:, :1]),
        "Poisson": (1, (x[:, :1] * 2).exp().round()),
    }
    width, y = kinds[type(likelihood).__name__]
    return caveat.Task(nn.Linear(2, width), (x, y), likelihood, validation=validation)


def said(posterior: caveat.Posterior) -> list[str]:
    return [warning for warning in posterior.info.warnings if SAID in warning]


def test_learning_by_heart_is_seen_on_validation_rows_alone() -> None:
    by_heart = caveat.MAP(training=Training(epochs=150, learning_rate=0.01))
    found = caveat.fit(noise_task(), by_heart, progress=False)
    (warning,) = said(found)
    gained = found.info.diagnostics["against_marginals"]
    assert gained["rows"] == "validation"
    assert gained["count"] == 60
    assert gained["gain"] < 0
    assert "on 60 validation rows" in warning
    blind = caveat.fit(noise_task(60, None), by_heart, progress=False)
    assert not said(blind)  # which is why the row says which rows these are
    assert blind.info.diagnostics["against_marginals"]["rows"] == "training"
    few = caveat.fit(noise_task(66, 0.1), by_heart, progress=False)  # seven rows are too few to judge by
    assert few.info.diagnostics["against_marginals"]["rows"] == "training"


@pytest.mark.parametrize("validation", [None, 0.2])
@pytest.mark.parametrize(
    "likelihood",
    [
        caveat.Categorical(),
        caveat.Bernoulli(),
        caveat.Gaussian(standardise=True),
        caveat.HeteroscedasticGaussian(),
        caveat.Poisson(),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_what_has_learned_is_not_warned_of_and_what_has_not_is(
    likelihood: caveat.Likelihood, validation: float | None
) -> None:
    task = learnable_task(likelihood, validation)
    good = caveat.fit(task, caveat.MAP(training=Training(epochs=200, learning_rate=0.03)), progress=False)
    assert not said(good)
    assert good.info.diagnostics["against_marginals"]["gain"] > 0.1
    with torch.no_grad():
        for parameter in task.network.module.parameters():
            parameter.zero_()
    untrained = caveat.fit(task, caveat.MAP(training=Training(epochs=0)), progress=False)
    if type(likelihood).__name__ != "Gaussian":  # whose noise alone is as good as the marginals
        assert said(untrained)


@pytest.mark.parametrize("name", [n for n, method in METHODS.items() if method.starts_from != "trained"])
def test_every_method_says_so(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=rng), torch.randint(2, (60,), generator=rng)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    task = caveat.Task(model, (x, y), caveat.Categorical(), caveat.GaussianPrior(0.1), validation=0.5)
    assert said(caveat.fit(task, short(METHODS[name]), progress=False))


def by_hand(task: caveat.Task, posterior: caveat.Posterior, x: Tensor, y: Tensor, count: int) -> float:
    """Gaussian marginals of the training rows and one more, subtracted from the code length of the training rows."""
    _, known = task.train.everything()
    gains = []
    for position in torch.linspace(0, len(x) - 1, count, dtype=torch.float64).long():
        together = torch.cat([known, y[position][None]]).double()

        def log_likelihood(targets: Tensor) -> float:
            variance = float(targets.double().var(correction=0))
            return -0.5 * len(targets) * (1 + math.log(2 * math.pi * variance))

        marginal = log_likelihood(together) - log_likelihood(known)
        gains.append(float(posterior.predict(x[position][None]).log_prob(y[position][None])) - marginal)
    return sum(gains) / count


def test_the_gain_is_that_over_the_training_rows_marginals() -> None:
    task = noise_task(200)
    posterior = caveat.fit(task, caveat.MAP(training=Training(epochs=3)), progress=False)
    assert task.validation is not None
    x, y = task.validation.everything()
    gained = posterior.info.diagnostics["against_marginals"]
    assert gained["count"] == 100  # 32 leave a doubt
    assert gained["gain"] == pytest.approx(by_hand(task, posterior, x, y, 100), rel=1e-4)


def test_a_few_rows_are_enough_where_they_leave_no_doubt() -> None:
    task = learnable_task(caveat.Gaussian(standardise=True), 0.5)
    posterior = caveat.fit(task, caveat.MAP(training=Training(epochs=300, learning_rate=0.1)), progress=False)
    assert posterior.info.diagnostics["against_marginals"]["count"] == 32


def test_weighted_classes_are_not_compared() -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    task = caveat.Task(nn.Linear(2, 2), (x, (x[:, 0] > 1).long()), caveat.Categorical(class_weights=(1.0, 5.0)))
    posterior = caveat.fit(task, caveat.MAP(training=Training(epochs=2)), progress=False)
    assert "against_marginals" not in posterior.info.diagnostics
    assert not said(posterior)


def test_rows_of_many_outputs_go_through_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    predict = caveat.Posterior.predict
    monkeypatch.setattr("caveat.engine.training.marginals.NUMBERS", 4 * 2 * 5)

    def counted(self: caveat.Posterior, x: Tensor, **knobs: int) -> object:
        pieces.append(len(x))
        return predict(self, x, **knobs)

    monkeypatch.setattr(caveat.Posterior, "predict", counted)
    few = caveat.DeepEnsemble(members=4, training=Training(epochs=60, learning_rate=0.03))
    caveat.fit(learnable_task(caveat.Categorical(), 0.2), few, progress=False)
    assert pieces == [5, 5, 5, 5, 4]  # 4 draws of 2 outputs


class OnceInTraining(nn.Linear):
    """A module that cannot take a single piece of validation rows once it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 90).any()):
            raise RuntimeError("no such rows")
        return super().forward(x)


def test_a_fit_is_not_lost_where_predictions_fail() -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    y = x[:, :1] * 3
    task = caveat.Task(OnceInTraining(2, 1), (x, y), caveat.Gaussian(), validation=(x + 100, y))
    posterior = caveat.fit(task, caveat.SGMCMC(chains=2, length=8, burn_in=10, thin=1), progress=False)
    assert any("could not be compared with the label marginals (" in text for text in posterior.info.warnings)


def test_the_comparison_leaves_random_numbers_and_training_alone() -> None:
    task = noise_task()
    before = torch.random.get_rng_state()
    first = caveat.fit(task, caveat.MAP(training=Training(epochs=2)), progress=False)
    assert torch.equal(before, torch.random.get_rng_state())
    again = caveat.fit(task, caveat.MAP(training=Training(epochs=2)), progress=False)
    assert first.info.diagnostics["against_marginals"] == again.info.diagnostics["against_marginals"]
