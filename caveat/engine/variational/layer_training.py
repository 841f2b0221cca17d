"""Training networks of sparse layers: Gaussians over their weights by the ELBO, or point weights.

    minimise  beta_t / N sum_k KL(N(mu_k, sigma_k^2) || N(0, s^2)) - 1/N E_q log p(D | theta)
    KL = log(s / sigma) + (sigma^2 + mu^2) / (2 s^2) - 1/2

Outputs are drawn by local reparameterisation. log sigma is what is learned, by Adam at a rate of its own: in a
softplus's argument at the means' rate its steps fall below what float32 resolves, and sigma stays where it began.
Biases and norm layers are points under the prior.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from caveat.batches import Inputs, count_rows
from caveat.engine.run import Run
from caveat.engine.sparse import (
    ActiveWeights,
    Exchange,
    FlopsByCounts,
    NoExchange,
    Noise,
    StepBatch,
    Substitute,
    WeightLayout,
    stored_counts,
)
from caveat.engine.torch_settings import compiled
from caveat.engine.training import (
    BatchPart,
    Moments,
    Training,
    Variables,
    optimise,
    row_losses,
    steps_per_epoch,
    total_steps,
    warn_of_noise,
)
from caveat.engine.variational.bound import check_fine, gaussian_kl, noise_of_batch, noise_of_weights, precisions
from caveat.engine.variational.layer_posterior import LayerState
from caveat.likelihoods import Hyper, learned_noise
from caveat.network import Network, Params
from caveat.priors import gaussian_precisions, weight_decay
from caveat.randomness import seeded
from caveat.storage import State
from caveat.task import Task

__all__ = ["LayerTraining", "Trained"]


@dataclass(frozen=True)
class Trained:
    """What training ended with: flat weights [size] where a layout says, and everything else."""

    layout: WeightLayout
    mean: Tensor
    log_std: Tensor | None
    rest: Params
    hyper: Hyper
    history: list[dict[str, float]]

    def state(self, network: Network, slices: Params | None = None) -> LayerState:
        """What a posterior keeps; `network` is the one that was trained, `slices` say which channels it has."""
        counts = stored_counts(network, self.layout.counts)
        return LayerState(
            self.mean, self.layout.indices, counts, self.rest, self.hyper, self.log_std, slices=slices or {}
        )


@dataclass
class _Variables(Variables):
    """With what an exchange has added up over batches, since an epoch may end between them."""

    sums: Params = field(default_factory=dict)  # absolute gradients, by layer

    def groups(self) -> State:
        return super().groups() | {"sums": self.sums}


class LayerTraining:
    """Training in progress: a substitute, its flat weights, and what is done to them in a step.

    Args:
        task: what is trained for.
        substitute: the network with sparse layers.
        weights: of those layers, flat; moved in place.
        hyper: what the likelihood starts from.
        training: the knobs of the loop.
        run: the fit's surroundings.
        exchange: what changes which weights there are; nothing does unless given.
        std_learning_rate: of log standard deviations, by Adam.
        kl_weight: the weight of the divergence, by the share of training that is over.
        selects: whether a training whose length nobody gave takes the last epoch that validation rows, at the means,
            cannot tell from the best.
    """

    def __init__(
        self,
        task: Task,
        substitute: Substitute,
        weights: ActiveWeights,
        hyper: Hyper,
        training: Training,
        run: Run,
        *,
        exchange: Exchange | None = None,
        std_learning_rate: float = 1e-2,
        kl_weight: Callable[[float], float] = lambda progress: 1.0,
        selects: bool = False,
    ) -> None:
        if weights.log_std is not None:
            check_fine(weights.log_std)
        self.task, self.substitute, self.weights, self.training, self.run = task, substitute, weights, training, run
        self.mean = weights.mean.requires_grad_()
        self.log_std = None if weights.log_std is None else weights.log_std.requires_grad_()
        self.exchange: Exchange = NoExchange() if exchange is None else exchange
        self.kl_weight = kl_weight
        open_ended = training.epochs is None and not training.patience
        self._selects = selects and open_ended and task.validation is not None
        self.step, self.begun, self.steps = 0, False, total_steps(task, training)
        # The share of the sparse layers' weights that steps took sparse kernels for; None where none was left to make.
        self.ran_sparse: float | None = None
        self._nothing = weights.mean.new_empty(0)
        # On a GPU as a CUDA graph: a narrow network's kernels are done sooner than they can be launched one by one.
        mode = "reduce-overhead" if run.device.type == "cuda" else None
        self._fast_pass = compiled(self._forgetful_pass, mode=mode) if training.compile else self._forgetful_pass
        self.variables = self._variables(hyper, std_learning_rate)
        network = task.network.to(run.device)
        points = self._points()
        precisions_of_points = gaussian_precisions(network.prior, points)
        gaussian = precisions_of_points is not None
        self.precision = precisions(network, substitute.layout) if self.log_std is not None or gaussian else None
        if precisions_of_points is not None and self.log_std is None and self.precision is not None:
            precisions_of_points["active.mean"] = self.precision
        # The prior of what has no posterior, as weight decay; None where it has to be in the loss.
        self.decay = weight_decay(precisions_of_points, task.n)
        # Operations of an example, beyond those with the weights of the start: by the layers' counts, and now.
        self._flops: FlopsByCounts | None = None
        self._more_flops = 0.0

    def _variables(self, hyper: Hyper, std_learning_rate: float) -> "_Variables":
        """What the loop moves and keeps."""
        module, layout = self.substitute.network.module, self.substitute.layout
        parameters = dict(module.named_parameters())
        weights = {"active.mean": self.mean}
        weights |= {name: parameters[name].requires_grad_() for name in self.substitute.network.names}
        hyper = {name: t.to(self.run.device, copy=True) for name, t in hyper.items()}
        if (noise_to_learn := learned_noise(self.task.network.likelihood, hyper)) is not None:
            noise_to_learn.requires_grad_()
        extra = {
            "indices": layout.indices.clone(),  # the layers' own stay as they are while these are overwritten
            "counts": torch.tensor([*layout.counts.values()]),
            "step": torch.zeros((), dtype=torch.int64),
        }
        return _Variables(
            weights,
            hyper,
            dict(module.named_buffers()),
            extra | self.exchange.state(),
            {} if self.log_std is None else {"active.log_std": self.log_std},
            std_learning_rate,
            self.exchange.sums,
        )

    def _points(self) -> Params:
        """The parameters beside the layers' weights, which have no posterior."""
        return {name: self.variables.weights[name] for name in self.substitute.network.names}

    def train(self, training_flops: float | None = None) -> Trained:
        """Train to the end; `training_flops` are those of an example with the weights of the start."""
        task, substitute = self.task, self.substitute
        self._check_ranks()
        self._flops = self._flops_beyond_start()
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
            row_losses=self._row_losses if self._selects else None,
        )
        self.exchange.sums.clear()
        self._take_up()
        substitute.use(self.mean.detach())
        hyper = task.fitted_hyper(substitute.network, {}, task.validation)
        warn_of_noise(task, self.run)
        log_std = None if self.log_std is None else self.log_std.detach()
        return Trained(substitute.layout, self.mean.detach(), log_std, substitute.rest(), hyper, history)

    def std_balance(self, rows: int = 2048, pairs: int = 2) -> float | None:
        """How wide the deviations are against the bound's own optimum, given the means, from noisy passes.

        With h_k the expected curvature of -log p(D | theta), the bound is stationary in log sigma_k where
        sigma_k^2 (h_k / beta + lambda_k) = 1; this is its mean over the weights, with at most `rows` training rows for
        the sum over h. The gradient of -log p(D | theta) in log sigma_k is an estimate of sigma_k^2 h_k; passes come
        in `pairs` of opposite noise, whose slopes cancel. None where the divergence has no weight.
        """
        weight = self.kl_weight(self.step / self.steps)
        if self.log_std is None or self.precision is None or not weight:
            return None
        task, device, variables = self.task, self.run.device, self.variables
        some = torch.linspace(0, task.n - 1, min(task.n, rows), dtype=torch.float64).long()
        batches = some.tensor_split(steps_per_epoch(len(some), self.training.batch_size or task.train.batch_size))
        before = {name: buffer.clone() for name, buffer in variables.buffers.items()}
        curvature = 0.0
        self.substitute.network.module.train()
        for pair in range(pairs):
            for number, (x, y) in enumerate(task.train.batches(batches, device)):
                for sign in (1.0, -1.0):
                    seed = self.run.seed + pair * len(batches) + number
                    self.substitute.draw_noise(*_signed_noise(sign, count_rows(x), seed, device))
                    with seeded(seed, device):  # for randomness inside the module
                        outputs = self._plain_pass(x, self.mean, self.weights.variance())
                    value = -task.log_joint(outputs, y, {}, variables.hyper, batch_rows=len(some), share=0.0)
                    curvature += float(torch.autograd.grad(value, self.log_std)[0].sum()) / (2 * pairs)
        for name, buffer in variables.buffers.items():
            buffer.copy_(before[name])
        self.substitute.draw_noise(None)
        prior = float((self.precision * (2 * self.log_std.detach()).exp()).expand_as(self.log_std).sum())
        return max(0.0, curvature / weight + prior) / len(self.log_std)

    def _flops_beyond_start(self) -> FlopsByCounts | None:
        """How many more operations an example takes than with the present counts; None where these stay."""
        device = self.run.device
        flops = self.exchange.flops(self.task.network.to(device), self.task.example(device))
        if flops is None:
            return None
        start = flops(self.substitute.layout.counts)
        return lambda counts: flops(counts) - start

    def _check_ranks(self) -> None:
        batch = self.training.batch_size or self.task.train.batch_size
        smallest, ranks = self.task.n // steps_per_epoch(self.task.n, batch), self.run.ranks.size
        if ranks * self.exchange.rows_of_each_rank > smallest:
            raise ValueError(
                f"{ranks} ranks share batches of {smallest} rows, and an exchange of weights takes rows on each: use a "
                f"batch_size of at least {ranks}, or fewer ranks"
            )

    def _log_prior_of_points(self) -> Tensor:
        """The log prior of what has no posterior, but for constants."""
        points = self._points()
        active = self.mean.new_zeros(())
        if self.log_std is None and self.precision is not None:
            active = -0.5 * (self.precision * self.mean.square()).sum()
        elif self.log_std is None:  # a prior that is not Gaussian may correlate a layer's weights: all of them
            points |= self.substitute.layout.whole(self.mean)
        return active + (self.task.network.prior.log_prob(points) if points else 0.0)

    def _loss(self, x: Inputs, y: Tensor, part: BatchPart, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        if not self.begun:
            self._take_up()
        self.run.flops += part.batch_rows * self._more_flops
        loss = partial(self._minus_log_likelihood, y=y, part=part)
        self.exchange.begin(self.step, StepBatch(x, loss, partial(self._pass_at_the_means, x, y, part)))
        if self.run.ranks.size > 1 or not self.training.compile:
            self.substitute.draw_noise(noise_of_batch(count_rows(x), part, rng), noise_of_weights(rng))
        variance = self.weights.variance()
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
        at_the_mean = variance is None and self.log_std is not None  # now and then only: not worth a graph
        fast = self.training.compile and not at_the_mean
        outputs = (self._compiled_pass if fast else self._plain_pass)(x, self.mean, variance)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        return outputs, self._minus_log_likelihood(outputs, y, part)

    def _minus_log_likelihood(self, outputs: Tensor, y: Tensor, part: BatchPart) -> Tensor:
        joint = self.task.log_joint(outputs, y, {}, self.variables.hyper, batch_rows=part.batch_rows, share=0.0)
        return -joint / self.task.n

    def _plain_pass(self, x: Inputs, mean: Tensor, variance: Tensor | None) -> Tensor:
        self.substitute.use(mean, variance)
        return self.substitute.network.training_pass(x)

    def _compiled_pass(self, x: Inputs, mean: Tensor, variance: Tensor | None) -> Tensor:
        """The compiled pass, with whole weights written out before it: one graph for all places and densities.

        Gradients of whole weights come back from it in any case, so that looking at them takes no other pass.
        """
        layout = self.substitute.layout
        collectors = {n: layer.collect for n, layer in self.substitute.layers.items() if layer.collect is not None}
        self.substitute.collect({})  # or the pass would be compiled once more, for steps that look
        self.substitute.forget(self._nothing)
        whole = layout.joined(mean)

        def look(gradient: Tensor) -> None:
            for name, part in layout.split_joined(gradient):
                if name in collectors:
                    collectors[name](part)

        if collectors:
            whole.register_hook(look)
        return self._fast_pass(x, whole, None if variance is None else layout.joined(variance))

    def _forgetful_pass(self, x: Inputs, mean: Tensor, variance: Tensor | None) -> Tensor:
        """The pass to be compiled: layers forget their weights, which would otherwise be outputs of the graph too."""
        self.substitute.use_joined(mean, variance)
        outputs = self.substitute.network.training_pass(x)
        self.substitute.forget(self._nothing)
        return outputs

    def _pass_at_the_means(self, x: Inputs, y: Tensor, part: BatchPart) -> None:
        """A pass without noise, forward and back, for what layers collect alone."""
        before = {name: buffer.clone() for name, buffer in self.variables.buffers.items()}
        _, value = self._outputs(x, y, part, None)
        torch.autograd.grad(value, [self.mean])
        for name, buffer in self.variables.buffers.items():
            buffer.copy_(before[name])  # the statistics of a batch count once

    def _after_step(self, moments: Moments) -> None:
        self.step += 1
        self.variables.extra["step"].fill_(self.step)
        if self.exchange.finish(moments):
            layout = self.substitute.layout
            self.variables.extra["indices"].copy_(layout.indices)
            self.variables.extra["counts"].copy_(torch.tensor([*layout.counts.values()]))
            self._follow_layout()

    def _take_up(self) -> None:
        """Where the flat tensors came from a file or from the best epoch, have the layers and the exchange follow."""
        layout, values = self.substitute.layout, self.variables.extra
        self.begun, self.step = True, int(values["step"])
        self.exchange.take_up()
        counts = dict(zip(layout.counts, values["counts"].tolist(), strict=True))
        if counts != layout.counts or not torch.equal(values["indices"], layout.indices):
            self.substitute.arrange(WeightLayout(layout.geometries, counts, values["indices"].clone()))
            self._follow_layout()

    def _follow_layout(self) -> None:
        """Look up the prior precisions of the weights that there are, where they differ, and count operations."""
        if self._flops is not None:
            self._more_flops = self._flops(self.substitute.layout.counts)
        if self.precision is not None and self.precision.ndim:
            self.precision = precisions(self.task.network.to(self.run.device), self.substitute.layout)

    def _after_epoch(self, epoch: int) -> None:
        self.ran_sparse = 0.0 if self.training.compile else self.substitute.ran_sparse()  # compiled, none does
        self.substitute.collect({})
        self.run.ranks.average(self.variables.buffers.values())

    def _validate(self) -> float:
        """The validation loss at the means."""
        self.substitute.use(self.mean.detach())
        return -float(self.task.log_likelihood(self.substitute.network, {}, self.variables.hyper, self.task.validation))

    def _row_losses(self) -> Tensor:
        """The losses of the validation rows [R] at the means, with the noise that these rows show."""
        task, network = self.task, self.substitute.network
        assert task.validation is not None
        self.substitute.use(self.mean.detach())
        outputs, targets = task.outputs(network, {}, task.validation)
        hyper = {name: value.to(outputs.device) for name, value in task.hyper.items()}
        return row_losses(task.network.likelihood, outputs, targets, hyper)


def _signed_noise(sign: float, rows: int, seed: int, device: torch.device) -> tuple[Noise, Noise]:
    """What draws the noise of one whole batch and of its weights, or their opposites."""
    rng = torch.Generator(device).manual_seed(seed)
    draw, of_weights = noise_of_batch(rows, BatchPart(0, rows, 1.0), rng), noise_of_weights(rng)
    return lambda like: sign * draw(like), lambda like: sign * of_weights(like)
