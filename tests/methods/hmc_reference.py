"""Tasks of small networks, and what draws of chains must satisfy."""

import torch
from torch import Tensor, nn

import caveat
from caveat.engine.chains.diagnostics import effective_sample_size


def flat_draws(posterior: caveat.Posterior) -> Tensor:
    """All weights and noise of every draw, [chains, draws, P], float64."""
    return torch.cat([stack.flatten(2) for stack in posterior.state["params"].values()], 2).double()


def assert_mean(values: Tensor, expected: Tensor | float, tolerance: float = 4.0, least: int = 50) -> None:
    """The mean of draws [chains, draws, ...], within so many of its own Monte Carlo standard errors.

    Chains may be better than independent draws, but that is not relied on: an error as small as it says is by luck.
    """
    count = values.shape[0] * values.shape[1]
    size = effective_sample_size(values)[0].clamp_max(count)
    error = values.flatten(0, 1).std(0) / size.sqrt()
    assert float(size.min()) > least, f"only {float(size.min()):.0f} effective draws: the test says nothing"
    apart = ((values.mean((0, 1)) - expected) / error).abs()
    assert float(apart.max()) < tolerance, f"{float(apart.max()):.1f} standard errors from what is expected"


def assert_normal(draws: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Draws [chains, draws, P] have this mean and covariance: all first and second moments of what they whiten to."""
    root = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(root, (draws - mean).unsqueeze(-1), upper=False).squeeze(-1)
    assert_mean(white, 0.0)
    products = white.unsqueeze(-1) * white.unsqueeze(-2)
    assert_mean(products, torch.eye(len(mean), dtype=torch.float64), tolerance=4.5)


def without_data(prior: object) -> caveat.Task:
    """Targets whose log likelihood counts a billionth."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    return caveat.Task(nn.Linear(5, 3), (x, y), caveat.Categorical(class_weights=(1e-9,) * 3), prior)  # type: ignore[arg-type]


def network_task(dtype: torch.dtype = torch.float32, likelihood: str = "Bernoulli", n: int = 20) -> caveat.Task:
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=rng, dtype=torch.float64).to(dtype)
    signal = x[:, :1] - x[:, 1:2] * x[:, 2:]
    y = (
        (signal > 0).to(dtype)
        if likelihood == "Bernoulli"
        else signal
        if likelihood == "Gaussian"
        else signal.exp().round()
    )
    module = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)).to(dtype)
    return caveat.Task(module, (x, y), getattr(caveat, likelihood)(), caveat.GaussianPrior(2.0))
