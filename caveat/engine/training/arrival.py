"""Whether weights are at an optimum of the log posterior: what one step along the gradient would still gain.

    gain = max_t  (log p(D, theta + t g) - log p(D, theta)) / N,    g = gradient of log p(D, theta)

in nats a row. At an optimum it is zero. It is a lower bound of what training has left to gain, needs no curvature, and
takes one pass forward and back and at most eight passes forward over a few hundred rows. Noise that is learned is the
best at each place, since it follows the weights.
"""

import math

import torch
from torch import Tensor

from caveat.engine.run import Run
from caveat.network import Network, Params
from caveat.rows import Rows
from caveat.task import Task

__all__ = ["gain_left", "warn_if_no_optimum"]

BATCH = 32  # rows of a pass: less memory than any method takes. On a GPU a training batch, since passes wait for Python
ROWS = 256  # that are looked at: the gradient of fewer is not near zero at the optimum of all
LENGTHS = [10.0**power for power in range(-6, 1)]  # of the step, in units of the weights' norm
WORTH_A_WORD = 0.05  # nats a row


def gain_left(task: Task, network: Network, params: Params) -> float:
    """What the best step along the gradient gains of the log joint, in nats a row; 0 if none gains anything."""
    rows = task.train.some(ROWS).on(network.device)
    weights = {name: params[name].detach().clone().requires_grad_() for name in network.names}

    def value(moved: Params) -> float:
        prior = float(network.prior.log_prob(moved)) / task.n
        hyper = task.fitted_hyper(network, params | moved, rows)
        return prior + float(task.log_likelihood(network, params | moved, hyper, rows))

    gradient = _gradient(task, network, params, weights, rows)
    slope, size = _norm(gradient), _norm(weights) or 1.0  # slope: of the value in the distance moved
    here = {name: weight.detach() for name, weight in weights.items()}
    if slope == 0 or not math.isfinite(slope):
        return 0.0

    def gain(distance: float) -> float:
        reached = value({name: w + distance / slope * gradient[name] for name, w in here.items()}) - start
        return reached if math.isfinite(reached) else -math.inf

    start = value(here)
    best, distance = -math.inf, 0.0
    for length in LENGTHS:
        gained = gain(length * size)
        if gained > best:
            best, distance = gained, length * size
        elif gained < -WORTH_A_WORD:  # a concave log joint falls further on
            break
    # Of the parabola with this slope that passes through the best.
    bend = 2 * (slope * distance - best) / distance**2 if distance else 0.0
    return max(0.0, best, gain(slope / bend) if 0 < bend < math.inf else 0.0)


def warn_if_no_optimum(task: Task, network: Network, params: Params, run: Run, what: str) -> float:
    """Warn if one step along the gradient would gain much; returns the gain. `what` is the subject of the sentence."""
    gain = gain_left(task, network, params)
    if gain > WORTH_A_WORD:
        run.warnings.append(
            f"{what} is no optimum: one step along the gradient would raise the log posterior by {gain:.2g} nats a "
            "row; train longer (Training(epochs=...)) or at another learning rate"
        )
    return gain


def _gradient(task: Task, network: Network, params: Params, weights: Params, rows: Rows) -> Params:
    """The gradient of the log joint of these rows, divided by their number."""
    hyper = task.fitted_hyper(network, params, rows)
    gradient = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    with torch.enable_grad():
        _add_gradient(gradient, network.prior.log_prob(weights) / task.n, weights)
        for x, y in rows.ordered(_rows_of_pass(rows, network.device), network.device):
            likelihood = network.likelihood.log_prob(network(params | weights, x), y, hyper).sum() / len(rows)
            _add_gradient(gradient, likelihood, weights)
    return gradient


def _rows_of_pass(rows: Rows, device: torch.device) -> int:
    return max(BATCH, rows.batch_size) if device.type == "cuda" else BATCH


def _add_gradient(gradient: Params, value: Tensor, weights: Params) -> None:
    """Add the gradient of a value to what is there."""
    if not value.requires_grad:
        return
    parts = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
    for total, part in zip(gradient.values(), parts, strict=True):
        if part is not None:
            total += part


def _norm(tensors: Params) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors.values()))
