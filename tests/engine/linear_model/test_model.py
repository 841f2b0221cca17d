"""The linear model against dense matrices in float64: products, systems, samples, effective dimension, evidence."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from caveat import Categorical
from caveat.engine.linear_model.conjugate_gradients import ConjugateGradients
from caveat.engine.linear_model.counted_normals import standard_normals
from caveat.engine.linear_model.features import (
    DenseFeatures,
    RowBlock,
    RowNoise,
    ScaledFeatures,
    apply_factor,
    apply_factor_transposed,
)
from caveat.engine.linear_model.model import (
    LinearModel,
    LinearSystem,
    SampleRandomness,
    g_prior,
    log_determinant,
    misfit,
    regression_system,
)

ROWS, OUTPUTS, SIZE = 40, 3, 30


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax_model(block_rows: int = 7, precision: float = 0.7, rows: int = ROWS) -> LinearModel:
    """Classification at given logits: three outputs a row, whose precision has rank two."""
    logits = 2 * normal(rows, OUTPUTS, seed=1)
    factors = Categorical().fisher_factor(logits, torch.zeros(rows), {})
    features = DenseFeatures(normal(rows, OUTPUTS, SIZE), block_rows)
    return LinearModel(features, RowNoise(factors), torch.tensor([precision], dtype=torch.float64))


def pulled_rows(model: LinearModel) -> Tensor:
    """R^T Phi of all rows, [n r, d]."""
    features, noise = model.features, model.noise
    assert isinstance(features, DenseFeatures)
    assert isinstance(noise, RowNoise)
    factors = torch.diag_embed(noise.factors) if noise.factors.ndim == 2 else noise.factors
    return torch.einsum("nmr,nmd->nrd", factors, features.phi).flatten(0, 1)


def dense(model: LinearModel) -> tuple[Tensor, Tensor]:
    """M and H."""
    rows = pulled_rows(model)
    M = rows.T @ rows
    return M, M + torch.diag(model.precision.expand(len(M)))


def all_noise(model: LinearModel, draws: SampleRandomness) -> Tensor:
    """e of all rows, [K, n r]."""
    return torch.cat([draws.noise(block) for block in model.features.blocks()], 1).flatten(1)


def test_products_are_those_of_the_matrix() -> None:
    model = softmax_model()
    M, H = dense(model)
    z = normal(5, SIZE, seed=2)
    torch.testing.assert_close(model.curvature(z), z @ M)
    torch.testing.assert_close(model.product(z), z @ H)


@pytest.mark.parametrize("scaled", [False, True])
def test_backward_is_the_adjoint_of_forward(scaled: bool) -> None:
    model = softmax_model()
    features = ScaledFeatures(model.features, normal(SIZE, seed=5)) if scaled else model.features
    z, left, right = normal(4, SIZE, seed=2), 0.0, 0.0
    for number, block in enumerate(features.blocks()):
        v = normal(4, len(block.index), OUTPUTS, seed=number)
        left = left + (block.forward(z) * v).sum((1, 2))
        right = right + (z * block.backward(v)).sum(1)
    torch.testing.assert_close(left, right)


def test_a_factor_may_be_given_by_its_diagonal() -> None:
    diagonal, v = normal(6, OUTPUTS).exp(), normal(2, 6, OUTPUTS, seed=1)
    torch.testing.assert_close(apply_factor(diagonal, v), apply_factor(torch.diag_embed(diagonal), v))
    torch.testing.assert_close(
        apply_factor_transposed(diagonal, v), apply_factor_transposed(torch.diag_embed(diagonal), v)
    )


def test_a_factor_may_hold_positions() -> None:
    factor = normal(5, 2, 3, 2, 4)  # rows, positions before, outputs, columns, positions after
    whole = torch.zeros(5, 2, 3, 4, 2, 2, 4, dtype=torch.float64)
    for p in range(2):
        for t in range(4):
            whole[:, p, :, t, p, :, t] = factor[:, p, :, :, t]
    whole = whole.reshape(5, 24, 16)
    e, v = normal(2, 5, 16, seed=1), normal(2, 5, 24, seed=2)
    torch.testing.assert_close(apply_factor(factor, e), apply_factor(whole, e))
    torch.testing.assert_close(apply_factor_transposed(factor, v), apply_factor_transposed(whole, v))


def test_noise_does_not_depend_on_blocks_or_their_order() -> None:
    small, large = softmax_model(7), softmax_model(64)
    one, two = SampleRandomness(small, 3, seed=4), SampleRandomness(large, 3, seed=4)
    torch.testing.assert_close(all_noise(small, one), all_noise(large, two))
    torch.testing.assert_close(one.system(small).right, two.system(large).right)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    shuffled = next(iter(small.features.blocks([order])))
    torch.testing.assert_close(one.noise(shuffled).flatten(1), two.noise(shuffled).flatten(1))
    whole = all_noise(large, two).unflatten(1, (ROWS, -1))
    torch.testing.assert_close(one.noise(shuffled), whole[:, order])


def test_a_sample_is_the_same_alone_and_among_others() -> None:
    model = softmax_model()
    torch.testing.assert_close(
        SampleRandomness(model, [2], seed=1).system(model).right,
        SampleRandomness(model, 4, seed=1).system(model).right[2:3],
    )


def test_looked_up_numbers_are_standard_normal_and_independent() -> None:
    places = torch.arange(50_000)
    e = standard_normals(0, "rows", range(4), places)
    for row in e:
        assert stats.kstest(row.numpy(), "norm").pvalue > 0.001
    others = [
        standard_normals(1, "rows", [0], places),  # another seed
        standard_normals(0, "parameters", [0], places),  # another use
        standard_normals(0, "rows", [0], places + 50_000),  # another layer
    ]
    together = torch.cat([e, *others, e[:1].roll(1, 1)])
    correlation = torch.corrcoef(together) - torch.eye(len(together))
    assert correlation.abs().max() < 4.5 / math.sqrt(len(places))


def test_layers_do_not_share_their_noise() -> None:
    phi = normal(4, 20_000)
    model = LinearModel(DenseFeatures(phi), RowNoise(torch.ones(4, 1).double()), torch.ones(1).double())
    layers = SampleRandomness(model, 2).system(model).prior.unflatten(1, (4, 5000)).flatten(0, 1)
    correlation = torch.corrcoef(layers) - torch.eye(8)
    assert correlation.abs().max() < 4.5 / math.sqrt(5000)


def test_the_samples_system_is_what_its_definition_says() -> None:
    model = softmax_model()
    draws = SampleRandomness(model, 6, seed=3)
    system = draws.system(model)
    expected = model.precision * system.prior + all_noise(model, draws) @ pulled_rows(model)
    torch.testing.assert_close(system.right, expected)


def test_the_two_objectives_differ_by_a_constant() -> None:
    model = softmax_model()
    draws = SampleRandomness(model, 1, seed=3)
    system, rows, e = draws.system(model), pulled_rows(model), all_noise(model, draws)
    shifted = system.right / model.precision  # theta_n

    def plain(z: Tensor) -> Tensor:
        return 0.5 * (e - z @ rows.T).square().sum() + 0.5 * (model.precision * (z - system.prior).square()).sum()

    def reduced(z: Tensor) -> Tensor:
        return 0.5 * (z @ rows.T).square().sum() + 0.5 * (model.precision * (z - shifted).square()).sum()

    differences = torch.stack([plain(z) - reduced(z) for z in normal(5, 1, SIZE, seed=8)])
    torch.testing.assert_close(differences, differences[:1].expand(5))
    z = torch.linalg.solve(dense(model)[1], system.right.T).T.requires_grad_()
    for objective in (plain, reduced):
        assert torch.autograd.grad(objective(z), z)[0].abs().max() < 1e-9


def test_primal_and_dual_have_the_same_solution() -> None:
    model = softmax_model()
    draws = SampleRandomness(model, 2, seed=3)
    system, rows, e = draws.system(model), pulled_rows(model), all_noise(model, draws)
    kernel = torch.eye(len(rows)) + rows @ rows.T / model.precision
    u = torch.linalg.solve(kernel, (e - system.prior @ rows.T).T).T
    dual = system.prior + u @ rows / model.precision
    torch.testing.assert_close(dual, torch.linalg.solve(dense(model)[1], system.right.T).T)


@pytest.fixture(scope="module")
def many() -> tuple[LinearModel, Tensor, Tensor]:
    """A model, 400 samples of it, and M of them."""
    model = softmax_model(block_rows=40)
    solution = (
        ConjugateGradients(tolerance=1e-8).prepare(model).solve(model, SampleRandomness(model, 400).system(model))
    )
    return model, solution.z, solution.image


def test_samples_have_the_posterior_covariance(many: tuple[LinearModel, Tensor, Tensor]) -> None:
    model, z, _ = many
    H = dense(model)[1]
    energies = ((z @ H) * z).sum(1)  # chi^2 with d degrees of freedom, each
    assert abs(energies.sum() - len(z) * SIZE) < 4 * math.sqrt(2 * len(z) * SIZE)
    assert stats.kstest(energies.numpy(), stats.chi2(SIZE).cdf).pvalue > 0.01
    white = z @ torch.linalg.cholesky(H)
    covariance = white.T @ white / len(z)
    assert (covariance - torch.eye(SIZE)).abs().max() < 5 * math.sqrt(2 / len(z))


@pytest.mark.parametrize("samples", [1, 16, 400])
def test_effective_dimension_is_within_its_error(many: tuple[LinearModel, Tensor, Tensor], samples: int) -> None:
    model, z, image = many
    mu = torch.linalg.eigvalsh(dense(model)[0]).clamp_min(0)
    shares = mu / (mu + model.precision)
    found = (z * image)[:samples].sum(1).mean()
    assert abs(found - shares.sum()) < 3 * (2 * shares.square().sum() / samples).sqrt()


def test_the_mean_is_that_of_ridge_regression() -> None:
    phi, y, std = normal(50, 8), normal(50, 1, seed=1), normal(50, seed=2).exp()
    model = LinearModel(DenseFeatures(phi), RowNoise(1 / std.unsqueeze(1)), torch.tensor([0.3]).double())
    system = regression_system(model, y)
    expected = phi.T @ (y[:, 0] / std**2)
    torch.testing.assert_close(system.right[0], expected)
    mean = torch.linalg.solve(dense(model)[1], expected)
    torch.testing.assert_close(misfit(model, y, mean), float(((y[:, 0] - phi @ mean) / std).square().sum()))


@pytest.mark.parametrize("rows", [5, 40])
def test_log_determinant_by_parameters_and_by_rows(rows: int) -> None:
    model = softmax_model(rows=rows).with_precision(normal(SIZE, seed=9).exp())
    H = dense(model)[1]
    expected = float(torch.logdet(H) - model.precision.log().sum())
    assert log_determinant(model) == pytest.approx(expected, rel=1e-10)


def test_too_large_a_determinant_is_refused() -> None:
    phi = torch.ones(6000, 6000, dtype=torch.float32)[:, :1].expand(6000, 6000)
    model = LinearModel(DenseFeatures(phi), RowNoise(torch.ones(6000, 1)), torch.ones(1))
    with pytest.raises(ValueError, match=r"side 6,000 .*held-out rows"):
        log_determinant(model)


def test_the_g_prior_does_not_know_the_features_units() -> None:
    units = normal(SIZE, seed=3).mul(3).exp()
    units[4] = 0.0  # a parameter that does nothing
    model = softmax_model()
    assert isinstance(model.features, DenseFeatures)
    changed = LinearModel(DenseFeatures(model.features.phi * units, 7), model.noise, model.precision)
    one, two = (g_prior(m) for m in (model, changed))
    z = normal(3, SIZE, seed=1)
    z[:, 4] = 0.0
    torch.testing.assert_close(one.product(z)[:, :4], two.product(z)[:, :4])
    torch.testing.assert_close(one.product(z)[:, 5:], two.product(z)[:, 5:])
    assert isinstance(two.features, ScaledFeatures)
    assert two.features.scale[4] == 0
    diagonal = torch.stack([one.curvature(unit.unsqueeze(0))[0, j] for j, unit in enumerate(torch.eye(SIZE).double())])
    torch.testing.assert_close(diagonal, torch.ones(SIZE).double())


def test_features_that_are_not_finite_are_named() -> None:
    phi = normal(9, 2)
    phi[5, 1] = math.nan
    with pytest.raises(ValueError, match="first in row 5"):
        DenseFeatures(phi)
    with pytest.raises(ValueError, match=r"shape \(9,\)"):
        DenseFeatures(normal(9))
    model = softmax_model(block_rows=10)
    assert isinstance(model.noise, RowNoise)
    model.noise.factors[25] = math.inf
    with pytest.raises(ValueError, match="features of row 25 give products"):
        model.check_finite()


@dataclass(frozen=True)
class Wave:
    """Features cos(row x frequency), made when they are asked for."""

    index: Tensor
    frequencies: Tensor

    def forward(self, z: Tensor) -> Tensor:
        return (z @ torch.cos(self.index.double() * self.frequencies.unsqueeze(1))).unsqueeze(2)

    def backward(self, v: Tensor) -> Tensor:
        return v.squeeze(2) @ torch.cos(self.index.double().unsqueeze(1) * self.frequencies)


class Waves:
    """As many rows as wanted, none of them held."""

    size, outputs, dtype, device = 12, 1, torch.float64, torch.device("cpu")

    def __init__(self, rows: int) -> None:
        self.rows, self.frequencies = rows, 3 * normal(self.size).abs()

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[RowBlock]:
        starts = range(0, self.rows, 50)
        for index in order or (torch.arange(start, min(start + 50, self.rows)) for start in starts):
            yield Wave(index, self.frequencies)


class UnitNoise:
    width = 1

    def factor(self, block: RowBlock) -> Tensor:
        return torch.ones(len(block.index), 1, dtype=torch.float64)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_nothing_grows_with_the_number_of_rows() -> None:
    found = []
    for rows in (500, 2000):
        with Largest() as largest:
            model = LinearModel(Waves(rows), UnitNoise(), torch.ones(1, dtype=torch.float64))
            solution = ConjugateGradients(rank=4).prepare(model).solve(model, SampleRandomness(model, 6).system(model))
        assert solution.report.converged
        found.append(largest.numel)
    assert found[0] == found[1] <= 50 * 12


def test_any_right_hand_side_can_stand_beside_samples() -> None:
    model = softmax_model()
    H, right = dense(model)[1], normal(2, SIZE, seed=4)
    samples = SampleRandomness(model, 3).system(model)
    system = samples.beside(LinearSystem.of(model, right))
    assert system.noise is not None
    block = next(iter(model.features.blocks()))
    assert system.noise(block).shape == (5, 7, 2)
    assert (system.noise(block)[3:] == 0).all()
    solution = ConjugateGradients(tolerance=1e-9).prepare(model).solve(model, system)
    torch.testing.assert_close(solution.z, torch.linalg.solve(H, torch.cat([samples.right, right]).T).T)
    torch.testing.assert_close(system.take(torch.tensor([4])).right[0], right[1])
