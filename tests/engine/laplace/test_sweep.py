"""Every pass over the data gives the sums of a dense reference, whatever the likelihood, the layers and the pieces."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from caveat import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Network, Poisson
from caveat.engine import working_memory
from caveat.engine.laplace import gaussians
from caveat.engine.laplace import sweep as curvature
from caveat.engine.laplace.layer_gaussians import DiagonalPart, KroneckerPart, LayerCurvature
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.row_gradients import Jacobian, RowPass
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


@pytest.mark.parametrize("case", CASES)
def test_every_sum_is_that_of_the_dense_ggn(case: str, dense: Any) -> None:
    found = sweep(case)
    by_hand, x, y = reference(dense, found)
    j, fisher, ggn = by_hand.jacobian(x), by_hand.fisher(x, y), by_hand.ggn(x, y)
    assert_close(found.full(None).ggn, ggn)
    stacked = found.stacked(None).rows
    assert len(stacked) == N * found.rank()
    assert_close(stacked.T @ stacked, ggn)
    index = chosen(found)
    assert_close(found.full(index).ggn, ggn[index][:, index])
    some = found.stacked(index).rows
    assert_close(some.T @ some, ggn[index][:, index])
    assert_close(flat(found.diagonal(), found), ggn.diagonal())
    assert_close(matrix(found.layered(kronecker=False)), ggn.diagonal().diag())
    vectors = normal(3, len(ggn))
    assert_close(found._products(vectors, "curvature")[0], vectors @ ggn)
    everything = found.low_rank(len(ggn)).rows
    assert_close(everything.T @ everything, ggn, 1e-8)
    curved, energy = found.scores(exact=True)
    assert_close(flat(curved, found), ggn.diagonal())
    assert_close(flat(energy, found), j.square().sum((0, 1)))
    assert_close(found.traces(), fisher.diagonal(dim1=1, dim2=2).sum(1))


def test_frozen_weights_have_no_place(dense: Any) -> None:
    found = sweep("frozen")
    assert found.network.names == ("2.weight", "4.weight", "4.bias")
    assert len(found.full(None).ggn) == 4 * 4 + 2 * 4 + 2


# Kronecker products


def by_preactivations(dense: Any, found: Sweep, layer: int) -> tuple[Tensor, Tensor]:
    """A and G of a linear layer of a Sequential: a with a 1 beside it, and g = d(outputs)/d(preactivation)."""
    module, (_, x, y) = found.network.module, reference(dense, found)
    a = module[:layer](x)
    fisher = reference(dense, found)[0].fisher(x, y)
    rest = nn.Sequential(nn.Identity(), *module[layer + 1 :])  # a copy of it that takes the preactivation
    g = torch.stack([torch.func.jacrev(rest)(row) for row in module[layer](a)])  # [N, D, O]
    a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
    return a.T @ a, torch.einsum("ndo,nde,nep->op", g, fisher, g)


@pytest.mark.parametrize("case", ["categorical", "class weights", "two outputs", "heteroscedastic", "poisson"])
def test_kronecker_factors_are_those_of_inputs_and_preactivations(case: str, dense: Any) -> None:
    found = sweep(case)
    parts = found.layered(kronecker=True).parts
    assert list(parts) == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    for layer, part in zip((0, 2), parts.values(), strict=True):
        a, g = by_preactivations(dense, found, layer)
        assert isinstance(part, KroneckerPart)
        assert_close(part.inputs, a)
        assert_close(part.outputs, g)
        assert float(part.count) == N


def test_kronecker_factors_of_a_convolution_sum_over_patches(dense: Any) -> None:
    found = sweep("images")
    part = found.layered(kronecker=True).parts["0.weight", "0.bias"]
    module, (by_hand, x, y) = found.network.module, reference(dense, found)
    patches = nn.functional.unfold(x, 2, stride=2)  # [N, 4, T]
    a = torch.cat([patches, torch.ones_like(patches[:, :1])], 1).transpose(0, 1).flatten(1)
    g = torch.stack([torch.func.jacrev(lambda h: module[1:](h.unsqueeze(0)))(h.clone())[0] for h in module[0](x)])
    g = g.flatten(3)  # [N, D, O, T]
    assert_close(part.inputs, a @ a.T)
    assert_close(part.outputs, torch.einsum("ndot,nde,nept->op", g, by_hand.fisher(x, y), g))
    assert float(part.count) == N * 4


def test_norms_and_other_layers_get_a_diagonal(dense: Any) -> None:
    parts = sweep("images").layered(kronecker=True).parts
    assert {names: type(part) for names, part in parts.items()} == {
        ("0.weight", "0.bias"): KroneckerPart,
        ("4.weight", "4.bias"): KroneckerPart,
        ("1.weight",): DiagonalPart,
        ("1.bias",): DiagonalPart,
    }
    found = sweep("recurrent")
    by_hand, x, y = reference(dense, found)
    layered, ggn = found.layered(kronecker=True), by_hand.ggn(x, y)
    assert [names for names, part in layered.parts.items() if isinstance(part, KroneckerPart)] == [
        ("twice.weight", "twice.bias")
    ]
    rest = torch.cat([torch.arange(p.start, p.stop) for name, p in layered.places.items() if "twice" not in name])
    assert_close(matrix(layered).diagonal()[rest], ggn.diagonal()[rest])
    assert type(sweep("frozen").layered(kronecker=True).parts["2.weight",]) is KroneckerPart  # its bias is frozen


@pytest.mark.parametrize("case", ["categorical", "multi-label", "two outputs", "heteroscedastic", "poisson"])
def test_kronecker_blocks_are_exact_for_one_row(case: str, dense: Any) -> None:
    _, x, y, _ = CASES[case]
    found = sweep(case, rows=Rows((x[:1], y[:1])))
    by_hand, x, y = reference(dense, found)
    first, ggn = 4 * 3 + 4, by_hand.ggn(x, y)
    ggn[:first, first:], ggn[first:, :first] = 0, 0  # no covariance between layers
    assert_close(matrix(found.layered(kronecker=True)), ggn)


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
    ggn, layered = by_hand.ggn(x, y), found.layered(kronecker=True)
    layers = torch.cat([torch.full((p.stop - p.start,), int(n[0])) for n, p in layered.places.items()])
    assert_close(matrix(layered), ggn * (layers.unsqueeze(1) == layers))


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
    assert float(((found.full(None).ggn / times - ggn) / error).abs().max()) < 5
    assert float(((flat(found.diagonal(), found) / times - ggn.diagonal()) / error.diagonal()).abs().max()) < 5
    part = found.layered(kronecker=True).parts["2.weight", "2.bias"]
    a, g = by_preactivations(dense, sweep("categorical"), 2)
    assert_close(part.inputs / times, a)
    assert_close(part.outputs / times, g, 0.1)
    curved, energy = (flat(found_, found) / times for found_ in found.scores(exact=False))
    assert float(((curved - ggn.diagonal()) / error.diagonal()).abs().max()) < 5
    signs = (2 * j.square().sum(1).square().sum(0) / times).sqrt()
    assert float(((energy - j.square().sum((0, 1))) / signs).abs().max()) < 5
    other = Sweep(found.network, found.params, found.hyper, found.rows, Run(seed=1), "mc")
    assert not torch.equal(other.full(None).ggn, found.full(None).ggn)


# Dominant directions


def test_low_rank_is_the_best_approximation_of_its_rank(dense: Any) -> None:
    torch.manual_seed(0)
    network = Network(mlp(5, 12, 3).double(), Categorical())
    x, y = normal(60, 5) * torch.tensor([4.0, 2.0, 1.0, 0.3, 0.1]), labels(3, 60)
    found = Sweep(network, network.params(), {}, Rows((x, y)), Run())
    ggn = dense(network, network.params(), {}).ggn(x, y)
    values, vectors = torch.linalg.eigh(ggn)
    for rank in (1, 4, 12):
        rows = found.low_rank(rank).rows
        assert rows.shape == (rank, len(ggn))
        best = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
        assert_close(rows.T @ rows, best, 1e-3)
        assert float(torch.linalg.eigvalsh(ggn - rows.T @ rows)[0]) > -1e-8 * float(values[-1]), "never above the GGN"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_of_more_directions_than_there_are(dtype: torch.dtype, dense: Any) -> None:
    _, x, y, _ = CASES["two outputs"]
    found = sweep("two outputs", dtype, rows=Rows((x[:2].to(dtype), y[:2])))
    by_hand, x, y = reference(dense, sweep("two outputs", rows=Rows((x[:2], y[:2]))))
    rows = found.low_rank(20).rows
    assert_close(rows.T @ rows, by_hand.ggn(x, y), 1e-4 if dtype == torch.float32 else 1e-9)


def test_low_rank_is_not_above_the_ggn_where_rounding_is_all_that_is_left() -> None:
    torch.manual_seed(0)
    network = Network(mlp(10, 50, 1), Gaussian(noise=0.1))
    x = (normal(500, 10) * torch.logspace(0, -6, 10)).float()
    likelihood = network.likelihood
    found = Sweep(network, network.params(), likelihood.initial_hyper(x[:, :1]), Rows((x, x[:, :1])), Run())
    rows, all_rows = found.low_rank(60).rows.double(), found.stacked(None).rows.double()
    above = torch.linalg.eigvalsh(rows.T @ rows - all_rows.T @ all_rows)[-1]
    assert float(above) < 2e-6 * float(all_rows.square().sum())
    assert rows.is_contiguous()


class BiasFirst(nn.Module):
    """A last layer whose bias comes before its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 4), nn.ParameterDict()
        self.out["bias"], self.out["weight"] = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(x).tanh(), self.out["weight"], self.out["bias"])


CASES["bias first"] = (BiasFirst(), ROWS, labels(3, N), Categorical())


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
    monkeypatch.setitem(working_memory.WORKING_NUMBERS, "cpu", numbers)
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: 3)
    monkeypatch.delattr(RowPass, "columns")
    ggn = found.full(None).ggn
    assert torch.equal(ggn, ggn.T)
    assert_close(ggn, by_hand.ggn(x, y))


def test_a_last_layer_may_be_summed_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sweep("bias first")
    found = dataclasses.replace(whole, network=whole.network.restricted(["out.bias", "out.weight"]))
    wanted, features, calls = found.full(None).ggn, RowPass.features, itertools.count()
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: 3)
    monkeypatch.setattr(RowPass, "features", lambda self: features(self) if next(calls) % 2 else None)
    assert_close(found.full(None).ggn, wanted)


def test_a_last_layer_of_many_classes_takes_fewer_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the Fisher information of the classes of each, which is more than one gradient of few features."""
    classes = 50
    network = Network(nn.Linear(2, classes).double(), Categorical())
    found = Sweep(network, network.params(), {}, Rows((normal(N, 2), labels(classes, N))), Run(), "mc")
    asked = []
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: asked.append(columns) or 3)
    found.full(None)
    assert len(asked) == 1
    assert asked[0] * network.n_parameters >= classes**2


# Pieces and precision


def test_a_last_layer_in_single_precision_is_summed_in_double() -> None:
    """Logits may all be shifted: rounding of single precision makes some of those eigenvalues negative."""
    torch.manual_seed(0)
    network = Network(nn.Linear(20, 10), Categorical())
    x = normal(200, 20).relu().float()
    values = torch.linalg.eigvalsh(
        Sweep(network, network.params(), {}, Rows((x, labels(10, 200))), Run()).full(None).ggn
    )
    assert float(values[0]) > -1e-13 * float(values[-1])


@pytest.mark.parametrize(("rows", "block", "batch"), [(1, 1, 1), (5, 3, 2), (9, 7, 3), (10**6, 4, 100)])
def test_the_gram_matrix_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, dense: Any, rows: int, block: int, batch: int
) -> None:
    monkeypatch.setattr(curvature, "GRAM_ROWS", rows)
    monkeypatch.setattr(curvature, "GRAM_BLOCK", block)
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: batch)
    found = sweep("categorical")
    by_hand, x, y = reference(dense, found)
    ggn = found.full(None).ggn
    assert torch.equal(ggn, ggn.T)
    assert_close(ggn, by_hand.ggn(x, y))
    stacked = found.stacked(None).rows
    assert_close(stacked.T @ stacked, by_hand.ggn(x, y))
    assert_close(matrix(found.layered(kronecker=True)), matrix(sweep("categorical").layered(kronecker=True)))


@pytest.mark.parametrize("double_up_to", [0, 4096])
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("case", ["categorical", "images", "heteroscedastic"])
def test_single_and_half_precision_stay_positive_definite(
    monkeypatch: pytest.MonkeyPatch, dense: Any, case: str, bfloat16: bool, double_up_to: int
) -> None:
    monkeypatch.setattr(curvature, "DOUBLE_UP_TO", double_up_to)
    monkeypatch.setattr(gaussians, "DOUBLE_UP_TO", double_up_to)
    found = sweep(case, torch.float32, bfloat16=bfloat16)
    by_hand, x, y = reference(dense, sweep(case))
    wanted, tolerance = by_hand.ggn(x, y), 0.05 if bfloat16 else 1e-5
    full = found.full(None)
    assert full.ggn.dtype == (torch.float64 if double_up_to else torch.float32)
    prior = torch.full((len(wanted),), 1e-5 * float(wanted.trace()))
    stacked = found.stacked(None)
    for ggn, gaussian in (
        (full.ggn, full.gaussian(prior)),
        (stacked.rows.T @ stacked.rows, stacked.gaussian(prior)),
    ):
        assert_close(ggn.double(), wanted, tolerance)
        assert bool(gaussian.variances().isfinite().all())
        assert bool((gaussian.variances() > 0).all())
    assert_close(flat(found.diagonal(), found).double(), wanted.diagonal(), tolerance)
    layered = found.layered(kronecker=True)
    assert_close(matrix(layered), matrix(sweep(case).layered(kronecker=True)), tolerance)
    assert bool((layered.gaussian(prior).variances() > 0).all())


# A killed pass


PASSES: dict[str, Callable[[Sweep], Any]] = {
    "full": lambda s: s.full(None).ggn,
    "stacked": lambda s: s.stacked(None).rows,
    "diagonal": lambda s: flat(s.diagonal(), s),
    "kronecker": lambda s: matrix(s.layered(kronecker=True)),
    "low_rank": lambda s: s.low_rank(3).rows,
    "scores": lambda s: torch.stack([flat(found, s) for found in s.scores(exact=False)]),
}


def kill_at_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Run.checkpoint

    def killed(self: Run, carry: Any, note: Any) -> None:
        keep(self, carry, note)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_a_killed_pass_goes_on_to_the_identical_sum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, fisher: str
) -> None:
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: 3)
    identity = {"fit": "this one"}
    plain = PASSES[name](sweep("categorical", fisher=fisher))
    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    kept = sweep("categorical", fisher=fisher, run=Run(0, folder=tmp_path / "whole", identity=identity))
    whole = PASSES[name](kept)
    kill_at_checkpoints(monkeypatch)
    attempts, found = 0, None
    while found is None:
        attempts += 1
        assert attempts < 20
        again = sweep("categorical", fisher=fisher, run=Run(0, folder=tmp_path / "killed", identity=identity))
        try:
            found = PASSES[name](again)
        except KeyboardInterrupt:
            continue
    assert attempts == 1 + math.ceil(N / 3) * (3 if name == "low_rank" else 1), "no batch was summed twice"
    assert torch.equal(found, whole)
    assert_close(found, plain, 1e-12)


@pytest.mark.parametrize("name", ["full", "diagonal", "kronecker"])
def test_a_killed_pass_goes_on_in_pieces_of_another_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Which is that of the memory which is free."""
    plain = PASSES[name](sweep("categorical"))
    kill_at_checkpoints(monkeypatch)

    def go_on(size: int) -> Tensor:
        monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: size)
        return PASSES[name](sweep("categorical", run=Run(0, folder=tmp_path / "killed")))

    for size in (3, 2, N):  # ends with the last row
        with pytest.raises(KeyboardInterrupt):
            go_on(size)
    assert_close(go_on(1), plain, 1e-12)
