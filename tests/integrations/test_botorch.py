"""BoTorch climbs acquisition functions through a posterior's draws."""

import pytest
import torch
from torch import nn

import caveat

pytest.importorskip("botorch", reason="needs botorch")

from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement, qUpperConfidenceBound
from botorch.optim import optimize_acqf

from caveat.integrations.botorch import PosteriorModel

pytestmark = pytest.mark.filterwarnings("ignore")  # BoTorch advises on scaling and on its own defaults

BEST = torch.tensor([-0.8, 0.4], dtype=torch.float64)


def objective(x: torch.Tensor) -> torch.Tensor:
    return 50 - 6 * (x - BEST).square().sum(-1, keepdim=True)


@pytest.fixture(scope="module")
def posterior() -> caveat.Posterior:
    x = 4 * torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 2
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    task = caveat.Task(network, (x, objective(x)), caveat.Gaussian(standardise=True))
    training = caveat.Training(epochs=100, batch_size=15, learning_rate=0.02)
    return caveat.fit(task, caveat.DeepEnsemble(members=4, training=training), progress=False)


def test_values_are_those_of_the_posterior_and_have_gradients(posterior) -> None:
    model = PosteriorModel(posterior)
    x = torch.rand(5, 3, 2, dtype=torch.float64, requires_grad=True)
    at = model.posterior(x)
    assert at.values.shape == (5, 4, 3, 1)
    expected = posterior.predict(x.detach().reshape(15, 2))
    torch.testing.assert_close(at.mean.reshape(15, 1), expected.mean)
    torch.testing.assert_close(at.values.movedim(1, 0).reshape(4, 15, 1), expected.samples)
    gradient = torch.autograd.grad(at.mean.sum(), x)[0]
    step = 1e-5 * torch.eye(2, dtype=torch.float64)[0]
    ends = (model.posterior(x.detach() + sign * step).mean for sign in (1, -1))
    high, low = ends
    torch.testing.assert_close(gradient[..., 0], ((high - low) / 2e-5).squeeze(-1), rtol=1e-5, atol=1e-5)
    single = PosteriorModel(posterior).posterior(x.float())
    assert single.mean.dtype == torch.float32


@pytest.mark.parametrize("kind", [LogExpectedImprovement, qLogExpectedImprovement, qUpperConfidenceBound])
def test_an_optimiser_finds_the_best_point(posterior, kind) -> None:
    model = PosteriorModel(posterior)
    settings = {"beta": 0.1} if kind is qUpperConfidenceBound else {"best_f": torch.tensor(45.0, dtype=torch.float64)}
    torch.manual_seed(0)
    bounds = torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)
    acquisition = kind(model, **settings)
    found, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=32)
    grid = torch.cartesian_prod(*[torch.linspace(-2, 2, 41, dtype=torch.float64)] * 2)
    with torch.no_grad():
        assert value > acquisition(grid.unsqueeze(1)).max() - 1e-6, "no point of a grid is better"
    assert (found - BEST).abs().max() < 0.6


def test_draws_are_fixed_and_classes_refused(posterior) -> None:
    x = torch.rand(2, 1, 2, dtype=torch.float64)
    swag = PosteriorModel(posterior, draws=3)
    assert torch.equal(swag.posterior(x).values, swag.posterior(x).values)
    assert swag.posterior(x).values.shape[1] == 3
    classes = caveat.Task(nn.Linear(2, 2).double(), (x[:, 0], torch.tensor([0, 1])), caveat.Categorical())
    point = caveat.fit(classes, caveat.MAP(training=caveat.Training(epochs=1)), progress=False)
    with pytest.raises(ValueError, match="a posterior of Categorical"):
        PosteriorModel(point)
