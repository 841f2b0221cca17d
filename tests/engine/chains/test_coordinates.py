"""Whitened coordinates against their definition: positions stand for weights, gradients are pulled back by autograd."""

import math

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.chains.coordinates import Coordinates
from caveat.likelihoods import learned_noise
from caveat.network import Network, Params


class TwoGroups:
    """A prior of the user's own, without a scale that anything could know."""

    def log_prob(self, params: Params) -> Tensor:
        return -sum((w**4).sum() for w in params.values())  # type: ignore[return-value]


INPUTS = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * torch.tensor([2, 1, 0.1])
PRIORS = {
    "gaussian": caveat.GaussianPrior(4.0),
    "by layer": caveat.GaussianPrior({"0.*": 0.25, "*": 9.0}),
    "by weight": caveat.GaussianPrior({"0.weight": torch.linspace(0.5, 8, 6).reshape(2, 3), "*": 1.0}),
    "laplace": caveat.LaplacePrior(0.3),
    "student": caveat.StudentTPrior(0.3, 5.0),
    "logistic": caveat.LogisticPrior(0.3),
    "mixture": caveat.GaussianMixturePrior((0.2, 1.5), (0.5, 0.5)),
    "empcov": caveat.EmpCovPrior("0.weight", INPUTS.T.cov(), alpha=2.0, epsilon=0.05, precision=4.0),
    "own": TwoGroups(),
}
NORMAL = ("gaussian", "by layer", "by weight", "empcov")

every_prior = pytest.mark.parametrize("prior", PRIORS)


def network_with(prior: str, likelihood: object | None = None) -> Network:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    return Network(module, likelihood or caveat.Categorical(), PRIORS[prior])  # type: ignore[arg-type]


def log_prior(network: Network, coordinates: Coordinates, position: Tensor) -> Tensor:
    """Of the weights at a position, from the prior's own density."""
    return network.prior.log_prob(coordinates.split(coordinates.weights(position)))


@every_prior
@pytest.mark.parametrize("width", [False, True])
def test_positions_and_weights_are_inverse_to_each_other(prior: str, width: bool) -> None:
    network = network_with(prior)
    coordinates = Coordinates.of(network, {})
    if width:
        coordinates = coordinates.with_width(torch.linspace(0.1, 3, coordinates.size).double())
    params = network.params()
    found = coordinates.split(coordinates.weights(coordinates.at(params)))
    assert found.keys() == params.keys()
    for name, weight in params.items():
        torch.testing.assert_close(found[name], weight)
    positions = torch.randn(2, 3, coordinates.size, dtype=torch.float64)
    stacked = coordinates.weights(positions)
    torch.testing.assert_close(stacked[1, 2], coordinates.weights(positions[1, 2]))
    assert coordinates.split(stacked)["0.weight"].shape == (2, 3, 2, 3)


@pytest.mark.parametrize("prior", NORMAL)
def test_a_gaussian_prior_is_standard_normal_in_its_coordinates(prior: str) -> None:
    network = network_with(prior)
    coordinates = Coordinates.of(network, {})
    z = torch.randn(5, coordinates.size, dtype=torch.float64)
    densities = torch.stack([log_prior(network, coordinates, one) for one in z])
    apart = densities + 0.5 * z.square().sum(1)
    torch.testing.assert_close(apart, apart[:1].expand(5))  # a constant: the map's determinant
    assert coordinates.normal == slice(0, coordinates.size)


@pytest.mark.parametrize("prior", ["laplace", "student", "logistic", "mixture"])
def test_other_priors_have_unit_scale_in_their_coordinates(prior: str) -> None:
    scale = {"mixture": math.sqrt((0.2**2 + 1.5**2) / 2)}.get(prior, 0.3)  # a mixture's is its standard deviation
    coordinates = Coordinates.of(network_with(prior), {})
    weights = coordinates.weights(torch.ones(coordinates.size, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.full_like(weights, scale))
    assert coordinates.normal.start == coordinates.size


@every_prior
@pytest.mark.parametrize("width", [False, True])
def test_gradients_are_pulled_back_as_autograd_does_it(prior: str, width: bool) -> None:
    network = network_with(prior)
    coordinates = Coordinates.of(network, {})
    if width:
        coordinates = coordinates.with_width(torch.linspace(0.1, 3, coordinates.size).double())
    position = torch.randn(coordinates.size, dtype=torch.float64)
    towards = torch.randn(coordinates.size, dtype=torch.float64)
    _, (wanted,) = torch.autograd.functional.vjp(coordinates.weights, (position,), towards)
    torch.testing.assert_close(coordinates.pulled_back(towards), wanted)
    if prior in NORMAL:
        exact = torch.func.grad(lambda p: log_prior(network, coordinates, p))(position)
        torch.testing.assert_close(-coordinates.prior_gradient(position), exact)


@every_prior
def test_weights_themselves_where_nothing_is_to_be_whitened(prior: str) -> None:
    network = network_with(prior)
    coordinates = Coordinates.of(network, {}, whitened=False)
    flat = torch.cat([w.flatten() for w in network.params().values()])
    torch.testing.assert_close(coordinates.at(network.params()), flat)
    torch.testing.assert_close(coordinates.weights(flat), flat)
    assert coordinates.normal.start == (0 if isinstance(network.prior, caveat.GaussianPrior) else coordinates.size)
    if coordinates.normal.start == 0:
        exact = torch.func.grad(lambda p: log_prior(network, coordinates, p))(flat)
        torch.testing.assert_close(-coordinates.prior_gradient(flat), exact)


def test_noise_that_is_learned_rides_along_at_the_end() -> None:
    targets = torch.tensor([[0.0, 1.0], [2.0, 7.0], [4.0, -5.0]], dtype=torch.float64)
    network = network_with("laplace", caveat.Gaussian())
    hyper = network.likelihood.initial_hyper(targets)
    assert learned_noise(network.likelihood, hyper) is hyper["log_noise"]
    coordinates = Coordinates.of(network, hyper)
    place, shape = coordinates.places["hyper/log_noise"]
    assert place == coordinates.normal == slice(coordinates.size - 2, coordinates.size)
    assert shape == (2,)
    z = torch.zeros(coordinates.size, dtype=torch.float64)
    z[place] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    spread = targets.std(0, correction=0)
    found = coordinates.split(coordinates.weights(z))["hyper/log_noise"]
    torch.testing.assert_close(found, spread.log() - 1 + torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(coordinates.at(network.params())[place], torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(coordinates.at(network.params() | {"hyper/log_noise": found})[place], z[place])


def test_noise_that_is_given_does_not() -> None:
    for likelihood in (caveat.Gaussian(noise=0.5), caveat.HeteroscedasticGaussian(), caveat.Categorical()):
        network = network_with("gaussian", likelihood)
        hyper = {} if isinstance(likelihood, caveat.Categorical) else likelihood.initial_hyper(torch.randn(4, 1))
        assert learned_noise(network.likelihood, hyper) is None
        assert "hyper/log_noise" not in Coordinates.of(network, hyper).places


def test_weights_of_several_types_are_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"several types, \['torch\.float32', 'torch\.float64'\]: convert the module"):
        Coordinates.of(Network(module, caveat.Categorical()), {})


def test_filters_of_a_convolution_are_correlated_within_and_not_between() -> None:
    covariance = torch.randn(18, 18, dtype=torch.float64)
    prior = caveat.EmpCovPrior("weight", covariance @ covariance.T, alpha=0.5, epsilon=0.1)
    coordinates = Coordinates.of(Network(nn.Conv2d(2, 4, 3).double(), caveat.Categorical(), prior), {})
    map_ = torch.func.jacrev(coordinates.weights)(torch.zeros(coordinates.size, dtype=torch.float64))
    wanted = torch.block_diag(*[0.5 * covariance @ covariance.T + 0.1 * torch.eye(18).double()] * 4, torch.eye(4))
    torch.testing.assert_close(map_ @ map_.T, wanted.double())
    assert math.isclose(float(map_.logdet()), 0.5 * float(wanted.logdet()), rel_tol=1e-9)
