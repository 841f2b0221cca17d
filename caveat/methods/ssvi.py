"""SSVI: a Bayesian network that is sparse from the first step of training to the last (Li et al. 2024).

    q(theta) = prod_k N(theta_k; mu_k, sigma_k^2) over the active weights, all others zero
    minimise  beta/N sum_active KL(q_k || p_k) - 1/N E_q log p(D | theta),  while weights that matter least are
    exchanged for those whose loss gradient is largest

The number of active weights is set beforehand and holds at every step. Only their values and places are stored, trained
and saved; on a CPU only they are computed with. The bound is that of the present subnetwork: the KL of a weight that is
fixed at zero, against a Gaussian, is infinite and left out.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from caveat.engine.channels import (
    OUTPUTS,
    ChannelExchange,
    Channels,
    KeptChannels,
    channel_density,
    find_channels,
    is_restorable,
    narrow_network,
    narrow_params,
    random_channels,
    stored_slices,
)
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.sparse import (
    ActiveWeights,
    Allocation,
    Criterion,
    Exchange,
    LayerGeometry,
    Schedule,
    Scheme,
    Substitute,
    active_counts,
    channel_account,
    default_density,
    default_interval,
    dense_layers,
    inferred_weights,
    keep_scores,
    random_layout,
    sparse_layers,
    substitute_and_means,
    training_account,
    weight_name,
)
from caveat.engine.training import ADAM, Training, total_steps
from caveat.engine.variational import (
    Addition,
    LayerPrediction,
    LayerPredictor,
    LayerState,
    LayerTraining,
    Scope,
    WeightExchange,
    check_layers,
    kl_weight_for,
    layer_info,
    std_diagnostics,
    std_rate_for,
    warm_up,
)
from caveat.knobs import Count, NonNegative, Positive, Range, Share, check_knobs
from caveat.network import Network
from caveat.priors import gaussian_precisions
from caveat.storage import State
from caveat.task import Task

__all__ = ["SSVI"]


@dataclass(frozen=True)
class SSVI(Method):
    """Mean-field Gaussians over few weights, chosen while they are trained."""

    # Share of the weights that are active; .05, or more where that would be few weights (`default_density`).
    density: Annotated[float, Range(0, 1, open_low=True)] | None = None
    structure: Literal["unstructured", "channel"] = "unstructured"  # weights one by one, or whole channels
    allocation: Allocation = "uniform"  # of the active weights over layers: the same share, or more to small ones (erk)
    dense: tuple[str, ...] | Literal["first"] = "first"  # layers that keep all weights; "first" is a first convolution
    criterion: Criterion = "snr_magnitude"  # by which weights are kept
    addition: Addition = "noisy"  # the gradient by which weights are added: of a noisy batch, at the means, of batches
    addition_batches: Count = 5  # that addition="batches" averages over
    scope: Scope = "layer"  # weights are exchanged within each layer, or over all of them
    replacement: Annotated[float, Range(0, 1, open_high=True)] = 0.3  # share exchanged at first; it falls as a cosine
    interval: Count | None = None  # steps from one exchange to the next; 100, or fewer so that there are 40 exchanges
    stop: Share = 0.75  # share of training after which the places stay
    initial_std: Positive = 0.01  # of the weights
    new_std: Positive | None = None  # of weights that are added; the mean of their layer's unless given
    std_learning_rate: Positive | None = None  # of log std, by Adam; .01, or more in a short training, unless given
    kl_weight: NonNegative | None = None  # beta at its highest; 1 is the ELBO; min(1, rows / active weights) else
    kl_warmup: Share = 0.5  # share of training over which it rises from 0
    prediction: LayerPrediction = "draws"  # draws of the weights, or of outputs row by row (local reparameterisation)
    default_draws: Count = 10  # a prediction's draws
    training: Training = ADAM
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["SSVI"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))
        if self.structure == "channel":
            unused = ("allocation", "dense", "addition", "addition_batches", "scope")
            given = [name for name in unused if getattr(self, name) != type(self).__dataclass_fields__[name].default]
            if given:
                raise ValueError(
                    f"SSVI(structure='channel'): {', '.join(given)} are for single weights: leave them out"
                )

    def active_counts(self, layers: dict[str, LayerGeometry]) -> dict[str, int]:
        """How many active weights each layer has."""
        return active_counts(layers, self._density(layers), self.allocation, dense_layers(layers, self.dense))

    def _density(self, layers: dict[str, LayerGeometry]) -> float:
        """The density, as given or by the number of weights."""
        return default_density(sum(layer.size for layer in layers.values())) if self.density is None else self.density

    def memory(self, network: Network) -> int:
        """Two values, their gradients and moments, and a place for each active weight."""
        if self.structure == "channel":
            density = self._density(sparse_layers(network))
            return int(10 * network.dtype.itemsize * max(1.0, density * network.n_parameters))
        return 11 * network.dtype.itemsize * sum(self.active_counts(inferred_weights(network)).values())

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train, exchanging weights or channels."""
        fit = self._fit_channels if self.structure == "channel" else self._fit_weights
        return fit(task, start, run)

    def _fit_weights(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        network, params = task.network.to(run.device), start.pop("params")
        layers = inferred_weights(network)
        layout = random_layout(layers, self.active_counts(layers), run)
        substitute, mean = substitute_and_means(network, params, layout)
        del params  # whole weights, of which few are trained
        weights = self._weights(mean)
        exchange = WeightExchange(
            substitute,
            weights,
            partial(self._keep_scores, weights),
            self._schedule(task),
            scope=self.scope,
            addition=self.addition,
            batches=self.addition_batches,
            new_std=self.new_std,
            ranks=run.ranks,
        )
        scheme = self._scheme(exchange.between_looks)
        account = training_account(task, substitute.layout, run, scheme)
        # Gradients at the means take a pass of their own.
        extra = 3 * account.total.inference_flops / self._interval(task) if self.addition == "mean" else 0.0
        trainer = self._trainer(task, substitute, weights, exchange, start, run)
        trained = trainer.train(account.total.training_flops + extra)
        diagnostics = self._diagnostics(trainer, task, run) | {
            "exchanges": exchange.updates,
            "exchanged": exchange.replaced,
        }
        diagnostics["ran_sparse"] = trainer.ran_sparse
        account = training_account(task, trained.layout, run, scheme)  # scope="global" moves weights between layers
        return trained.state(network).tensors(), layer_info(task, trained, run, account, "Gaussian", diagnostics)

    def _fit_channels(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        network, params = task.network.to(run.device), start.pop("params")
        channels = find_channels(network.module, task.example(run.device))
        _check_channels(network, channels)
        wide = sparse_layers(network)
        sizes = {name: geometry.size for name, geometry in wide.items()}
        kept = self._first_channels(channels, sizes, self._density(wide), run)
        if not is_restorable(network, channels, kept):
            raise ValueError(
                "structure='channel' cannot narrow a normalisation without parameters or statistics of its own "
                "(GroupNorm or InstanceNorm with affine=False): give it affine=True, or use structure='unstructured'"
            )
        narrow = narrow_network(network.with_fixed(params), channels, kept)
        layers = sparse_layers(narrow)
        narrow_values = narrow_params(params, channels, kept)
        for name in channels.weights:  # fewer inputs are added up
            fewer = params[name][0].numel() / narrow_values[name][0].numel()
            narrow_values[name] = narrow_values[name] * fewer**0.5
        del params  # whole weights
        layout = random_layout(layers, {name: geometry.size for name, geometry in layers.items()}, run)
        substitute, mean = substitute_and_means(narrow, narrow_values, layout)
        del narrow_values
        weights = self._weights(mean)
        exchange = ChannelExchange(
            network,
            substitute,
            weights,
            channels,
            kept,
            partial(self._keep_scores, weights),
            self._schedule(task),
            new_std=self.new_std,
            seed=run.seed,
            ranks=run.ranks,
        )
        account = channel_account(task, narrow, run, self._scheme(None), self._interval(task))
        trainer = self._trainer(task, substitute, weights, exchange, start, run)
        trained = trainer.train(account.total.training_flops)
        diagnostics = self._diagnostics(trainer, task, run)
        diagnostics |= {"exchanges": exchange.updates, "exchanged_channels": exchange.replaced}
        diagnostics["channels"] = [f"{len(exchange.kept[s])} of {width}" for s, width in enumerate(channels.widths)]
        diagnostics["whole"] = channels.whole
        diagnostics["density"] = sum(trained.layout.counts.values()) / sum(sizes.values())  # of what has a posterior
        state = trained.state(narrow, stored_slices(channels, exchange.kept))
        return state.tensors(), layer_info(task, trained, run, account, "Gaussian", diagnostics)

    def _first_channels(self, channels: Channels, sizes: dict[str, int], density: float, run: Run) -> KeptChannels:
        """The channels to begin with, drawn at random; on a GPU multiples of sixteen, where that is near the density.

        Matrix units work on sixteen channels at a time, and are far slower on a number that is no multiple of eight.
        """
        state, weights = run.rng.get_state(), {weight_name(layer): size for layer, size in sizes.items()}
        if run.device.type == "cuda":
            kept = random_channels(channels, density, run.rng, 16, weights)
            if abs(channel_density(channels, kept, weights) / density - 1) < 0.2:
                return kept
            run.rng.set_state(state)
        kept = random_channels(channels, density, run.rng, sizes=weights)
        reached = channel_density(channels, kept, weights)
        if abs(reached / density - 1) > 0.2:
            near = f"whole channels come as near to density={density} as {reached:.3g}"
            whole = _stay_whole(channels, sizes) if reached > density else {}
            # The others, one channel each, would be bottlenecks that save nothing.
            if sum(sizes[name] for name in whole) > density * sum(sizes.values()):
                named = "; ".join([*[*whole.values()][:5], *(["and others"] if len(whole) > 5 else [])])
                raise ValueError(
                    f"{near}: some layers keep all of them ({named}); use structure='unstructured', or a higher density"
                )
            run.warnings.append(f"{near}: the network is too narrow for more")
        return kept

    def _scheme(self, interval: int | None) -> Scheme:
        return Scheme(interval=interval, optimizer=self.training.descent.optimizer)

    def _schedule(self, task: Task) -> Schedule:
        return Schedule(self._interval(task), self.replacement, self.stop, total_steps(task, self.training))

    def _interval(self, task: Task) -> int:
        """The steps from one exchange to the next, as given or by the number of steps."""
        return default_interval(total_steps(task, self.training), self.stop) if self.interval is None else self.interval

    def _weights(self, mean: Tensor) -> ActiveWeights:
        return ActiveWeights(mean, torch.full_like(mean, math.log(self.initial_std)))

    def _keep_scores(self, weights: ActiveWeights) -> Tensor:
        assert weights.log_std is not None
        return keep_scores(self.criterion, weights.mean.detach(), weights.log_std.detach().exp())

    def _trainer(
        self, task: Task, substitute: Substitute, weights: ActiveWeights, exchange: Exchange, start: State, run: Run
    ) -> LayerTraining:
        return LayerTraining(
            task,
            substitute,
            weights,
            start["hyper"],
            self.training,
            run,
            exchange=exchange,
            std_learning_rate=std_rate_for(self.std_learning_rate, total_steps(task, self.training)),
            kl_weight=warm_up(kl_weight_for(self.kl_weight, task.n, len(weights.mean)), self.kl_warmup),
        )

    def _diagnostics(self, trainer: LayerTraining, task: Task, run: Run) -> dict[str, Any]:
        told = {"exchanging": self.replacement > 0, "interval": self._interval(task)}
        return std_diagnostics(trainer, self.initial_std, run) | told

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not over weights of the network."""
        check_layers(state, network, ["active", "rest", "hyper"], has_widths=True)

    def predictor(self, state: State, network: Network) -> LayerPredictor:
        """What predicts by passes through sparse layers."""
        return LayerPredictor(LayerState.of(state), network, local=self.prediction == "local")


def _stay_whole(channels: Channels, layers: Iterable[str]) -> dict[str, str]:
    """The layers that keep all of their channels, each with its name and the reason where one is known.

    A layer that makes the network's outputs counts only where it cannot read fewer inputs.
    """
    whole = {}
    for name in layers:
        why = channels.whole.get(name)
        if weight_name(name) not in channels.weights or why not in (None, OUTPUTS):
            whole[name] = name if why is None else f"{name}: {why}"
    return whole


def _check_channels(network: Network, channels: Channels) -> None:
    """Refuse a network or a prior that channels cannot be taken from."""
    parameters = dict(network.module.named_parameters())
    fixed = [name for name in channels.extents if name in parameters and name not in network.names]
    if fixed:
        raise ValueError(
            f"structure='channel' would take channels from {', '.join(fixed[:3])}, which are fixed (frozen, or left "
            "out by parameters=): select all parameters, or use structure='unstructured'"
        )
    concerned = {name: parameters[name] for name in channels.extents if name in parameters}
    precisions = gaussian_precisions(network.prior, concerned)
    if precisions is not None and any(precision.ndim for precision in precisions.values()):
        raise ValueError(
            "structure='channel' needs a prior with one precision a layer, since a channel that comes takes the place "
            "of another: give GaussianPrior numbers, or use structure='unstructured'"
        )


SSVI.quick = SSVI(
    density=0.3,
    interval=20,
    kl_weight=0.1,
    std_learning_rate=0.01,
    training=replace(Training(), epochs=60, learning_rate=0.01),
)
