"""The Jacobian itself as features: against autograd's in float64, and when holding it pays."""

from types import SimpleNamespace

import pytest
import torch

from caveat.engine.linear_model import RowNoise
from caveat.engine.linearised import held_features
from caveat.engine.linearised.held_features import HeldFeatures, holding_pays
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.rows import Rows
from tests.engine.tangents.program_reference import CASES, K, N, dense_jacobian, doubled, network_of


def features_of(name: str = "in place") -> tuple[NetworkFeatures, torch.Tensor]:
    torch.manual_seed(0)
    module, x = CASES[name]()
    network, x = network_of(module), doubled(x)
    features = NetworkFeatures(network, network.params(), Rows((x, torch.zeros(N, dtype=torch.long))))
    return features, dense_jacobian(network, network.names, x)


@pytest.mark.parametrize("name", ["in place", "tied", "tokens", "recurrent and attention", "partly frozen"])
def test_products_are_those_of_the_jacobian(name: str) -> None:
    features, J = features_of(name)
    held = HeldFeatures.of_network(features, "few")
    assert (held.rows, held.outputs, held.size) == J.shape
    z, v = torch.randn(K, held.size).double(), torch.randn(K, N, held.outputs).double()
    (block,) = held.blocks()
    torch.testing.assert_close(block.forward(z), torch.einsum("bmd,kd->kbm", J, z))
    torch.testing.assert_close(block.backward(v), torch.einsum("bmd,kbm->kd", J, v))
    factor = torch.randn(N, held.outputs, 2).double()
    expected = torch.einsum("bmd,bmr->brd", J, factor).square().sum((0, 1))
    torch.testing.assert_close(held.curvature_diagonal(RowNoise(factor)), expected)
    some = torch.tensor([3, 1])
    torch.testing.assert_close(held.of(some).dense.phi, J[some])
    assert held.way()["why"] == "few"


def test_holding_pays_where_everything_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    features, J = features_of()
    assert holding_pays(features, 3, 1e6).startswith("15 rows x outputs are few: an exact solve over them takes")
    features.float16 = True
    assert not holding_pays(features, 3, 1e6)
    features.float16 = False
    on_gpu = SimpleNamespace(device=torch.device("cuda"), rows=900, outputs=10, size=100_000, dtype=torch.float32)
    on_gpu.float16, at_once = False, "9,000 rows x outputs are few: an exact solve over them"
    assert holding_pays(on_gpu, 10, 6e8).startswith(at_once), "an adapter of a hundred thousand weights, on a GPU"
    on_gpu.rows = 1300
    assert not holding_pays(on_gpu, 10, 6e8)
    monkeypatch.setattr(held_features, "_FEW_FLOPS", 0)
    assert not holding_pays(features, 3, 0.0)
    assert not holding_pays(features, 2000, 1e6)
    monkeypatch.setattr(held_features, "_HELD_BYTES", {"cpu": 15 * J.shape[2]})
    assert not holding_pays(features, 3, 1e6)


def test_a_row_without_finite_derivatives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    features, J = features_of()
    J = J.clone()
    J[4, 1, 7] = torch.nan
    monkeypatch.setattr(held_features.RowPass, "rows", lambda _: J)
    with pytest.raises(ValueError, match="the features of row 4 give products that hold NaN or infinity"):
        HeldFeatures.of_network(features, "few")
