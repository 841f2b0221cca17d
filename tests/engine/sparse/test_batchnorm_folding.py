"""Folding BatchNorm into the layer before it changes nothing but the time; what cannot be folded stays."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from caveat.engine.sparse.batchnorm_folding import folded
from caveat.engine.sparse.kernels import LayerGeometry, Pattern
from caveat.engine.sparse.substitute import SparseLayer
from caveat.models import resnet18

RNG = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RNG)


def settled(module: nn.Module) -> nn.Module:
    """In eval mode, with statistics and weights of BatchNorm that are no identity."""
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None:
            norm.running_mean.copy_(normal(norm.num_features))
            norm.running_var.copy_(normal(norm.num_features).exp())
            if norm.affine:
                norm.weight.data.copy_(normal(norm.num_features))
                norm.bias.data.copy_(normal(norm.num_features))
    return module.eval()


def sparse(layer: nn.Module, density: float | None) -> SparseLayer:
    geometry = LayerGeometry.of(layer)
    assert geometry is not None
    found = SparseLayer(layer, geometry)
    found.variance = None
    if density is None:
        found.values = normal(*geometry.shape)
    else:
        chosen = torch.randperm(geometry.size, generator=RNG)[: round(density * geometry.size)].sort().values.int()
        found.pattern, found.values = Pattern(geometry, chosen), normal(len(chosen))
    return found


class Through(nn.Module):
    """A convolution, its BatchNorm, and what else is done with them."""

    def __init__(self, run: Callable[["Through", Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.norm, self.run = nn.Conv2d(3, 3, 3, padding=1), norm or nn.BatchNorm2d(3), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


FOLDS = {
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 5, 5)),
    "with bias": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (2, 3, 5)),
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), (2, 3)),
    "sparse": (lambda: nn.Sequential(sparse(nn.Conv2d(4, 6, 3, groups=2), 0.3), nn.BatchNorm2d(6)), (2, 4, 5, 5)),
    "sparse linear": (lambda: nn.Sequential(sparse(nn.Linear(9, 7), 0.3), nn.BatchNorm1d(7)), (5, 9)),
    "all weights": (lambda: nn.Sequential(sparse(nn.Conv2d(3, 6, 3), None), nn.BatchNorm2d(6)), (2, 3, 5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDS)
def test_outputs_stay(case: str) -> None:
    make, shape = FOLDS[case]
    module, x = settled(make()), normal(*shape)
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        wanted, found = module(x), folded(module)
        torch.testing.assert_close(found.module(x), wanted, rtol=1e-4, atol=1e-5)
        assert found.norms == ("1",)
        assert found.reason is None
        torch.testing.assert_close(module(x), wanted, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))


def test_resnet18() -> None:
    module = settled(resnet18(3, 4, width=4)).double()
    x = normal(2, 3, 16, 16).double()
    found = folded(module)
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(found.norms) == len(norms) == 20
    torch.testing.assert_close(found.module(x), module(x))


STAYS: dict[str, tuple[Callable[[Through, Tensor], Tensor], nn.Module | None]] = {
    "another user": (lambda m, x: m.norm(y := m.layer(x)) + y, None),
    "layer used twice": (lambda m, x: m.norm(m.layer(m.layer(x))), None),
    "norm used twice": (lambda m, x: m.norm(m.norm(m.layer(x))), None),
    "something between": (lambda m, x: m.norm(m.layer(x).relu()), None),
    "weight used elsewhere": (lambda m, x: m.norm(m.layer(x)) * m.layer.weight.sum(), None),
    "no statistics": (lambda m, x: m.norm(m.layer(x)), nn.BatchNorm2d(3, track_running_stats=False)),
    "another norm": (lambda m, x: m.norm(m.layer(x)), nn.GroupNorm(3, 3)),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_cannot_be_folded_stays(case: str) -> None:
    module = settled(Through(*STAYS[case]))
    found = folded(module)
    assert found.norms == ()
    assert found.module is module


def test_in_training_it_stays() -> None:
    assert folded(Through(lambda m, x: m.norm(m.layer(x)))).norms == ()


def test_variances_and_shared_weights_stay() -> None:
    layer = sparse(nn.Conv2d(3, 3, 3), 0.5)
    layer.variance = torch.ones_like(layer.values)
    assert folded(settled(nn.Sequential(layer, nn.BatchNorm2d(3)))).norms == ()

    module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    module[3].weight = module[0].weight
    assert folded(settled(module)).norms == ()


def test_a_module_that_cannot_be_traced_comes_back_with_the_reason() -> None:
    module = settled(Through(lambda m, x: m.norm(m.layer(x)) if x.sum() > 0 else x))
    found = folded(module)
    assert found.module is module
    assert found.norms == ()
    assert "cannot trace Through (TraceError" in str(found.reason)


def test_a_linear_layer_on_sequences_is_not_passed_on_wrongly() -> None:
    """BatchNorm1d normalises the second dimension of [row, place, feature]: as many places as features look alike."""
    found = folded(settled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))))
    with pytest.raises(ValueError, match="do not fold"):
        found.module(normal(2, 4, 3))
