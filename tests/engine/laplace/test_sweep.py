"""Every pass over the data gives the sums of a dense reference, whatever the likelihood and the pieces."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from caveat import Categorical, Gaussian, Network
from caveat.engine import cost
from caveat.engine.laplace import gaussians, gram_matrix
from caveat.engine.laplace import sweep as sweep_module
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.row_gradients import Jacobian, RowPass, lower_triangle
from caveat.engine.run import Run
from caveat.rows import Rows
from tests.engine.laplace.sweep_reference import (
    CASES,
    N,
    assert_close,
    by_preactivations,
    chosen,
    diagonal,
    flat,
    labels,
    matrix,
    mlp,
    normal,
    reference,
    sweep,
)


@pytest.mark.parametrize("case", CASES)
def test_every_sum_is_that_of_the_dense_ggn(case: str, dense: Any) -> None:
    found = sweep(case)
    by_hand, x, y = reference(dense, found)
    j, fisher, ggn = by_hand.jacobian(x), by_hand.fisher(x, y), by_hand.ggn(x, y)
    assert_close(found.full(None)[0].ggn, ggn)
    stacked = found.stacked(None)[0].rows
    assert len(stacked) == N * found.rank()
    assert_close(stacked.T @ stacked, ggn)
    index = chosen(found)
    assert_close(found.full(index)[0].ggn, ggn[index][:, index])
    some = found.stacked(index)[0].rows
    assert_close(some.T @ some, ggn[index][:, index])
    assert_close(diagonal(found), ggn.diagonal())
    assert_close(matrix(found.diagonal()[0]), ggn.diagonal().diag())
    vectors = normal(3, len(ggn))
    assert_close(found._products(vectors, "curvature")[0], vectors @ ggn)
    everything = found.low_rank(len(ggn))[0].rows
    assert_close(everything.T @ everything, ggn, 1e-8)
    curved, energy = found.scores(exact=True)
    assert_close(flat(curved, found), ggn.diagonal())
    assert_close(flat(energy, found), j.square().sum((0, 1)))
    assert_close(found.traces(), fisher.diagonal(dim1=1, dim2=2).sum(1))


def test_frozen_weights_have_no_place(dense: Any) -> None:
    found = sweep("frozen")
    assert found.network.names == ("2.weight", "4.weight", "4.bias")
    assert len(found.full(None)[0].ggn) == 4 * 4 + 2 * 4 + 2


# One random cotangent


def test_mc_fisher_is_right_on_average(dense: Any) -> None:
    times = 2000
    _, x, y, _ = CASES["categorical"]
    found = sweep("categorical", rows=Rows((x.repeat(times, 1), y.repeat(times))), fisher="mc")
    by_hand = dense(found.network, found.params, found.hyper)
    j, fisher = by_hand.jacobian(x), by_hand.fisher(x, y)
    ggn = by_hand.ggn(x, y)
    per_row = torch.einsum("ndp,nde,nep->np", j, fisher, j)  # variances of a row's gradient
    error = (2 * per_row.T @ per_row / times).sqrt() + 1e-12  # at most, of an entry
    assert found.rank() == 1
    assert float(((found.full(None)[0].ggn / times - ggn) / error).abs().max()) < 5
    assert float(((diagonal(found) / times - ggn.diagonal()) / error.diagonal()).abs().max()) < 5
    part = found.kronecker()[0].parts["2.weight", "2.bias"]
    a, g = by_preactivations(dense, sweep("categorical"), 2)
    assert_close(part.inputs / times, a)
    assert_close(part.outputs / times, g, 0.1)
    curved, energy = (flat(found_, found) / times for found_ in found.scores(exact=False))
    assert float(((curved - ggn.diagonal()) / error.diagonal()).abs().max()) < 5
    signs = (2 * j.square().sum(1).square().sum(0) / times).sqrt()
    assert float(((energy - j.square().sum((0, 1))) / signs).abs().max()) < 5
    other = Sweep(found.network, found.params, found.hyper, found.rows, Run(seed=1), "mc")
    assert not torch.equal(other.full(None)[0].ggn, found.full(None)[0].ggn)


# Dominant directions


def test_low_rank_is_the_best_approximation_of_its_rank(dense: Any) -> None:
    torch.manual_seed(0)
    network = Network(mlp(5, 12, 3).double(), Categorical())
    x, y = normal(60, 5) * torch.tensor([4.0, 2.0, 1.0, 0.3, 0.1]), labels(3, 60)
    found = Sweep(network, network.params(), {}, Rows((x, y)), Run())
    ggn = dense(network, network.params(), {}).ggn(x, y)
    values, vectors = torch.linalg.eigh(ggn)
    for rank in (1, 4, 12):
        rows = found.low_rank(rank)[0].rows
        assert rows.shape == (rank, len(ggn))
        best = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
        assert_close(rows.T @ rows, best, 1e-3)
        assert float(torch.linalg.eigvalsh(ggn - rows.T @ rows)[0]) > -1e-8 * float(values[-1]), "never above the GGN"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_of_more_directions_than_there_are(dtype: torch.dtype, dense: Any) -> None:
    _, x, y, _ = CASES["two outputs"]
    found = sweep("two outputs", dtype, rows=Rows((x[:2].to(dtype), y[:2])))
    by_hand, x, y = reference(dense, sweep("two outputs", rows=Rows((x[:2], y[:2]))))
    rows = found.low_rank(20)[0].rows
    assert_close(rows.T @ rows, by_hand.ggn(x, y), 1e-4 if dtype == torch.float32 else 1e-9)


def test_low_rank_is_not_above_the_ggn_where_rounding_is_all_that_is_left() -> None:
    torch.manual_seed(0)
    network = Network(mlp(10, 50, 1), Gaussian(noise=0.1))
    x = (normal(500, 10) * torch.logspace(0, -6, 10)).float()
    likelihood = network.likelihood
    found = Sweep(network, network.params(), likelihood.initial_hyper(x[:, :1]), Rows((x, x[:, :1])), Run())
    rows, all_rows = found.low_rank(60)[0].rows.double(), found.stacked(None)[0].rows.double()
    above = torch.linalg.eigvalsh(rows.T @ rows - all_rows.T @ all_rows)[-1]
    assert float(above) < 2e-6 * float(all_rows.square().sum())
    assert rows.is_contiguous()


@pytest.mark.parametrize("numbers", [1, 250, 2**21])
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("sequence", "pixels", "recurrent")])
def test_a_last_layer_is_summed_from_its_features(
    monkeypatch: pytest.MonkeyPatch, dense: Any, case: str, numbers: int
) -> None:
    whole = sweep(case)
    layer = whole.network.names[-1].rpartition(".")[0]
    names = [name for name in whole.network.names if name.startswith(f"{layer}.")]
    found = dataclasses.replace(whole, network=whole.network.restricted(names))
    by_hand, x, y = reference(dense, found)
    monkeypatch.setitem(cost.WORKING_NUMBERS, "cpu", numbers)
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: 3)
    monkeypatch.delattr(RowPass, "columns")
    ggn = found.full(None)[0].ggn
    assert torch.equal(ggn, ggn.T)
    assert_close(ggn, by_hand.ggn(x, y))


def test_a_last_layer_may_be_summed_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sweep("bias first")
    found = dataclasses.replace(whole, network=whole.network.restricted(["out.bias", "out.weight"]))
    wanted, features, calls = found.full(None)[0].ggn, RowPass.features, itertools.count()
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: 3)
    monkeypatch.setattr(RowPass, "features", lambda self: features(self) if next(calls) % 2 else None)
    assert_close(found.full(None)[0].ggn, wanted)


def test_a_last_layer_of_many_classes_takes_fewer_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the Fisher information of the classes of each, which is more than one gradient of few features."""
    classes = 50
    network = Network(nn.Linear(2, classes).double(), Categorical())
    found = Sweep(network, network.params(), {}, Rows((normal(N, 2), labels(classes, N))), Run(), "mc")
    asked = []
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: asked.append(columns) or 3)
    found.full(None)[0]
    assert len(asked) == 1
    assert asked[0] * network.n_parameters >= classes**2


# Pieces and precision


def test_a_last_layer_in_single_precision_is_summed_in_double() -> None:
    """Logits may all be shifted: rounding of single precision makes some of those eigenvalues negative."""
    torch.manual_seed(0)
    network = Network(nn.Linear(20, 10), Categorical())
    x = normal(200, 20).relu().float()
    values = torch.linalg.eigvalsh(
        Sweep(network, network.params(), {}, Rows((x, labels(10, 200))), Run()).full(None)[0].ggn
    )
    assert float(values[0]) > -1e-13 * float(values[-1])


@pytest.mark.parametrize(("rows", "block", "batch"), [(1, 1, 1), (5, 3, 2), (9, 7, 3), (10**6, 4, 100)])
def test_the_gram_matrix_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, dense: Any, rows: int, block: int, batch: int
) -> None:
    monkeypatch.setattr(gram_matrix, "GRAM_ROWS", rows)
    monkeypatch.setitem(lower_triangle.BLOCK, "cpu", block)
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: batch)
    found = sweep("categorical")
    by_hand, x, y = reference(dense, found)
    ggn = found.full(None)[0].ggn
    assert torch.equal(ggn, ggn.T)
    assert_close(ggn, by_hand.ggn(x, y))
    stacked = found.stacked(None)[0].rows
    assert_close(stacked.T @ stacked, by_hand.ggn(x, y))
    assert_close(matrix(found.kronecker()[0]), matrix(sweep("categorical").kronecker()[0]))


@pytest.mark.parametrize("double_up_to", [0, 4096])
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("case", ["categorical", "images", "heteroscedastic"])
def test_single_and_half_precision_stay_positive_definite(
    monkeypatch: pytest.MonkeyPatch, dense: Any, case: str, bfloat16: bool, double_up_to: int
) -> None:
    monkeypatch.setattr(sweep_module, "DOUBLE_UP_TO", double_up_to)
    monkeypatch.setattr(gaussians, "DOUBLE_UP_TO", double_up_to)
    found = sweep(case, torch.float32, bfloat16=bfloat16)
    by_hand, x, y = reference(dense, sweep(case))
    wanted, tolerance = by_hand.ggn(x, y), 0.05 if bfloat16 else 1e-5
    full = found.full(None)[0]
    assert full.ggn.dtype == (torch.float64 if double_up_to else torch.float32)
    prior = torch.full((len(wanted),), 1e-5 * float(wanted.trace()))
    stacked = found.stacked(None)[0]
    for ggn, gaussian in (
        (full.ggn, full.gaussian(prior)),
        (stacked.rows.T @ stacked.rows, stacked.gaussian(prior)),
    ):
        assert_close(ggn.double(), wanted, tolerance)
        assert bool(gaussian.variances().isfinite().all())
        assert bool((gaussian.variances() > 0).all())
    assert_close(diagonal(found).double(), wanted.diagonal(), tolerance)
    layered = found.kronecker()[0]
    assert_close(matrix(layered), matrix(sweep(case).kronecker()[0]), tolerance)
    assert bool((layered.gaussian(prior).variances() > 0).all())
