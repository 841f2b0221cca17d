"""A last layer's rows from an ordinary pass are those of a watched one, or are not given."""

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.row_gradients import Jacobian, LastLayer
from caveat.network import Network

X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Head(nn.Module):
    """Two layers, and what may be done after the last."""

    def __init__(self, after: str = "", bias: bool = True) -> None:
        super().__init__()
        self.after, self.first, self.last = after, nn.Linear(3, 5), nn.Linear(5, 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.last(self.first(x).tanh())
        if self.after == "twice":
            return outputs + self.last(self.first(x))
        return outputs.mul_(2) if self.after == "in place" else outputs


def rows_of(module: nn.Module) -> tuple[LastLayer | None, Jacobian]:
    network = Network(module.double(), caveat.Categorical(), parameters="last.*")
    jacobian = Jacobian(network, network.params(), X[:3])
    return LastLayer.of(jacobian), jacobian


@pytest.mark.parametrize("bias", [True, False])
def test_rows_and_products_are_those_of_a_watched_pass(bias: bool) -> None:
    torch.manual_seed(0)
    last, jacobian = rows_of(Head(bias=bias))
    assert last is not None
    rows, watched = last.at(X), jacobian.at(X)
    assert rows is not None
    torch.testing.assert_close(rows.outputs, watched.outputs)
    torch.testing.assert_close(rows.rows(), watched.rows())
    matrix = torch.randn(jacobian.size, 4, dtype=torch.float64)
    torch.testing.assert_close(rows.times(matrix), watched.times(matrix))


@pytest.mark.parametrize("after", ["twice", "in place"])
def test_a_layer_whose_outputs_are_not_the_networks_is_left_to_the_general_way(after: str) -> None:
    last, _ = rows_of(Head(after))
    assert last is None or last.at(X) is None


def test_weights_of_another_layer_are_left_to_the_general_way() -> None:
    network = Network(Head().double(), caveat.Categorical(), parameters="first.*")
    assert LastLayer.of(Jacobian(network, network.params(), X[:3])) is None
