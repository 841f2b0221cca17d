"""A wide Kronecker factor, kept as a few directions and the mean of the rest: exact for its own matrix."""

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Categorical, Network
from caveat.engine.flat_weights import flat_places
from caveat.engine.laplace.factor_sides import FactorSum, Side, Sketch, directions_of
from caveat.engine.laplace.layer_gaussians import KroneckerPart, LayerCurvature
from caveat.engine.row_gradients import Jacobian


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def columns(side: int, decay: float, count: int = 200) -> Tensor:
    """Columns whose second moments fall by a factor from direction to direction."""
    scales = decay ** torch.arange(side, dtype=torch.float64)
    return torch.linalg.qr(normal(side, side, seed=1)).Q @ (scales[:, None] * normal(side, count))


def summed(a: Tensor, directions: int) -> Tensor | Sketch:
    total = FactorSum.empty(len(a), directions, a)
    for piece in a.split(70, 1):
        total.add(piece)
    return total.total()


def matrix(side: Side) -> Tensor:
    """The factor that a side stands for."""
    eye = torch.eye(len(side.vectors), dtype=torch.float64)
    across = 0 if side.rest is None else side.rest * (eye - side.vectors @ side.vectors.T)
    return (side.vectors * side.values) @ side.vectors.T + across


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


def test_directions_of_wide_factors_alone_are_chosen() -> None:
    assert directions_of(4097, 8, "auto") == 64
    assert directions_of(769, 8, "auto") == 64
    assert directions_of(512, 8, "auto") == 0
    assert directions_of(4608, 512, "auto") == 0, "a wide convolution has no narrow side"
    assert directions_of(4097, 8, "whole") == 0
    assert directions_of(41, 30, 20) == 20
    assert directions_of(40, 30, 20) == 0


def test_a_factor_of_few_directions_is_exact() -> None:
    a = normal(30, 4) @ normal(4, 50, seed=2)
    side = Side.of(summed(a, 5))
    close(matrix(side), a @ a.T, 1e-7)
    assert float(side.rest or 0.0) < 1e-6 * float(side.values.max())


def test_the_leading_directions_are_those_of_the_eigenvectors_and_the_trace_is_kept() -> None:
    a = columns(40, 0.6)
    side, whole = Side.of(summed(a, 8)), a @ a.T
    close(side.values[:4], torch.linalg.eigvalsh(whole).flip(0)[:4], 1e-3)
    assert float(matrix(side).trace()) == pytest.approx(float(whole.trace()), rel=1e-10)
    assert float((matrix(side) - whole).norm() / whole.norm()) < 0.01
    fewer = Side.of(summed(a, 2))
    assert float((matrix(fewer) - whole).norm() / whole.norm()) > 0.02, "fewer directions are worse"


def test_a_frame_is_tight_and_its_shares_are_dimensions() -> None:
    side = Side.of(summed(columns(12, 0.8), 3))
    vectors = normal(12, 5, seed=4)
    close(side.restored(side.rotated(vectors)), vectors, 1e-12)
    close(side.restored(side.spectrum()[:, None] * side.rotated(vectors)), matrix(side) @ vectors, 1e-12)
    assert float(side.shares().sum()) == pytest.approx(12)
    numbers = torch.cat([normal(3, 2, seed=5), normal(1, 2, seed=6).expand(12, 2)])
    wanted = torch.stack(
        [side.restored(c[:, None] * side.rotated(torch.eye(12).double())).diagonal() for c in numbers.T], 1
    )
    close(side.squares(numbers), wanted, 1e-12)


def test_sums_of_two_data_sets_add_up() -> None:
    a, b = columns(20, 0.7), columns(20, 0.9)
    one, other, both = (summed(part, 4) for part in (a, b, torch.cat([a, b], 1)))
    assert isinstance(one, Sketch)
    assert isinstance(other, Sketch)
    assert isinstance(both, Sketch)
    close(one.plus(other).products, both.products, 1e-12)
    again = Side.of(Side.of(one, torch.tensor(3.0)).factor(torch.tensor(3.0)))
    close(matrix(again), matrix(Side.of(one)), 0.05)


def adapter() -> tuple[Network, LayerCurvature, LayerCurvature]:
    """A narrow layer on a wide input, its curvature by sketches, and that of the matrices these stand for."""
    network = Network(nn.Sequential(nn.Linear(20, 2), nn.Tanh(), nn.Linear(2, 20)).double(), Categorical())
    curvatures = []
    for sketched in (True, False):
        parts = {}
        for names, (i, o) in {("0.weight", "0.bias"): (21, 2), ("2.weight", "2.bias"): (3, 20)}.items():
            a, g, count = columns(i, 0.7), columns(o, 0.8), torch.tensor(200.0, dtype=torch.float64)
            sums = [summed(part, 4 if len(part) > 8 else 0) for part in (a, g)]
            if not sketched:
                sums = [s if isinstance(s, Tensor) else matrix(Side.of(s)) for s in sums]
            parts[names] = KroneckerPart(*sums, count, True)
        curvatures.append(LayerCurvature(dict(parts), flat_places(network)))
    return network, *curvatures


def test_the_posterior_is_that_of_the_matrix_it_stands_for() -> None:
    network, sketched, whole = adapter()
    prior = torch.full((network.n_parameters,), 0.3, dtype=torch.float64)
    found, wanted = sketched.gaussian(prior), whole.gaussian(prior)
    row_pass = Jacobian(network, network.params(), normal(3, 20)).at(normal(3, 20))
    close(found.covariance(row_pass), wanted.covariance(row_pass))
    close(found.covariance(row_pass, joint=True), wanted.covariance(row_pass, joint=True))
    close(found.covariances(row_pass, [0.1, 10.0]), wanted.covariances(row_pass, [0.1, 10.0]))
    close(found.variances(), wanted.variances())
    assert found.log_det(2.0) == pytest.approx(wanted.log_det(2.0), rel=1e-10)
    draws = [gaussian.weights(gaussian.deltas(3, torch.Generator().manual_seed(1))) for gaussian in (found, wanted)]
    close(draws[0], draws[1], 1e-8)
    deltas = found.deltas(3, torch.Generator().manual_seed(1))
    close(found.shifts(row_pass, deltas), (row_pass.rows() @ draws[0].T).movedim(2, 0))
    assert found.tensors()["0.weight+0.bias|in_vectors"].shape == (21, 4)


def adapted() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(60, 48) * 0.7 ** torch.arange(48)
    module = nn.Sequential(nn.Linear(48, 2), nn.Tanh(), nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 3))
    return module, (x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def fitted(factors: str | int, rows: int = 60) -> caveat.Posterior:
    module, (x, y) = adapted()
    task = caveat.Task(module, (x[:rows], y[:rows]), Categorical())
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=40, batch_size=20)), progress=False)
    method = caveat.Laplace(factors=factors, precision=1.0, skip=0)
    return caveat.fit(task, method, start=point, progress=False)


def test_few_directions_predict_as_all_do_from_fewer_bytes(tmp_path) -> None:
    x = adapted()[1][0]
    whole, few = fitted("whole"), fitted(10)
    exact, found = whole.moments(x)[1], few.moments(x)[1]
    assert float((found - exact).norm() / exact.norm()) < 0.05
    assert not torch.equal(found, exact)
    assert few.info.stored_bytes < 0.5 * whole.info.stored_bytes
    few.save(tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", adapted()[0])
    assert torch.equal(loaded.predict(x).samples, few.predict(x).samples)
    both = few.update(adapted()[1], progress=False)
    assert bool(both.moments(x)[1].diagonal(dim1=1, dim2=2).sum() < found.diagonal(dim1=1, dim2=2).sum())


def test_a_state_with_a_factor_of_another_shape_is_refused(tmp_path) -> None:
    few = fitted(10)
    state = {group: dict(tensors) for group, tensors in few.state.items()}
    name = next(name for name in state["gaussian"] if name.endswith("in_vectors"))
    state["gaussian"][name] = state["gaussian"][name][:, :-1]
    with pytest.raises(ValueError, match="in_vectors"):
        few.method.check_state(state, few.network)
