"""Which weights there are, changed while they are trained: some are removed, as many others added.

Every `interval` steps until a share `stop` of training, the weights that matter least by a criterion go, a share r_t of
each layer's (or of all), and those come whose loss gradient is largest among the ones that are not there:

    r_t = initial / 2 (1 + cos(pi t / stop))

Gradients of weights that are not there take the whole weight's gradient of a layer: it exists for one layer at a time,
on update steps alone, for as long as it takes to find its largest entries; in compiled training those of all layers
come back from every pass. An average over batches has the sums of all layers from its first batch to the update.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.distributed import Ranks
from caveat.engine.sparse import (
    ActiveWeights,
    FlopsByCounts,
    Schedule,
    Scheme,
    StepBatch,
    Substitute,
    WeightLayout,
    exchange_count,
    flops_by_counts,
)
from caveat.engine.training import Moments
from caveat.network import Network, Params

__all__ = ["PIECE", "Addition", "Scope", "WeightExchange"]

Addition = Literal["noisy", "mean", "batches"]  # gradient of one noisy batch, at the means, or averaged over batches
Scope = Literal["layer", "global"]
PIECE = 2**20  # entries of a gradient that are looked at together, about: fewer take longer, more take memory


class GradientSums(dict[str, Tensor]):
    """By layer, the absolute gradients of its whole weight, added up over batches; zeros when first asked for.

    The first to ask may be whoever reads the checkpoint of a run that ended between the batches.
    """

    def __init__(self, substitute: Substitute) -> None:
        super().__init__()
        self._layers = substitute.layers

    def __missing__(self, name: str) -> Tensor:
        layer = self._layers[name]
        self[name] = layer.place.detach().new_zeros(layer.geometry.size)
        return self[name]


class WeightExchange:
    """Changes which weights a substitute has.

    Args:
        substitute: whose layers' weights are exchanged.
        weights: the weights themselves, flat, which are exchanged in place.
        keep_scores: gives a score of every weight, [size], high for those to keep.
        schedule: when weights are exchanged, and which share.
        scope: as many go as come in each layer, or over all layers together.
        addition: the gradients by which weights come, see `Addition`.
        batches: over which addition="batches" averages: the last ones, and none before the last exchange.
        new_std: standard deviation of weights that come; the mean of their layer's unless given.
        ranks: over which gradients are added up.
    """

    rows_of_each_rank = 1

    def __init__(
        self,
        substitute: Substitute,
        weights: ActiveWeights,
        keep_scores: Callable[[], Tensor],
        schedule: Schedule,
        *,
        scope: Scope = "layer",
        addition: Addition = "noisy",
        batches: int = 1,
        new_std: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.substitute, self.weights, self.keep_scores, self.schedule = substitute, weights, keep_scores, schedule
        self.scope, self.addition, self.new_std, self.ranks = scope, addition, new_std, ranks or Ranks()
        self.batches = min(batches, schedule.interval) if addition == "batches" else 1
        self.updates = self.replaced = 0  # exchanges so far, and the weights that came
        self.sums = GradientSums(substitute)
        self._state = {"exchanges": torch.zeros(2, dtype=torch.int64)}
        self._candidates: dict[str, tuple[Tensor, Tensor]] = {}  # by layer: gradients and flat indices to add
        self._removed: Tensor | None = None  # [size]: what goes after this step
        self._remaining: dict[str, Tensor] = {}  # by layer: flat indices of weights that stay

    @property
    def between_looks(self) -> int:
        """Steps from one look at whole gradients to the next, on average."""
        return self.schedule.interval // self.batches

    def begin(self, step: int, batch: StepBatch) -> None:
        """Before a step: choose what goes, and have the gradients of whole weights looked at, where it is time."""
        ahead = -(step + 1) % self.schedule.interval  # steps to the next exchange
        sparse = [name for name in self.substitute.layers if not self.substitute.layout.is_dense(name)]
        looking = bool(sparse) and ahead < self.batches and self.schedule.due(step + ahead)
        self.substitute.collect({name: self._collector(name, last=ahead == 0) for name in sparse if looking})
        if ahead == 0 and looking:
            self._removed = self._choose_removed(self.schedule.rate(step))
            self._remaining = self._remaining_indices(self._removed)
        if self.addition == "mean" and self.schedule.due(step):
            batch.pass_at_the_means()
            self.substitute.collect({})  # the step itself looks at nothing

    def _choose_removed(self, rate: float) -> Tensor:
        """The weights with the lowest scores, a mask [size]; each layer keeps its best one."""
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

    def _remaining_indices(self, removed: Tensor) -> dict[str, Tensor]:
        """Flat indices of the weights that stay, by layer."""
        goes = dict(self.substitute.layout.split(removed))
        indices = self.substitute.layout.indices_of()
        return {name: places[~goes[name]].long() for name, places in indices.items() if places is not None}

    def _collector(self, name: str, last: bool) -> Callable[[Tensor], None]:
        """What looks at the gradient of a layer's whole weight; after the last batch it finds the largest entries."""
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
            stay, everywhere = self._remaining[name], self.scope == "global"
            wanted = int((self._removed if everywhere else self._removed_of(name)).sum())  # type: ignore[union-attr]
            free = gradient.numel() - len(stay) - everywhere  # a sparse layer never fills up
            by_piece = torch.bincount(stay // (outputs * per_output), minlength=-(-len(gradient) // outputs)).tolist()
            self._candidates[name] = _largest(sizes, stay.split(by_piece), min(wanted, free))

        return collect

    def _sizes(self, name: str, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Absolute gradients of this batch, or their sums over batches so far, by piece; `pieces` are not changed."""
        start = 0
        for piece in pieces:
            flat = piece.flatten()
            if self.ranks.size > 1:
                flat = flat.clone()  # the step's own gradients, which come from it, are added up later
                self.ranks.add([flat])
            end = start + len(flat)
            yield flat.abs() if self.batches == 1 else self.sums[name][start:end].add_(flat.abs())
            start = end

    def _removed_of(self, name: str) -> Tensor:
        return dict(self.substitute.layout.split(self._removed))[name]  # type: ignore[arg-type]

    @torch.no_grad()
    def finish(self, moments: Moments) -> bool:
        """After a step: exchange, where it is time; returns whether it was.

        Weights that come have a mean of 0, moments of 0, and the standard deviation `new_std` or their layer's mean.
        """
        if self._removed is None:
            return False
        mean, log_std = self.weights.mean, self.weights.log_std
        layout, removed = self.substitute.layout, self._removed
        fills = None if log_std is None else self.weights.new_log_std(layout, self.new_std)
        for name, part in layout.split(removed):
            if name not in self._candidates:  # dense, or without a gradient: the loss does not depend on it
                part.fill_(False)
        origin, indices, counts = _rebuilt(layout, removed, self._choose_added())
        fresh = origin < 0
        source = origin.clamp_min(0)
        for tensor in (mean, *moments(mean), *([] if log_std is None else moments(log_std))):
            tensor.copy_(tensor[source].masked_fill_(fresh, 0.0))
        if log_std is not None and fills is not None:
            fill = fills.repeat_interleave(torch.tensor([*counts.values()], device=fills.device))
            log_std.copy_(torch.where(fresh, fill, log_std[source]))
        self.substitute.arrange(WeightLayout(layout.geometries, counts, indices))
        self.replaced += int(fresh.sum())
        self.updates += 1
        self._state["exchanges"].copy_(torch.tensor([self.updates, self.replaced]))
        self._removed, self._remaining, self._candidates = None, {}, {}
        self.sums.clear()
        return True

    def state(self) -> Params:
        """How many exchanges there were, and of how many weights; their places are in the substitute's layout."""
        return self._state

    def take_up(self) -> None:
        """Go on counting from what `state` has now."""
        self.updates, self.replaced = self._state["exchanges"].tolist()

    def flops(self, network: Network, example: Inputs) -> FlopsByCounts | None:
        """Operations of a training step, by the number of each layer's weights; None where a layer's number stays."""
        if self.scope == "layer":
            return None
        scheme = Scheme(gaussian=self.weights.log_std is not None, interval=self.between_looks)
        inference, training = flops_by_counts(network, example, scheme)

        def total(counts: Mapping[str, int]) -> float:
            at_the_means = 3 * inference(counts) / self.schedule.interval if self.addition == "mean" else 0.0
            return training(counts) + at_the_means

        return total

    def _choose_added(self) -> dict[str, Tensor]:
        """Flat indices of the weights that come, by layer."""
        if self.scope == "layer":
            return {name: indices for name, (_, indices) in self._candidates.items()}
        if not self._candidates:
            return {}
        sizes = torch.cat([values for values, _ in self._candidates.values()])
        chosen = torch.zeros_like(sizes, dtype=torch.bool)
        chosen[sizes.topk(int(self._removed.sum())).indices] = True  # type: ignore[union-attr]
        parts = chosen.split([len(values) for values, _ in self._candidates.values()])
        return {name: indices[part] for (name, (_, indices)), part in zip(self._candidates.items(), parts, strict=True)}


def _largest(sizes: Iterable[Tensor], kept: Iterable[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The largest `count` numbers of all pieces together, and their places; those at places `kept` are left out.

    Both come piece by piece; the numbers are written to.
    """
    values: list[Tensor] = []
    places: list[Tensor] = []
    start = 0
    for size, stay in zip(sizes, kept, strict=True):
        size.index_fill_(0, stay - start, -1.0)
        top = size.topk(min(count, len(size)))
        values, places = [*values, top.values], [*places, top.indices + start]
        start += len(size)
        if len(values) > 1:
            together = torch.cat(values)
            chosen = together.topk(min(count, len(together))).indices
            values, places = [together[chosen]], [torch.cat(places)[chosen]]
    return values[0], places[0]


def _rebuilt(layout: WeightLayout, removed: Tensor, added: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Where each weight of the new layout was before (-1: nowhere), its indices, and its counts."""
    origins, indices, counts, before = [], [], {}, 0
    gone = dict(layout.split(removed))
    for name, places in layout.indices_of().items():
        slots = torch.arange(before, before + layout.counts[name], device=removed.device)
        before += layout.counts[name]
        if places is None:
            origins.append(slots)
            counts[name] = len(slots)
            continue
        new = added.get(name, places[:0].long())
        everything = torch.cat([places[~gone[name]].long(), new])
        order = everything.argsort()
        origins.append(torch.cat([slots[~gone[name]], torch.full_like(new, -1)])[order])
        indices.append(everything[order].int())
        counts[name] = len(everything)
    return torch.cat(origins), torch.cat(indices), counts
