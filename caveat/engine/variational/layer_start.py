"""Where training of layers begins: places drawn at random, and the start's weights at those places."""

import math

import torch
from torch import Tensor

from caveat.engine.run import Run
from caveat.engine.sparse import LayerGeometry, Substitute, WeightLayout, weight_name
from caveat.network import Network, Params

__all__ = ["random_layout", "substitute_and_means"]


def random_layout(geometries: dict[str, LayerGeometry], counts: dict[str, int], run: Run) -> WeightLayout:
    """A layout with `counts` weights of each layer, at places drawn from the run's generator."""
    places = [
        torch.randperm(geometry.size, generator=run.rng)[: counts[name]].sort().values.int()
        for name, geometry in geometries.items()
        if counts[name] < geometry.size
    ]
    indices = torch.cat(places) if places else torch.zeros(0, dtype=torch.int32)
    return WeightLayout(geometries, counts, indices.to(run.device))


def substitute_and_means(network: Network, params: Params, layout: WeightLayout) -> tuple[Substitute, Tensor]:
    """A network with sparse layers, and its first means [size]: the start's, larger where fewer inputs are added up."""
    means = layout.gathered({name: params[weight_name(name)] for name in layout.counts})
    for name, part in layout.split(means):
        part *= math.sqrt(layout.geometries[name].size / layout.counts[name])
    return Substitute(network, layout, params), means
