"""Every form of a Gaussian over weights agrees with the dense inverse of its precision: moments, draws, scales."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from caveat import Gaussian as GaussianLikelihood
from caveat import Network
from caveat.engine.flat_weights import flat_places
from caveat.engine.laplace import gaussians
from caveat.engine.laplace.gaussians import Curvature, FullCurvature, StackedCurvature
from caveat.engine.laplace.layer_gaussians import DiagonalPart, KroneckerPart, LayerCurvature, restored
from caveat.engine.row_gradients import Jacobian, RowPass

SCALES = (0.03, 1.0, 40.0)
Form = tuple[Curvature, Tensor, Tensor]  # curvature, prior [n], GGN [n, n]


class Twice(nn.Module):
    """A layer that acts twice, on rows with positions; one without bias; one that does not act."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never, self.head = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(self.twice(x).tanh())).sum(1)


MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "mlp": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "images": (nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)), (1, 3, 3)),
    "twice": (Twice(), (3, 2)),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def setting(case: str, rows: int = 5) -> tuple[Network, RowPass]:
    module, shape = MODULES[case]
    network = Network(module.double(), GaussianLikelihood())
    x = normal(rows, *shape)
    return network, Jacobian(network, network.params(), x).at(x)


def positive(n: int, rank: int, seed: int) -> Tensor:
    half = normal(rank, n, seed=seed)
    return half.T @ half


def full(network: Network) -> Form:
    n = network.n_parameters
    ggn = positive(n, n // 2, 1)
    return FullCurvature(ggn), normal(n, seed=2).exp(), ggn


def rows(network: Network) -> Form:
    half = normal(6, network.n_parameters, seed=1)
    return StackedCurvature(half), normal(network.n_parameters, seed=2).exp(), half.T @ half


def diagonal(network: Network) -> Form:
    values = normal(network.n_parameters, seed=1).exp()
    parts = {(name,): DiagonalPart(values[place]) for name, place in flat_places(network).items()}
    return LayerCurvature(parts, flat_places(network)), normal(network.n_parameters, seed=2).exp(), values.diag()


def kronecker(network: Network) -> Form:
    """A product for linear layers and convolutions, with one prior a layer; a diagonal for the others."""
    where, own = flat_places(network), network.params()
    parts: dict[tuple[str, ...], DiagonalPart | KroneckerPart] = {}
    prior = torch.empty(network.n_parameters, dtype=torch.float64)
    ggn = torch.zeros(len(prior), len(prior), dtype=torch.float64)
    layers = dict.fromkeys(name.rpartition(".")[0] for name in network.names)
    for number, layer in enumerate(layers):
        names = tuple(name for name in network.names if name.startswith(f"{layer}."))
        prior[where[names[0]].start : where[names[-1]].stop] = 0.5 + number
        weight = own[names[0]]
        if weight.ndim == 1 or layer == "never":
            for name in names:
                values = normal(own[name].numel(), seed=number).exp()
                parts[name,] = DiagonalPart(values)
                ggn[where[name], where[name]] = values.diag()
            continue
        o, i = len(weight), weight[0].numel() + len(names) - 1
        part = KroneckerPart(positive(i, 3, number), positive(o, 1, number + 9), torch.tensor(7.0), len(names) > 1)
        parts[names] = part
        # vec(W | b) is G (x) A / count over outputs x (inputs, 1): one row of it for every weight, then every bias.
        at = {(k, j): where[names[0]].start + k * weight[0].numel() + j for k in range(o) for j in range(i)}
        at |= {(k, i - 1): where[names[1]].start + k for k in range(o) if len(names) > 1}
        for (k, j), row in at.items():
            for (m, n), column in at.items():
                ggn[row, column] = part.outputs[k, m] * part.inputs[j, n] / 7
    return LayerCurvature(parts, where), prior, ggn


FORMS: dict[str, Callable[[Network], Form]] = {
    "full": full,
    "rows": rows,
    "diagonal": diagonal,
    "kronecker": kronecker,
}
every_form = pytest.mark.parametrize("form", FORMS)
every_case = pytest.mark.parametrize("case", MODULES)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


@every_form
@every_case
def test_moments_are_those_of_the_dense_inverse(form: str, case: str) -> None:
    network, row_pass = setting(case)
    curvature, prior, ggn = FORMS[form](network)
    gaussian, precision = curvature.gaussian(prior), ggn + prior.diag()
    inverse, j = precision.inverse(), row_pass.rows()  # [B, D, n]
    assert_close(gaussian.covariance(row_pass), j @ inverse @ j.mT)
    together = j.flatten(0, 1)
    assert_close(gaussian.covariance(row_pass, joint=True), together @ inverse @ together.T)
    assert gaussian.log_det() == pytest.approx(float(precision.logdet()), rel=1e-10)
    assert_close(gaussian.variances(), inverse.diagonal())
    assert torch.equal(gaussian.prior, prior)
    deltas = gaussian.deltas(4, torch.Generator().manual_seed(3))
    assert deltas.shape == (4, network.n_parameters)
    assert_close(gaussian.shifts(row_pass, deltas), torch.einsum("bdn,sn->sbd", j, gaussian.weights(deltas)))


@pytest.mark.parametrize("rows", [3, 20])  # fewer outputs than weights, and more
def test_a_last_layers_moments_are_those_of_the_dense_inverse(rows: int) -> None:
    network = Network(MODULES["mlp"][0].double(), GaussianLikelihood(), parameters="2.*")
    x = normal(rows, 3)
    row_pass = Jacobian(network, network.params(), x).at(x)
    curvature, prior, ggn = full(network)
    gaussian, inverse, j = curvature.gaussian(prior), (ggn + prior.diag()).inverse(), row_pass.rows()
    assert row_pass.features() is not None
    assert_close(gaussian.covariance(row_pass), j @ inverse @ j.mT)
    assert_close(gaussian.covariance(row_pass, joint=True), j.flatten(0, 1) @ inverse @ j.flatten(0, 1).T)
    deltas = gaussian.deltas(4, torch.Generator().manual_seed(3))
    assert_close(gaussian.shifts(row_pass, deltas), torch.einsum("bdn,sn->sbd", j, deltas))
    found = curvature.path(prior).covariances(row_pass, SCALES)
    for k, scale in enumerate(SCALES):
        assert_close(found[k], j @ (ggn + scale * prior.diag()).inverse() @ j.mT)


@every_form
@pytest.mark.parametrize("case", ["mlp", "twice"])
def test_draws_have_the_covariance_of_the_dense_inverse(form: str, case: str) -> None:
    network, _ = setting(case)
    curvature, prior, ggn = FORMS[form](network)
    gaussian, count = curvature.gaussian(prior), 40_000
    draws = gaussian.weights(gaussian.deltas(count, torch.Generator().manual_seed(4)))
    covariance = (ggn + prior.diag()).inverse()
    spread = covariance.diagonal().sqrt()
    assert float((draws.mean(0) / spread * math.sqrt(count)).abs().max()) < 5
    # The standard error of a covariance entry is at most sqrt(2 c_ii c_jj / count).
    error = (draws.T @ draws / count - covariance) / (spread.unsqueeze(1) * spread) * math.sqrt(count / 2)
    assert float(error.abs().max()) < 5


@every_form
@every_case
def test_a_path_serves_every_multiple_of_the_prior(form: str, case: str) -> None:
    network, row_pass = setting(case)
    curvature, prior, ggn = FORMS[form](network)
    path, j = curvature.path(prior), row_pass.rows()
    found = path.covariances(row_pass, SCALES)
    assert path.lowest < 1e-10
    for k, scale in enumerate(SCALES):
        precision, alone = ggn + scale * prior.diag(), curvature.gaussian(scale * prior)
        assert_close(found[k], j @ precision.inverse() @ j.mT)
        assert_close(found[k], alone.covariance(row_pass))
        assert path.log_det(scale) == pytest.approx(float(precision.logdet()), rel=1e-10)
        assert path.log_det(scale) == pytest.approx(alone.log_det(), rel=1e-10)


@every_form
@every_case
def test_what_is_stored_is_all_there_is(form: str, case: str) -> None:
    network, row_pass = setting(case)
    curvature, prior, ggn = FORMS[form](network)
    gaussian = curvature.gaussian(prior)
    again = restored(gaussian.tensors(), flat_places(network))
    assert type(again) is type(gaussian)
    for joint in (False, True):
        assert torch.equal(again.covariance(row_pass, joint), gaussian.covariance(row_pass, joint))
    drawn = [g.weights(g.deltas(3, torch.Generator().manual_seed(0))) for g in (gaussian, again)]
    assert torch.equal(*drawn)
    # Adding another prior to the curvature that comes back is adding it to the GGN.
    more = again.curvature().gaussian(3 * prior)
    assert_close(more.variances(), (ggn + 3 * prior.diag()).inverse().diagonal(), 1e-7)


@every_form
def test_curvatures_can_be_multiplied(form: str) -> None:
    network, _ = setting("images")
    curvature, prior, ggn = FORMS[form](network)
    found = curvature.times(5.0).gaussian(prior).variances()
    assert_close(found, (5 * ggn + prior.diag()).inverse().diagonal())


def test_curvatures_of_two_data_sets_add_up() -> None:
    network, _ = setting("images")
    for form in (diagonal, kronecker):
        first, prior, ggn = form(network)
        assert isinstance(first, LayerCurvature)
        both = first.plus(first)  # twice the sums, over twice the count
        assert_close(both.gaussian(prior).variances(), (2 * ggn + prior.diag()).inverse().diagonal())


def test_the_dual_form_does_not_cancel_in_single_precision() -> None:
    network, row_pass = setting("mlp")
    half = (1e3 * normal(15, network.n_parameters, seed=1)).float()  # data that say much, and a prior that says little
    prior = torch.full((network.n_parameters,), 1e-2)
    j = row_pass.rows() @ half.double().T @ half.double() / 1e6  # only what the data determine
    exact = (half.double().T @ half.double() + prior.double().diag()).inverse()

    class Seen:
        outputs = row_pass.outputs.float()

        def rows(self) -> Tensor:
            return j.float()

    found: Any = StackedCurvature(half).gaussian(prior)
    rounded = j.float().double()
    assert_close(found.covariance(Seen()).double(), rounded @ exact @ rounded.mT, 1e-2)
    assert_close(found.variances().double(), exact.diagonal(), 1e-3)


@pytest.mark.parametrize("wide", [True, False])
def test_a_precision_that_is_not_positive_definite_is_a_sentence(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    if not wide:
        monkeypatch.setattr(gaussians, "DOUBLE_UP_TO", 0)
    prior = torch.full((3,), 0.5)
    for bad in (-2.0, torch.nan, torch.inf):
        ggn = torch.eye(3)
        ggn[1, 1] = bad
        with pytest.raises(ValueError, match=r"\(3 weights\) is not positive definite.*raise the prior's precision"):
            FullCurvature(ggn).gaussian(prior)
    with pytest.raises(ValueError, match="not positive definite"):
        StackedCurvature(torch.full((2, 3), torch.nan)).gaussian(prior)


def test_a_kronecker_product_takes_one_prior_only() -> None:
    network, _ = setting("mlp")
    curvature, prior, _ = kronecker(network)
    prior[0] *= 2
    with pytest.raises(ValueError, match=r"one prior precision for 0\.weight and 0\.bias.*structure='diagonal'"):
        curvature.gaussian(prior)
