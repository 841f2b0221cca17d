"""LastLayerLaplace: a Laplace approximation over the last layer only; the layers before it are features.

    f(x) = W phi(x) + b,   (W, b) ~ N((W*, b*), P^-1)

With a Gaussian likelihood this is Bayesian linear regression on the features phi, exactly. One forward pass and the
last layer's gradient are all that a row costs (Kristiadi et al. 2020).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from caveat.batches import count_rows
from caveat.engine.laplace import (
    ChosenWeights,
    LaplaceKnobs,
    LaplaceState,
    add_rows,
    check_laplace,
    point_of,
    sweep_at,
    tuned_gaussian,
    what_was_done,
)
from caveat.engine.row_gradients import Tape
from caveat.engine.run import Info, Run
from caveat.engine.torch_settings import plain_attention
from caveat.network import Layer, Network
from caveat.rows import Rows
from caveat.storage import State
from caveat.task import Task

__all__ = ["LastLayerLaplace"]


@dataclass(frozen=True)
class LastLayerLaplace(LaplaceKnobs):
    """A Gaussian over the last layer's weights; the layers before it stay as they are."""

    structure: Literal["full", "kronecker", "diagonal"] = "full"
    layer: str = "auto"  # name of a layer; auto is the last one that acts in a forward pass
    chooses_weights: ClassVar[bool] = True
    quick: ClassVar["LastLayerLaplace"]

    def check(self, task: Task, device: torch.device) -> None:
        """Refuse what can be refused before a start is trained; memory as if no row were left out."""
        chosen = self._chosen(task, task.network)
        check_laplace(self, task, chosen, self.structure, device, "LastLayerLaplace")

    def _chosen(self, task: Task, network: Network) -> ChosenWeights:
        """The layer's weights."""
        layers = _last_to_act(task, network, network.names) if self.layer == "auto" else {self.layer}
        names = [name for name in network.names if _layer(name) in layers]
        if not names:
            known = list(dict.fromkeys(map(_layer, network.names)))
            raise ValueError(f"layer={self.layer!r} has no weights that inference is about: the layers are {known}")
        return ChosenWeights(network.restricted(names))

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Find the layer, sum its curvature, then find the prior precision."""
        network, point = task.network.to(run.device), point_of(start, run)
        chosen = self._chosen(task, network)
        layer = " and ".join(dict.fromkeys(map(_layer, chosen.network.names)))
        parameters = dict(network.module.named_parameters())
        if self.layer == "auto" and parameters.keys() != set(network.names):  # else it is the last of all
            last = _last_to_act(task, network, parameters)
            if not last & set(map(_layer, chosen.network.names)):
                run.warnings.append(
                    f"the last layer to act, {' and '.join(sorted(last))}, has no weights that inference is about: "
                    f"{layer} was taken in its place, the last that has some"
                )
        sweep, skipped = sweep_at(self, task, chosen, point, run).informative(self.skip)
        curvature, log_likelihood = sweep.curvature(self.structure)
        tuned = tuned_gaussian(self, task, sweep, chosen, curvature, log_likelihood)
        entries = chosen.stored_entries(task.network)
        state = LaplaceState(point.params, tuned.hyper or point.hyper, tuned.gaussian.tensors(), entries)
        report = {"layer": layer} | what_was_done(tuned, curvature, sweep, chosen, skipped)
        counts = chosen.layer_counts()

        def treatment(which: Layer) -> str:
            count = counts.get(which.name, 0)
            some = f" over {count:,} of {which.selected:,} weights" if count < which.selected else ""
            return f"Gaussian, {self.structure} covariance{some}" if count else "fixed at the MAP"

        return state.tensors(), run.info(task.network, treatment, report)

    def update(self, state: State, network: Network, rows: Rows, run: Run) -> State:
        """Add the curvature of more rows at the same point; the point and the prior stay."""
        return add_rows(self, state, network, rows, run)


def _last_to_act(task: Task, network: Network, names: Iterable[str]) -> set[str]:
    """The layer of the weights that the last function to take any takes; two where it takes one of another's, tied."""
    params = network.params()
    parameters = dict(network.module.named_parameters()) | params
    x, _ = next(iter(task.train.batches([torch.arange(min(3, task.n))], network.device)))
    tape = Tape({id(parameters[name]): name for name in names}, count_rows(x))
    with torch.no_grad(), plain_attention(), tape:
        network(params, x)
    return set(map(_layer, tape.last))


def _layer(name: str) -> str:
    """The layer of a parameter; a weight norm's belong to the layer whose weight it makes, the module's own to none."""
    return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0] or name


LastLayerLaplace.quick = LastLayerLaplace()
