"""What the chains predict, draw by draw, and how well it mixed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import caveat
from caveat.engine.chains import convergence
from caveat.evaluate.diagnosis import Quantities, gather_evidence
from caveat.evaluate.diagnosis.by_draw import predict_by_draw

Chains = Callable[..., tuple[caveat.Posterior, Tensor, Tensor]]


ROWS = 20


def test_the_numbers_are_those_of_the_predictions(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand()
    found = caveat.diagnose(posterior, (x, y))
    outputs = torch.stack([posterior.network(params, x) for params in posterior.sample(1600)])
    log_probs = outputs.log_softmax(-1)
    quantities = torch.cat([log_probs.exp().flatten(1), log_probs[:, range(ROWS), y]], 1).reshape(4, 400, -1)
    expected = convergence(quantities)
    assert found.predictions.rhat_max == pytest.approx(float(expected.rhat.max()), abs=1e-5)
    assert found.predictions.ess_tail_min == pytest.approx(float(expected.ess_tail.min()), rel=1e-2)
    assert found.log_density.rhat_max == pytest.approx(float(convergence(posterior.state["stats"]["lp"]).rhat))


def test_regression_with_a_noise_of_its_own_in_each_draw(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(caveat.Gaussian(standardise=True))
    by_draw = predict_by_draw(posterior, (x, y))
    assert by_draw.samples.shape == (4, 400, ROWS, 1)
    params = {name: stack[2, 5] for name, stack in posterior.state["params"].items()}
    own = caveat.Gaussian(standardise=True)
    hyper = posterior.state["hyper"] | {"log_noise": params["hyper/log_noise"]}
    expected = own.log_prob(posterior.network(params, x), y, hyper)
    torch.testing.assert_close(by_draw.log_prob[2, 5], expected)
    names = gather_evidence(posterior, (x, y)).predictions.names
    assert names[0] == "row 0: mean 0"
    assert names[ROWS] == "row 0: log density"
    assert names[-1] == "log_noise 0"
    assert caveat.diagnose(posterior, (x, y)).verdict == "trust"


def test_a_quantity_that_moves_in_the_middle_draw_alone_hides_nothing() -> None:
    draws = torch.randn(4, 401, 3, generator=torch.Generator().manual_seed(0))
    draws[0] += 3
    draws[..., 0] = 0
    draws[0, 200, 0] = 1  # in neither half of an odd number of draws
    mixing = Quantities.of(["a", "b", "c"], draws).mixing()
    assert mixing.constant == 1
    assert mixing.rhat_max is not None
    assert mixing.rhat_max > 1.4
