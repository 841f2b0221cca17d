"""The weights that a Laplace posterior is over: whole parameters of a network, or chosen entries of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.engine.flat_weights import flat, flat_places
from caveat.network import Network, Params
from caveat.priors import gaussian_precisions

__all__ = ["ChosenWeights", "flat_prior"]


@dataclass(frozen=True)
class ChosenWeights:
    """Weights of a network, at the positions `index` of the concatenation of its selected parameters."""

    network: Network  # restricted to the parameters that have chosen weights
    index: Tensor | None = None  # ascending, [n], on the network's device; None for all

    @classmethod
    def at(cls, network: Network, index: Tensor) -> "ChosenWeights":
        """The weights at positions of a whole network's flat vector; parameters without one are left out."""
        whole = flat_places(network)
        pieces = {name: index[(index >= place.start) & (index < place.stop)] for name, place in whole.items()}
        restricted = network.restricted(name for name, piece in pieces.items() if len(piece))
        part = flat_places(restricted)
        moved = [pieces[name] - whole[name].start + part[name].start for name in restricted.names]
        return cls(restricted, torch.cat(moved).to(network.device))

    @classmethod
    def stored(cls, network: Network, entries: Params | None) -> "ChosenWeights":
        """The weights that `stored_entries` made `entries` of."""
        if entries is None:
            return cls(network)
        restricted = network.restricted(entries)
        if all(not len(entry) for entry in entries.values()):
            return cls(restricted)
        places = flat_places(restricted)
        positions = [entries[n].long().to(network.device) + places[n].start for n in restricted.names]
        return cls(restricted, torch.cat(positions))

    def stored_entries(self, whole: Network) -> Params | None:
        """For each parameter the entries chosen, int32, none standing for all; None for all of the whole network."""
        if self.index is None and self.network.names == whole.names:
            return None
        everything = torch.zeros(0, dtype=torch.int32)
        return {
            name: everything if self.index is None else entries.to(torch.int32).cpu()
            for name, entries in self._entries().items()
            if self.index is None or len(entries)
        }

    def _entries(self) -> Params:
        """The chosen entries of each parameter, as positions in it."""
        if self.index is None:
            places = flat_places(self.network)
            return {name: torch.arange(place.stop - place.start) for name, place in places.items()}
        index = self.index
        return {
            name: index[(index >= place.start) & (index < place.stop)] - place.start
            for name, place in flat_places(self.network).items()
        }

    def __len__(self) -> int:
        return self.network.n_parameters if self.index is None else len(self.index)

    def of(self, values: Tensor) -> Tensor:
        """The values of the chosen weights, [n], out of values of all weights of the network."""
        return values if self.index is None else values[self.index.to(values.device)]

    def weights(self, params: Params) -> Tensor:
        """The chosen weights themselves, [n], out of all parameters."""
        return self.of(flat(self.network, params))

    def prior(self, params: Params) -> Tensor:
        """The prior precision of each chosen weight, [n]."""
        return self.of(flat_prior(self.network, params))

    def moved(self, params: Params, delta: Tensor) -> Params:
        """`params` with delta [n] added to the chosen weights."""
        vector = flat(self.network, params)
        if self.index is None:
            vector = vector + delta.to(vector)
        else:
            vector = vector.index_add(0, self.index.to(vector.device), delta.to(vector))
        places = flat_places(self.network)
        return params | {name: vector[place].reshape(params[name].shape) for name, place in places.items()}

    def by_layer(self) -> list[tuple[str, Tensor]]:
        """The layers with chosen weights, each with the positions of its weights among the chosen ones."""
        groups: dict[str, list[Tensor]] = {}
        for name, place in flat_places(self.network).items():
            if self.index is None:
                positions = torch.arange(place.start, place.stop)
            else:
                positions = ((self.index >= place.start) & (self.index < place.stop)).nonzero().squeeze(1).cpu()
            if len(positions):
                groups.setdefault(name.rpartition(".")[0], []).append(positions)
        return [(layer or "(module)", torch.cat(parts).to(self.network.device)) for layer, parts in groups.items()]

    def layer_counts(self) -> dict[str, int]:
        """How many weights are chosen in each layer that has any."""
        counts: dict[str, int] = {}
        for name, entries in self._entries().items():
            layer = name.rpartition(".")[0]
            counts[layer] = counts.get(layer, 0) + len(entries)
        return counts


def flat_prior(network: Network, params: Params) -> Tensor:
    """The prior precision of every selected weight, [n]."""
    precisions = gaussian_precisions(network.prior, {name: params[name] for name in network.names})
    if precisions is None:
        raise ValueError(
            f"a Laplace approximation needs a Gaussian prior with independent weights, and this is a "
            f"{type(network.prior).__name__}: give the task prior=caveat.GaussianPrior(...)"
        )
    return torch.cat([precision.expand(params[name].shape).flatten() for name, precision in precisions.items()])
