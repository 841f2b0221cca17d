"""Rows whose derivatives are those of the row alone, up to the corners of relus that rounding turns over."""

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.linearised.rows_alone import facts_of_rows


class AtACorner(nn.Module):
    """Units that stand a millionth of a thousandth above zero, which single precision cannot tell from below."""

    def __init__(self, in_double: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.in_double = nn.Linear(3, 4), nn.Linear(4, 2), in_double

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64 and not self.in_double:
            raise RuntimeError("expected single precision")
        h = self.first(x)
        rounding = torch.finfo(x.dtype).eps * (-1 if len(x) == 1 else 1)  # of a sum in another order
        return self.last((h - h.detach() + 1e-9 + rounding).relu()) + h[:, :2]


def network(module: nn.Module) -> caveat.Network:
    return caveat.Network(module, caveat.Categorical())


def test_what_rounding_turns_over_is_no_dependence_on_other_rows() -> None:
    torch.manual_seed(0)
    net, x = network(AtACorner()), torch.randn(3, 3)
    assert facts_of_rows(net, net.params(), net.names, x).output_shape == (2,)
    net = network(AtACorner(in_double=False))
    with pytest.raises(ValueError, match=r"the derivatives of .*first.weight.* are not those .* for a row alone"):
        facts_of_rows(net, net.params(), net.names, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dependence_on_other_rows_is_refused_in_either_precision(dtype: torch.dtype) -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h - 0.5 * h.mean(0)

    torch.manual_seed(0)
    net = network(Centred(3, 2).to(dtype))
    with pytest.raises(ValueError, match="the derivatives of weight are not those"):
        facts_of_rows(net, net.params(), net.names, torch.randn(3, 3, dtype=dtype))
