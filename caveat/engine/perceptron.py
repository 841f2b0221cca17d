"""Backpropagation written out, for stacks of linear layers and activations on a CPU.

    h_l = W_l a_(l-1) + b_l,  a_l = s(h_l);   dW_l += g_l a_(l-1)^T,  g_(l-1) = s'(h_(l-1)) (W_l^T g_l)

In a small network autograd's bookkeeping takes longer than its arithmetic: this takes two thirds of the time of a
backward pass (64-32-10, 1,438 rows). Rows are the last axis throughout, which is what matrix products with few outputs
and a softmax over few classes are fastest with.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Perceptron", "is_plain", "softmax_at_labels"]

Ends = Callable[[Tensor], tuple[Tensor, Tensor]]  # outputs [C, B] -> log likelihood, and its gradient [C, B]

_aten = torch.ops.aten
# An activation, and its gradient from that of its output, its input and its output.
_ACTIVATIONS: dict[type, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu, lambda g, x, y: _aten.threshold_backward(g, y, 0)),
    nn.SiLU: (F.silu, lambda g, x, y: _aten.silu_backward(g, x)),
    nn.Tanh: (torch.tanh, lambda g, x, y: _aten.tanh_backward(g, y)),
}


def is_plain(module: nn.Module) -> bool:
    """Whether it is a stack of linear layers with biases and known activations, without hooks or shared weights."""
    if type(module) is not nn.Sequential or any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()):
        return False
    layers = [m for m in module if not (type(m) is nn.Flatten and (m.start_dim, m.end_dim) == (1, -1))]
    linear = [m for m in layers if type(m) is nn.Linear]
    weights = [p for m in linear for p in m.parameters()]
    known = all(type(m) is nn.Linear or type(m) in _ACTIVATIONS for m in layers)
    alone = len({id(p) for p in weights}) == len(weights) == 2 * len(linear)
    return known and alone and bool(layers) and type(layers[0]) is nn.Linear


class Perceptron:
    """A module's layers, if it is a plain stack of them; gradients are added to each parameter's own `grad`."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    @staticmethod
    def of(module: nn.Module) -> "Perceptron | None":
        """None for a module that is no such stack, or whose parameters do not all have room for a gradient."""
        ready = all(p.requires_grad and p.grad is not None for p in module.parameters())
        return (
            Perceptron([m for m in module.children() if type(m) is not nn.Flatten])
            if ready and is_plain(module)
            else None
        )

    def add_gradient(self, x: Tensor, ends: Ends) -> Tensor:
        """The log likelihood of rows; its gradient is added."""
        kept, h = [], x.flatten(1).t()  # [features, B]
        for layer in self.layers:
            known = _ACTIVATIONS.get(type(layer))
            out = torch.addmm(layer.bias.unsqueeze(1), layer.weight, h) if known is None else known[0](h)
            kept.append((h, out))
            h = out
        value, g = ends(h)
        for place in reversed(range(len(self.layers))):
            layer, (before, out) = self.layers[place], kept[place]
            known = _ACTIVATIONS.get(type(layer))
            if known is not None:
                g = known[1](g, before, out)
                continue
            layer.weight.grad.addmm_(g, before.t())
            layer.bias.grad.add_(g.sum(1))
            if place:
                g = layer.weight.t() @ g
        return value


def softmax_at_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log likelihood of labels under a softmax of logits [C, B], summed in float64, and its gradient."""
    log_probs = F.log_softmax(logits, 0)
    value = log_probs.gather(0, labels.unsqueeze(0)).sum(dtype=torch.float64)
    gradient = log_probs.exp_().neg_()
    return value, gradient.scatter_add_(0, labels.unsqueeze(0), gradient.new_ones(1, len(labels)))
