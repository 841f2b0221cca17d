"""Kronecker draws do not depend on what a decomposition leaves open: signs, and bases of equal values."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.laplace.factor_sides import Side
from caveat.engine.laplace.layer_gaussians import KroneckerPart, LayerGaussian, RotatedPart


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(part: RotatedPart, prior: float) -> Tensor:
    """Two draws of the weights [4, 2] and of the bias [4]."""
    places = {"weight": slice(0, 8), "bias": slice(8, 12)}
    gaussian = LayerGaussian({("weight", "bias"): part}, places, torch.full((12,), prior, dtype=torch.float64))
    return gaussian.weights(gaussian.deltas(2, torch.Generator().manual_seed(5)))


def product(scale: float = 1.0) -> KroneckerPart:
    a, g = normal(9, 3, seed=1), normal(3, 4, seed=2)  # G has an eigenvalue 0
    return KroneckerPart(a.T @ a, scale * (g.T @ g), torch.tensor(9.0, dtype=torch.float64), has_bias=True)


def test_signs_and_order_of_eigenvectors_do_not_matter() -> None:
    """They did: the sample variances of one seed moved by 19% under an affine change of the targets."""
    part = product().rotated()
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    inputs, outputs = part.inputs, part.outputs
    flipped = replace(
        part,
        inputs=replace(inputs, vectors=inputs.vectors * signs[:3]),
        outputs=replace(outputs, vectors=outputs.vectors * signs),
    )
    torch.testing.assert_close(drawn(flipped, 0.5), drawn(part, 0.5), rtol=1e-10, atol=1e-12)
    order = torch.tensor([2, 0, 3, 1])
    moved = replace(part, outputs=Side(outputs.values[order], outputs.vectors[:, order]))
    torch.testing.assert_close(drawn(moved, 0.5), drawn(part, 0.5), rtol=1e-10, atol=1e-12)


def test_the_basis_of_equal_eigenvalues_does_not_matter() -> None:
    part = product().rotated()
    equal = torch.tensor([0.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    turn = torch.eye(4, dtype=torch.float64)
    turn[1:, 1:] = torch.linalg.qr(normal(3, 3, seed=3)).Q
    one, other = (replace(part, outputs=Side(equal, part.outputs.vectors @ q)) for q in (turn, torch.eye(4).double()))
    torch.testing.assert_close(drawn(one, 0.5), drawn(other, 0.5), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1 / 9, 1e6])
def test_a_change_of_units_scales_every_draw(scale: float) -> None:
    plain, scaled = drawn(product().rotated(), 0.5), drawn(product(scale).rotated(), 0.5 * scale)
    torch.testing.assert_close(scaled * scale**0.5, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "low_rank"])
@pytest.mark.parametrize("factor", [3.0, 1e4, 0.07])
def test_an_affine_change_of_the_targets_changes_predictions_alike(structure: str, factor: float) -> None:
    x = normal(60, 2, seed=0)
    y = torch.stack([x[:, 0].sin() + x[:, 1], x.prod(1)], 1) + 0.1 * normal(60, 2, seed=1)
    samples = []
    for targets in (y, factor * y + 7):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        task = caveat.Task(module, (x, targets), caveat.Gaussian(standardise=True))
        method = caveat.Laplace(structure=structure, precision="given", rank=6)  # type: ignore[arg-type]
        training = caveat.Training(epochs=30, learning_rate=0.01)
        posterior = caveat.fit(task, method, start=caveat.MAP(training=training), progress=False)
        samples.append(posterior.predict(x[:7], draws=20, seed=3).samples)
    torch.testing.assert_close((samples[1] - 7) / factor, samples[0], rtol=1e-4, atol=1e-5)
