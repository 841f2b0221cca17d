"""Products with a network's Jacobian by autograd, for networks of every kind, against the dense one in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

import caveat
from caveat.batches import Inputs, map_tensors
from caveat.engine.tangents import AutogradProducts
from caveat.network import Network
from tests.engine.tangents.program_reference import CASES, K, N, dense_jacobian, doubled, network_of


class Padded(nn.Module):
    """Looks whether anything is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.embedding(tokens)
        if not mask.all():
            h = h * mask.unsqueeze(-1)
        q = F.normalize(h, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, q, h).sum(1))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(4, 3), nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        h = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                h[rows] = expert(x[rows]) * weight[rows, None]
        return self.head(h.tanh())


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.recurrent(packed)[1][0].transpose(0, 1).flatten(1))


OTHERS: dict[str, Any] = {
    "padded": lambda: (Padded(), {"tokens": torch.randint(7, (N, 3)), "mask": torch.tensor([[1, 1, 0]] * N)}),
    "routed": lambda: (Routed(), torch.randn(N, 4)),
    "packed": lambda: (Packed(), {"x": torch.randn(N, 4, 3), "lengths": torch.tensor([4, 1, 3, 2, 4])}),
    "weight norm": lambda: (nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)), torch.randn(N, 4)),
}


def products_of(network: Network, x: Inputs, **options: Any) -> AutogradProducts:
    return AutogradProducts.looking(network, network.params(), network.names, x, N, **options)


def assert_products(network: Network, products: AutogradProducts, x: Inputs) -> None:
    J = dense_jacobian(network, network.names, x)
    graph, outputs = products.run(x)
    for k in (K, 1):
        z, v = torch.randn(k, J.shape[2]).double(), torch.randn(k, *J.shape[:2]).double()
        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(products.push(graph, z), torch.einsum("bmd,kd->kbm", J, z), **close)
        torch.testing.assert_close(products.pull(graph, v), torch.einsum("bmd,kbm->kd", J, v), **close)
    torch.testing.assert_close(outputs, network(network.params(), x).flatten(1))


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_products_are_those_of_the_jacobian(name: str) -> None:
    module, x = (CASES | OTHERS)[name]()
    network, x = network_of(module), map_tensors(doubled, x)
    products = products_of(network, x)
    assert not products.facts.forward_mode
    assert products.facts.output_shape == network(network.params(), x).shape[1:]
    assert_products(network, products, x)


class OnceForward(torch.autograd.Function):
    """No second derivatives, but forward-mode ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = x.cos()
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        slope: Tensor = g * ctx.saved_tensors[0].cos()
        return slope

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        slope: Tensor = t * ctx.slope
        return slope


class OnceBackward(torch.autograd.Function):
    """Neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        slope: Tensor = g * ctx.saved_tensors[0].cos()
        return slope


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function.apply(self.first(x)))


def test_forward_mode_where_there_are_no_second_derivatives() -> None:
    network, x = network_of(Applied(OnceForward)), torch.randn(N, 4).double()
    products = products_of(network, x)
    assert products.facts.forward_mode
    assert "forward-mode" in products.facts.way
    assert_products(network, products, x)


def test_an_operation_with_neither_is_refused() -> None:
    network, x = network_of(Applied(OnceBackward)), torch.randn(N, 4).double()
    with pytest.raises(ValueError, match=r"neither second derivatives nor forward-mode ones.*parameters="):
        products_of(network, x)


def test_parameters_that_do_not_act_are_refused_alone_and_zero_beside_others() -> None:
    module = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(2, 2)})
    module.forward = module["used"].forward  # type: ignore[method-assign]
    network, x = network_of(module), torch.randn(N, 4).double()
    assert_products(network, products_of(network, x), x)
    with pytest.raises(ValueError, match="outputs do not depend on the parameters"):
        AutogradProducts.looking(network, network.params(), ["unused.weight"], x, N)


class Adapted(nn.Module):
    """A frozen trunk of bfloat16 with an adapter of float32 in its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.trunk = nn.Linear(8, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.to(torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(self.first(x.bfloat16()) + self.adapter(x).bfloat16())[:, :3]


def test_a_frozen_trunk_has_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = Network(Adapted(), caveat.Categorical(), parameters="adapter*"), torch.randn(N, 8)
    products = products_of(network, x)
    asked: list[int] = []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda o, i, *a, **k: (asked.append(len(i)), real(o, i, *a, **k))[1])
    graph, outputs = products.run(x)
    z, v = torch.randn(K, products.sizes[0]), torch.randn(K, N, 3)
    pushed, pulled = products.push(graph, z), products.pull(graph, v)
    assert asked == [1, 1, 1]
    assert (outputs.dtype, pushed.dtype, pulled.dtype) == (torch.float32,) * 3
    assert products.facts.activations < 64 * 64  # per row; what a gradient of the trunk would keep is no less
    torch.testing.assert_close((pushed * v).sum((1, 2)), (z * pulled).sum(1), rtol=0.05, atol=0.05)
    assert all(p.grad is None and not p.requires_grad for p in network.module.parameters())
