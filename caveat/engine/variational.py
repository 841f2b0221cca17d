"""Training networks of sparse layers: Gaussians over their weights by the ELBO, or point weights.

    minimise  beta_t / N sum_k KL(N(mu_k, sigma_k^2) || N(0, s^2)) - 1/N E_q log p(D | theta)
    KL = log(s / sigma) + (sigma^2 + mu^2) / (2 s^2) - 1/2

Outputs are drawn by local reparameterisation. log sigma is what is learned, by Adam at a rate of its own: in a
softplus's argument at the means' rate its steps fall below what float32 resolves, and sigma stays where it began.
Biases and norm layers are points under the prior.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.optimise import BatchPart, Moments, Variables, optimise
from caveat.engine.replacement import Replacement
from caveat.engine.run import Run
from caveat.engine.sparse_layers import Layout, Substitute, candidates
from caveat.engine.training import Training
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.priors import GaussianPrior
from caveat.storage import State
from caveat.task import Task

__all__ = ["Trained", "Variational", "gaussian_kl", "precisions"]


@dataclass(frozen=True)
class Trained:
    """What training ended with."""

    layout: Layout
    mean: Tensor
    log_std: Tensor | None
    rest: Params
    hyper: Hyper
    history: list[dict[str, float]]

    def state(self, network: Network) -> State:
        """As a posterior keeps it."""
        counts = torch.tensor([self.layout.counts.get(name, 0) for name in candidates(network)])
        active = {"mean": self.mean, "indices": self.layout.indices, "counts": counts}
        if self.log_std is not None:
            active["log_std"] = self.log_std
        return {"active": active, "rest": self.rest, "hyper": self.hyper}


def gaussian_kl(mean: Tensor, log_std: Tensor, precision: Tensor) -> Tensor:
    """KL(N(mean, std^2) || N(0, 1/precision)), summed."""
    moments = precision * ((2 * log_std).exp() + mean.square())
    return 0.5 * (moments - precision.log() - 1).sum() - log_std.sum()


def precisions(network: Network, layout: Layout) -> Tensor:
    """The prior's precision of each weight, [size], or one for all."""
    prior = network.prior
    if not isinstance(prior, GaussianPrior):
        raise ValueError(
            f"variational layers need a Gaussian prior, for its KL divergence in closed form, and this one is "
            f"{type(prior).__name__}: use caveat.GaussianPrior(precision)"
        )
    own = dict(network.module.named_parameters())
    by_layer = {name: prior.of(f"{name}.weight", own[f"{name}.weight"]) for name in layout.counts}
    values = [*by_layer.values()]
    if all(value.ndim == 0 and value == values[0] for value in values):
        return values[0]
    whole = {name: value.expand(layout.geometries[name].shape) for name, value in by_layer.items()}
    return layout.gathered(whole)


class Variational:
    """Training in progress: a substitute, its flat tensors, and what is done to them in a step."""

    def __init__(
        self,
        task: Task,
        substitute: Substitute,
        mean: Tensor,
        log_std: Tensor | None,
        hyper: Hyper,
        training: Training,
        run: Run,
        *,
        std_learning_rate: float = 1e-2,
        kl_weight: Callable[[float], float] = lambda progress: 1.0,
    ) -> None:
        self.task, self.substitute, self.training, self.run = task, substitute, training, run
        self.mean, self.log_std = mean.requires_grad_(), None if log_std is None else log_std.requires_grad_()
        self.kl_weight = kl_weight
        self.replacement: Replacement | None = None
        self.new_std: float | None = None  # of added weights; None takes the mean of their layer's
        self.at_the_mean = False  # whether gradients of weights that are not there are taken without noise
        self.step, self.begun = 0, False
        module = substitute.network.module
        own = dict(module.named_parameters())
        weights = {"active.mean": self.mean} | {n: own[n].requires_grad_() for n in substitute.network.names}
        hyper = {name: t.to(run.device, copy=True) for name, t in hyper.items()}
        if "log_noise" in hyper and getattr(task.network.likelihood, "noise", None) is None:
            hyper["log_noise"].requires_grad_()
        scales = {} if self.log_std is None else {"active.log_std": self.log_std}
        self.counts = torch.tensor([*substitute.layout.counts.values()])
        extra = {"indices": substitute.layout.indices, "counts": self.counts, "step": torch.zeros((), dtype=torch.int64)}
        self.variables = Variables(weights, hyper, dict(module.named_buffers()), extra, scales, std_learning_rate)
        self.precision = precisions(task.network, substitute.layout) if scales else None
        steps = math.ceil(task.n / (training.batch_size or task.train.batch_size))
        self.steps = max(1, training.epochs * steps)

    def train(self, training_flops: float | None = None) -> Trained:
        """To the end."""
        task, substitute = self.task, self.substitute
        history = optimise(
            task,
            task.network,
            self.variables,
            self._loss,
            self.training,
            self.run,
            decay=self._decay(),
            validate=None if task.validation is None else self._validate,
            after_epoch=self._after_epoch,
            after_step=self._after_step,
            training_flops=training_flops,
        )
        self._take_up()
        substitute.use(self.mean.detach())
        hyper = task.fitted_hyper(substitute.network, {}, task.validation)
        std = None if self.log_std is None else self.log_std.detach()
        return Trained(substitute.layout, self.mean.detach(), std, substitute.rest(), hyper, history)

    def _decay(self) -> dict[str, float] | None:
        """The prior of what has no posterior, as weight decay."""
        prior, network = self.task.network.prior, self.substitute.network
        if not isinstance(prior, GaussianPrior):
            return None
        own = dict(network.module.named_parameters())
        points = {name: prior.of(name, own[name]) for name in network.names}
        decay = {name: float(p) / self.task.n for name, p in points.items() if p.numel() == 1}
        if self.log_std is None:  # points have their prior as weight decay, and one precision
            precision = precisions(self.task.network, self.substitute.layout)
            decay["active.mean"] = float(precision.mean()) / self.task.n
        return decay

    def variance(self) -> Tensor | None:
        """Of every weight."""
        return None if self.log_std is None else (2 * self.log_std).exp()

    def _loss(self, x: Inputs, y: Tensor, part: BatchPart, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        if not self.begun:
            self._take_up()
        if self.replacement is not None:
            self.replacement.begin(self.step)
            if self.at_the_mean and self.replacement.due(self.step):
                self._look_at_the_mean(x, y, part)
        outputs, value = self._outputs(x, y, part, self.variance())
        if self.log_std is not None and self.precision is not None:
            weight = self.kl_weight(self.step / self.steps)
            value = value + part.prior_share * weight / self.task.n * gaussian_kl(
                self.mean, self.log_std, self.precision
            )
        return value, outputs

    def _outputs(self, x: Inputs, y: Tensor, part: BatchPart, variance: Tensor | None) -> tuple[Tensor, Tensor]:
        self.substitute.use(self.mean, variance)
        outputs = self.substitute.network.training_pass(x)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        joint = self.task.log_joint(outputs, y, {}, self.variables.hyper, batch_rows=part.batch_rows, share=0.0)
        return outputs, -joint / self.task.n

    def _look_at_the_mean(self, x: Inputs, y: Tensor, part: BatchPart) -> None:
        """A pass without noise, for its gradients alone; the step itself then looks at nothing."""
        _, value = self._outputs(x, y, part, None)
        torch.autograd.grad(value, [self.mean])
        self.substitute.collect({})

    def _after_step(self, moments: Moments) -> None:
        self.step += 1
        self.variables.extra["step"].fill_(self.step)
        if self.replacement is None:
            return
        tensors = {} if self.log_std is None else {"log_std": self.log_std}
        fill: Tensor | float = 0.0
        if self.log_std is not None:
            parts = (part.exp().mean().log() for _, part in self.substitute.layout.split(self.log_std.detach()))
            fill = torch.stack([*parts]) if self.new_std is None else math.log(self.new_std)
        if self.replacement.finish(self.mean, {"log_std": fill}, tensors, moments):
            layout = self.substitute.layout
            self.variables.extra["indices"].copy_(layout.indices)
            self.counts.copy_(torch.tensor([*layout.counts.values()]))
            if self.precision is not None and self.precision.ndim:
                self.precision = precisions(self.task.network, layout)

    def _take_up(self) -> None:
        """Where the flat tensors came from a file or from the best epoch, have the layers follow."""
        layout, kept = self.substitute.layout, self.variables.extra
        self.begun, self.step = True, int(kept["step"])
        if not torch.equal(kept["indices"], layout.indices):
            counts = dict(zip(layout.counts, kept["counts"].tolist(), strict=True))
            self.substitute.arrange(Layout(layout.geometries, counts, kept["indices"].clone()))

    def _after_epoch(self, epoch: int) -> None:
        buffers = [b for b in self.variables.buffers.values() if b.is_floating_point()]
        self.run.ranks.add(buffers)  # each rank's statistics are of its own rows: all go on with their mean
        for buffer in buffers if self.run.ranks.size > 1 else []:
            buffer /= self.run.ranks.size

    def _validate(self) -> float:
        """At the means."""
        self.substitute.use(self.mean.detach())
        return -float(
            self.task.log_likelihood(self.substitute.network, {}, self.variables.hyper, self.task.validation)
        )
