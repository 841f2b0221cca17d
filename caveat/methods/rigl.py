"""RigL: point weights that are sparse all through training (Evci et al. 2020).

The weights of smallest magnitude are exchanged for those whose loss gradient is largest, on the schedule of SSVI and in
the same layers: what is left of SSVI without its Gaussians. A point has no epistemic uncertainty.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.sparse import (
    ActiveWeights,
    Allocation,
    LayerGeometry,
    Schedule,
    Scheme,
    active_counts,
    default_density,
    default_interval,
    dense_layers,
    inferred_weights,
    random_layout,
    substitute_and_means,
    training_account,
)
from caveat.engine.training import ADAM, Training, total_steps
from caveat.engine.variational import (
    LayerPredictor,
    LayerState,
    LayerTraining,
    Scope,
    WeightExchange,
    check_layers,
    layer_info,
)
from caveat.knobs import Count, Range, Share, check_knobs
from caveat.network import Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["RigL"]


@dataclass(frozen=True)
class RigL(Method):
    """Few point weights, chosen while they are trained."""

    # Share of the weights that are active; .05, or more where that would be few weights (`default_density`).
    density: Annotated[float, Range(0, 1, open_low=True)] | None = None
    allocation: Allocation = "uniform"  # of the active weights over layers: the same share, or more to small ones (erk)
    dense: tuple[str, ...] | Literal["first"] = "first"  # layers that keep all weights; "first" is a first convolution
    scope: Scope = "layer"  # weights are exchanged within each layer, or over all of them
    replacement: Annotated[float, Range(0, 1, open_high=True)] = 0.3  # share exchanged at first; it falls as a cosine
    interval: Count | None = None  # steps from one exchange to the next; 100, or fewer so that there are 40 exchanges
    stop: Share = 0.75  # share of training after which the places stay
    training: Training = ADAM
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["RigL"]
    default_draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))

    def active_counts(self, layers: dict[str, LayerGeometry]) -> dict[str, int]:
        """How many active weights each layer has."""
        weights = sum(layer.size for layer in layers.values())
        density = default_density(weights) if self.density is None else self.density
        return active_counts(layers, density, self.allocation, dense_layers(layers, self.dense))

    def memory(self, network: Network) -> int:
        """A value, its gradient and moments, and a place for each active weight."""
        return 6 * network.dtype.itemsize * sum(self.active_counts(inferred_weights(network)).values())

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train, exchanging weights."""
        network, params = task.network.to(run.device), start.pop("params")
        layers = inferred_weights(network)
        substitute, values = substitute_and_means(
            network, params, random_layout(layers, self.active_counts(layers), run)
        )
        del params  # whole weights, of which few are trained
        steps = total_steps(task, self.training)
        interval = default_interval(steps, self.stop) if self.interval is None else self.interval
        schedule = Schedule(interval, self.replacement, self.stop, steps)
        weights = ActiveWeights(values)
        exchange = WeightExchange(
            substitute, weights, lambda: values.detach().abs(), schedule, scope=self.scope, ranks=run.ranks
        )
        scheme = Scheme(gaussian=False, interval=interval, optimizer=self.training.descent.optimizer)
        account = training_account(task, substitute.layout, run, scheme)
        trainer = LayerTraining(
            task, substitute, weights, start["hyper"], self.training, run, exchange=exchange, selects=True
        )
        trained = trainer.train(account.total.training_flops)
        diagnostics: dict[str, Any] = {"exchanges": exchange.updates, "exchanged": exchange.replaced}
        diagnostics |= {"exchanging": self.replacement > 0, "interval": interval, "ran_sparse": trainer.ran_sparse}
        account = training_account(task, trained.layout, run, scheme)  # scope="global" moves weights between layers
        return trained.state(network).tensors(), layer_info(task, trained, run, account, "point", diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not over weights of the network."""
        check_layers(state, network, ["active", "rest", "hyper"], has_widths=False)

    def predictor(self, state: State, network: Network) -> LayerPredictor:
        """What predicts by passes through sparse layers."""
        return LayerPredictor(LayerState.of(state), network)


RigL.quick = RigL(density=0.3, interval=20, training=replace(Training(), epochs=60, learning_rate=0.01))
