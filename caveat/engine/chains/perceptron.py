"""Gradients by explicit formulas instead of autograd, for stacks of linear layers and activations on a CPU.

    h_l = W_l a_(l-1) + b_l,  a_l = s(h_l);   dW_l += g_l a_(l-1)^T,  g_(l-1) = s'(h_(l-1)) (W_l^T g_l)

In a small network autograd's bookkeeping takes longer than its arithmetic: this takes two thirds of the time of a
backward pass (64-32-10, 1,438 rows). Rows are the last axis throughout, because matrix products with few outputs and a
softmax over few classes are fastest that way. Several chains go through at once, so that two threads wait less for
Python.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caveat.network import Params

__all__ = ["Perceptron", "is_plain", "softmax_at_labels"]

# Outputs [chains, C, B] -> log likelihoods [chains], and their gradient [chains, C, B].
OutputGradient = Callable[[Tensor], tuple[Tensor, Tensor]]

_aten = torch.ops.aten
# An activation, and its gradient from that of its output, its input and its output.
_ACTIVATIONS: dict[type, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu, lambda g, x, y: _aten.threshold_backward.default(g, y, 0)),
    nn.SiLU: (F.silu, lambda g, x, y: _aten.silu_backward.default(g, x)),
    nn.Tanh: (torch.tanh, lambda g, x, y: _aten.tanh_backward.default(g, y)),
}


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a stack of linear layers with biases and known activations, without hooks or shared weights.

    A leading `nn.Flatten` is allowed.
    """
    if type(module) is not nn.Sequential or any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()):
        return False
    layers = [m for m in module if not (type(m) is nn.Flatten and (m.start_dim, m.end_dim) == (1, -1))]
    linear = [m for m in layers if type(m) is nn.Linear]
    weights = [p for m in linear for p in m.parameters()]
    known = all(type(m) is nn.Linear or type(m) in _ACTIVATIONS for m in layers)
    alone = len({id(p) for p in weights}) == len(weights) == 2 * len(linear)
    return known and alone and bool(layers) and type(layers[0]) is nn.Linear


class Perceptron:
    """The layers of a plain stack for several chains: weights [chains, ...], and gradients of the same shapes.

    Both are views, by name, of tensors that belong to the caller; gradients are added to in place.
    """

    def __init__(self, module: nn.Module, weights: Params, gradients: Params) -> None:
        self._layers: list[Any] = []  # an activation and its derivative, or weight, bias and their gradients
        for name, layer in module.named_children():
            if type(layer) is nn.Linear:
                values, sums = ([p[f"{name}.weight"], p[f"{name}.bias"].unsqueeze(2)] for p in (weights, gradients))
                self._layers.append((*values, *sums))
            elif type(layer) is not nn.Flatten:
                self._layers.append(_ACTIVATIONS[type(layer)])

    def forward(self, x: Tensor) -> list[Tensor]:
        """The rows of x [B, ...] as [features, B], then the outputs of every layer, [chains, units, B]."""
        activations = [x.flatten(1).t()]
        for layer in self._layers:
            h = activations[-1]
            if len(layer) == 2:
                activations.append(layer[0](h))
            elif h.ndim == 2:  # the rows themselves: one product for all chains
                weight, bias = layer[0].flatten(0, 1), layer[1].flatten(0, 1)
                activations.append(torch.addmm(bias, weight, h).unflatten(0, layer[0].shape[:2]))
            else:
                activations.append(torch.baddbmm(layer[1], layer[0], h))
        return activations

    def add_gradient(self, x: Tensor, output_gradient: OutputGradient) -> Tensor:
        """The log likelihood of rows x [B, ...], [chains]; its gradient is added to the gradients."""
        activations = self.forward(x)
        value, g = output_gradient(activations[-1])
        for place in range(len(self._layers) - 1, -1, -1):
            layer, before = self._layers[place], activations[place]
            if len(layer) == 2:
                g = layer[1](g, before, activations[place + 1])
                continue
            if before.ndim == 2:
                layer[2].add_((g.flatten(0, 1) @ before.t()).view(layer[2].shape))
            else:
                layer[2].baddbmm_(g, before.transpose(1, 2))
            layer[3].add_(g.sum(2, keepdim=True))
            if place:
                g = layer[0].transpose(1, 2) @ g
        return value


def softmax_at_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The log likelihood of labels [B] under a softmax of logits [chains, C, B], and its gradient.

    The log likelihood is summed over rows in float64, [chains]; the gradient is shaped as the logits.
    """
    log_probs = F.log_softmax(logits, 1)
    at = labels.expand(len(logits), 1, -1)
    value = log_probs.gather(1, at).sum((1, 2), dtype=torch.float64)
    gradient = log_probs.exp_().neg_()
    return value, gradient.scatter_add_(1, at, gradient.new_ones(()).expand(at.shape))
