"""H = F^T F from pieces of F, in the precisions that it is summed in, against float64."""

import pytest
import torch
from torch import Tensor

from caveat.engine.laplace import gram_matrix
from caveat.engine.laplace.gram_matrix import GramMatrix
from caveat.engine.row_gradients import lower_triangle


def summed(f: Tensor, pieces: int = 3) -> Tensor:
    gram = GramMatrix(torch.zeros(f.shape[1], f.shape[1]), None)
    for piece in f.split(len(f) // pieces):
        gram.add(piece)
    gram.flush()
    return gram.symmetric().double()


def error(found: Tensor, f: Tensor) -> float:
    """The largest error of an entry, in units of the root of the product of its diagonal entries."""
    exact = f.double().T @ f.double()
    scale = exact.diagonal().sqrt()
    return float(((found - exact) / (scale[:, None] * scale)).abs().max())


@pytest.fixture
def rows() -> Tensor:
    """Rows of weights whose gradients differ by orders of magnitude, and go together."""
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(3000, 5, generator=rng) @ torch.randn(5, 60, generator=rng)
    return (common + torch.randn(3000, 60, generator=rng)) * 10 ** torch.linspace(-4, 2, 60)


def test_split_products_are_those_of_float32(rows: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    single, half = error(summed(rows), rows), error(summed(rows.bfloat16().float()), rows)
    monkeypatch.setitem(lower_triangle.BLOCK, "cpu", 16)  # several blocks
    monkeypatch.setattr(lower_triangle, "LARGE", 16)
    blocks = summed(rows)
    monkeypatch.setattr(gram_matrix, "_splitting_pays", lambda device: True)
    split = summed(rows)
    assert not torch.equal(split, blocks)
    assert torch.equal(split, split.T)
    assert error(split, rows) < 5e-6  # 3.6e-6; in bfloat16 2.4e-4
    assert single < 2e-6
    assert half > 50 * error(split, rows)
    factor, info = torch.linalg.cholesky_ex(split.float() + 1e-6 * split.float().diagonal().diag())
    assert not info
    assert bool(factor.isfinite().all())


def test_what_is_split_is_left_over_in_the_last_places(rows: Tensor) -> None:
    (high, _), (_, low), _ = lower_triangle.split(rows)
    assert float(((high.double() + low.double() - rows.double()) / rows.double()).abs().max()) < 2**-16
    assert high.dtype == low.dtype == torch.bfloat16


def test_a_cpu_does_not_split() -> None:
    assert not gram_matrix._splitting_pays(torch.device("cpu"))


def test_both_triangles_in_the_order_of_the_weights() -> None:
    h, order = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)), torch.arange(12).view(4, 3).flip(1)
    gram = GramMatrix(h.clone(), order)
    whole = h.tril() + h.tril(-1).T
    back = order.flatten().argsort()
    assert torch.equal(gram.symmetric(), whole[back][:, back])
