"""Tiny networks in float64 with their tasks, and their linear models as matrices by torch's own functions."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import caveat
from caveat import SampledLaplace, Training
from caveat.engine.linear_model import ConjugateGradients

LIKELIHOODS = {
    "Categorical": caveat.Categorical(),
    "Bernoulli": caveat.Bernoulli(),
    "Gaussian": caveat.Gaussian(noise=0.3),
    "HeteroscedasticGaussian": caveat.HeteroscedasticGaussian(),
    "Poisson": caveat.Poisson(),
}
WIDTH = {"Categorical": 3, "Bernoulli": 2, "Gaussian": 2, "HeteroscedasticGaussian": 2, "Poisson": 1}
EXACT = ConjugateGradients(tolerance=1e-9)  # with a sketch of the whole curvature: the networks are small


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(kind: str, n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [n, 3] and targets; multi-label for Bernoulli, two outputs for Gaussian."""
    x = normal(n, 3, seed=seed)
    signal = torch.stack([x[:, 0] + x[:, 1] ** 2 - 1, x[:, 2] - x[:, 0]], 1)
    noisy = signal + 0.3 * normal(n, 2, seed=seed + 1)
    targets = {
        "Categorical": torch.stack([noisy[:, 0], noisy[:, 1], torch.zeros(n).double()], 1).argmax(1),
        "Bernoulli": (noisy > 0).double(),
        "Gaussian": noisy,
        "HeteroscedasticGaussian": noisy[:, :1],
        "Poisson": torch.poisson((signal[:, :1] / 2).exp(), generator=torch.Generator().manual_seed(seed)),
    }
    return x, targets[kind]


@cache
def trained(kind: str) -> tuple[caveat.Task, caveat.Posterior]:
    """A task and its MAP, stopped before it has converged."""
    task = untrained(kind)
    training = Training(epochs=150, learning_rate=0.02, batch_size=60)
    return task, caveat.fit(task, caveat.MAP(training=training), progress=False)


def untrained(kind: str, validation: tuple[Tensor, Tensor] | None = None) -> caveat.Task:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, WIDTH[kind])).double()
    return caveat.Task(module, rows(kind), LIKELIHOODS[kind], caveat.GaussianPrior(1.0), validation=validation)


def fitted(kind: str, method: SampledLaplace, seed: int = 0, **options: Any) -> caveat.Posterior:
    task, start = trained(kind)
    return caveat.fit(task, method, start=start, seed=seed, progress=False, **options)


def jacobian(posterior: caveat.Posterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, m] and the Jacobian [n, m, d] by torch's own functions."""
    network, params = posterior.network, posterior.state["params"]
    own = {name: params[name] for name in network.names}

    def outputs(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(network.module, params | own, (x,)).flatten(1)

    J = jacrev(outputs)(own, x)
    return outputs(own, x), torch.cat([J[name].flatten(2) for name in own], 2)


def information(kind: str, f: Tensor) -> Tensor:
    """The Fisher information of each row's outputs, [n, m, m], from its formula."""
    if kind == "Categorical":
        p = f.softmax(1)
        return p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    if kind == "Bernoulli":
        return (f.sigmoid() * (1 - f.sigmoid())).diag_embed()
    if kind == "Gaussian":
        return torch.full_like(f, 0.3**-2).diag_embed()
    if kind == "Poisson":
        return f.exp().diag_embed()
    return torch.cat([(-f[:, 1:]).exp(), torch.full_like(f[:, 1:], 0.5)], 1).diag_embed()


class Dense:
    """A network's linear model as matrices."""

    def __init__(self, kind: str, posterior: caveat.Posterior) -> None:
        self.kind = kind
        self.x, self.y = rows(kind)
        self.f, self.J = jacobian(posterior, self.x)
        self.M = torch.einsum("nmd,nmk,nke->de", self.J, information(kind, self.f), self.J)
        self.w = torch.cat([posterior.state["params"][name].flatten() for name in posterior.network.names])
        self.hyper, self.size = posterior.state["hyper"], len(self.w)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        shift, likelihood = self.J @ (theta - self.w), LIKELIHOODS[self.kind]
        if self.kind != "HeteroscedasticGaussian":
            return likelihood.log_prob(self.f + shift, self.y, self.hyper).sum()
        f = self.f.detach().requires_grad_()  # to second order about f(w, x)
        slope = torch.autograd.grad(likelihood.log_prob(f, self.y, self.hyper).sum(), f)[0]
        B = information(self.kind, self.f)
        return (slope * shift).sum() - 0.5 * torch.einsum("nm,nmk,nk->", shift, B, shift)

    def mean(self, alpha: float, theta: Tensor) -> Tensor:
        """The minimum of the objective, by a quasi-Newton method of torch's."""
        theta = theta.detach().clone().requires_grad_()
        optimizer = torch.optim.LBFGS([theta], max_iter=2000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = 0.5 * alpha * theta @ theta - self.log_likelihood(theta)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        return theta.detach()

    def evidence(self, alpha: float, theta: Tensor) -> float:
        """The Laplace approximation of the log evidence at the mean."""
        H = self.M + alpha * torch.eye(self.size, dtype=torch.float64)
        prior = 0.5 * self.size * math.log(alpha) - 0.5 * alpha * theta @ theta
        return float(self.log_likelihood(theta) + prior - 0.5 * torch.linalg.slogdet(H)[1])

    def shares(self, alpha: float) -> Tensor:
        mu = torch.linalg.eigvalsh(self.M).clamp_min(0)
        return mu / (mu + alpha)


def deviations(posterior: caveat.Posterior) -> Tensor:
    return torch.cat(list(posterior.state["samples"].values()))


@cache
def normalised(factor: float) -> tuple[caveat.Task, Tensor]:
    """A network whose first layer is normalised, its weights times a factor: the same function."""
    torch.manual_seed(1)
    first, norm = nn.Linear(3, 6), nn.BatchNorm1d(6)
    module = nn.Sequential(first, norm, nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = rows("Categorical")
    with torch.no_grad():
        for _ in range(60):
            module.train()(x)
    norm.eps = 1e-30  # or it would be another function at another scale
    optimizer = torch.optim.Adam(module.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module.eval()(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        first.weight *= factor
        first.bias *= factor
        norm.running_mean *= factor  # type: ignore[operator]
        norm.running_var *= factor**2  # type: ignore[operator]
    return caveat.Task(module, (x, y), caveat.Categorical()), x


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).abs().sqrt()  # of zero: finite, but its slope is not


@cache
def rooted() -> nn.Module:
    torch.manual_seed(0)
    module, (x, y) = Root().double(), rows("Categorical")
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy((module.linear(x).abs() + 1e-3).sqrt(), y).backward()  # type: ignore[operator]
        optimizer.step()
    return module


class Held(TorchDispatchMode):
    """The most bytes that tensors made meanwhile hold together."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {place: held for place, held in self._held.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return out
