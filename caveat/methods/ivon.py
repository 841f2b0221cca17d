"""IVON: a diagonal Gaussian learned by natural gradients, at the cost of Adam (Shen et al. 2024).

    q = N(m, 1 / (lambda (h + delta))),   lambda = N / T,   delta = prior precision / N

    theta ~ q,   g = gradient of the mean loss at theta,   h_hat = g (theta - m) lambda (h + delta)
    g_avg <- b1 g_avg + (1 - b1) g
    h     <- b2 h + (1 - b2) h_hat + (1 - b2)^2 (h - h_hat)^2 / (2 (h + delta))
    m     <- m - rate (g_avg / (1 - b1^t) + delta m) / (h + delta)

h_hat estimates the diagonal of the loss's curvature; the last term of h keeps h + delta positive. The fixed point is
the optimum of the evidence lower bound over diagonal Gaussians: of a Gaussian posterior, its mean and one over the
diagonal of its precision. Unlike mean-field VI with local reparameterisation this knows nothing of layers: any module
that can be trained has such a posterior, all of its weights included.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.state_checks import buffers_like, check_hyper, check_like, check_names, network_tensors
from caveat.engine.training import ADAM, BatchPart, PointTraining, Training, run_loop, total_steps
from caveat.knobs import Count, Positive, Range, check_knobs
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.priors import gaussian_precisions, weight_decay
from caveat.storage import CorruptFile, State
from caveat.task import Task

__all__ = ["IVON"]

OWN = replace(ADAM, learning_rate=0.1)  # the rate of a Newton step: 1 would be a whole one

LONGEST = 1.0  # Newton step of a weight: where the curvature is not known yet, its reciprocal may be huge
FORGOTTEN = 10.0  # how often over the whole training forgets the first curvature, unless told otherwise


@dataclass(frozen=True)
class IVON(Method):
    """An independent Gaussian for every weight, learned by variational Newton steps at the cost of Adam."""

    initial_hessian: Positive = 0.1  # h before the first step: the curvature of the mean loss
    momentum: Annotated[float, Range(0, 1, open_high=True)] = 0.9  # b1
    # b2; None forgets the first curvature ten times over, but takes no fewer than 100 steps for once.
    hessian_momentum: Annotated[float, Range(0, 1, open_high=True)] | None = None
    temperature: Positive = 1.0  # divides the number of rows: below 1 a cold posterior
    default_draws: Count = 30  # a prediction's draws
    training: Training = OWN
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["IVON"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(OWN))

    def memory(self, network: Network) -> int:
        """Bytes of means, curvatures, averaged gradients, noise and gradients."""
        return 5 * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train means and curvatures from the start's weights."""
        network = task.network.to(run.device)
        decay = weight_decay(gaussian_precisions(network.prior, network.params()), task.n)
        if decay is None:
            raise ValueError(
                "IVON needs a Gaussian prior of one precision a tensor, which is in its step: GaussianPrior()"
            )
        steps = total_steps(task, self.training)
        forgetting = min(0.01, FORGOTTEN / steps) if self.hessian_momentum is None else 1 - self.hessian_momentum
        newton: list[VariationalNewton] = []

        def optimizer(groups: list[dict[str, Any]]) -> VariationalNewton:
            lambda_ = task.n / self.temperature
            newton.append(
                VariationalNewton(groups, lambda_, self.initial_hessian, self.momentum, 1 - forgetting, run.seed)
            )
            return newton[0]

        def forward(trainee: Network, x: Inputs, part: BatchPart, rng: torch.Generator) -> Tensor:
            parameters = dict(trainee.module.named_parameters())
            drawn = {name: parameters[name] + newton[0].noise(parameters[name]) for name in trainee.names}
            return trainee(dict(trainee.module.named_buffers()) | drawn, x, train=True)

        trained = PointTraining(task, network, start, self.training, run, forward, optimizer=optimizer)
        run_loop(trained.loop)
        point, weights = trained.point(), trained.loop.variables.weights
        variance = {name: newton[0].variance(tensor) for name, tensor in weights.items()}
        hyper = {name: value.detach() for name, value in trained.loop.variables.hyper.items()}  # learned under q
        buffers = {name: value for name, value in point.params.items() if name not in weights}
        state = IVONState({name: point.params[name] for name in weights}, variance, buffers, hyper)
        if steps * forgetting < 3:
            run.warnings.append(
                f"{steps} steps are too few for curvatures that forget {forgetting:.2g} a step: widths are still near "
                f"those of initial_hessian={self.initial_hessian:g}; train longer or lower hessian_momentum"
            )
        median = torch.cat([value.flatten() for value in variance.values()]).sqrt().median()
        diagnostics = {"history": point.history, "median_std": float(median), "hessian_momentum": 1 - forgetting}
        return state.tensors(), run.info(network, "diagonal Gaussian", diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not a diagonal Gaussian over the network's weights."""
        check_names("state", state, ["mean", "variance", "buffers", "hyper"])
        found, (weights, buffers) = IVONState.of(state), network_tensors(network)
        check_like("mean", found.mean, weights)
        check_like("variance", found.variance, weights)
        if any(bool((variance < 0).any()) for variance in found.variance.values()):
            raise CorruptFile("variance holds negative numbers")
        check_like("buffers", found.buffers, buffers_like(found.buffers, buffers))
        check_hyper(found.hyper, network)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N draws from the Gaussian."""
        found = IVONState.of(state)
        for _ in range(n):
            yield found.draw(rng)


class VariationalNewton(torch.optim.Optimizer):
    """The step above, for groups with "highest" (the rate) and "weight_decay" (delta).

    The noise of a step is a function of the seed and the step, so that it is the same on every rank and after a resume.
    """

    def __init__(
        self, groups: list[dict[str, Any]], rows: float, hessian: float, momentum: float, memory: float, seed: int
    ) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.rows, self.momentum, self.memory, self.seed = rows, momentum, memory, seed
        self._delta = {p: group["weight_decay"] for group in self.param_groups for p in group["params"]}
        self._place = {p: i for i, p in enumerate(self._delta)}
        self._noise: dict[Tensor, Tensor] = {}  # of the step that is under way
        for p in self._delta:
            self.state[p] = {
                "step": torch.zeros((), dtype=torch.int64),
                "hessian": torch.full_like(p, hessian),
                "average": torch.zeros_like(p),
            }

    def variance(self, p: Tensor) -> Tensor:
        """Of the posterior of a tensor, shaped as it is."""
        return 1 / (self.rows * (self.state[p]["hessian"] + self._delta[p]))

    def noise(self, p: Tensor) -> Tensor:
        """Theta - m of the next step; the same until that step is made."""
        if p not in self._noise:
            name = f"{self.seed}/{int(self.state[p]['step'])}/{self._place[p]}"
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
            rng = torch.Generator(p.device).manual_seed(seed)
            drawn = torch.randn(p.shape, generator=rng, dtype=p.dtype, device=p.device)
            self._noise[p] = drawn * self.variance(p).sqrt()
        return self._noise[p]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move means and curvatures by the gradients at the drawn weights."""
        for group in self.param_groups:
            delta, rate = group["weight_decay"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] += 1
                hessian, forgetting = state["hessian"], 1 - self.memory
                estimate = p.grad * self.noise(p) * (self.rows * (hessian + delta))
                correction = 0.5 * forgetting**2 * (hessian - estimate).square() / (hessian + delta)
                hessian.mul_(self.memory).add_(estimate, alpha=forgetting).add_(correction)
                state["average"].mul_(self.momentum).add_(p.grad, alpha=1 - self.momentum)
                unbiased = state["average"] / (1 - self.momentum ** int(state["step"]))
                newton = ((unbiased + delta * p) / (hessian + delta)).clamp_(-LONGEST, LONGEST)
                p.sub_(rate * newton)
        self._noise.clear()


@dataclass(frozen=True)
class IVONState:
    """What an IVON posterior keeps."""

    mean: Params
    variance: Params  # shaped as the mean
    buffers: Params  # the same for every draw
    hyper: Hyper

    def tensors(self) -> State:
        """As a posterior keeps it, by group and name."""
        return {"mean": self.mean, "variance": self.variance, "buffers": self.buffers, "hyper": self.hyper}

    @classmethod
    def of(cls, state: State) -> "IVONState":
        """The state that `tensors` made groups of."""
        missing = {"mean", "variance", "buffers", "hyper"} - state.keys()
        if missing or state["mean"].keys() != state["variance"].keys():
            lacking = f"no group {sorted(missing)[0]!r}" if missing else "a variance of other weights than its mean"
            raise CorruptFile(f"this is not the state of an IVON posterior: it has {lacking}")
        return cls(state["mean"], state["variance"], state["buffers"], state["hyper"])

    def draw(self, rng: torch.Generator) -> Params:
        """One draw of the weights, with the buffers."""
        params = dict(self.buffers)
        for name, mean in self.mean.items():
            z = torch.randn(mean.shape, generator=rng, dtype=mean.dtype).to(mean.device)
            params[name] = mean + self.variance[name].sqrt() * z
        return params


IVON.quick = IVON(training=Training(epochs=60))
