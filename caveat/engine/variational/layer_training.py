"""Training networks of sparse layers: Gaussians over their weights by the ELBO, or point weights.

    minimise  beta_t / N sum_k KL(N(mu_k, sigma_k^2) || N(0, s^2)) - 1/N E_q log p(D | theta)
    KL = log(s / sigma) + (sigma^2 + mu^2) / (2 s^2) - 1/2

Outputs are drawn by local reparameterisation. log sigma is what is learned, by Adam at a rate of its own: in a
softplus's argument at the means' rate its steps fall below what float32 resolves, and sigma stays where it began.
Biases and norm layers are points under the prior.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from caveat.batches import Inputs, count_rows
from caveat.engine.channels import ChannelExchange
from caveat.engine.run import Run
from caveat.engine.sparse import Scheme, Substitute, WeightLayout, flops_by_counts, plain_layers, weight_name
from caveat.engine.training import (
    BatchPart,
    Moments,
    Training,
    Variables,
    optimise,
    steps_per_epoch,
    warn_if_nothing_was_learned,
)
from caveat.engine.variational.weight_exchange import WeightExchange
from caveat.likelihoods import Hyper, learned_noise
from caveat.network import Network, Params
from caveat.priors import GaussianPrior
from caveat.storage import State
from caveat.task import Task

__all__ = ["LayerTraining", "Trained", "check_fine", "gaussian_kl", "noise_of_batch", "precisions", "warm_up"]


@dataclass(frozen=True)
class Trained:
    """What training ended with."""

    layout: WeightLayout
    mean: Tensor
    log_std: Tensor | None
    rest: Params
    hyper: Hyper
    history: list[dict[str, float]]

    def state(self, network: Network) -> State:
        """As a posterior keeps it."""
        counts = torch.tensor([self.layout.counts.get(name, 0) for name in plain_layers(network)])
        active = {"mean": self.mean, "indices": self.layout.indices, "counts": counts}
        if self.log_std is not None:
            active["log_std"] = self.log_std
        return {"active": active, "rest": self.rest, "hyper": self.hyper}


def gaussian_kl(mean: Tensor, log_std: Tensor, precision: Tensor, variance: Tensor | None = None) -> Tensor:
    """KL(N(mean, std^2) || N(0, 1/precision)), summed; with the variance where it is known already.

    Summed term by term: of millions of weights, every pass over them less is felt.
    """
    variance = (2 * log_std).exp() if variance is None else variance
    if precision.ndim:
        squares, logs = (precision * (variance + mean.square())).sum(), precision.log().sum()
    else:
        squares, logs = precision * (variance.sum() + mean.square().sum()), mean.numel() * precision.log()
    return 0.5 * (squares - logs - mean.numel()) - log_std.sum()


def precisions(network: Network, layout: WeightLayout) -> Tensor:
    """The prior's precision of each weight, [size], or one for all."""
    prior = network.prior
    if not isinstance(prior, GaussianPrior):
        raise ValueError(
            f"variational layers need a Gaussian prior, for its KL divergence in closed form, and this one is "
            f"{type(prior).__name__}: use caveat.GaussianPrior(precision)"
        )
    own = dict(network.module.named_parameters())
    by_layer = {name: prior.of(weight_name(name), own[weight_name(name)]) for name in layout.counts}
    values = [*by_layer.values()]
    if all(value.ndim == 0 and value == values[0] for value in values):
        return values[0]
    whole = {name: value.expand(layout.geometries[name].shape) for name, value in by_layer.items()}
    return layout.gathered(whole)


@dataclass
class _Variables(Variables):
    """With what an exchange has seen in the batches before it, where an epoch may end between them."""

    sums: Params = field(default_factory=dict)  # of the sizes of gradients, by layer

    def groups(self) -> State:
        return super().groups() | {"sums": self.sums}


class LayerTraining:
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
        if log_std is not None:
            check_fine(log_std)
        self.task, self.substitute, self.training, self.run = task, substitute, training, run
        self.mean, self.log_std = mean.requires_grad_(), None if log_std is None else log_std.requires_grad_()
        self.kl_weight = kl_weight
        self.replacement: WeightExchange | None = None
        self.exchange: ChannelExchange | None = None
        self.new_std: float | None = None  # of added weights; None takes the mean of their layer's
        self.at_the_mean = False  # whether gradients of weights that are not there are taken without noise
        self.step, self.begun = 0, False
        # The share of the sparse layers' weights that steps took sparse kernels for; None where none was left to make.
        self.ran_sparse: float | None = None
        self._nothing = mean.new_empty(0)
        # On a GPU as a CUDA graph: a narrow network's kernels are done sooner than they can be launched one by one.
        mode = "reduce-overhead" if run.device.type == "cuda" else None
        self._fast_pass = torch.compile(self._forgetful_pass, mode=mode) if training.compile else self._forgetful_pass
        module = substitute.network.module
        own = dict(module.named_parameters())
        weights = {"active.mean": self.mean} | {n: own[n].requires_grad_() for n in substitute.network.names}
        hyper = {name: t.to(run.device, copy=True) for name, t in hyper.items()}
        if (noise_to_learn := learned_noise(task.network.likelihood, hyper)) is not None:
            noise_to_learn.requires_grad_()
        scales = {} if self.log_std is None else {"active.log_std": self.log_std}
        self.counts = torch.tensor([*substitute.layout.counts.values()])
        indices = substitute.layout.indices.clone()  # the layers' own stay as they are while these are overwritten
        extra = {"indices": indices, "counts": self.counts, "step": torch.zeros((), dtype=torch.int64)}
        extra["exchanges"] = torch.zeros(2, dtype=torch.int64)  # how many, and of how many weights
        self.variables = _Variables(weights, hyper, dict(module.named_buffers()), extra, scales, std_learning_rate)
        gaussian = isinstance(task.network.prior, GaussianPrior)
        network = task.network.to(run.device)
        self.precision = precisions(network, substitute.layout) if scales or gaussian else None
        self.decay = self._decay()
        steps = steps_per_epoch(task.n, training.batch_size or task.train.batch_size)
        self.steps = max(1, training.epochs * steps)
        # Of an example, beyond those with the weights of the start: by the numbers of layers' weights, and now.
        self._flops: Callable[[dict[str, int]], float] | None = None
        self._more_flops = 0.0

    def train(self, training_flops: float | None = None) -> Trained:
        """To the end; `training_flops` are those of an example with the weights of the start."""
        task, substitute = self.task, self.substitute
        self._check_ranks()
        if self.replacement is not None:
            self.variables.sums = self.replacement.sums
            self._flops = self._flops_of_layouts(self.replacement)
        history = optimise(
            task,
            task.network,
            self.variables,
            self._loss,
            self.training,
            self.run,
            decay=self.decay,
            validate=None if task.validation is None else self._validate,
            after_epoch=self._after_epoch,
            after_step=self._after_step,
            training_flops=training_flops,
        )
        self.variables.sums.clear()
        self._take_up()
        substitute.use(self.mean.detach())
        hyper = task.fitted_hyper(substitute.network, {}, task.validation)
        if self.training.epochs:
            warn_if_nothing_was_learned(task, substitute.network, {}, hyper, self.run)
        std = None if self.log_std is None else self.log_std.detach()
        return Trained(substitute.layout, self.mean.detach(), std, substitute.rest(), hyper, history)

    def _flops_of_layouts(self, replacement: WeightExchange) -> Callable[[dict[str, int]], float] | None:
        """How many more operations an example takes than with the present numbers; None where these stay."""
        if replacement.scope == "layer":
            return None
        task, first, looking = self.task, dict(self.substitute.layout.counts), self.at_the_mean
        example, _ = next(task.train.batches([torch.arange(min(task.n, 2))], self.run.device))
        scheme = Scheme(gaussian=self.log_std is not None, interval=replacement.between_looks)
        inference, training = flops_by_counts(task.network.to(self.run.device), example, scheme)

        def of(counts: dict[str, int]) -> float:
            return training(counts) + (3 * inference(counts) / replacement.interval if looking else 0.0)

        return lambda counts: of(counts) - of(first)

    def _check_ranks(self) -> None:
        batch = self.training.batch_size or self.task.train.batch_size
        smallest, ranks = self.task.n // steps_per_epoch(self.task.n, batch), self.run.ranks.size
        if ranks > smallest and (self.replacement is not None or self.exchange is not None):
            raise ValueError(
                f"{ranks} ranks share batches of {smallest} rows, and an exchange of weights takes rows on each: use a "
                f"batch_size of at least {ranks}, or fewer ranks"
            )

    def _decay(self) -> dict[str, float] | None:
        """The prior of what has no posterior, as weight decay; None where it has to be in the loss."""
        prior, network = self.task.network.prior, self.substitute.network
        if not isinstance(prior, GaussianPrior) or self.precision is None:
            return None
        own = dict(network.module.named_parameters())
        points = {name: prior.of(name, own[name]) for name in network.names}
        if self.log_std is None:
            points["active.mean"] = self.precision
        if any(precision.numel() > 1 for precision in points.values()):
            return None
        return {name: float(precision) / self.task.n for name, precision in points.items()}

    def _log_prior_of_points(self) -> Tensor:
        """Of what has no posterior, but for constants."""
        points = {name: self.variables.weights[name] for name in self.substitute.network.names}
        active = self.mean.new_zeros(())
        if self.log_std is None and self.precision is not None:
            active = -0.5 * (self.precision * self.mean.square()).sum()
        elif self.log_std is None:  # a prior that is not Gaussian may correlate a layer's weights: all of them
            points |= self.substitute.layout.whole(self.mean)
        return active + (self.task.network.prior.log_prob(points) if points else 0.0)

    def variance(self) -> Tensor | None:
        """Of every weight."""
        return None if self.log_std is None else (2 * self.log_std).exp()

    def _loss(self, x: Inputs, y: Tensor, part: BatchPart, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        if not self.begun:
            self._take_up()
        self.run.flops += part.batch_rows * self._more_flops
        if self.replacement is not None:
            self.replacement.begin(self.step)
            if self.at_the_mean and self.replacement.due(self.step):
                self._look_at_the_mean(x, y, part)
        if self.exchange is not None and self.exchange.due(self.step):
            loss = partial(self._minus_log_likelihood, y=y, part=part)
            self.exchange.look(self.step, self.mean, x, loss)
        if self.run.ranks.size > 1 or not self.training.compile:
            self.substitute.draw_noise(noise_of_batch(count_rows(x), part, rng))
        variance = self.variance()
        outputs, value = self._outputs(x, y, part, variance)
        if self.decay is None:
            value = value - part.prior_share / self.task.n * self._log_prior_of_points()
        if self.log_std is not None and self.precision is not None:
            weight = self.kl_weight(self.step / self.steps)
            divergence = gaussian_kl(self.mean, self.log_std, self.precision, variance)
            value = value + part.prior_share * weight / self.task.n * divergence
        return value, outputs

    def _outputs(self, x: Inputs, y: Tensor, part: BatchPart, variance: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.substitute.network.module.training:
            self.substitute.network.module.train()  # or the pass would be compiled for both modes
        at_the_mean = variance is None and self.log_std is not None  # now and then: not worth a graph of its own
        compiled = self.training.compile and not at_the_mean
        outputs = (self._compiled_pass if compiled else self._plain_pass)(x, self.mean, variance)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        return outputs, self._minus_log_likelihood(outputs, y, part)

    def _minus_log_likelihood(self, outputs: Tensor, y: Tensor, part: BatchPart) -> Tensor:
        joint = self.task.log_joint(outputs, y, {}, self.variables.hyper, batch_rows=part.batch_rows, share=0.0)
        return -joint / self.task.n

    def _plain_pass(self, x: Inputs, mean: Tensor, variance: Tensor | None) -> Tensor:
        self.substitute.use(mean, variance)
        return self.substitute.network.training_pass(x)

    def _compiled_pass(self, x: Inputs, mean: Tensor, variance: Tensor | None) -> Tensor:
        """With weights that are written out whole before it: one graph, wherever weights are and however many.

        Gradients of whole weights come back from it in any case, so that to look at them takes no pass of its own.
        """
        layout = self.substitute.layout
        collectors = {n: layer.collect for n, layer in self.substitute.layers.items() if layer.collect is not None}
        self.substitute.collect({})  # or the pass would be compiled for steps that look, too
        whole = layout.joined(mean)

        def look(gradient: Tensor) -> None:
            for name, part in layout.split_joined(gradient):
                if name in collectors:
                    collectors[name](part)

        if collectors:
            whole.register_hook(look)
        return self._fast_pass(x, whole, None if variance is None else layout.joined(variance))

    def _forgetful_pass(self, x: Inputs, mean: Tensor, variance: Tensor | None) -> Tensor:
        """To be compiled: what layers keep would be returned as well, and the way back begin with zeros for each."""
        self.substitute.use_joined(mean, variance)
        outputs = self.substitute.network.training_pass(x)
        for layer in self.substitute.layers.values():
            layer.values, layer.variance = self._nothing, None
        return outputs

    def _look_at_the_mean(self, x: Inputs, y: Tensor, part: BatchPart) -> None:
        """A pass without noise, for its gradients alone; the step itself then looks at nothing."""
        before = {name: buffer.clone() for name, buffer in self.variables.buffers.items()}
        _, value = self._outputs(x, y, part, None)
        torch.autograd.grad(value, [self.mean])
        for name, buffer in self.variables.buffers.items():
            buffer.copy_(before[name])  # the statistics of a batch count once
        self.substitute.collect({})

    def _after_step(self, moments: Moments) -> None:
        self.step += 1
        self.variables.extra["step"].fill_(self.step)
        if self.exchange is not None and self.exchange.chosen:
            scales = {} if self.log_std is None else {"log_std": (self.log_std, self._new_log_std())}
            self.exchange.finish(self.mean, scales, moments)
            self.variables.extra["exchanges"].copy_(torch.tensor([self.exchange.updates, self.exchange.replaced]))
            for space, own in self.exchange.kept.items():
                self.variables.extra[f"kept.{space}"].copy_(own)
        if self.replacement is None or not self.replacement.chosen:
            return
        tensors = {} if self.log_std is None else {"log_std": self.log_std}
        fill: Tensor | float = 0.0 if self.log_std is None else self._new_log_std()
        if self.replacement.finish(self.mean, {"log_std": fill}, tensors, moments):
            layout = self.substitute.layout
            self.variables.extra["indices"].copy_(layout.indices)
            self.variables.extra["exchanges"].copy_(torch.tensor([self.replacement.updates, self.replacement.replaced]))
            self.counts.copy_(torch.tensor([*layout.counts.values()]))
            self._follow_layout()

    def _new_log_std(self) -> Tensor:
        """Of weights that are added, for each layer."""
        assert self.log_std is not None
        parts = [part.mean() for _, part in self.substitute.layout.split(self.log_std.detach().exp())]
        means = torch.stack(parts).log()
        return means if self.new_std is None else torch.full_like(means, math.log(self.new_std))

    def use_channels(self, exchange: ChannelExchange) -> None:
        """Have channels exchanged."""
        self.exchange = exchange
        self.variables.extra |= {f"kept.{space}": own.clone() for space, own in exchange.kept.items()}

    def _take_up(self) -> None:
        """Where the flat tensors came from a file or from the best epoch, have the layers follow."""
        layout, kept = self.substitute.layout, self.variables.extra
        self.begun, self.step = True, int(kept["step"])
        if self.replacement is not None:
            self.replacement.updates, self.replacement.replaced = kept["exchanges"].tolist()
        if self.exchange is not None:
            self.exchange.updates, self.exchange.replaced = kept["exchanges"].tolist()
            self.exchange.kept = {space: kept[f"kept.{space}"].clone() for space in self.exchange.kept}
        counts = dict(zip(layout.counts, kept["counts"].tolist(), strict=True))
        if counts != layout.counts or not torch.equal(kept["indices"], layout.indices):
            self.substitute.arrange(WeightLayout(layout.geometries, counts, kept["indices"].clone()))
            self._follow_layout()

    def _follow_layout(self) -> None:
        """Have the precisions of the weights that there are, where they differ, and count their operations."""
        if self._flops is not None:
            self._more_flops = self._flops(self.substitute.layout.counts)
        if self.precision is not None and self.precision.ndim:
            self.precision = precisions(self.task.network.to(self.run.device), self.substitute.layout)

    def _after_epoch(self, epoch: int) -> None:
        self.ran_sparse = 0.0 if self.training.compile else self.substitute.ran_sparse()  # compiled, none does
        self.substitute.collect({})
        buffers = [b for b in self.variables.buffers.values() if b.is_floating_point()]
        self.run.ranks.add(buffers)  # each rank's statistics are of its own rows: all go on with their mean
        for buffer in buffers if self.run.ranks.size > 1 else []:
            buffer /= self.run.ranks.size

    def _validate(self) -> float:
        """At the means."""
        self.substitute.use(self.mean.detach())
        return -float(self.task.log_likelihood(self.substitute.network, {}, self.variables.hyper, self.task.validation))


def check_fine(log_std: Tensor) -> None:
    """Refuse half precision: a step of .01 at -5 rounds away, and sigma would never move."""
    if torch.finfo(log_std.dtype).bits < 32:
        raise ValueError(
            f"steps of log sigma are lost in {str(log_std.dtype).removeprefix('torch.')}: give the module in float32, "
            "and for speed Training(precision='bfloat16')"
        )


def noise_of_batch(rows: int, part: BatchPart, rng: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Standard normals as one process would draw them for a whole batch: those of this rank's rows."""

    def draw(like: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0:  # in a backward pass
            raise ValueError(
                "the network computes activations again in its backward pass (torch.utils.checkpoint), where the noise "
                "would be another one: switch gradient checkpointing off in the module"
            )
        times, rest = divmod(len(like), rows)  # a module may have folded another axis into the rows
        total, start = (len(like), 0) if rest else (times * part.batch_rows, times * part.start)
        shape = (total, *like.shape[1:])
        whole = torch.randn(shape, generator=rng, dtype=like.dtype, device=like.device)
        return whole[start : start + len(like)]

    return draw


def warm_up(highest: float, share: float) -> Callable[[float], float]:
    """The weight of a divergence by the progress of training: from 0 to its highest over a share of it."""
    return lambda progress: highest * (min(1.0, progress / share) if share else 1.0)
