"""The log posterior density on a plane through three draws."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import caveat
from caveat.network import Params

Chains = Callable[..., tuple[caveat.Posterior, Tensor, Tensor]]


def repeated(params: Params, stats: Params) -> None:
    for name, stack in params.items():
        params[name] = stack.repeat_interleave(5, 1)[:, : stack.shape[1]]


def test_the_surface_goes_through_its_draws(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(caveat.Gaussian(standardise=True))
    chosen = [(0, 3), (2, 17), (3, 9)]
    surface = caveat.posterior_surface(posterior, (x, y), draws=chosen, points=3, scale=2.0)
    assert surface.draws == tuple(chosen)
    assert surface.log_density.shape == (3, 3)
    weights = [{name: stack[c, d] for name, stack in posterior.state["params"].items()} for c, d in chosen]
    flat = [torch.cat([w.flatten().double() for w in each.values()]) for each in weights]
    for i, j in ((0, 1), (0, 2), (1, 2)):  # distances in the plane are those of the weights
        torch.testing.assert_close((surface.positions[i] - surface.positions[j]).norm(), (flat[i] - flat[j]).norm())
    # The log density at a corner of the grid, from the weights there.
    u = (flat[1] - flat[0]) / (flat[1] - flat[0]).norm()
    v = flat[2] - flat[0]
    v = (v - (v @ u) * u) / (v - (v @ u) * u).norm()
    there = flat[0] + surface.along[0] * u + surface.across[2] * v
    own = {"weight": there[:3].reshape(1, 3).float(), "bias": there[3:4].float()}
    hyper = posterior.state["hyper"] | {"log_noise": there[4:]}
    likelihood = posterior.network.likelihood.log_prob(posterior.network(own, x), y, hyper).double().sum()
    expected = 2 * likelihood + posterior.network.prior.log_prob(own)
    torch.testing.assert_close(surface.log_density[2, 0], expected, rtol=1e-5, atol=1e-4)


def test_some_rows_stand_for_all(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(draws=10)
    some = caveat.posterior_surface(posterior, (x, y), points=2, rows=5)
    chosen = [0, 4, 9, 14, 19]
    by_hand = caveat.posterior_surface(posterior, (x[chosen], y[chosen]), points=2, scale=4.0)
    torch.testing.assert_close(some.log_density, by_hand.log_density)


def test_the_surface_chooses_draws_of_different_chains(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(draws=10)
    assert caveat.posterior_surface(posterior, (x, y), points=2).draws == ((0, 9), (1, 9), (2, 9))
    posterior, x, y = chains_by_hand(chains=1, draws=10)
    assert caveat.posterior_surface(posterior, (x, y), points=2).draws == ((0, 0), (0, 4), (0, 9))


@pytest.mark.parametrize("draws", [[(0, 0), (0, 1)], [(0, 0), (0, 1), (4, 0)], [(0, 0), (0, 1), (0, 10)]])
def test_draws_that_are_not_there_are_refused(draws: list[tuple[int, int]], chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(draws=10)
    with pytest.raises(ValueError, match=r"three pairs \(chain, draw\) of 4 chains of 10 draws"):
        caveat.posterior_surface(posterior, (x, y), draws=draws)


def test_equal_draws_span_no_plane(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(draws=10, change=repeated)
    with pytest.raises(ValueError, match="lie on one line"):
        caveat.posterior_surface(posterior, (x, y), draws=[(0, 0), (0, 1), (1, 0)])
    with pytest.raises(ValueError, match="lie on one line"):
        caveat.posterior_surface(posterior, (x, y), draws=[(0, 0), (1, 0), (1, 1)])
    with pytest.raises(ValueError, match="points=1"):
        caveat.posterior_surface(posterior, (x, y), points=1)
