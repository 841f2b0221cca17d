"""A network that ends in a sigmoid is refused where logits are wanted."""

import pytest
import torch
from torch import Tensor, nn

import caveat


class EndsInFunction(nn.Module):
    """Ends in a sigmoid that is no module, and then in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layer(x)).reshape(-1, 1)


def task(model: nn.Module) -> caveat.Task:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    return caveat.Task(model, (x, (x[:, :1] > 0).float()), caveat.Bernoulli())


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()), EndsInFunction()])
def test_a_sigmoid_at_the_end_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="ends in a sigmoid, and Bernoulli takes logits"):
        task(model)


def test_sigmoids_inside_and_logits_between_zero_and_one_are_not() -> None:
    last = nn.Linear(4, 1)
    nn.init.constant_(last.weight, 0.1)
    nn.init.constant_(last.bias, 0.1)
    assert task(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), last)).n == 20
    assert task(nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))).n == 20
