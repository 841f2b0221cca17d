"""Which weights there are, changed while they are trained: some are removed, as many others added.

Every `interval` steps until a share `stop` of training, the weights that matter least by a criterion go, a share r_t of
each layer's (or of all), and those come whose loss gradient is largest among the ones that are not there:

    r_t = initial / 2 (1 + cos(pi t / stop))

Gradients of weights that are not there take the whole weight's gradient of a layer: it exists for one layer at a time,
on update steps alone, for as long as it takes to find its largest entries. An average over batches has the sums of all
layers from its first batch to the update.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from caveat.engine.distributed import Ranks
from caveat.engine.sparse import Substitute, WeightLayout, exchange_count, replacement_rate
from caveat.engine.training import Moments

__all__ = ["PIECE", "Addition", "Scope", "WeightExchange"]

Addition = Literal["noisy", "mean", "batches"]  # gradient of one noisy batch, at the means, or averaged over batches
Scope = Literal["layer", "global"]
PIECE = 2**20  # entries of a gradient whose sizes are there at a time, about: fewer take longer, all as much again


class Sums(dict[str, Tensor]):
    """By layer, the sizes of the gradients of its whole weight, added up over batches; zero when first asked for.

    The first to ask may be whoever reads the file of a run that ended between the batches.
    """

    def __init__(self, substitute: Substitute) -> None:
        super().__init__()
        self._layers = substitute.layers

    def __missing__(self, name: str) -> Tensor:
        layer = self._layers[name]
        self[name] = layer.place.detach().new_zeros(layer.geometry.size)
        return self[name]


@dataclass
class WeightExchange:
    """Changes the weights of a substitute, and with them flat tensors beside it."""

    substitute: Substitute
    keep_scores: Callable[[], Tensor]  # [size], high for weights to keep
    interval: int  # steps between updates
    initial: float  # share replaced at first
    stop: float  # share of training after which nothing is replaced
    steps: int  # of the whole training
    scope: Scope = "layer"
    batches: int = 1  # whose absolute gradients are averaged: the last ones, and none before the last update
    ranks: Ranks = field(default_factory=Ranks)
    replaced: int = 0  # weights so far
    updates: int = 0
    _found: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # gradients and flat indices of candidates
    _removed: Tensor | None = None  # [size]

    def __post_init__(self) -> None:
        self.batches = min(self.batches, self.interval)
        self.sums = Sums(self.substitute)

    @property
    def between_looks(self) -> int:
        """Steps from one look at whole gradients to the next, on average."""
        return self.interval // self.batches

    def due(self, step: int) -> bool:
        """Whether weights are replaced after this step, counted from 0."""
        return (step + 1) % self.interval == 0 and replacement_rate(
            (step + 1) / self.steps, self.initial, self.stop
        ) > 0

    @property
    def chosen(self) -> bool:
        """Whether it is chosen what goes after this step."""
        return self._removed is not None

    def begin(self, step: int) -> None:
        """Before a step: choose what goes, and have the gradients of the whole weights looked at, where it is time."""
        ahead = -(step + 1) % self.interval  # steps to the next update
        sparse = [name for name in self.substitute.layers if not self.substitute.layout.is_dense(name)]
        looking = bool(sparse) and ahead < self.batches and self.due(step + ahead)
        self.substitute.collect({name: self._collector(name, last=ahead == 0) for name in sparse if looking})
        if ahead == 0 and looking:
            rate = replacement_rate((step + 1) / self.steps, self.initial, self.stop)
            self._removed = self._choose_removed(rate)
            self._kept_indices = self._kept()

    def _choose_removed(self, rate: float) -> Tensor:
        """The weights with the lowest scores, [size]; each layer keeps its best one."""
        layout, scores = self.substitute.layout, self.keep_scores()
        removed = torch.zeros_like(scores, dtype=torch.bool)
        parts, marks = dict(layout.split(scores.clone())), dict(layout.split(removed))
        sparse = [name for name in parts if not layout.is_dense(name)]
        for name in sparse:
            parts[name][parts[name].argmax()] = torch.inf
        if self.scope == "layer":
            for name in sparse:
                count = exchange_count(layout.counts[name], layout.geometries[name].size, rate)
                marks[name][parts[name].topk(count, largest=False).indices] = True
            return removed
        everyone = torch.cat([parts[name] for name in sparse])
        count = min(round(rate * len(everyone)), len(everyone) - len(sparse))
        lowest = torch.zeros_like(everyone, dtype=torch.bool)
        lowest[everyone.topk(count, largest=False).indices] = True
        for name, part in zip(sparse, lowest.split([layout.counts[name] for name in sparse]), strict=True):
            marks[name].copy_(part)
        return removed

    def _kept(self) -> dict[str, Tensor]:
        """Flat indices of the weights that stay, by layer."""
        removed = dict(self.substitute.layout.split(self._removed))  # type: ignore[arg-type]
        indices = self.substitute.layout.indices_of()
        return {name: own[~removed[name]].long() for name, own in indices.items() if own is not None}

    def _collector(self, name: str, last: bool) -> Callable[[Tensor], None]:
        so_far: Tensor | None = None  # gradient of this batch
        before: Tensor | None = None  # sizes in earlier ones

        def collect(gradient: Tensor) -> None:
            nonlocal so_far, before
            again = self.substitute.layers[name].calls > 1
            if again:  # in the same pass: the sum of all calls counts
                gradient = so_far = gradient.clone() if so_far is None else so_far.add_(gradient)
                if self.batches > 1:
                    before = self.sums[name] if before is None else before
                    self.sums[name] = before.clone()
            per_output = gradient[0].numel()
            outputs = max(1, PIECE // per_output)
            sizes = self._sizes(name, gradient.split(outputs))
            if not last:
                for _ in sizes:  # added up
                    pass
                return
            kept, everywhere = self._kept_indices[name], self.scope == "global"
            wanted = int((self._removed if everywhere else self._part(name)).sum())  # type: ignore[union-attr]
            free = gradient.numel() - len(kept) - everywhere  # a sparse layer never fills up
            by_piece = torch.bincount(kept // (outputs * per_output), minlength=-(-len(gradient) // outputs)).tolist()
            self._found[name] = _largest(sizes, kept.split(by_piece), min(wanted, free))

        return collect

    def _sizes(self, name: str, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Absolute gradients of this batch, or added up over all so far; the pieces stay as they are."""
        start = 0
        for piece in pieces:
            flat = piece.flatten()
            if self.ranks.size > 1:
                flat = flat.clone()  # the step's own gradients, which come from it, are added up later
                self.ranks.add([flat])
            end = start + len(flat)
            yield flat.abs() if self.batches == 1 else self.sums[name][start:end].add_(flat.abs())
            start = end

    def _part(self, name: str) -> Tensor:
        return dict(self.substitute.layout.split(self._removed))[name]  # type: ignore[arg-type]

    def finish(
        self, mean: Tensor, fills: dict[str, Tensor | float], tensors: dict[str, Tensor], moments: Moments
    ) -> bool:
        """After a step: replace, where it was time. Returns whether anything changed.

        `mean` and `tensors` are flat and changed in place: added weights have a mean of 0 and the value of `fills` (a
        number, or one for each layer) in the other tensors; the optimiser's moments of them are 0.
        """
        if self._removed is None:
            return False
        layout, removed = self.substitute.layout, self._removed
        for name, part in layout.split(removed):
            if name not in self._found:  # dense, or without a gradient: the loss does not depend on it
                part.fill_(False)
        added = self._choose_added()
        origin, indices, counts = _rebuilt(layout, removed, added)
        fresh = origin < 0
        source = origin.clamp_min(0)
        with torch.no_grad():
            for tensor in (mean, *(m for t in (mean, *tensors.values()) for m in moments(t))):
                tensor.copy_(tensor[source].masked_fill_(fresh, 0.0))
            new_layout = WeightLayout(layout.geometries, counts, indices)
            for name, tensor in tensors.items():
                fill = fills[name]
                per_weight = (
                    torch.full_like(tensor, fill)
                    if isinstance(fill, float)
                    else fill.repeat_interleave(torch.tensor([*counts.values()], device=fill.device))
                )
                tensor.copy_(torch.where(fresh, per_weight, tensor[source]))
        self.substitute.arrange(new_layout)
        self.replaced += int(fresh.sum())
        self.updates += 1
        self._removed, self._found = None, {}
        self.sums.clear()
        return True

    def _choose_added(self) -> dict[str, Tensor]:
        if self.scope == "layer":
            return {name: indices for name, (_, indices) in self._found.items()}
        if not self._found:
            return {}
        sizes = torch.cat([values for values, _ in self._found.values()])
        chosen = torch.zeros_like(sizes, dtype=torch.bool)
        chosen[sizes.topk(int(self._removed.sum())).indices] = True  # type: ignore[union-attr]
        parts = chosen.split([len(values) for values, _ in self._found.values()])
        return {name: own[part] for (name, (_, own)), part in zip(self._found.items(), parts, strict=True)}


def _largest(sizes: Iterable[Tensor], kept: Iterable[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The largest of numbers that come in pieces, which are written to, and their places; none of `kept`, by piece."""
    values: list[Tensor] = []
    places: list[Tensor] = []
    start = 0
    for size, own in zip(sizes, kept, strict=True):
        size.index_fill_(0, own - start, -1.0)
        found = size.topk(min(count, len(size)))
        values, places = [*values, found.values], [*places, found.indices + start]
        start += len(size)
        if len(values) > 1:
            together = torch.cat(values)
            chosen = together.topk(min(count, len(together))).indices
            values, places = [together[chosen]], [torch.cat(places)[chosen]]
    return values[0], places[0]


def _rebuilt(layout: WeightLayout, removed: Tensor, added: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Where each new place's weight was before (-1: nowhere), the new indices of sparse layers, and the new counts."""
    origins, indices, counts, before = [], [], {}, 0
    gone = dict(layout.split(removed))
    for name, own in layout.indices_of().items():
        slots = torch.arange(before, before + layout.counts[name], device=removed.device)
        before += layout.counts[name]
        if own is None:
            origins.append(slots)
            counts[name] = len(slots)
            continue
        new = added.get(name, own[:0].long())
        everything = torch.cat([own[~gone[name]].long(), new])
        order = everything.argsort()
        origins.append(torch.cat([slots[~gone[name]], torch.full_like(new, -1)])[order])
        indices.append(everything[order].int())
        counts[name] = len(everything)
    return torch.cat(origins), torch.cat(indices), counts
