"""Modules of weight draws and of closed moments are equal to `predict`, for every likelihood and kind of posterior."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat

SHORT = caveat.Training(epochs=2, batch_size=20)
X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
COUNTS = torch.arange(40).remainder(4).float().unsqueeze(1)
TARGETS: dict[str, tuple[Any, Tensor, int]] = {
    "Categorical": (caveat.Categorical(), torch.arange(40) % 3, 3),
    "Bernoulli": (caveat.Bernoulli(), (COUNTS > 1).float(), 1),
    "Gaussian": (caveat.Gaussian(standardise=True), 30 + 4 * X[:, :2], 2),
    "HeteroscedasticGaussian": (caveat.HeteroscedasticGaussian(standardise=True), 30 + 4 * X[:, :1], 2),
    "Poisson": (caveat.Poisson(), COUNTS, 1),
}
METHODS: dict[str, Any] = {
    "MAP": caveat.MAP(training=SHORT),
    "temperature": caveat.MAP(temperature=True, training=SHORT),
    "DeepEnsemble": caveat.DeepEnsemble(members=3, training=SHORT),
    "SWAG": caveat.SWAG(rank=0, scale=1.0, default_draws=3, training=caveat.SWAG.quick.training),
    "IVON": caveat.IVON(training=SHORT, default_draws=3),
    "SSVI": caveat.SSVI(density=0.5, interval=3, default_draws=3, training=SHORT),
    "channels": caveat.SSVI(structure="channel", density=0.5, interval=3, default_draws=3, training=SHORT),
    "MaskedBNN": caveat.MaskedBNN.quick,
    "HMC": caveat.HMC(chains=2, length=3, warmup=0, step_size=1e-3, mass="identity"),
    "Laplace weights": caveat.Laplace("diagonal", precision=1.0, prediction="weights", default_draws=3),
}


def network(outputs: int, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(12) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(5, 12), middle, nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, outputs))


def fitted(method: Any, likelihood: str, norm: bool = False) -> caveat.Posterior:
    kind, y, outputs = TARGETS[likelihood]
    task = caveat.Task(network(outputs, norm), (X, y), kind, validation=0.2)
    start = caveat.MAP(training=SHORT) if method.starts_from == "trained" else None
    return caveat.fit(task, method, start=start, progress=False)


def check(posterior: caveat.Posterior, **options: Any) -> nn.Module:
    module, prediction = posterior.module(**options), posterior.predict(X[:7], **options)
    with torch.no_grad():
        given = module(X[:7])
    mean = prediction.probs if prediction.kind == "classification" else prediction.mean
    expected = {"mean": mean, "aleatoric": prediction.aleatoric, "epistemic": prediction.epistemic}
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-5, atol=1e-5)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
@pytest.mark.parametrize("method", METHODS)
def test_a_module_is_equal_to_predict(method: str, likelihood: str) -> None:
    if method == "temperature" and likelihood == "Gaussian":
        pytest.skip("a temperature of noise is fitted as one of logits is")
    check(fitted(METHODS[method], likelihood, norm=method in ("MAP", "SWAG", "SSVI", "channels")))


@pytest.mark.parametrize("likelihood", TARGETS)
def test_every_likelihood_has_its_units(likelihood: str) -> None:
    posterior = fitted(METHODS["DeepEnsemble"], likelihood)
    check(posterior)
    check(posterior, draws=2, seed=3)


@pytest.mark.parametrize("likelihood", ["Bernoulli", "HeteroscedasticGaussian"])
def test_closed_moments(likelihood: str) -> None:
    check(fitted(caveat.LastLayerLaplace(precision=1.0, prediction="closed"), likelihood))


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "low_rank"])
def test_closed_moments_of_every_form_of_covariance(structure: Any) -> None:
    check(fitted(caveat.Laplace(structure, rank=10, precision=1.0), "Gaussian"))


def test_draws_that_differ_in_linear_layers_go_through_together() -> None:
    module = check(fitted(METHODS["DeepEnsemble"], "Categorical"))
    assert module.groups[0].fused  # type: ignore[union-attr, index]
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    module.groups[0].network.module[0].register_forward_hook(count)  # type: ignore[union-attr, index]
    module(X)
    assert passes == 1


def test_compiled_it_is_the_same() -> None:
    module = fitted(METHODS["DeepEnsemble"], "Categorical").module()
    with torch.no_grad():
        expected, given = module(X), torch.compile(module, backend="aot_eager", fullgraph=True)(X)
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value)


def test_it_moves_and_is_saved_like_any_module() -> None:
    module = fitted(METHODS["DeepEnsemble"], "Gaussian").module()
    with torch.no_grad():
        expected = module(X)["mean"]
        torch.testing.assert_close(module.double()(X.double())["mean"].float(), expected, rtol=1e-5, atol=1e-5)
        module.float()
        content = {name: value.clone() for name, value in module.state_dict().items()}
        for value in module.state_dict().values():
            value.zero_()
        assert not torch.allclose(module(X)["mean"], expected)
        module.load_state_dict(content)
        torch.testing.assert_close(module(X)["mean"], expected)


REFUSALS = {
    "dropout": (caveat.MCDropout(rate=0.1, training=SHORT), r"MCDropout draws masks for every row anew.*DeepEnsemble"),
    "local": (caveat.SSVI(prediction="local", training=SHORT), r"noise for every row anew.*prediction='draws'"),
    "bridge": (caveat.LastLayerLaplace(precision=1.0, prediction="bridge"), r"of each row's own.*'closed'"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_drawn_anew_for_each_row_is_refused(name: str) -> None:
    method, message = REFUSALS[name]
    with pytest.raises(TypeError, match=message):
        fitted(method, "Categorical").module()


def test_the_example_is_made_up() -> None:
    posterior = fitted(METHODS["MAP"], "Categorical")
    example = posterior.example()
    assert example.shape == (3, 5)
    assert not any(torch.equal(row, other) for row in example for other in X)
    assert not any(torch.equal(row, other) for row in posterior.example(X) for other in X)
