"""Modules with everything that a network may have, and what must not change in them."""

import torch
from torch import Tensor, nn

from caveat import Categorical, Network


class Everything(nn.Module):
    """Frozen and free layers, BatchNorm, dropout, a hook, a plain buffer and in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.act(self.norm(self.stem(x))))) * self.scale


class Tied(nn.Module):
    """An embedding that is its own decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.decode = nn.Linear(3, 5, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decode(self.embed(tokens))


class Moving(nn.Module):
    """Replaces its buffer by one that depends on the weights, instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * y.mean(0)
        return y - self.mean


class OwnWeight(nn.Module):
    """A parameter that no reset_parameters draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def network(module: nn.Module, **options) -> Network:
    return Network(module, Categorical(), **options)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def snapshot(module: nn.Module) -> dict:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "ids": {name: id(t) for name, t in tensors.items()},
        "values": {name: t.detach().clone() for name, t in tensors.items()},
        "versions": {name: t._version for name, t in tensors.items()},
        "grad": {name: t.requires_grad for name, t in module.named_parameters()},
        "gradients": {name: t.grad is None for name, t in module.named_parameters()},
        "modes": {name: child.training for name, child in module.named_modules()},
        "hooks": {name: list(child._forward_hooks) for name, child in module.named_modules()},
    }


def assert_same(before: dict, after: dict) -> None:
    values, others = before.pop("values"), after.pop("values")
    assert before == after
    assert values.keys() == others.keys()
    assert all(torch.equal(values[name], others[name]) for name in values)
