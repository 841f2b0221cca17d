"""Joint likelihoods against a loop, and what they see that single rows do not."""

import math

import pytest
import torch

from caveat.evaluate.metrics import joint_nll


def test_it_is_the_mean_over_pairs_of_products_within_a_draw():
    rng = torch.Generator().manual_seed(3)
    log_prob = -torch.rand(7, 5, generator=rng, dtype=torch.float64)
    found = joint_nll(log_prob, pairs=11, labels=4)
    again = torch.Generator().manual_seed(0)
    pairs = torch.randint(7, (11, 2), generator=again)
    which = torch.randint(2, (11, 4), generator=again)
    total = 0.0
    for pair, places in zip(pairs.tolist(), which.tolist(), strict=True):
        products = [math.exp(sum(float(log_prob[pair[place], draw]) for place in places)) for draw in range(5)]
        total -= math.log(sum(products) / 5) / 4
    assert found == pytest.approx(total / 11, rel=1e-12)


def test_one_draw_is_scored_as_rows_are():
    log_prob = -torch.rand(50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert joint_nll(log_prob, pairs=20_000) == pytest.approx(-float(log_prob.mean()), abs=0.01)


def test_draws_that_agree_with_themselves_are_better_jointly_and_level_alone():
    """Two functions, each right of half of the labels: by single rows no better than noise of a half."""
    torn = torch.tensor([[math.log(0.9), math.log(0.1)]]).expand(20, 2)  # one function is right of all rows
    noise = torch.full((20, 2), math.log(0.5))
    alone = [-(values.logsumexp(1) - math.log(2)).mean() for values in (torn, noise)]
    assert float(alone[0]) == pytest.approx(float(alone[1]), abs=1e-6)
    assert joint_nll(torn) < joint_nll(noise) - 0.4


def test_labels_that_no_draw_allows_are_infinitely_bad_and_nothing_is_refused():
    assert joint_nll(torch.full((3, 2), -math.inf)) == math.inf
    with pytest.raises(ValueError, match=r"needs log probabilities \[rows, draws\], got shape \(0, 2\)"):
        joint_nll(torch.zeros(0, 2))
