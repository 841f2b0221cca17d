"""Training under noise that a prior wants large: weights or units that the data do not hold against it drown in it.

    minimise  beta_t / N KL(noise || log-uniform) - 1/N E log p(D | weights, noise)

What the noise is, the method decides: its `NoisyModel` readies the substitute's layers before a pass and gives the
divergence. beta_t rises to its highest as training begins (KL warm-up). All weights are there until training ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, count_rows
from caveat.engine.run import Run
from caveat.engine.sparse import SparseLayer, Substitute
from caveat.engine.torch_settings import compiled
from caveat.engine.training import (
    BatchPart,
    Moments,
    Training,
    Variables,
    optimise,
    total_steps,
    warn_of_noise,
)
from caveat.engine.variational.bound import check_fine, noise_of_batch, noise_of_weights
from caveat.engine.variational.unit_noise import factors_of
from caveat.engine.variational.units import Units
from caveat.likelihoods import Hyper, learned_noise
from caveat.network import Params
from caveat.priors import gaussian_precisions, weight_decay
from caveat.task import Task

__all__ = ["NoisyModel", "NoisyTraining", "UniformDraw", "scale_inputs"]

UniformDraw = Callable[[int], Tensor]  # numbers [rows, n] for the rows of this rank, as one process would draw them


@dataclass(frozen=True)
class NoisyModel:
    """What a method that prunes by noise has trained, and how it readies the layers for a pass."""

    weights: Params  # moved at the learning rate
    scales: Params  # moved by Adam at a rate of their own: logarithms and locations
    ready: Callable[[UniformDraw], None]  # readies the layers for a noisy pass; given draws of uniform numbers
    quiet: Callable[[], None]  # readies the layers at the means
    divergence: Callable[[], Tensor]  # from the log-uniform prior, summed
    constrain: Callable[[], None] | None = None  # after a step
    points: Callable[[], Params] = dict  # weights among them that are points under the task's prior, by name


class NoisyTraining:
    """Training under noise, in progress.

    Args:
        task: what is trained for.
        substitute: the network with sparse layers.
        noise: what is trained, and how the layers are readied for a pass.
        hyper: what the likelihood starts from.
        training: the knobs of the loop.
        run: the fit's surroundings.
        noise_learning_rate: of the noise's scales, by Adam.
        kl_weight: the weight of the divergence, by the share of training that is over.
    """

    def __init__(
        self,
        task: Task,
        substitute: Substitute,
        noise: NoisyModel,
        hyper: Hyper,
        training: Training,
        run: Run,
        *,
        noise_learning_rate: float,
        kl_weight: Callable[[float], float],
    ) -> None:
        for scale in noise.scales.values():
            check_fine(scale)
        self.task, self.substitute, self.noise, self.training, self.run = task, substitute, noise, training, run
        self.kl_weight = kl_weight
        self.begun, self.step = False, 0
        module = substitute.network.module
        parameters = dict(module.named_parameters())
        for tensor in (*noise.weights.values(), *noise.scales.values()):
            tensor.requires_grad_()
        weights = noise.weights | {n: parameters[n].requires_grad_() for n in substitute.network.names}
        hyper = {name: t.to(run.device, copy=True) for name, t in hyper.items()}
        if (noise_to_learn := learned_noise(task.network.likelihood, hyper)) is not None:
            noise_to_learn.requires_grad_()
        extra = {"step": torch.zeros((), dtype=torch.int64)}
        buffers = dict(module.named_buffers())
        self.variables = Variables(weights, hyper, buffers, extra, noise.scales, noise_learning_rate)
        self.decay = self._decay()
        self.steps = total_steps(task, training)
        forward = substitute.network.training_pass
        self._pass = compiled(forward) if training.compile else forward

    def train(self, training_flops: float) -> list[dict[str, float]]:
        """Train to the end; returns the history. `training_flops` are those of an example."""
        return optimise(
            self.task,
            self.task.network,
            self.variables,
            self._loss,
            self.training,
            self.run,
            decay=self.decay,
            validate=None if self.task.validation is None else self._validate,
            after_epoch=self._after_epoch,
            after_step=self._after_step,
            training_flops=training_flops,
        )

    def finish(self, pruned: Callable[[], None]) -> tuple[Params, Hyper]:
        """All other values, and the hyper fitted to the network whose layers `pruned` has readied."""
        pruned()
        network = self.substitute.network
        hyper = self.task.fitted_hyper(network, {}, self.task.validation)
        warn_of_noise(self.task, self.run)
        return self.substitute.rest(), hyper

    def _decay(self) -> dict[str, float] | None:
        """The prior of what has no noise as weight decay; None where it has to be in the loss."""
        prior, weights = self.task.network.prior, self.variables.weights
        precisions = gaussian_precisions(prior, {name: weights[name] for name in self.substitute.network.names})
        of_points = gaussian_precisions(prior, {name: value.detach() for name, value in self.noise.points().items()})
        if precisions is None or of_points is None:
            return None
        values = [*of_points.values()]
        if any(value.numel() > 1 or value != values[0] for value in values):
            return None  # one decay would have to serve all of a flat tensor
        shared = dict.fromkeys(self.noise.weights, values[0]) if values else {}
        return weight_decay(precisions | shared, self.task.n)

    def _loss(self, x: Inputs, y: Tensor, part: BatchPart, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        if not self.begun:  # the step may have come from a file
            self.begun, self.step = True, int(self.variables.extra["step"])
        if self.run.ranks.size > 1 or not self.training.compile:
            self.substitute.draw_noise(noise_of_batch(count_rows(x), part, rng), noise_of_weights(rng))
        module = self.substitute.network.module
        if not module.training:
            module.train()

        def uniform(n: int) -> Tensor:
            # Of the whole batch, so that the same numbers come from one process and from several.
            whole = torch.rand((part.batch_rows, n), generator=rng, dtype=torch.float64, device=self.run.device)
            return whole[part.start : part.start + count_rows(x)]

        self.noise.ready(uniform)
        outputs = self._pass(x)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        joint = self.task.log_joint(outputs, y, {}, self.variables.hyper, batch_rows=part.batch_rows, share=0.0)
        value = -joint / self.task.n
        if self.decay is None:
            points = {name: self.variables.weights[name] for name in self.substitute.network.names}
            points |= self.noise.points()
            value = value - part.prior_share / self.task.n * self.task.network.prior.log_prob(points)
        weight = part.prior_share * self.kl_weight(self.step / self.steps) / self.task.n
        return value + weight * self.noise.divergence().to(value.dtype), outputs

    def _after_step(self, moments: Moments) -> None:
        self.step += 1
        self.variables.extra["step"].fill_(self.step)
        if self.noise.constrain is not None:
            with torch.no_grad():
                self.noise.constrain()

    def _after_epoch(self, epoch: int) -> None:
        self.run.ranks.average(self.variables.buffers.values())

    def _validate(self) -> float:
        self.noise.quiet()
        return -float(self.task.log_likelihood(self.substitute.network, {}, self.variables.hyper, self.task.validation))


def scale_inputs(substitute: Substitute, units: Units) -> Callable[[Tensor], None]:
    """Make layers multiply their inputs; returns what sets the numbers of all units, [units] or [rows, units]."""
    factors: dict[str, Tensor] = {}
    device = substitute.network.device
    of_inputs = {name: numbers.to(device) for name, numbers in units.of_inputs.items()}  # once, not in every pass

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def multiply(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, factor = given[0], factors[name].to(given[0].dtype)
            if factor.ndim == 2 and len(factor) != len(x):  # a module may have folded another axis into the rows
                factor = factor[torch.arange(len(x), device=x.device) * len(factor) // len(x)]
            dimensions = len(substitute.layers[name].geometry.shape)
            if dimensions > 2:
                factor = factor.view(*factor.shape, *[1] * (dimensions - 2))
            elif factor.ndim == 2:
                factor = factor.view(len(factor), *[1] * (x.ndim - 2), -1)
            return (x * factor,)

        return multiply

    for name in of_inputs:
        layer = substitute.layers[name]
        assert isinstance(layer, SparseLayer)  # units are of layers that are called
        layer.register_forward_pre_hook(hook(name))
    return lambda numbers: factors.update(factors_of(numbers, of_inputs))
