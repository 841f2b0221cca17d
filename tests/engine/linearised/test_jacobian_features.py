"""A network's Jacobian as features of a linear model, block by block, against autograd's in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import caveat
from caveat.batches import Inputs
from caveat.engine.linear_model import LinearModel, RowNoise
from caveat.engine.linearised import jacobian_features
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.tangents import Programs, choice
from caveat.network import Network
from caveat.rows import Rows
from tests.engine.tangents.program_reference import (
    CASES,
    K,
    N,
    PartlyFrozen,
    TwoConvolutions,
    dense_jacobian,
    doubled,
    network_of,
)


def features_of(module: nn.Module, x: Tensor, **options: Any) -> NetworkFeatures:
    network = network_of(module)
    rows = Rows((doubled(x), torch.zeros(len(x), dtype=torch.long)))
    return NetworkFeatures(network, network.params(), rows, **options)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian_features, "FEW_ROWS", 1)


def assert_products(features: NetworkFeatures, x: Inputs) -> None:
    J = dense_jacobian(features.network, features.names, x)
    assert (features.rows, features.outputs, features.size) == J.shape
    z, v = torch.randn(K, features.size).double(), torch.randn(K, N, features.outputs).double()
    found, pulled, outputs = [], torch.zeros_like(z), []
    for block in features.blocks():
        found.append(block.forward(z))
        pulled += block.backward(v[:, block.index])
        outputs.append(block.outputs)
    torch.testing.assert_close(torch.cat(found, 1), torch.einsum("bmd,kd->kbm", J, z), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pulled, torch.einsum("bmd,kbm->kd", J, v), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close((torch.cat(found, 1) * v).sum((1, 2)), (z * pulled).sum(1), rtol=1e-10, atol=1e-10)
    expected = features.network(features.params, x).flatten(1)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("name", ["perceptron", "residual", "tokens", "recurrent and attention"])
def test_products_of_all_blocks_are_those_of_the_jacobian(name: str) -> None:
    module, x = CASES[name]()
    assert_products(features_of(module, x, block_rows=3), doubled(x))


def test_many_vectors_go_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian_features, "_CPU_NUMBERS", 32)
    module, x = CASES["in place"]()
    features = features_of(module, x)
    assert features.at_once < K
    assert_products(features, doubled(x))


def test_some_parameters_in_an_order_of_their_own() -> None:
    features = features_of(PartlyFrozen(), x := torch.randn(N, 4), names=["scale", "second.bias"])
    assert features.size == 6
    assert_products(features, x.double())


def test_chosen_rows_are_those_of_the_data() -> None:
    module, x = CASES["perceptron"]()
    features = features_of(module, x)
    J, order = dense_jacobian(features.network, features.names, x.double()), [torch.tensor([4, 0]), torch.tensor([2])]
    z = torch.randn(K, features.size).double()
    for index, block in zip(order, features.blocks(order), strict=True):
        assert torch.equal(block.index, index)
        expected = torch.einsum("bmd,kd->kbm", J[index], z)
        torch.testing.assert_close(block.forward(z), expected, rtol=1e-10, atol=1e-10)


class Pairs(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.linspace(0, 1, 3).double() + i
        return {"left": x, "right": x.cos(), "label": torch.tensor(0)}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) * self.right(right)


def test_inputs_of_several_tensors() -> None:
    network = network_of(TwoInputs())
    rows = Rows(DataLoader(Pairs(), batch_size=2))
    x = next(rows.batches([torch.arange(N)]))[0]
    assert_products(NetworkFeatures(network, network.params(), rows, block_rows=2), x)


def test_the_diagonal_of_the_curvature_is_exact() -> None:
    module, x = CASES["in place"]()
    features = features_of(module, x, names=None)
    J = dense_jacobian(features.network, features.names, x.double())
    full, diagonal = torch.randn(N, 3, 2).double(), torch.rand(N, 3).double()
    expected = torch.einsum("bmd,bmr->brd", J, full).square().sum((0, 1))
    torch.testing.assert_close(features.curvature_diagonal(RowNoise(full)), expected, rtol=1e-10, atol=1e-12)
    expected = (J * diagonal.unsqueeze(2)).square().sum((0, 1))
    torch.testing.assert_close(features.curvature_diagonal(RowNoise(diagonal)), expected, rtol=1e-10, atol=1e-12)


def unfolded() -> nn.Module:
    """A norm that cannot be folded: its weights are in single precision, what it takes is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 2), nn.Flatten())


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("make", [TwoConvolutions, unfolded])
def test_float16_is_near_and_gives_single_precision(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randn(N, 1, 4, 4)
    network = Network(module, caveat.Categorical())
    rows = Rows((x, torch.zeros(N, dtype=torch.long)))
    exact, rough = (NetworkFeatures(network, network.params(), rows, float16=b) for b in (False, True))
    z, v = torch.randn(K, exact.size), torch.randn(K, N, 3)
    a, b = next(exact.blocks()), next(rough.blocks())
    for precise, short in ((a.forward(z), b.forward(z)), (a.backward(v), b.backward(v)), (a.outputs, b.outputs)):
        assert short.dtype == torch.float32
        assert 1e-5 < float((short - precise).norm() / precise.norm()) < 2e-3


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e12])
def test_float16_takes_vectors_of_any_size(size: float) -> None:
    """Whose products are beyond its range, but for their scale; and beside others of another size."""
    network = Network(TwoConvolutions(), caveat.Categorical())
    rows = Rows((torch.randn(N, 1, 4, 4), torch.zeros(N, dtype=torch.long)))
    block = next(NetworkFeatures(network, network.params(), rows, float16=True).blocks())
    z, v = torch.randn(K, block.features.size), torch.randn(K, N, 3)
    sizes = torch.tensor([1.0, size, 0.0])[:K]
    for product, given in ((block.forward, z), (block.backward, v)):
        scaled = product(given * sizes.view(-1, *[1] * (given.ndim - 1)))
        for one, plain, factor in zip(scaled, product(given), sizes, strict=True):
            torch.testing.assert_close(
                one / (factor or 1), plain * (factor > 0), rtol=0.1, atol=2e-3 * float(plain.norm())
            )


@pytest.mark.usefixtures("many_rows")
def test_float16_makes_room_where_a_product_is_too_large() -> None:
    network = Network(nn.Sequential(nn.Linear(4, 64, bias=False), nn.Linear(64, 3, bias=False)), caveat.Categorical())
    for parameter, value in zip(network.module.parameters(), (20.0, 0.001), strict=True):
        nn.init.constant_(parameter, value)
    rows = Rows((torch.full((N, 4), 200.0), torch.zeros(N, dtype=torch.long)))
    exact, short = (NetworkFeatures(network, network.params(), rows, float16=f) for f in (False, True))
    v = torch.ones(1, N, 3)
    found, expected = (next(f.blocks()).backward(v) for f in (short, exact))
    assert float(expected.max()) > torch.finfo(torch.float16).max
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


def test_a_network_whose_numbers_leave_the_range_of_float16_is_refused() -> None:
    network, x = Network(nn.Linear(4, 3), caveat.Categorical()), torch.randn(N, 4)
    x[3] = 1e6
    rows = Rows((x, torch.zeros(N, dtype=torch.long)))
    assert next(NetworkFeatures(network, network.params(), rows).blocks()).outputs.isfinite().all()
    with pytest.raises(ValueError, match=r"numbers at row 3 leave the range of float16.*arithmetic='full'"):
        next(NetworkFeatures(network, network.params(), rows, float16=True).blocks())


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Straight.apply(self.first(x)))


class OverTheBatch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def test_a_custom_derivative_is_that_of_autograd() -> None:
    features = features_of(Signs(), x := torch.randn(N, 4))
    assert_products(features, x.double())


def test_rows_that_depend_on_each_other_are_refused() -> None:
    network = network_of(OverTheBatch(4, 3))
    params, rows = network.params(), Rows((torch.randn(N, 4).double(), torch.zeros(N, dtype=torch.long)))
    for _ in range(2):  # what the network keeps does not make it pass
        with pytest.raises(ValueError, match=r"derivatives of weight.*row alone.*leave those parameters out"):
            NetworkFeatures(network, params, rows)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names=\['other'\] must be among the parameters"):
        features_of(nn.Linear(4, 3), torch.randn(N, 4), names=["other"])


class Root(nn.Linear):
    """Finite at zero, but its slope is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs().sqrt()


@pytest.mark.parametrize("row", [0, 1])
def test_the_first_rows_without_finite_derivatives_are_named(row: int) -> None:
    x = torch.ones(N, 2)
    x[row] = 0
    with pytest.raises(
        ValueError, match=f"derivatives of row {row} by 1.weight hold NaN or infinity: look at that row"
    ):
        features_of(nn.Sequential(nn.Identity(), Root(2, 2, bias=False)), x)


def test_rows_without_finite_derivatives_are_named() -> None:
    x = torch.ones(N, 2)
    x[3] = 0
    features = features_of(Root(2, 2, bias=False), x, block_rows=2)
    model = LinearModel(features, RowNoise(torch.ones(N, 2).double()), torch.ones(1).double())
    with pytest.raises(ValueError, match="the features of row 3 give products that hold NaN"):
        model.check_finite()


def test_a_network_is_traced_once_for_each_shape_and_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    real = choice.Program
    monkeypatch.setattr(choice, "Program", lambda *a: (traced.append(1), real(*a))[1])
    monkeypatch.setattr(jacobian_features, "FEW_ROWS", 1)
    network, x = network_of(nn.Linear(4, 3)), torch.randn(N, 4).double()
    params, programs = network.params(), Programs()

    def outputs(params: dict[str, Tensor], count: int) -> Tensor:
        rows = Rows((x[:count], torch.zeros(count, dtype=torch.long)))
        features = NetworkFeatures(network, params, rows, programs=programs)
        return torch.cat([block.outputs for block in features.blocks()])

    first = outputs(params, N)
    assert len(traced) == 1
    assert torch.equal(outputs(params, N), first)
    assert len(traced) == 1
    params["bias"] += 1  # in place
    torch.testing.assert_close(outputs(params, N), first + 1)
    other = network.params()
    torch.testing.assert_close(outputs(other, N), first)
    assert len(traced) == 3
    monkeypatch.setattr(choice, "PROGRAMS", 2)
    for count in range(2, N + 1):
        torch.testing.assert_close(outputs(other, count), first[:count])
    assert len(traced) == 4, "further shapes go by autograd"


@pytest.mark.usefixtures("many_rows")
def test_numbers_of_rows_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    real = choice.Program
    monkeypatch.setattr(choice, "Program", lambda *a: (traced.append(1), real(*a))[1])
    module, _ = CASES["perceptron"]()
    network, x, programs = network_of(module), torch.randn(8, 4).double(), Programs()
    params = network.params()
    J = dense_jacobian(network, network.names, x)
    z, v = torch.randn(K, J.shape[2]).double(), torch.randn(K, 8, 3).double()
    for count in (5, 6, 7, 8):
        rows = Rows((x[:count], torch.zeros(count, dtype=torch.long)))
        features = NetworkFeatures(network, params, rows, programs=programs, padded=True)
        (block,) = features.blocks()
        torch.testing.assert_close(block.forward(z), torch.einsum("bmd,kd->kbm", J[:count], z))
        torch.testing.assert_close(block.backward(v[:, :count]), torch.einsum("bmd,kbm->kd", J[:count], v[:, :count]))
        torch.testing.assert_close(block.outputs, network(params, x[:count]))
    assert len(traced) == 1


def test_few_rows_are_not_traced() -> None:
    module, x = CASES["perceptron"]()
    features = features_of(module, x)
    assert_products(features, x.double())
    assert features.way()["why"] == "5 rows are few"
