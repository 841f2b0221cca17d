"""Births and deaths of nodes: detailed balance and frequencies against all masks of a small network, one by one."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.run import Run
from caveat.engine.sparse_chains.masked_network import MaskedNetwork
from caveat.engine.sparse_chains.masks import MaskMove, log_mask_prior, log_probability_of_set, penalty
from caveat.engine.training import BatchPart
from caveat.methods.masked_bnn import MaskedBNN

WIDTHS, ROWS = (3, 3), 12
PART = BatchPart(0, ROWS, 1.0)


def masked() -> tuple[MaskedNetwork, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(ROWS, 2, dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(ROWS, 1, dtype=torch.float64)
    task = caveat.Task(module, (x, y), caveat.Gaussian(noise=0.7))
    start = {"params": task.network.params(), "hyper": task.hyper}
    return MaskedNetwork(task, start, Run(), MaskedBNN(sparsity=0.3)), (x, y)


def every_mask() -> list[Tensor]:
    return [torch.tensor(bits, dtype=torch.bool) for bits in itertools.product((False, True), repeat=sum(WIDTHS))]


@pytest.fixture(scope="module")
def enumerated() -> tuple[MaskMove, list[Tensor], list[tuple[float, Tensor]], Tensor]:
    """The moves, all masks without an empty space, what the likelihood is there, and their posterior."""
    target, batch = masked()
    masks = [m for m in every_mask() if all(part.any() for part in m.split(list(WIDTHS)))]
    found = [target.evaluate(mask, batch, PART) for mask in masks]
    joint = [at[0] + log_mask_prior(m, WIDTHS, target.moves.c) for m, at in zip(masks, found, strict=True)]
    return target.moves, masks, found, torch.tensor(joint, dtype=torch.float64).softmax(0)


def test_likelihood_and_gradient_are_those_of_masked_activities() -> None:
    target, (x, y) = masked()
    first, _, second, _, third = target.network.module
    for mask in every_mask():
        if not all(part.any() for part in mask.split(list(WIDTHS))):
            continue
        m = mask.double().requires_grad_()
        h = torch.tanh(first(x)) * m[:3]
        outputs = third(torch.tanh(second(h)) * m[3:])
        known = torch.distributions.Normal(outputs, 0.7).log_prob(y).sum()
        (gradient,) = torch.autograd.grad(known, m)
        value, found = target.evaluate(mask, (x, y), PART)
        assert value == pytest.approx(float(known.detach()), rel=1e-12)
        torch.testing.assert_close(found[mask], gradient[mask], rtol=1e-10, atol=1e-12)
        assert not found[~mask].any()


def test_a_batch_stands_for_all_rows() -> None:
    target, (x, y) = masked()
    mask = torch.tensor([True, False, True, True, True, False])
    whole = target.evaluate(mask, (x, y), PART)
    halves = [target.evaluate(mask, (x[s], y[s]), BatchPart(0, 6, 1.0)) for s in (slice(0, 6), slice(6, 12))]
    assert halves[0][0] != pytest.approx(halves[1][0])
    assert (halves[0][0] + halves[1][0]) / 2 == pytest.approx(whole[0])
    torch.testing.assert_close((halves[0][1] + halves[1][1]) / 2, whole[1])


def test_the_prior_is_over_the_number_of_nodes_and_even_among_masks_of_it() -> None:
    c = penalty(0.3, 100)
    assert c == pytest.approx((0.3 * math.log(100)) ** 5)
    masks = [torch.tensor(bits, dtype=torch.bool) for bits in itertools.product((False, True), repeat=4)]
    weights = torch.tensor([math.exp(log_mask_prior(m, (4,), 0.1)) for m in masks], dtype=torch.float64)
    by_count = [float(weights[[int(m.sum()) == s for m in masks]].sum()) for s in range(5)]
    assert by_count == pytest.approx([0.0] + [math.exp(-0.1 * s**2) for s in range(1, 5)])


def test_probabilities_of_sets_are_those_of_draws_one_after_the_other() -> None:
    weights = torch.tensor([0.3, -1.0, 2.0, 0.0, -3.0], dtype=torch.float64)
    p = weights.softmax(0).tolist()
    by_hand = p[0] * p[2] / (1 - p[0]) + p[2] * p[0] / (1 - p[2])
    assert log_probability_of_set(weights, torch.tensor([0, 2])) == pytest.approx(math.log(by_hand))
    for size in (1, 2, 3):
        sets = [torch.tensor(s) for s in itertools.combinations(range(5), size)]
        assert sum(math.exp(log_probability_of_set(weights, s)) for s in sets) == pytest.approx(1.0)
    far = torch.tensor([0.0, -2000.0, -3000.0])  # weights that underflow are still drawn, when there are no others
    assert log_probability_of_set(far, torch.tensor([0, 1, 2])) == pytest.approx(0.0)


def test_detailed_balance_and_proposals_that_sum_to_one(enumerated) -> None:  # type: ignore[no-untyped-def]
    moves, masks, found, posterior = enumerated
    assert float(posterior.max()) < 0.6, "or there is nothing to see"
    for mask, at in zip(masks, found, strict=True):
        forth = sum(math.exp(moves.log_proposal(mask, new, at[1])) for new in every_mask())
        possible = sum((int(pool.sum()) >= n) / 6 for pool in (mask, ~mask) for n in (1, 2, 3))
        assert forth == pytest.approx(possible, rel=1e-12), "the rest are moves that cannot be made"
    transition = transitions(moves, masks, found)
    flow = posterior[:, None] * transition
    torch.testing.assert_close(flow, flow.T, rtol=1e-9, atol=1e-15)
    assert int((transition > 0).sum()) > 10 * len(masks)


def transitions(moves: MaskMove, masks: list[Tensor], found: list[tuple[float, Tensor]]) -> Tensor:
    matrix = torch.zeros(len(masks), len(masks), dtype=torch.float64)
    for i, j in itertools.permutations(range(len(masks)), 2):
        forth = moves.log_proposal(masks[i], masks[j], found[i][1])
        if forth > -math.inf:
            ratio = moves.log_ratio(masks[i], masks[j], found[i], found[j])
            matrix[i, j] = math.exp(forth + min(0.0, ratio))
    return matrix + torch.diag(1 - matrix.sum(1))


def test_a_chain_of_masks_visits_each_as_often_as_its_posterior_says(enumerated) -> None:  # type: ignore[no-untyped-def]
    moves, masks, found, posterior = enumerated
    place = {tuple(m.tolist()): i for i, m in enumerate(masks)}
    rng, mask, n = torch.Generator().manual_seed(0), masks[-1], 3000
    visits = torch.zeros(len(masks), dtype=torch.float64)
    for _ in range(n):
        new = moves.move(mask, lambda m: found[place[tuple(m.tolist())]], rng)
        mask = mask if new is None else new
        visits[place[tuple(mask.tolist())]] += 1
    # The variance of a chain's averages, exactly, from its transition matrix: those of indicators of every mask.
    size = len(masks)
    matrix = torch.eye(size, dtype=torch.float64) - transitions(moves, masks, found) + posterior.expand(size, size)
    centred = torch.eye(size, dtype=torch.float64) - posterior
    solved = torch.linalg.solve(matrix, centred)
    weighted = posterior[:, None] * centred
    variance = (2 * (weighted * solved).sum(0) - (weighted * centred).sum(0)) / n
    z = (visits / n - posterior) / variance.sqrt()
    assert float(z.abs().max()) < 4.5
    assert float(z.square().mean()) < 2


def test_no_space_is_emptied_and_nothing_impossible_is_tried() -> None:
    moves = MaskMove((2, 1), 100.0, 3)  # the prior wants no nodes at all
    rng, mask = torch.Generator().manual_seed(0), torch.ones(3, dtype=torch.bool)
    for _ in range(200):
        new = moves.move(mask, lambda m: (0.0, torch.zeros(3)), rng)
        mask = mask if new is None else new
        assert mask[:2].any()
        assert mask[2]
    assert int(mask.sum()) == 2
