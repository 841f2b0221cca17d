"""Which weights there are, changed while they are trained: some are removed, as many others added.

Every `interval` steps until a share `stop` of training, the weights that matter least by a criterion go, a share r_t of
each layer's (or of all), and those come whose loss gradient is largest among the ones that are not there:

    r_t = initial / 2 (1 + cos(pi t / stop))

Gradients of weights that are not there take the whole weight's gradient of a layer: it exists for one layer at a time,
on update steps alone, for as long as it takes to find its largest entries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from caveat.engine.densities import replaced, replacement_rate
from caveat.engine.distributed import Ranks
from caveat.engine.optimise import Moments
from caveat.engine.sparse_layers import Layout, Substitute

__all__ = ["Addition", "Replacement", "Scope"]

Addition = Literal["noisy", "mean", "batches"]  # gradient of one noisy batch, at the means, or averaged over batches
Scope = Literal["layer", "global"]


@dataclass
class Replacement:
    """Changes the weights of a substitute, and with them flat tensors beside it."""

    substitute: Substitute
    keep_scores: Callable[[], Tensor]  # [size], high for weights to keep
    interval: int  # steps between updates
    initial: float  # share replaced at first
    stop: float  # share of training after which nothing is replaced
    steps: int  # of the whole training
    scope: Scope = "layer"
    batches: int = 1  # whose absolute gradients are averaged
    ranks: Ranks = field(default_factory=Ranks)
    replaced: int = 0  # weights so far
    updates: int = 0
    _found: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # gradients and flat indices of candidates
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _removed: Tensor | None = None  # [size]

    def due(self, step: int) -> bool:
        """Whether weights are replaced after this step, counted from 0."""
        return (step + 1) % self.interval == 0 and replacement_rate(
            (step + 1) / self.steps, self.initial, self.stop
        ) > 0

    @property
    def chosen(self) -> bool:
        """Whether it is chosen what goes after this step."""
        return self._removed is not None

    def forget(self) -> None:
        """Begin the average over batches anew, as a run that goes on from a file would: it is not kept there."""
        self._sums = {}

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
                count = replaced(layout.counts[name], layout.geometries[name].size, rate)
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
        before, so_far = self._sums.get(name), None  # sizes in earlier batches; gradient of this one

        def collect(gradient: Tensor) -> None:
            nonlocal so_far
            if self.ranks.size > 1:
                gradient = gradient.clone()  # the step's own gradients, which come from it, are added up later
                self.ranks.add([gradient])
            gradient = gradient if so_far is None else so_far + gradient  # a layer called again in the same pass
            so_far = gradient if self.substitute.layers[name].calls > 1 else None
            size = gradient.abs().flatten()
            if self.batches > 1:
                size = self._sums[name] = size if before is None else before + size
            if last:
                kept = self._kept_indices[name]
                size.index_fill_(0, kept, -1.0)
                everywhere = self.scope == "global"
                wanted = int((self._removed if everywhere else self._part(name)).sum())  # type: ignore[union-attr]
                found = size.topk(min(wanted, len(size) - len(kept) - everywhere))  # a sparse layer never fills up
                self._found[name] = (found.values, found.indices)

        return collect

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
            new_layout = Layout(layout.geometries, counts, indices)
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
        self._removed, self._found, self._sums = None, {}, {}
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


def _rebuilt(layout: Layout, removed: Tensor, added: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, int]]:
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
