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
from caveat.engine.laplace import LaplaceMethod, Structure, places
from caveat.engine.row_gradients import Tape
from caveat.engine.run import Info, Run
from caveat.engine.torch_settings import plain_attention
from caveat.network import Layer, Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["LastLayerLaplace"]


@dataclass(frozen=True)
class LastLayerLaplace(LaplaceMethod):
    """A Gaussian over the last layer's weights; the layers before it stay as they are."""

    structure: Literal["full", "kronecker", "diagonal"] = "full"
    structured: ClassVar = "LastLayerLaplace"
    layer: str = "auto"  # name of a layer; auto is the last one that acts in a forward pass
    quick: ClassVar["LastLayerLaplace"]

    @property
    def _rank(self) -> int:
        return 0

    def memory(self, network: Network) -> int:
        """A copy of the weights; `check` knows the layer."""
        return network.n_parameters * network.dtype.itemsize

    def about(self, task: Task, network: Network) -> tuple[Network, int, Structure]:
        """The layer's parameters."""
        layers = _last_to_act(task, network, network.names) if self.layer == "auto" else {self.layer}
        names = [name for name in network.names if _layer(name) in layers]
        if not names:
            known = list(dict.fromkeys(map(_layer, network.names)))
            raise ValueError(f"layer={self.layer!r} has no weights that inference is about: the layers are {known}")
        own = network.restricted(names)
        return own, own.n_parameters, self.structure

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Find the layer; one pass over the data; the prior precision."""
        network = task.network.to(run.device)
        own, _, _ = self.about(task, network)
        report = {"layer": " and ".join(dict.fromkeys(map(_layer, own.names)))}
        if self.layer == "auto":
            last = _last_to_act(task, network, dict(network.module.named_parameters()))
            if not last & set(map(_layer, own.names)):
                run.warnings.append(
                    f"the last layer to act, {' and '.join(sorted(last))}, has no weights that inference is about: "
                    f"{report['layer']} was taken in its place, the last that has some"
                )
        counts: dict[str, int] = {}
        for name, place in places(own).items():
            owner = name.rpartition(".")[0]
            counts[owner] = counts.get(owner, 0) + place.stop - place.start

        def treatment(which: Layer) -> str:
            chosen = counts.get(which.name, 0)
            some = f" over {chosen:,} of {which.selected:,} weights" if chosen < which.selected else ""
            return f"Gaussian, {self.structure} covariance{some}" if chosen else "fixed at the MAP"

        return self._laplace(task, start, run, own, None, self.structure, treatment=treatment, diagnostics=report)


def _last_to_act(task: Task, network: Network, names: Iterable[str]) -> set[str]:
    """The layer of the weights that the last function to take any takes; two where it takes one of another's, tied."""
    params = network.params()
    own = dict(network.module.named_parameters()) | params
    x, _ = next(iter(task.train.batches([torch.arange(min(3, task.n))], network.device)))
    tape = Tape({id(own[name]): name for name in names}, count_rows(x))
    with torch.no_grad(), plain_attention(), tape:
        network(params, x)
    return set(map(_layer, tape.last))


def _layer(name: str) -> str:
    """The layer of a parameter; a weight norm's belong to the layer whose weight it makes, the module's own to none."""
    return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0] or name


LastLayerLaplace.quick = LastLayerLaplace()
