"""Networks of every kind of operation, and their Jacobians by autograd in float64 to compare products with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import caveat
from caveat.batches import Inputs
from caveat.engine.tangents import Program
from caveat.network import Network

N, K = 5, 3  # rows, and vectors at once


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))[:, :3]


class TwoConvolutions(nn.Module):
    """Two convolutions, each with a normalisation, beside a shortcut that has one too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.shortcut, self.head = nn.Conv2d(1, 4, 1, 2, bias=False), nn.Linear(4, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)), inplace=True)
        h = self.norms[1](self.second(h)) + self.norms[2](self.shortcut(x))
        return self.head(F.relu(h).mean((2, 3)))


class Masks(nn.Module):
    """Comparisons and places have no slopes, and what they choose has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = torch.where(h > 0, h * (h < 1), 0.1 * h)
        return self.second(h) * (1 + h.argmax(1, keepdim=True))


class NormalisedOverThePlaces(nn.Module):
    """The channels of the normalisation are not the outputs of the linear layer, though as many."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, outputs), nn.BatchNorm1d(3), nn.Linear(3 * outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).flatten(1))


class CalledByName(nn.Module):
    """Arguments of a convolution by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(3, affine=False)
        self.last = nn.Conv2d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(F.conv2d(x, self.first.weight, self.first.bias, 2, padding=1))
        h = F.conv2d(input=h, weight=self.last.weight, stride=3)
        return self.second(h).flatten(1)


class Views(nn.Module):
    """Looks at the numbers of an image in the order of its axes, however they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(1, 2, 3, stride=2), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x)).view(len(x), 1, 4, 4)
        shifted = torch.cat([h, -h], 3)
        return self.head(self.second(shifted).view(len(x), -1).repeat(1, 2))


class OwnSettings(nn.Linear):
    """Asks for settings of a GPU by their older names."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return super().forward(x)


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin()) * self.scale / (1 + self.scale**2) + self.scale.detach() * self.scale


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu")
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.recurrent(x)[0]).mean(1))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.queries, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.queries(self.norm(h)).chunk(3, -1)
        return self.head(h + F.scaled_dot_product_attention(q, k, v, is_causal=True))  # [B, 3, 3]


def images(*layers: nn.Module, channels: int = 2, side: int = 5) -> tuple[nn.Module, Tensor]:
    body = nn.Sequential(*layers, nn.Flatten())
    x = torch.randn(N, channels, side, side)
    features = body.eval()(x).shape[1]
    return nn.Sequential(*body, nn.Linear(features, 3)), x


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron": lambda: (
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Softplus(), nn.Linear(6, 3)),
        torch.randn(N, 4),
    ),
    "in place": lambda: images(nn.Conv2d(2, 4, 3), nn.ReLU(True), nn.BatchNorm2d(4), nn.SiLU(True), nn.Dropout(0.5)),
    "groups": lambda: images(
        nn.Conv2d(4, 6, 3, 2, 1, groups=2),
        nn.BatchNorm2d(6),
        nn.GELU(),
        nn.Conv2d(6, 6, 3, 1, 2, dilation=2, groups=6, bias=False),
        nn.BatchNorm2d(6, affine=False),
        nn.MaxPool2d(2),
        channels=4,
        side=8,
    ),
    "pools and norms": lambda: images(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.LeakyReLU(),
        nn.AvgPool2d(2),
        nn.PReLU(4),
        nn.ConvTranspose2d(4, 3, 3, 2),
        nn.MaxPool2d(3, 2, 1),
    ),
    "one place, strides": lambda: images(
        nn.Conv2d(2, 4, 1, (2, 3)), nn.Tanh(), nn.Conv2d(4, 6, 1, 2, groups=2), side=7
    ),
    "residual": lambda: (TwoConvolutions(), torch.randn(N, 1, 4, 4)),
    "one dimension": lambda: (
        nn.Sequential(nn.Conv1d(2, 4, 3, 2), nn.BatchNorm1d(4), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 3)),
        torch.randn(N, 2, 10),
    ),
    "tied": lambda: (Tied(), torch.randn(N, 4)),
    "partly frozen": lambda: (PartlyFrozen(), torch.randn(N, 4)),
    "recurrent and attention": lambda: (Recurrent(), torch.randn(N, 3, 3)),
    "tokens": lambda: (Tokens(), torch.randint(7, (N, 3))),
    "masks": lambda: (Masks(), torch.randn(N, 4)),
    "normalised over as many places": lambda: (NormalisedOverThePlaces(3), torch.randn(N, 3, 4)),
    "normalised over places": lambda: (NormalisedOverThePlaces(2), torch.randn(N, 3, 4)),
    "views": lambda: (Views(), torch.randn(N, 2, 4, 4)),
    "called by name": lambda: (CalledByName(), torch.randn(N, 2, 5, 5)),
    "settings of its own": lambda: (OwnSettings(4, 3), torch.randn(N, 4)),
}


def network_of(module: nn.Module) -> Network:
    """In float64, with statistics of BatchNorm that matter."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            for parameter in layer.parameters():
                nn.init.normal_(parameter)
    return Network(module.double(), caveat.Categorical())


def doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def dense_jacobian(network: Network, names: Sequence[str], x: Inputs) -> Tensor:
    """J by autograd, one output after the other, [n, m, d]."""
    own = {name: value.requires_grad_() for name, value in network.params().items()}
    wanted = [own[name] for name in names]
    outputs = network(own, x).flatten(1)
    rows = [
        torch.autograd.grad(output, wanted, retain_graph=True, allow_unused=True, materialize_grads=True)
        for output in outputs.flatten()
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, outputs.shape)


def program_of(module: nn.Module, x: Tensor) -> tuple[Network, Program]:
    network = network_of(module)
    return network, Program(network, network.params(), network.names, doubled(x))


def assert_products(module: nn.Module, x: Tensor) -> None:
    """Outputs, pushed and pulled vectors of a program are those of the dense Jacobian."""
    network, program = program_of(module, x)
    J = dense_jacobian(network, network.names, doubled(x))
    z, v = torch.randn(K, J.shape[2]).double(), torch.randn(K, *J.shape[:2]).double()
    saved, outputs = program.run(doubled(x))
    pushed, pulled = program.push(saved, z), program.pull(saved, v)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(pushed, torch.einsum("bmd,kd->kbm", J, z), **close)
    torch.testing.assert_close(pulled, torch.einsum("bmd,kbm->kd", J, v), **close)
    torch.testing.assert_close((pushed * v).sum((1, 2)), (z * pulled).sum(1), **close)
    torch.testing.assert_close(outputs, network(network.params(), doubled(x)).flatten(1), **close)
