"""LeNet-small on MNIST, its exact posterior, and what all cells share."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import caveat
from caveat import MAP, Training, data
from caveat.engine.laplace import Sweep
from caveat.engine.linear_model import ConjugateGradients, Hyperparameters, LinearModel
from caveat.engine.linear_model.conjugate_gradients import PreparedGradients
from caveat.engine.linearised import linearise
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.linearised.linearised_network import NetworkModel, mode
from caveat.engine.linearised.sampler import InputRows
from caveat.engine.run import Run

__all__ = ["Exact", "Problem", "lenet_small"]


def lenet_small(first: int = 6, second: int = 16, hidden: int = 45) -> nn.Sequential:
    """Two convolutions and two linear layers, 14,597 weights for 28 x 28 images and ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * second, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


@dataclass
class Problem:
    """The data, the trained network, and its linear model."""

    rows: int
    folder: Path
    device: str = "cpu"
    quick: bool = False  # a network of 866 weights, to see whether everything runs
    epochs: int = 15

    @cached_property
    def images(self) -> Any:
        """MNIST."""
        return data.load("mnist")

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        """Test rows."""
        x, y = self.images.test.tensors
        return x, y

    @cached_property
    def task(self) -> caveat.Task:
        """The network and its training rows."""
        torch.manual_seed(0)
        x, y = self.images.train.tensors
        module = lenet_small(2, 4, 8) if self.quick else lenet_small()
        return caveat.Task(module, (x[: self.rows], y[: self.rows]), caveat.Categorical())

    @cached_property
    def start(self) -> caveat.Posterior:
        """The MAP, trained once."""
        kept = self.folder / f"map-{self.rows}"
        if kept.exists():
            return caveat.load(kept, self.task.network.module, device=self.device)
        training = Training(epochs=self.epochs, learning_rate=2e-3, batch_size=100)
        return caveat.fit(self.task, MAP(training=training), device=self.device, folder=kept, progress=False)

    @cached_property
    def linear(self) -> NetworkModel:
        """The network's linear model."""
        network = self.task.network.to(self.device)
        return linearise(
            self.task, network, self.start.state["params"], self.start.state["hyper"], Run(), g_prior=False
        )[0]

    @property
    def model(self) -> LinearModel:
        """That without the offset."""
        return self.linear.model

    def under(self, alpha: float) -> Hyperparameters:
        """One prior precision for all."""
        return Hyperparameters(torch.full((1,), alpha, dtype=torch.float64, device=self.device))


class Exact:
    """The curvature as a matrix, in float64: effective dimension, evidence's fixed point, covariances of outputs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        kept = problem.folder / f"exact-{problem.rows}.pt"
        if kept.exists():
            self.M, self.values = torch.load(kept, weights_only=True)
            return
        network, start = problem.task.network.to(problem.device), problem.start
        rows = problem.task.train
        traces = Sweep(network, start.state["params"], {}, rows, Run()).traces().double().cpu()
        order = traces.argsort()
        dropped = order[: int((traces[order].cumsum(0) <= 1e-6 * traces.sum()).sum())]
        informative = torch.ones(len(rows), dtype=torch.bool)
        informative[dropped] = False  # rows with a millionth of the information between them
        some = rows.part(informative.nonzero().flatten())
        sweep = Sweep(network, start.state["params"], {}, some, Run(device=torch.device(problem.device)))
        self.M = sweep.full(None)[0].ggn.double()
        self.values = torch.linalg.eigvalsh(self.M).clamp_min(0)
        torch.save((self.M, self.values), kept)

    def gamma(self, alpha: float) -> float:
        """The effective dimension."""
        return float((self.values / (self.values + alpha)).sum())

    @cached_property
    def precision(self) -> float:
        """Where alpha = gamma / |mean|^2, exact but for the mean's tolerance; by a secant in logarithms."""
        kept = self.problem.folder / f"precision-{self.problem.rows}.txt"
        if not kept.exists():
            kept.write_text(repr(self._fixed_point()))
        return float(kept.read_text())

    def _fixed_point(self) -> float:
        linear = self.problem.linear
        prepared = PreparedGradients(ConjugateGradients(tolerance=1e-4), _Factored(self))  # type: ignore[arg-type]
        mean = linear.weights
        points: list[tuple[float, float]] = []
        log_alpha = math.log(10.0)
        for _ in range(40):
            alpha = math.exp(log_alpha)
            under = self.problem.under(alpha).model(linear.model)
            mean, vectors, found = mode(linear, under, prepared, mean, resting=1e-6)
            assert found
            step = math.log(self.gamma(alpha) / float(mean.double().square().sum())) - log_alpha
            print(f"precision {alpha:.4g}: the update is {step:+.4f} away, {vectors:.0f} products", file=sys.stderr)
            points.append((log_alpha, step))
            if abs(step) < 1e-3:
                return alpha
            slope = -1.0
            if len(points) > 1 and points[-1][0] != points[-2][0]:
                slope = (points[-1][1] - points[-2][1]) / (points[-1][0] - points[-2][0])
            log_alpha -= step / min(max(slope, -1.5), -0.25)
        raise RuntimeError("exact EM did not come to rest")

    def root(self, alpha: float) -> Tensor:
        """The Cholesky factor of H."""
        H = self.M.clone()
        H.diagonal().add_(alpha)
        return torch.linalg.cholesky(H)

    def outputs(self, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """J(x) [B m, d] and L^-1 J(x)^T, whose columns' inner products are the outputs' covariance."""
        problem = self.problem
        start = problem.start
        features = NetworkFeatures(problem.task.network.to(problem.device), start.state["params"], InputRows(x))
        pieces = []
        for block in features.blocks(torch.arange(len(x)).split(20)):
            unit = torch.eye(len(block.index) * 10, device=problem.device).unflatten(1, (-1, 10))
            pieces.append(block.backward(unit))
        J = torch.cat(pieces).double()
        return J, torch.linalg.solve_triangular(self.root(alpha), J.T, upper=False)


class _Factored:
    """Preconditions by the exact inverse of H, that of the noise at the network's outputs."""

    def __init__(self, own: Exact) -> None:
        self._own, self.values = own, own.values.flip(0)
        self._alpha, self._inverse = -1.0, own.M

    def preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """P^-1 v for v [K, d]; one inverse at a time is kept."""
        if float(precision) != self._alpha:
            self._alpha = float(precision)
            self._inverse = torch.cholesky_inverse(self._own.root(self._alpha)).to(precision.dtype)
        return lambda v: v @ self._inverse
