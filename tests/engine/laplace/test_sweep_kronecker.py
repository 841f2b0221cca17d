"""Kronecker factors are those of inputs and preactivations, and exact where a Kronecker product can be."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from caveat import Gaussian, Network
from caveat.engine.laplace.layer_gaussians import DiagonalPart, KroneckerPart
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.run import Run
from caveat.rows import Rows
from tests.engine.laplace.sweep_reference import (
    CASES,
    ROWS,
    TWO,
    N,
    assert_close,
    by_preactivations,
    matrix,
    reference,
    sweep,
)


@pytest.mark.parametrize("case", ["categorical", "class weights", "two outputs", "heteroscedastic", "poisson"])
def test_kronecker_factors_are_those_of_inputs_and_preactivations(case: str, dense: Any) -> None:
    found = sweep(case)
    parts = found.kronecker()[0].parts
    assert list(parts) == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    for layer, part in zip((0, 2), parts.values(), strict=True):
        a, g = by_preactivations(dense, found, layer)
        assert isinstance(part, KroneckerPart)
        assert_close(part.inputs, a)
        assert_close(part.outputs, g)
        assert float(part.count) == N


def test_kronecker_factors_of_a_convolution_sum_over_patches(dense: Any) -> None:
    found = sweep("images")
    part = found.kronecker()[0].parts["0.weight", "0.bias"]
    module, (by_hand, x, y) = found.network.module, reference(dense, found)
    patches = nn.functional.unfold(x, 2, stride=2)  # [N, 4, T]
    a = torch.cat([patches, torch.ones_like(patches[:, :1])], 1).transpose(0, 1).flatten(1)
    g = torch.stack([torch.func.jacrev(lambda h: module[1:](h.unsqueeze(0)))(h.clone())[0] for h in module[0](x)])
    g = g.flatten(3)  # [N, D, O, T]
    assert_close(part.inputs, a @ a.T)
    assert_close(part.outputs, torch.einsum("ndot,nde,nept->op", g, by_hand.fisher(x, y), g))
    assert float(part.count) == N * 4


def test_norms_and_other_layers_get_a_diagonal(dense: Any) -> None:
    parts = sweep("images").kronecker()[0].parts
    assert {names: type(part) for names, part in parts.items()} == {
        ("0.weight", "0.bias"): KroneckerPart,
        ("4.weight", "4.bias"): KroneckerPart,
        ("1.weight",): DiagonalPart,
        ("1.bias",): DiagonalPart,
    }
    found = sweep("recurrent")
    by_hand, x, y = reference(dense, found)
    layered, ggn = found.kronecker()[0], by_hand.ggn(x, y)
    assert [names for names, part in layered.parts.items() if isinstance(part, KroneckerPart)] == [
        ("twice.weight", "twice.bias")
    ]
    rest = torch.cat([torch.arange(p.start, p.stop) for name, p in layered.places.items() if "twice" not in name])
    assert_close(matrix(layered).diagonal()[rest], ggn.diagonal()[rest])
    assert type(sweep("frozen").kronecker()[0].parts["2.weight",]) is KroneckerPart  # its bias is frozen


@pytest.mark.parametrize("case", ["categorical", "multi-label", "two outputs", "heteroscedastic", "poisson"])
def test_kronecker_blocks_are_exact_for_one_row(case: str, dense: Any) -> None:
    _, x, y, _ = CASES[case]
    found = sweep(case, rows=Rows((x[:1], y[:1])))
    by_hand, x, y = reference(dense, found)
    first, ggn = 4 * 3 + 4, by_hand.ggn(x, y)
    ggn[:first, first:], ggn[first:, :first] = 0, 0  # no covariance between layers
    assert_close(matrix(found.kronecker()[0]), ggn)


@pytest.mark.parametrize("sizes", [(3, 2), (3, 4, 2), (3, 4, 3, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_kronecker_blocks_are_exact_for_linear_networks_with_squared_loss(
    sizes: tuple[int, ...], bias: bool, dense: Any
) -> None:
    torch.manual_seed(0)
    pairs = itertools.pairwise(sizes)
    network = Network(nn.Sequential(*[nn.Linear(i, o, bias) for i, o in pairs]).double(), Gaussian(noise=0.3))
    found = Sweep(network, network.params(), network.likelihood.initial_hyper(TWO), Rows((ROWS, TWO)), Run())
    by_hand, x, y = reference(dense, found)
    ggn, layered = by_hand.ggn(x, y), found.kronecker()[0]
    layers = torch.cat([torch.full((p.stop - p.start,), int(n[0])) for n, p in layered.places.items()])
    assert_close(matrix(layered), ggn * (layers.unsqueeze(1) == layers))
