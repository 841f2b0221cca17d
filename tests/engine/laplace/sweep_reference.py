"""Networks of every kind of layer and likelihood for sweeps over data, and dense references for their sums."""

import copy
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from caveat import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Network, Poisson
from caveat.engine.laplace.layer_gaussians import DiagonalPart, LayerCurvature
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.run import Run
from caveat.rows import Rows

RNG = torch.Generator().manual_seed(0)
N = 7


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RNG, dtype=torch.float64)


def labels(classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape, generator=RNG)


def mlp(*sizes: int) -> nn.Module:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[part for i, o in pairs for part in (nn.Linear(i, o), nn.Tanh())][:-1])


class Recurrent(nn.Module):
    """Layers that the rules do not know, then a layer that acts twice, then one that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.twice, self.never = nn.LSTM(3, 2, batch_first=True), nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.rnn(x)[0][:, -1]).tanh())


class Unused(nn.Module):
    """All that acts is a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.out = nn.Linear(3, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class BiasFirst(nn.Module):
    """A last layer whose bias comes before its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 4), nn.ParameterDict()
        self.out["bias"], self.out["weight"] = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(x).tanh(), self.out["weight"], self.out["bias"])


def half_frozen() -> nn.Module:
    module = mlp(3, 4, 4, 2)
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return module


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2, stride=2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 2)
    )


ROWS, SERIES, IMAGES = normal(N, 3), normal(N, 4, 3), normal(N, 1, 4, 4)
IGNORED = labels(3, N, 4).masked_fill(torch.rand(N, 4, generator=RNG) < 0.3, -100)
COUNTS = torch.poisson(torch.full((N, 2), 2.0), generator=RNG).double()
ONE, TWO = normal(N, 1), normal(N, 2)
CASES: dict[str, tuple[nn.Module, Tensor, Tensor, Any]] = {
    "categorical": (mlp(3, 4, 3), ROWS, labels(3, N), Categorical()),
    "class weights": (mlp(3, 4, 3), ROWS, labels(3, N), Categorical(class_weights=(0.5, 2.0, 0.0))),
    "bernoulli": (mlp(3, 4, 1), ROWS, labels(2, N).double(), Bernoulli()),
    "multi-label": (mlp(3, 4, 2), ROWS, labels(2, N, 2).double(), Bernoulli()),
    "gaussian": (mlp(3, 4, 1), ROWS, ONE, Gaussian(noise=0.3, standardise=True)),
    "two outputs": (mlp(3, 4, 2), ROWS, TWO * torch.tensor([1.0, 3.0]), Gaussian()),
    "heteroscedastic": (mlp(3, 4, 4), ROWS, TWO, HeteroscedasticGaussian()),
    "poisson": (mlp(3, 4, 2), ROWS, COUNTS, Poisson()),
    "sequence": (mlp(3, 4, 3), SERIES, IGNORED, Categorical(class_axis=-1)),
    "pixels": (nn.Conv2d(1, 3, 3, padding=1), IMAGES, labels(3, N, 4, 4), Categorical(class_weights=(1.0, 2.0, 3.0))),
    "images": (images(), IMAGES, labels(2, N), Categorical()),
    "embedding": (
        nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Flatten(), nn.Linear(12, 2)),
        labels(5, N, 4),
        TWO,
        Gaussian(noise=0.5),
    ),
    "recurrent": (Recurrent(), SERIES, labels(2, N), Categorical()),
    "frozen": (half_frozen(), ROWS, labels(2, N), Categorical()),
    "never used": (Unused(), ROWS, labels(3, N), Categorical()),
    "bias first": (BiasFirst(), ROWS, labels(3, N), Categorical()),
}


def sweep(case: str, dtype: torch.dtype = torch.float64, rows: Rows | None = None, **options: Any) -> Sweep:
    module, x, y, likelihood = CASES[case]
    module, rng = copy.deepcopy(module), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=rng).div_(math.sqrt(parameter[0].numel()))
        for buffer in (b for b in module.buffers() if b.is_floating_point()):
            buffer.uniform_(0.5, 2, generator=rng)
    network = Network(module.to(dtype), likelihood)
    x = x.to(dtype) if x.is_floating_point() else x
    hyper = likelihood.initial_hyper(y)
    return Sweep(network, network.params(), hyper, rows or Rows((x, y)), options.pop("run", Run()), **options)


def reference(dense: Any, sweep: Sweep) -> tuple[Any, Tensor, Tensor]:
    return dense(sweep.network, sweep.params, sweep.hyper), *sweep.rows.everything()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()), check_dtype=False
    )


def flat(values: dict[str, Tensor], sweep: Sweep) -> Tensor:
    return torch.cat([values[name].flatten() for name in sweep.network.names])


def diagonal(sweep: Sweep) -> Tensor:
    """The diagonal of the curvature, [n]."""
    parts = sweep.diagonal()[0].parts
    return torch.cat([parts[name,].ggn for name in sweep.network.names])


def chosen(sweep: Sweep) -> Tensor:
    n = sweep.network.n_parameters
    return torch.randperm(n, generator=RNG)[: n // 3].sort().values


def matrix(layered: LayerCurvature) -> Tensor:
    """The whole curvature: Kronecker products [weight, bias] and diagonals where their parameters are."""
    n = max(place.stop for place in layered.places.values())
    found = torch.zeros(n, n, dtype=torch.float64)
    for names, part in layered.parts.items():
        own = torch.cat([torch.arange(layered.places[name].start, layered.places[name].stop) for name in names])
        if isinstance(part, DiagonalPart):
            found[own, own] = part.ggn.double()
            continue
        o, i = len(part.outputs), len(part.inputs)
        order = torch.arange(o * i).reshape(o, i)
        order = torch.cat([order[:, :-1].flatten(), order[:, -1]]) if part.has_bias else order.flatten()
        product = torch.kron(part.outputs.double(), part.inputs.double() / part.count)
        found[own.unsqueeze(1), own] = product[order.unsqueeze(1), order]
    return found


def by_preactivations(dense: Any, found: Sweep, layer: int) -> tuple[Tensor, Tensor]:
    """A and G of a linear layer of a Sequential: a with a 1 beside it, and g = d(outputs)/d(preactivation)."""
    module, (_, x, y) = found.network.module, reference(dense, found)
    a = module[:layer](x)
    fisher = reference(dense, found)[0].fisher(x, y)
    rest = nn.Sequential(nn.Identity(), *module[layer + 1 :])  # a copy of it that takes the preactivation
    g = torch.stack([torch.func.jacrev(rest)(row) for row in module[layer](a)])  # [N, D, O]
    a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
    return a.T @ a, torch.einsum("ndo,nde,nep->op", g, fisher, g)
