"""LastLayerLaplace: a Laplace approximation over the last layer only; the layers before it are features.

    f(x) = W phi(x) + b,   (W, b) ~ N((W*, b*), P^-1)

With a Gaussian likelihood this is Bayesian linear regression on the features phi, exactly. One forward pass and the
last layer's gradient are all that a row costs (Kristiadi et al. 2020).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from caveat.batches import count_rows
from caveat.engine.jacobian import plain_attention
from caveat.engine.laplace import LaplaceMethod
from caveat.engine.run import Info, Run
from caveat.engine.tape import Tape
from caveat.network import Layer, Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["LastLayerLaplace"]


@dataclass(frozen=True)
class LastLayerLaplace(LaplaceMethod):
    """A Gaussian over the last layer's weights; the layers before it stay as they are."""

    structure: Literal["full", "kronecker", "diagonal"] = "full"
    layer: str = "auto"  # name of a layer; auto is the last one that acts in a forward pass
    quick: ClassVar["LastLayerLaplace"]

    @property
    def _rank(self) -> int:
        return 0

    def memory(self, network: Network) -> int:
        """A copy of the weights; the covariance is looked at when the layer is known."""
        return network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Find the layer; one pass over the data; the prior precision."""
        network = task.network.to(run.device)
        layers = _last_to_act(task, network, start) if self.layer == "auto" else {self.layer}
        names = [name for name in network.names if _layer(name) in layers]
        if not names:
            known = list(dict.fromkeys(map(_layer, network.names)))
            raise ValueError(f"layer={self.layer!r} has no weights that inference is about: the layers are {known}")
        owners = {name.rpartition(".")[0] for name in names}

        def treatment(which: Layer) -> str:
            return f"Gaussian, {self.structure} covariance" if which.name in owners else "fixed at the MAP"

        report = {"layer": " and ".join(dict.fromkeys(map(_layer, names)))}
        return self._laplace(
            task, start, run, network.restricted(names), None, self.structure, treatment=treatment, diagnostics=report
        )


def _last_to_act(task: Task, network: Network, start: State) -> set[str]:
    """The layer whose weights the last function of a forward pass takes; two where it takes one of another's, tied."""
    params = dict(start["params"])
    x, _ = next(iter(task.train.batches([torch.arange(min(3, task.n))], network.device)))
    tape = Tape({id(params[name]): name for name in network.names}, count_rows(x))
    with torch.no_grad(), plain_attention(), tape:
        network(params, x)
    return set(map(_layer, tape.last))


def _layer(name: str) -> str:
    """The layer of a parameter; a weight norm's belong to the layer whose weight it makes."""
    return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]


LastLayerLaplace.quick = LastLayerLaplace()
